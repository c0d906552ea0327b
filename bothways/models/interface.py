"""What a model is to the rest of the package. Search, training and scoring know nothing but this page.

B sentences   R rows (R / B of them share a source)   D direction   K hypotheses of one direction
S source   T target   V vocabulary   E width

A stream's position i consumes its tag (i = 0) or its token i - 1, and predicts its token i. Models never learn which
direction a stream has except from its tag, and never see padding or an end mark as a key.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from bothways.nn.layers import Packed, output_layer, pack_when_used
from bothways.stepwise import Distribution, State


class Memory(Protocol):
    """Encoded sources: all that a decoder reads of them. One memory may serve any number of passes."""

    def keep(self, sentences: Tensor) -> Self:
        """These sentences only, by row [B']."""
        ...


@dataclass(frozen=True)
class Lattice:
    """Every token that a search consumed, as N nodes per direction: what `replay`, the slow `step`, reads."""

    tokens: Tensor  # [D, N] what each node consumed
    positions: Tensor  # [D, N] the step at which it did, from 0 (the tag)
    own: Tensor  # [D, N, N] true where the second node is the first one or one of its forebears
    seen: Tensor  # [D, N, P, N] true where the second (of the other direction) belongs to the first's p-th partner
    weights: Tensor  # [D, N, P] the partners' weights; all zero: no future


class Seq2Seq(nn.Module):
    """An encoder-decoder with one or two directions."""

    interaction: bool  # whether each direction reads the other's words
    int8 = False  # whether the output layer multiplies in int8 while the model decodes in bfloat16 on a CPU

    @abstractmethod
    def encode(self, source: Tensor) -> Memory:
        """Sources [B, S], each with its end mark -> their memory."""

    @abstractmethod
    def hidden(self, memory: Memory, inputs: Tensor) -> Tensor:
        """Teacher forcing: input tokens [R, D, T] -> what the output layer reads, [R, D, T, E].

        R / B rows in turn share a source.
        """

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """The output layer's matrix [V, E]."""

    @abstractmethod
    def start(self, memory: Memory, directions: int, hypotheses: int) -> State:
        """Be ready for the tags of `directions` x `hypotheses` streams a sentence."""

    @abstractmethod
    def step(
        self, tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Distribution, State]:
        """Consume one token per hypothesis, [B, D, K]; returns the next token's distribution [B, D, K, V].

        `partners` [B, D, K, P] are slots of the other direction and `weights` [B, D, K, P] their shares (all zero: no
        future). Without them no direction reads the other. PAD consumes nothing: it leaves no key.
        """

    @abstractmethod
    def replay(self, memory: Memory, lattice: Lattice) -> Tensor:
        """Next-token log-probabilities [D, N, V] of every node of the one sentence in memory, without a cache."""

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The parts that repeat: compiled once each, they serve every layer of their kind."""

    @abstractmethod
    def interaction_parameters(self) -> set[str]:
        """Names of the parameters that a model without interaction does not have."""

    def begin_interaction(self) -> None:
        """Called where all but `interaction_parameters` comes from a model without interaction: start gently."""

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Teacher forcing over sources [B, S]: log-probabilities [R, D, T, V] of every next token."""
        return self.log_probs(self.hidden(self.encode(source), inputs))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V], with tags and padding masked before the softmax; at least float32."""
        return self.following(hidden).log_probs()

    def following(self, hidden: Tensor) -> Distribution:
        """[..., E] -> the distribution of the next token."""
        return Distribution(output_layer(hidden, self.output_weight))

    def forget_recorded(self) -> bool:
        """Let go of recorded steps, if there are any: they take memory, and know where the weights lie."""
        return self.__dict__.pop("recorder", None) is not None

    # Training changes weights where they lie, and goes on decoding with what was recorded before.
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.forget_recorded()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Self:
        """Learn, or decode (see `eval`): only then may weights be packed for it."""
        super().train(mode)
        pack_when_used(self, wanted=not mode)
        if self.int8 and not mode:
            self.output_weight.__dict__["packed"] = Packed(int8=True)
        return self

    def in_precision(self, precision: str) -> Self:
        """Ready to decode in float32, in bfloat16, or in int8: bfloat16, but for an output layer in int8."""
        for model in (module for module in self.modules() if isinstance(module, Seq2Seq)):
            model.int8 = precision == "int8"
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        return self.to(dtype).eval()

    def parameter_count(self) -> int:
        """Trained numbers, shared ones once."""
        return sum(p.numel() for p in self.parameters())


@dataclass(frozen=True)
class TwoPassMemory:
    """Sources encoded once, for a model that decodes in two passes."""

    first: Memory
    second: Memory  # once it is informed, the first pass' states as well

    def keep(self, sentences: Tensor) -> "TwoPassMemory":
        """Only these sentences."""
        return TwoPassMemory(self.first.keep(sentences), self.second.keep(sentences))


class TwoPass(Seq2Seq):
    """A model that writes from left to right, and reads the states of what it has written from right to left before.

    Streams of `hidden` [R, D, T] are l2r, then any number of r2l. The l2r stream reads all of the second one, which
    must therefore be known text: decoded from the source alone, never gold. With D = 1 it reads what the memory was
    informed of, if anything. Without interaction it reads no other stream at all.
    """

    first_model: ClassVar[type[Seq2Seq]]  # the class of `first`
    first: Seq2Seq  # the first pass, a whole r2l model: its encoder and its embeddings are the second pass' too

    @abstractmethod
    def encode(self, source: Tensor) -> TwoPassMemory:
        """See Seq2Seq."""

    @abstractmethod
    def informed(self, memory: TwoPassMemory, tokens: Tensor) -> TwoPassMemory:
        """The same memory with the states of what the first pass has said: [B, T], its tag, tokens and padding."""

    @property
    def output_weight(self) -> Tensor:
        """See Seq2Seq: both passes have one."""
        return self.first.output_weight
