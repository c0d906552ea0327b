"""ABD: an r2l decoder speaks first, and an l2r decoder reads its states while it speaks itself. They share one encoder.

The first pass is a Transformer or an RNMT as it is. The second is one more decoder stack over the same encoder, which
also reads the first pass' top states rᴸ_k of all that was said: a Transformer in each of its layers, by one more
attention with projections of its own, after the source; an RNMT at each position, beside the source, by

    cr_i = Σ_k softmax_k(vᵀ tanh(W zᴸ_i + U rᴸ_k)) rᴸ_k
    z_i  = drop(tanh(W_c [zᴸ_i ; c_i] + W_f cr_i))           W_f is W_c's third block, where BI-RNMT has its partner's
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bothways.config import ModelConfig
from bothways.models.interface import Memory, TwoPass, TwoPassMemory
from bothways.models.rnn import RNN, FutureOfStates, RNNDecoding, RNNMemory
from bothways.models.transformer import DecoderLayer, Decoding, Transformer, TransformerMemory
from bothways.nn.attention import SourceAttention
from bothways.nn.layers import Embedding, SubLayer, bias_of, initialize
from bothways.tokens import PAD


class Asynchronous(TwoPass):
    """What both families do alike: who reads whom. Without interaction it is two decoders that share the encoder."""

    interaction = False  # of the streams within the second pass' stack, which is what that asks
    reads_states: bool

    def informed(self, memory: TwoPassMemory, tokens: Tensor) -> TwoPassMemory:
        """See TwoPass."""
        return self._informed(memory, self.say(memory.first, tokens[:, None])[1][:, 0], tokens)

    def hidden(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See TwoPass."""
        own, others = inputs[:, :1], inputs[:, 1:]
        if not others.size(1):
            return self.write(memory, own)
        assert isinstance(memory, TwoPassMemory)
        said, states = self.say(memory.first, others)
        memory = self._informed(memory, states[:, 0], others[:, 0])
        return torch.cat([self.write(memory, own), said], dim=1)

    def _informed(self, memory: TwoPassMemory, states: Tensor, tokens: Tensor) -> TwoPassMemory:
        """With states [R, T, E] of tokens [R, T], of which padding is never a key."""
        return replace(memory, second=self.reading(memory, states, tokens != PAD)) if self.reads_states else memory

    @abstractmethod
    def say(self, memory: Memory, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The first pass' `hidden` of r2l streams, and their top states, both [R, D, T, E]."""

    @abstractmethod
    def write(self, memory: Memory, inputs: Tensor) -> Tensor:
        """`hidden` of the second pass' own stack: l2r streams [R, 1, T], under what the memory was informed of."""

    @abstractmethod
    def reading(self, memory: TwoPassMemory, states: Tensor, mask: Tensor) -> Memory:
        """The second pass' memory with states [R, T, E], those that may be read by their mask [R, T]."""


# -- Transformer ------------------------------------------------------------------------------------------------------


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


class AsynchronousTransformer(Asynchronous, Decoding):
    """ABD with Transformers."""

    first_model = Transformer

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__()
        self.config = config
        self.reads_states = bool(config.interaction)
        self.first: Transformer = Transformer(_alone(config), source_size, target_size)
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

    def say(self, memory: Memory, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See Asynchronous: the top states are what the output layer reads."""
        states = self.first.hidden(memory, inputs)
        return states, states

    def write(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See Asynchronous."""
        return Decoding.hidden(self, memory, inputs)

    def reading(self, memory: TwoPassMemory, states: Tensor, mask: Tensor) -> InformedMemory:
        """See Asynchronous: keys and values for every layer."""
        keys_values = tuple(layer.state_attention.remember(states) for layer in self.decoder)  # type: ignore[operator, union-attr]
        source = self.read_of(memory)
        return InformedMemory(source.keys_values, source.mask, TransformerMemory(keys_values, mask[:, None, None, :]))


# -- RNMT -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InformedRNNMemory(RNNMemory):
    """Encoded sources, and of each the top states of what the first pass has said."""

    states: Tensor  # [R, T, 2E] beside their keys
    states_bias: Tensor  # [R, 1, T]

    def keep(self, sentences: Tensor) -> "InformedRNNMemory":
        """Only these sentences."""
        kept = super().keep(sentences)
        states = self.states[sentences], self.states_bias[sentences]
        return InformedRNNMemory(kept.encoded, kept.keys, kept.bias, kept.begin, *states)


class AsynchronousRNN(Asynchronous, RNNDecoding):
    """ABD with RNMTs. Dropout on the future branch falls on cr_i."""

    first_model = RNN

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__()
        self.config = config
        self.reads_states = bool(config.interaction)
        self.first: RNN = RNN(_alone(config), source_size, target_size)
        self.add_decoder(config, self.reads_states)
        self.apply(initialize)

    @property
    def embedded(self) -> Embedding:
        """See RNNDecoding: the first pass' own."""
        return self.first.target_embedding

    def layers(self) -> list[nn.Module]:
        """See Seq2Seq: the attentions whose shapes are the same at every position."""
        return [*self.first.layers(), self.source_attention, *([self.future_attention] if self.reads_states else [])]

    def encode(self, source: Tensor) -> TwoPassMemory:
        """See Seq2Seq: one encoder, and each decoder's keys and first states from what it says."""
        encoded = self.first.encoded(source)
        return TwoPassMemory(self.first.remember(*encoded), self.remember(*encoded))

    def read_of(self, memory: Memory) -> RNNMemory:
        """See RNNDecoding."""
        assert isinstance(memory, TwoPassMemory) and isinstance(memory.second, RNNMemory)
        return memory.second

    def read_besides(self, memory: RNNMemory) -> FutureOfStates | None:
        """See RNNDecoding: what the first pass has said, all of it, if the memory holds any."""
        if not isinstance(memory, InformedRNNMemory):
            return None
        return FutureOfStates(self, memory.states, memory.states_bias)

    def say(self, memory: Memory, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See Asynchronous."""
        return self.first.spoken(memory, inputs)

    def write(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See Asynchronous."""
        return RNNDecoding.hidden(self, memory, inputs)

    def reading(self, memory: TwoPassMemory, states: Tensor, mask: Tensor) -> InformedRNNMemory:
        """See Asynchronous."""
        source, bias = self.read_of(memory), bias_of(mask[:, None], self.output_weight.dtype)
        return InformedRNNMemory(source.encoded, source.keys, source.bias, source.begin, self.keyed(states), bias)


def _alone(config: ModelConfig) -> ModelConfig:
    """The first pass' own settings."""
    return config.model_copy(update={"direction": "r2l", "interaction": False})
