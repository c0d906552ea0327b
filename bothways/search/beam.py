"""Synchronous bidirectional beam search: a step function in, the best hypotheses of every sentence out.

    every direction starts with its tag in slot 0
    repeat: every live hypothesis consumes its newest token, with its partner in the other half beam as its future
            of its extensions a direction keeps the 2K best: those that end are complete, K go on
    until no live hypothesis of either direction can still enter the sentence's n-best

With one direction the same code is ordinary beam search; with one candidate instead of 2K it is greedy.

B sentences   D direction (0 l2r, 1 r2l)   K hypotheses of one direction   V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bothways.config import SearchConfig
from bothways.errors import SearchError
from bothways.search.hypothesis import (
    End,
    Found,
    Hypothesis,
    State,
    Step,
    Trace,
    TraceStep,
    extend,
    first_ones,
    length_norm,
    order_key,
    partners_of,
)
from bothways.tokens import END, PAD, Direction

CHECK_EVERY = 8  # steps between looks at what has finished on a GPU, where each look waits for all work to end


@dataclass(frozen=True)
class Plan:
    """The settings of one search, resolved for its directions."""

    directions: tuple[Direction, ...]
    slots: int  # K
    candidates: int  # 2K; 1 if greedy
    kept: int  # complete hypotheses kept per direction
    config: SearchConfig

    @classmethod
    def of(cls, config: SearchConfig, directions: tuple[Direction, ...]) -> "Plan":
        """Both directions share the beam."""
        if config.greedy:
            return cls(directions, 1, 1, 1, config)
        if config.beam % len(directions):
            raise SearchError(
                f"search.beam: must be even when both directions decode (each takes half), got {config.beam}"
            )
        slots = config.beam // len(directions)
        return cls(directions, slots, 2 * slots, config.beam, config)

    def keeping_all(self, limit: int) -> "Plan":
        """The same search to its end, with all that it completes, by log-probability: see `search.rerank.under`."""
        kept = self.candidates * (limit + 1)
        options = {"nbest": kept * len(self.directions), "length_penalty": 0.0, "early_stop": False}
        return replace(self, kept=kept, config=self.config.model_copy(update=options))


def search(
    step: Step,
    state: State,
    limits: Tensor,
    directions: tuple[Direction, ...],
    config: SearchConfig,
    forced: Tensor | None = None,
    trace: bool = False,
    all_complete: bool = False,
) -> list[Found]:
    """Decode every sentence of a started state.

    limits [B]: the most tokens before the end mark, a sentence's own. forced [B, D, F]: what a direction must begin
    with, PAD where it is free; only a direction that is forced may then win, the other is its future.
    """
    plan = Plan.of(config, directions)
    if all_complete:
        plan = plan.keeping_all(int(limits.max()))
    beam = Beam(plan, limits, forced, trace)
    found: list[Found | None] = [None] * limits.size(0)
    while True:
        partners, weights = beam.partners()
        log_probs, state = step(beam.tokens, state, partners, weights)
        state = state.select(beam.advance(log_probs))
        del log_probs  # the largest tensor of all: the next step's takes its place in memory
        if not beam.is_time_to_look():
            continue
        running = beam.active.nonzero().squeeze(1)
        if 2 * len(running) > beam.active.size(0):
            continue  # leaving the batch costs a copy: wait until half of it is done
        for sentence, result in beam.results():
            found[sentence] = result
        if not len(running):
            return [result for result in found if result is not None]
        state, beam = state.keep(running), beam.keep(running)


class Beam:
    """The half beams of a batch of sentences, what they completed, and how they came to be."""

    def __init__(self, plan: Plan, limits: Tensor, forced: Tensor | None, trace: bool) -> None:
        B, D, K, C, device = limits.size(0), len(plan.directions), plan.slots, plan.kept, limits.device
        self.plan, self.limits, self.forced, self.step, self.trace = plan, limits, forced, 0, trace
        tags = torch.tensor([d.tag for d in plan.directions], device=device)
        self.tokens = tags[None, :, None].expand(B, D, K)  # [B, D, K] to be consumed next
        self.scores = torch.full((B, D, K), -torch.inf, dtype=torch.float64, device=device)  # log-probabilities
        self.scores[:, :, 0] = 0.0
        self.active = torch.ones(B, dtype=torch.bool, device=device)
        self.sentences = torch.arange(B, device=device)  # a row's place in the input
        self.last_step = torch.zeros(B, dtype=torch.long, device=device)  # at which it finished
        self.may_win = torch.ones(B, D, dtype=torch.bool, device=device)
        if forced is not None:
            is_forced = (forced != PAD).any(-1)
            self.may_win = is_forced | ~is_forced.any(-1, keepdim=True)
        # complete hypotheses, best first: normalized score, and where they ended
        self.done = torch.full((B, D, C), -torch.inf, dtype=torch.float64, device=device)
        self.done_step = torch.zeros((B, D, C), dtype=torch.long, device=device)
        self.done_slot = torch.zeros((B, D, C), dtype=torch.long, device=device)
        self.done_log_prob = torch.zeros((B, D, C), dtype=torch.float32, device=device)
        # per step, [B, D, K]: the token chosen, the slot it was chosen by, its log-probability
        self.chosen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.readings: list[tuple[Tensor, Tensor | None, Tensor | None]] = []  # for the trace: live, partners, weights

    def partners(self) -> tuple[Tensor | None, Tensor | None]:
        """Slots and weights of the futures that the next step reads."""
        partners = weights = None
        if len(self.plan.directions) == 2:
            partners, weights = partners_of(self.scores, self.plan.config.pairing)
            if self.plan.config.greedy:  # a direction that has ended stays the other's future
                partners, weights = torch.zeros_like(partners), torch.ones_like(weights)
        if self.trace:
            self.readings.append((self.scores > -torch.inf, partners, weights))
        return partners, weights

    def advance(self, log_probs: Tensor) -> Tensor:
        """Extend, complete and go on by one token; returns the origins [B, D, K] of the slots that go on."""
        best, origin, token, log_prob = extend(self.scores, self._restricted(log_probs), self.plan.candidates)
        ends = (token == END) & (best > -torch.inf)
        self._complete(torch.where(ends & self.may_win[..., None], best, -torch.inf), origin, log_prob)
        go_on = best.masked_fill(ends, -torch.inf)
        places = first_ones(go_on, self.plan.slots)
        scores, origins, log_prob = (x.gather(-1, places) for x in (go_on, origin, log_prob))
        tokens = token.gather(-1, places).masked_fill(scores == -torch.inf, PAD)
        self.chosen.append((tokens, origins, log_prob))
        self.tokens = tokens
        self.scores = torch.where(self.active[:, None, None], scores, self.scores)
        self._finish()
        self.step += 1
        return origins

    def is_time_to_look(self) -> bool:
        """Whether to ask which sentences have finished."""
        return self.active.device.type == "cpu" or self.step % CHECK_EVERY == 0

    def results(self) -> list[tuple[int, Found]]:
        """Place in the input and result of every sentence that has finished."""
        rows = (~self.active).nonzero().squeeze(1)
        if not len(rows):
            return []
        tokens, origins, log_probs = (
            torch.stack([x[i] for x in self.chosen], dim=1)[rows].cpu().numpy() for i in range(3)
        )  # each [rows, steps, D, K]
        done = [x[rows].cpu().numpy() for x in (self.done, self.done_step, self.done_slot, self.done_log_prob)]
        may_win, last = (x[rows].cpu().numpy() for x in (self.may_win, self.last_step))
        reached = torch.minimum(self.last_step + 1, self.limits)[rows].tolist()  # tokens that a cut-off output has
        out = []
        for i, (row, sentence) in enumerate(zip(rows.tolist(), self.sentences[rows].tolist(), strict=True)):
            paths = _Paths(self.plan, tokens[i], origins[i], log_probs[i])
            complete = paths.complete(*(x[i] for x in done))
            cut_off = paths.cut_off(reached[i])
            trace = self._trace(row, int(last[i]), paths, [end for _, end in complete]) if self.trace else None
            out.append((sentence, _found(self.plan, complete, cut_off, may_win[i], trace)))
        return out

    def keep(self, rows: Tensor) -> "Beam":
        """The beams of some sentences only."""
        kept = object.__new__(Beam)
        kept.__dict__.update(self.__dict__)
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                setattr(kept, name, value[rows])
        kept.chosen = [(a[rows], b[rows], c[rows]) for a, b, c in self.chosen]
        kept.readings = [tuple(None if x is None else x[rows] for x in reading) for reading in self.readings]  # type: ignore[misc]
        return kept

    def _restricted(self, log_probs: Tensor) -> Tensor:
        """Only the forced token, where there is one."""
        if self.forced is None or self.step >= self.forced.size(-1):
            return log_probs
        token = self.forced[:, :, None, self.step, None]  # [B, D, 1, 1]
        allowed = torch.arange(log_probs.size(-1), device=token.device) == token
        return log_probs.masked_fill(~(allowed | (token == PAD)), -torch.inf)

    def _complete(self, ended: Tensor, slot: Tensor, log_prob: Tensor) -> None:
        """Merge hypotheses that end at this step into the complete ones; equal scores keep the earlier step first."""
        score = ended / length_norm(self.step + 1, self.plan.config.length_penalty)
        score = score.masked_fill(~self.active[:, None, None], -torch.inf)
        merged = torch.cat([self.done, score], dim=-1)
        places = first_ones(merged, self.done.size(-1))
        self.done = merged.gather(-1, places)
        self.done_step = torch.cat([self.done_step, torch.full_like(slot, self.step)], dim=-1).gather(-1, places)
        self.done_slot = torch.cat([self.done_slot, slot], dim=-1).gather(-1, places)
        self.done_log_prob = torch.cat([self.done_log_prob, log_prob.float()], dim=-1).gather(-1, places)

    def _finish(self) -> None:
        """A sentence ends at its own limit, or when nothing live can still enter its n-best."""
        config = self.plan.config
        live = self.scores.masked_fill(~self.may_win[..., None], -torch.inf).flatten(1).amax(-1)
        finished = self.step >= self.limits
        if config.greedy:
            finished = finished | (self.scores.flatten(1).amax(-1) == -torch.inf)
        elif config.early_stop:
            longest = (self.limits + 1).double()  # with the end mark
            reachable = live / length_norm(longest, config.length_penalty)
            nth = self.done.flatten(1).sort(dim=-1, descending=True).values[:, config.nbest - 1]
            finished = finished | ((nth > -torch.inf) & ~(reachable > nth))
        self.last_step = torch.where(self.active, self.step, self.last_step)
        self.active = self.active & ~finished

    def _trace(self, row: int, last: int, paths: "_Paths", ends: Sequence[End]) -> Trace:
        D, K = self.tokens.shape[1:]
        steps = []
        for t in range(last + 2):
            live, partners, weights = self.readings[t] if t <= last else (None, None, None)
            first = t == 0
            steps.append(
                TraceStep(
                    tokens=[[d.tag] * K for d in self.plan.directions] if first else paths.tokens[t - 1].tolist(),
                    parents=[list(range(K))] * D if first else paths.origins[t - 1].tolist(),
                    log_probs=[[0.0] * K] * D if first else paths.log_probs[t - 1].tolist(),
                    live=(self.scores > -torch.inf)[row].tolist() if live is None else live[row].tolist(),
                    partners=[[[]] * K] * D if partners is None else partners[row].tolist(),
                    weights=[[[]] * K] * D if weights is None else weights[row].tolist(),
                )
            )
        return Trace(steps, list(ends))


class _Paths:
    """Follows the hypotheses of one sentence back to their tags: arrays [steps, D, K]."""

    def __init__(self, plan: Plan, tokens: np.ndarray, origins: np.ndarray, log_probs: np.ndarray) -> None:
        self.plan, self.tokens, self.origins, self.log_probs = plan, tokens, origins, log_probs

    def back(self, steps: int, d: int, slot: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of the hypothesis that stood in `slot` after `steps` tokens."""
        tokens, scores = [], []
        for t in range(steps - 1, -1, -1):
            tokens.append(int(self.tokens[t, d, slot]))
            scores.append(float(self.log_probs[t, d, slot]))
            slot = int(self.origins[t, d, slot])
        return tokens[::-1], scores[::-1]

    def complete(
        self, scores: np.ndarray, steps: np.ndarray, slots: np.ndarray, log_probs: np.ndarray
    ) -> list[tuple[Hypothesis, End]]:
        """All complete hypotheses of both directions, best first; arrays [D, C]."""
        found = []
        for d, direction in enumerate(self.plan.directions):
            for c in np.flatnonzero(scores[d] > -np.inf):
                end = End(int(steps[d, c]), direction, int(slots[d, c]), float(log_probs[d, c]))
                tokens, token_scores = self.back(end.step, d, end.slot)
                hypothesis = Hypothesis(tokens, [*token_scores, end.log_prob], float(scores[d, c]), direction, False)
                found.append((hypothesis, end))
        return sorted(found, key=lambda pair: order_key(*pair))

    def cut_off(self, steps: int) -> list[Hypothesis]:
        """The hypothesis of each direction that is best after so many tokens, if one is live then.

        The token after the last one allowed is chosen as well, in case it is an end mark; it is not handed out.
        """
        found = []
        norm = float(length_norm(steps, self.plan.config.length_penalty))
        for d, direction in enumerate(self.plan.directions):
            if steps == 0 or self.tokens[steps - 1, d, 0] != PAD:
                tokens, scores = self.back(steps, d, 0)
                found.append(Hypothesis(tokens, scores, sum(scores) / norm, direction, True))
        return found


def _found(
    plan: Plan,
    complete: list[tuple[Hypothesis, End]],
    cut_off: list[Hypothesis],
    may_win: np.ndarray,
    trace: Trace | None,
) -> Found:
    best: dict[Direction, Hypothesis] = {}
    for hypothesis in [*(found for found, _ in complete), *cut_off]:
        best.setdefault(hypothesis.direction, hypothesis)
    winners = [found for found, _ in complete]
    if not winners:
        allowed = [h for h in cut_off if may_win[plan.directions.index(h.direction)]]
        winners = sorted(allowed or cut_off, key=lambda h: (-h.score, int(h.direction)))[:1]
    return Found(winners[: plan.config.nbest], best, trace)
