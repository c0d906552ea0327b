"""Several models as one: searched with together, or each on its own and judged by all.

Their vocabularies are the same; their families, sizes and training need not be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from bothways.models.interface import Lattice, Memory, Seq2Seq
from bothways.stepwise import Clock, Distribution, State
from bothways.tokens import Direction


class Panel(nn.Module):
    """Models that search each on its own and rescore what all of them found: one model with itself, or several."""

    members: Sequence[Seq2Seq]

    def __init__(self, members: Sequence[Seq2Seq], directions: Sequence[tuple[Direction, ...]]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)  # type: ignore[assignment]
        self.directions = directions

    def in_precision(self, precision: str) -> Self:
        """See Seq2Seq."""
        for model in self.members:
            model.in_precision(precision)
        return self

    def parameter_count(self) -> int:
        """Trained numbers of all members; a member that stands twice counts once."""
        return sum(p.numel() for p in self.parameters())


@dataclass(frozen=True)
class EnsembleMemory:
    """Each member's own."""

    parts: tuple[Memory, ...]

    def keep(self, sentences: Tensor) -> "EnsembleMemory":
        """See Memory."""
        return EnsembleMemory(tuple(part.keep(sentences) for part in self.parts))


@dataclass(frozen=True)
class EnsembleState:
    """Each member's own."""

    parts: tuple[State, ...]

    @property
    def clock(self) -> Clock:
        """See State."""
        return self.parts[0].clock

    def select(self, origins: Tensor) -> "EnsembleState":
        """See State."""
        return EnsembleState(tuple(part.select(origins) for part in self.parts))

    def keep(self, sentences: Tensor) -> "EnsembleState":
        """See State."""
        return EnsembleState(tuple(part.keep(sentences) for part in self.parts))

    def fixed(self, room: int) -> "EnsembleState":
        """See State."""
        return EnsembleState(tuple(part.fixed(room) for part in self.parts))


class Ensemble(Seq2Seq):
    """Models that decode as one: the log-probability of a token is the mean of theirs.

    So a hypothesis' log-probability is the mean of what the members say of it; over all tokens the probabilities may
    sum to less than 1, and do where members disagree.
    """

    members: Sequence[Seq2Seq]

    def __init__(self, members: Sequence[Seq2Seq]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)  # type: ignore[assignment]
        self.interaction = any(model.interaction for model in members)

    def encode(self, source: Tensor) -> EnsembleMemory:
        """See Seq2Seq."""
        return EnsembleMemory(tuple(model.encode(source) for model in self.members))

    def hidden(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See Seq2Seq: the members' side by side."""
        assert isinstance(memory, EnsembleMemory)
        pairs = zip(self.members, memory.parts, strict=True)
        return torch.cat([model.hidden(part, inputs) for model, part in pairs], dim=-1)

    def following(self, hidden: Tensor) -> Distribution:
        """See Seq2Seq."""
        parts = hidden.split([model.output_weight.size(1) for model in self.members], dim=-1)
        said = [model.log_probs(part) for model, part in zip(self.members, parts, strict=True)]
        return Distribution(_mean(said), is_normalized=True)

    def start(self, memory: Memory, directions: int, hypotheses: int) -> EnsembleState:
        """See Seq2Seq."""
        assert isinstance(memory, EnsembleMemory)
        pairs = zip(self.members, memory.parts, strict=True)
        return EnsembleState(tuple(model.start(part, directions, hypotheses) for model, part in pairs))

    def step(
        self, tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Distribution, EnsembleState]:
        """See Seq2Seq."""
        assert isinstance(state, EnsembleState)
        pairs = zip(self.members, state.parts, strict=True)
        said, states = zip(*(model.step(tokens, part, partners, weights) for model, part in pairs), strict=True)
        mean = _mean([following.log_probs() for following in said])
        return Distribution(mean, is_normalized=True), EnsembleState(states)

    def replay(self, memory: Memory, lattice: Lattice) -> Tensor:
        """See Seq2Seq."""
        assert isinstance(memory, EnsembleMemory)
        pairs = zip(self.members, memory.parts, strict=True)
        return _mean([model.replay(part, lattice) for model, part in pairs])

    def train(self, mode: bool = True) -> Self:
        """See Seq2Seq: each member for itself."""
        return nn.Module.train(self, mode)

    def in_precision(self, precision: str) -> Self:
        """See Seq2Seq: each member for itself."""
        for model in self.members:
            model.in_precision(precision)
        return self

    @property
    def output_weight(self) -> Tensor:
        """See Seq2Seq. There is no such matrix: each member has its own, and they are trained apart."""
        raise NotImplementedError("an ensemble has no output layer of its own; its members have")

    def layers(self) -> list[nn.Module]:
        """See Seq2Seq."""
        return [layer for model in self.members for layer in model.layers()]

    def interaction_parameters(self) -> set[str]:
        """See Seq2Seq."""
        return {f"members.{i}.{name}" for i, m in enumerate(self.members) for name in m.interaction_parameters()}


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Of as many distributions, added up one by one: all of them together might not fit into memory."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts)
