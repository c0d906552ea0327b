"""What models and search say to each other at every step; neither imports the other, both know this page.

A search is a number of steps of one shape: on a GPU one of them is recorded and replayed (search/recorded.py), so the
number of steps taken is a tensor that counts itself.

B sentences   D direction   K hypotheses of one direction   V vocabulary
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from bothways import kernels
from bothways.tokens import FIRST_PREDICTED, PAD

GROUP = 128  # words that `largest` takes the maximum of: about the square root of a usual vocabulary
FEW = 32  # candidates of a hypothesis that a kernel looks for
FIRST_ROOM = 16  # steps that there is room for at first; it doubles when full


@dataclass(frozen=True)
class Distribution:
    """Of every next token: logits [..., V], which are normalized when they are read, as far as they are."""

    logits: Tensor  # whose memory may be used for what comes of them
    first: int = FIRST_PREDICTED  # tokens before this one are impossible
    is_normalized: bool = False  # these are log-probabilities

    def log_probs(self) -> Tensor:
        """All of them, [..., V]; at least float32."""
        if self.is_normalized:
            return self.logits
        logits = self.logits
        logits[..., : self.first] = -torch.inf
        precise = torch.promote_types(logits.dtype, torch.float32)
        # In place where no gradient is wanted: memory for as many numbers again costs more than computing them.
        in_place = not torch.is_grad_enabled() and logits.dtype == precise
        return torch.log_softmax(logits, dim=-1, dtype=precise, out=logits if in_place else None)

    def of(self, tokens: Tensor) -> Tensor:
        """The log-probability of one token each, [...]."""
        if kernels.usable(self.logits) and self.logits.dtype != torch.float64 and not self.is_normalized:
            from bothways.kernels.cross_entropy import cross_entropy_

            rows, ones = self.logits.flatten(0, -2), torch.ones(tokens.numel(), device=tokens.device)
            return -cross_entropy_(rows, tokens.flatten(), ones, 0.0, self.first, False)[1].view(tokens.shape)
        return self.log_probs().gather(-1, tokens[..., None]).squeeze(-1)

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens, best first: log-probabilities and tokens, twice [..., count]."""
        kernel = kernels.usable(self.logits) and self.logits.dtype != torch.float64 and count <= FEW
        if kernel and not self.is_normalized:
            from bothways.kernels.candidates import largest_normalized

            return largest_normalized(self.logits, self.first, count)
        return largest(self.log_probs(), count)

    def only(self, token: Tensor) -> "Distribution":
        """What `token` [...] says alone stays possible, as probable as it was; PAD there allows all."""
        log_probs = self.log_probs()
        allowed = torch.arange(log_probs.size(-1), device=token.device) == token[..., None]
        return Distribution(
            log_probs.masked_fill(~(allowed | (token == PAD)[..., None]), -torch.inf), is_normalized=True
        )


@dataclass(frozen=True)
class Clock:
    """How many steps were taken: a number on the device, and one here unless a recorded step is replayed."""

    step: Tensor  # []
    taken: int | None = 0  # None: only the device counts, and every step passes over all that there is room for

    @classmethod
    def start(cls, device: torch.device) -> "Clock":
        """Before the first step."""
        return cls(torch.zeros((), dtype=torch.long, device=device))

    def window(self, room: int) -> int:
        """How many steps, this one among them, are passed over; what is not written yet must not be read."""
        return room if self.taken is None else self.taken + 1

    def is_full(self, room: int) -> bool:
        """Whether this step finds no place any more."""
        return self.taken is not None and self.taken >= room

    def written(self, window: int) -> Tensor:
        """[window] true for the steps up to this one."""
        return torch.arange(window, device=self.step.device) <= self.step

    def put(self, x: Tensor, dim: int, value: Tensor) -> None:
        """Write this step's part of x, in place."""
        if self.taken is None:
            x.index_copy_(dim, self.step[None], value.unsqueeze(dim))
        else:
            x.select(dim, self.taken).copy_(value)

    def ticked(self) -> "Clock":
        """One step later; a clock that only the device reads goes on by itself."""
        if self.taken is None:
            self.step.add_(1)
            return self
        return Clock(self.step + 1, self.taken + 1)

    def on_device_only(self) -> "Clock":
        """The same time for steps that are recorded."""
        return replace(self, taken=None)


class State(Protocol):
    """All that decoding remembers. It is consumed by `step`: go on from the state that step returns.

    It is a dataclass of tensors, tuples and other such dataclasses, which is how steps can be recorded.
    """

    @property
    def clock(self) -> Clock:
        """How many tokens every hypothesis has consumed."""
        ...

    def select(self, origins: Tensor) -> Self:
        """Hypotheses that go on, in their new order: origins [B, D, K] name slots of their own half."""
        ...

    def keep(self, sentences: Tensor) -> Self:
        """Sentences that go on, by row [B']; those that are done leave the batch."""
        ...

    def fixed(self, room: int) -> Self:
        """The same with room for so many tokens, and with sizes that come again, for steps that are recorded.

        From then on a step returns a state of the shapes that it was given.
        """
        ...


def roomier(x: Tensor, dim: int, room: int | None = None) -> Tensor:
    """x with room for so many along `dim`, or for twice as many; what is new is not written yet."""
    held = x.size(dim)
    room = max(FIRST_ROOM, 2 * held) if room is None else room
    if room <= held:
        return x
    shape = list(x.shape)
    shape[dim] = room
    new = x.new_empty(shape)
    new.narrow(dim, 0, held).copy_(x)
    return new


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What `topk` finds on the last axis, in a third of the time: values and indices, [..., V] -> twice [..., count].

    None of them needs to lie outside the `count` groups with the largest maxima, so only these are searched, and the
    last few that fill no group.
    """
    whole = x.size(-1) // GROUP * GROUP
    if whole < count * GROUP:
        return x.topk(count, dim=-1)
    best = x[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1).topk(count, dim=-1).indices
    index = torch.arange(x.size(-1), device=x.device)
    members = (best[..., None] * GROUP + index[:GROUP]).flatten(-2)
    places = torch.cat([members, index[whole:].expand(*x.shape[:-1], -1)], dim=-1)
    values, chosen = x.gather(-1, places).topk(count, dim=-1)
    return values, places.gather(-1, chosen)
