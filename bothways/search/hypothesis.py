"""What search hands out, and the few functions on half beams that it consists of.

B sentences   D direction (0 l2r, 1 r2l)   K hypotheses of one direction (slots)   V vocabulary
A dead slot has log-probability -∞.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bothways.stepwise import Distribution, State
from bothways.tokens import L2R, Direction, turn


class Step(Protocol):
    """The model, as search sees it: consume tokens [B, D, K], return the distribution [B, D, K, V] of the next ones.

    `partners` and `weights` [B, D, K, P] say whose past is each hypothesis' future; None: there is but one direction.
    """

    def __call__(
        self, tokens: Tensor, state: State, partners: Tensor | None, weights: Tensor | None, /
    ) -> tuple[Distribution, State]: ...


@dataclass(frozen=True)
class Hypothesis:
    """One output of the search."""

    tokens: list[int]  # in the order they were generated, without tag and end mark
    token_scores: list[float]  # log-probability of each token and, unless cut off, of the end mark
    score: float  # length-normalized log-probability
    direction: Direction  # reading_order undoes r2l, here and nowhere else
    cut_off: bool  # it has no end mark: the maximum length, or the end of the search, came first

    @property
    def reading_order(self) -> list[int]:
        """The tokens as a person reads them."""
        return turn(self.tokens, self.direction)


@dataclass(frozen=True)
class TraceStep:
    """One step of one sentence: what every slot consumed and whom it read, indexed [direction][slot]."""

    tokens: list[list[int]]
    parents: list[list[int]]  # slot of the step before that this one goes on from
    log_probs: list[list[float]]  # of the token, when it was chosen
    live: list[list[bool]]
    partners: list[list[list[int]]]  # slots of the other direction that it read; empty with one direction
    weights: list[list[list[float]]]  # their shares


@dataclass(frozen=True)
class End:
    """A hypothesis that ended: chosen by `slot` of `direction` at `step`."""

    step: int
    direction: Direction
    slot: int
    log_prob: float  # of the end mark


@dataclass(frozen=True)
class Trace:
    """A search, step by step. The last step was chosen but not consumed any more: it reads nobody."""

    steps: list[TraceStep]
    ends: list[End]


@dataclass(frozen=True)
class Found:
    """What search found for one sentence."""

    hypotheses: list[Hypothesis]  # the n-best, best first; one cut-off hypothesis if none is complete
    best: dict[Direction, Hypothesis]  # the best of each direction, complete if there is one
    trace: Trace | None = field(default=None, repr=False)


def length_norm(length: Any, penalty: float) -> Any:
    """((5 + n) / 6)^α: what a log-probability of n tokens, a number or many, the end mark among them, is divided by."""
    return ((5 + length) / 6) ** penalty


def extend(scores: Tensor, own: Tensor, token: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best one-token extensions -> score, origin, token, log-probability, [B, D, candidates] each, best first.

    Search asks for 2K, because K of them may end here and K must still go on. No hypothesis can place more than all
    of them, so each comes cut to its own best: log-probabilities and tokens [B, D, K, n]. They are added in float64.
    """
    total = (scores[..., None] + own.double()).flatten(-2)
    best, flat = total.sort(dim=-1, descending=True, stable=True)
    best, flat = best[..., :candidates], flat[..., :candidates]
    return best, flat // own.size(-1), token.flatten(-2).gather(-1, flat), own.flatten(-2).gather(-1, flat)


def first_ones(key: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, best first, earlier ones first among equals."""
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def partners_of(scores: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """Whose future each hypothesis reads: slots and weights, [B, D, K] -> twice [B, D, K, P].

    Partners meet by rank: slot k of l2r reads slot k of r2l. An ended hypothesis leaves its slot, so the partner of a
    hypothesis can change from one step to the next. A dead partner is replaced by slot 0, the best of that half; a
    half without a live slot gives no future, which all-zero weights say.
    """
    other = scores.flip(1)
    alive = other > -torch.inf
    K = scores.size(-1)
    slots = torch.arange(K, device=scores.device).expand_as(scores)
    if pairing == "mix":
        shares = torch.where(alive, (other - other.amax(-1, keepdim=True)).exp(), 0.0)
        shares = torch.where(alive.any(-1, keepdim=True), shares / shares.sum(-1, keepdim=True), 0.0)
        return slots[:, :, None, :].expand(-1, -1, K, -1), shares[:, :, None, :].expand(-1, -1, K, -1)
    partners = torch.where(alive, slots, 0) if pairing == "rank" else torch.zeros_like(slots)
    some_alive = alive.any(-1, keepdim=True).expand_as(scores)
    return partners[..., None], some_alive[..., None].double()


def order_key(score: float, end: End) -> tuple[float, int, int, int]:
    """Best first; ties: earlier step, then l2r, then lower slot."""
    return (-score, end.step, int(end.direction), end.slot)


__all__ = [
    "L2R", "Direction", "End", "Found", "Hypothesis", "State", "Step", "Trace", "TraceStep",
    "extend", "first_ones", "length_norm", "order_key", "partners_of",
]  # fmt: skip
