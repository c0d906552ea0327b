"""ABD: an r2l decoder speaks first, and an l2r decoder reads its states while it speaks itself. They share one encoder.

The first pass is a Transformer as it is. The second is one more decoder stack over the same encoder, each of whose
layers has one more attention, with projections of its own, over the first pass' top states.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bothways.config import ModelConfig
from bothways.models.interface import Memory, TwoPass, TwoPassMemory
from bothways.models.transformer import DecoderLayer, Decoding, Transformer, TransformerMemory
from bothways.nn.attention import SourceAttention
from bothways.nn.layers import Embedding, SubLayer, initialize
from bothways.tokens import PAD


@dataclass(frozen=True)
class InformedMemory(TransformerMemory):
    """Encoded sources, and of each the states of what the first pass has said, ready for every layer."""

    states: TransformerMemory

    def of_layer(self, i: int) -> tuple[Tensor, ...]:
        """Keys, values and mask of the source, then those of the states."""
        return (*super().of_layer(i), *self.states.of_layer(i))

    def keep(self, sentences: Tensor) -> "InformedMemory":
        """Only these sentences."""
        kept = super().keep(sentences)
        return InformedMemory(kept.keys_values, kept.mask, self.states.keep(sentences))


class AsynchronousLayer(DecoderLayer):
    """A decoder layer that reads the first pass' states, after the source."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, interaction=False)
        self.state_attention = SourceAttention(config.width, config.heads)
        self.state_sub_layer = SubLayer(config.width, config.dropout, config.norm)

    def read(self, x: Tensor, memory: tuple[Tensor, ...]) -> Tensor:
        """The source, and the states if the memory holds any."""
        source, states = memory[:3], memory[3:]
        x = super().read(x, source)
        return self.state_sub_layer(x, lambda y: self.state_attention(y, *states)) if states else x


class AsynchronousTransformer(TwoPass, Decoding):
    """ABD. Without interaction it is an r2l and an l2r decoder that share the encoder."""

    first_model = Transformer

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__()
        self.config = config
        self.interaction = False  # of the streams within this stack, which is what Decoding asks
        self.reads_states = bool(config.interaction)
        alone = config.model_copy(update={"direction": "r2l", "interaction": False})
        self.first: Transformer = Transformer(alone, source_size, target_size)
        self.decoder = nn.ModuleList(
            AsynchronousLayer(config) if self.reads_states else DecoderLayer(config, interaction=False)
            for _ in range(config.decoder_layers)
        )
        self.decoder_norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.decoder.apply(initialize)

    @property
    def embedded(self) -> Embedding:
        """See Decoding: the first pass' own."""
        return self.first.target_embedding

    def layers(self) -> list[nn.Module]:
        """See Seq2Seq."""
        return [*self.first.layers(), *self.decoder]

    def interaction_parameters(self) -> set[str]:
        """See Seq2Seq: the attention to the first pass."""
        return {name for name, _ in self.named_parameters() if ".state_" in name}

    def encode(self, source: Tensor) -> TwoPassMemory:
        """See Seq2Seq: one encoder, and each decoder's keys and values of what it says."""
        encoded = self.first.encoded(source)
        return TwoPassMemory(self.first.remember(*encoded), self.remember(*encoded))

    def read_of(self, memory: Memory) -> TransformerMemory:
        """See Decoding."""
        assert isinstance(memory, TwoPassMemory) and isinstance(memory.second, TransformerMemory)
        return memory.second

    def informed(self, memory: TwoPassMemory, tokens: Tensor) -> TwoPassMemory:
        """See TwoPass."""
        return self._informed(memory, self.first.hidden(memory.first, tokens[:, None])[:, 0], tokens)

    def hidden(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See TwoPass."""
        own, others = inputs[:, :1], inputs[:, 1:]
        if not others.size(1):
            return super().hidden(memory, own)
        assert isinstance(memory, TwoPassMemory)
        states = self.first.hidden(memory.first, others)
        memory = self._informed(memory, states[:, 0], others[:, 0])
        return torch.cat([super().hidden(memory, own), states], dim=1)

    def _informed(self, memory: TwoPassMemory, states: Tensor, tokens: Tensor) -> TwoPassMemory:
        """With states [R, T, E] of tokens [R, T], of which padding is never a key."""
        if not self.reads_states:
            return memory
        keys_values = tuple(layer.state_attention.remember(states) for layer in self.decoder)  # type: ignore[operator, union-attr]
        source = self.read_of(memory)
        said = TransformerMemory(keys_values, (tokens != PAD)[:, None, None, :])
        return replace(memory, second=InformedMemory(source.keys_values, source.mask, said))
