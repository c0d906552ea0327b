"""Synchronous bidirectional beam search: a step function in, the best hypotheses of every sentence out.

    every direction starts with its tag in slot 0
    repeat: every live hypothesis consumes its newest token, with its partner in the other half beam as its future
            of its extensions a direction keeps the 2K best: those that end are complete, K go on
    until no live hypothesis of either direction can still enter the sentence's n-best

With one direction the same code is ordinary beam search; with one candidate instead of 2K it is greedy.

B sentences   D direction (0 l2r, 1 r2l)   K hypotheses of one direction   V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bothways import kernels
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
    partners_of,
)
from bothways.search.recorded import Recorder, changed
from bothways.stepwise import Clock, Distribution, roomier
from bothways.tokens import END, PAD, Direction

CPU = torch.device("cpu")
CHECK_EVERY = 4  # steps between looks at what has finished on a GPU


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
    device: torch.device = CPU,
    recorder: Recorder | None = None,
) -> list[Found]:
    """Decode every sentence of a started state, which is on `device`; limits and what is forced are on the CPU.

    limits [B]: the most tokens before the end mark, a sentence's own. forced [B, D, F]: what a direction must begin
    with, PAD where it is free; only a direction that is forced may then win, the other is its future. A recorder makes
    one launch of a step on a GPU.
    """
    plan, longest = Plan.of(config, directions), int(limits.max())
    if all_complete:
        plan = plan.keeping_all(longest)
    # Copies that the CPU does not wait for: the GPU is still busy with the sources.
    beam = changed(Beam.start(plan, limits, forced, trace), lambda x: x.to(device, non_blocking=True))
    found: list[Found | None] = [None] * len(limits)
    if recorder is not None:
        rows = torch.arange(len(limits), device=device)
        state, beam = _kept(state, beam, rows, recorder.size(len(limits)))
    taken, both = 0, (state, beam)
    while True:
        until = min(taken + steps_between_looks(device), longest + 1)
        both, going = _through(step, both, range(taken, until), recorder)
        taken, (state, beam) = until, both
        size = beam.active.size(0)
        may_wait = 2 * going > size or (going and recorder is not None and recorder.may_wait(size, taken))
        if may_wait and taken <= longest:
            continue  # leaving the batch costs a copy: wait until half of it is done
        running = beam.active.nonzero().squeeze(1)
        for sentence, result in beam.results():
            found[sentence] = result
        if not len(running):
            return [result for result in found if result is not None]
        both = _kept(state, beam, running, len(running) if recorder is None else recorder.size(len(running)))


def steps_between_looks(device: torch.device) -> int:
    """How often search asks which sentences have finished: not at every step where it would wait for the answer."""
    return 1 if device.type == "cpu" else CHECK_EVERY


def _through(
    step: Step, both: tuple[State, "Beam"], steps: range, recorder: Recorder | None
) -> tuple[tuple[State, "Beam"], int]:
    """Some steps further, and how many sentences go on, by the last of them or not long before."""
    if recorder is not None and not both[1].trace:
        return recorder.run((step, both[1].plan), partial(_stepped, step), both, steps, lambda both: both[1].active)
    for _ in steps:
        both = _stepped(step, *both)
    return both, int(both[1].active.sum())


def _stepped(step: Step, state: State, beam: "Beam") -> tuple[State, "Beam"]:
    """One step further: all of it that is computed, and nothing that is looked at."""
    partners, weights = beam.partners()
    following, state = step(beam.tokens, state, partners, weights)
    return state.select(beam.advance(following)), beam


def _kept(state: State, beam: "Beam", rows: Tensor, size: int) -> tuple[State, "Beam"]:
    """Some sentences of a batch, which is filled up to `size` with a sentence that has finished."""
    if size == beam.active.size(0) == len(rows):
        return state, beam
    filled = F.pad(rows, (0, size - len(rows)))
    return state.keep(filled), beam.keep(filled, len(rows))


@dataclass
class Beam:
    """The half beams of a batch of sentences, what they completed, and how they came to be."""

    plan: Plan
    trace: bool
    clock: Clock
    limits: Tensor  # [B]
    forced: Tensor | None  # [B, D, F]; the last is free
    tokens: Tensor  # [B, D, K] to be consumed next
    scores: Tensor  # [B, D, K] log-probabilities
    active: Tensor  # [B] whether a sentence goes on
    sentences: Tensor  # [B] a row's place in the input; -1: it only fills the batch
    last_step: Tensor  # [B] at which it finished
    may_win: Tensor  # [B, D]
    # complete hypotheses, best first: normalized score, and where they ended, [B, D, C]
    done: Tensor
    done_step: Tensor
    done_slot: Tensor
    done_log_prob: Tensor
    # per step, [B, room, D, K]: the token chosen, the slot it was chosen by, its log-probability
    chosen: tuple[Tensor, Tensor, Tensor]
    readings: list[tuple[Tensor, Tensor | None, Tensor | None]]  # for the trace: live, partners, weights

    @classmethod
    def start(cls, plan: Plan, limits: Tensor, forced: Tensor | None, trace: bool) -> "Beam":
        """Every direction has its tag in slot 0; the other slots are dead."""
        B, D, K, C, device = limits.size(0), len(plan.directions), plan.slots, plan.kept, limits.device
        tags = torch.tensor([d.tag for d in plan.directions], device=device)
        scores = torch.full((B, D, K), -torch.inf, dtype=torch.float64, device=device)
        scores[:, :, 0] = 0.0
        may_win = torch.ones(B, D, dtype=torch.bool, device=device)
        if forced is not None:
            is_forced = (forced != PAD).any(-1)
            may_win = is_forced | ~is_forced.any(-1, keepdim=True)
            forced = F.pad(forced, (0, 1), value=PAD)
        nothing = torch.zeros((B, D, C), dtype=torch.long, device=device)
        places = torch.zeros((B, 0, D, K), dtype=torch.long, device=device)
        return cls(
            plan,
            trace,
            Clock.start(device),
            limits,
            forced,
            tokens=tags[None, :, None].repeat(B, 1, K),
            scores=scores,
            active=torch.ones(B, dtype=torch.bool, device=device),
            sentences=torch.arange(B, device=device),
            last_step=torch.zeros(B, dtype=torch.long, device=device),
            may_win=may_win,
            done=torch.full((B, D, C), -torch.inf, dtype=torch.float64, device=device),
            done_step=nothing,
            done_slot=nothing.clone(),
            done_log_prob=nothing.float(),
            chosen=(places, places, places.float()),
            readings=[],
        )

    def partners(self) -> tuple[Tensor | None, Tensor | None]:
        """Slots and weights of the futures that the next step reads."""
        partners = weights = None
        if len(self.plan.directions) == 2:
            partners, weights = self._partners(self.plan.config.pairing)
            if self.plan.config.greedy:  # a direction that has ended stays the other's future
                partners, weights = torch.zeros_like(partners), torch.ones_like(weights)
        if self.trace:
            self.readings.append((self.scores > -torch.inf, partners, weights))
        return partners, weights

    def _partners(self, pairing: str) -> tuple[Tensor, Tensor]:
        if pairing != "mix" and kernels.usable(self.scores):
            from bothways.kernels.beam import pair

            return pair(self.scores, by_rank=pairing == "rank")
        return partners_of(self.scores, pairing)

    def advance(self, following: Distribution) -> Tensor:
        """Extend, complete and go on by one token; returns the origins [B, D, K] of the slots that go on."""
        count = min(self.plan.candidates, following.logits.size(-1))
        own, token = self._restricted(following).largest(count)  # [B, D, K, n]
        if kernels.usable(own):
            from bothways.kernels.beam import fits

            if fits(self.plan.slots, count, self.plan.kept) and own.dtype == torch.float32:
                return self._advance_in_kernels(own, token)
        best, origin, token, log_prob = extend(self.scores, own, token, self.plan.candidates)
        ends = (token == END) & (best > -torch.inf)
        self._complete(torch.where(ends & self.may_win[..., None], best, -torch.inf), origin, log_prob)
        go_on = best.masked_fill(ends, -torch.inf)
        places = first_ones(go_on, self.plan.slots)
        scores, origins, log_prob = (x.gather(-1, places) for x in (go_on, origin, log_prob))
        tokens = token.gather(-1, places).masked_fill(scores == -torch.inf, PAD)
        self._note(tokens, origins, log_prob)
        self.tokens = tokens
        self.scores = torch.where(self.active[:, None, None], scores, self.scores)
        self._finish()
        self.clock = self.clock.ticked()
        return origins

    def _advance_in_kernels(self, own: Tensor, token: Tensor) -> Tensor:
        """The rest of `advance`, in place."""
        from bothways.kernels.beam import advance

        plan, config, clock = self.plan, self.plan.config, self.clock
        self._make_room()
        origins = advance(
            own,
            token,
            self.scores,
            self.tokens,
            self.active,
            self.limits,
            self.last_step,
            self.may_win,
            (self.done, self.done_step, self.done_slot, self.done_log_prob),
            self.chosen,
            clock.step,
            candidates=plan.candidates,
            nbest=config.nbest,
            penalty=config.length_penalty,
            greedy=config.greedy,
            stops=config.early_stop,
            end=END,
            pad=PAD,
        )
        self.clock = clock.ticked()
        return origins

    def fixed(self, room: int) -> "Beam":
        """See State: with room for so many steps, of which all have one shape."""
        tokens, origins, log_probs = (roomier(x, 1, room) for x in self.chosen)
        return replace(self, chosen=(tokens, origins, log_probs), clock=self.clock.on_device_only())

    def results(self) -> list[tuple[int, Found]]:
        """Place in the input and result of every sentence that has finished."""
        rows = (~self.active & (self.sentences >= 0)).nonzero().squeeze(1)
        if not len(rows):
            return []

        def taken(x: Tensor) -> np.ndarray:
            return (x if len(rows) == len(x) else x[rows]).cpu().numpy()

        last = taken(self.last_step)
        reached = np.minimum(last + 1, taken(self.limits))  # tokens that a cut-off output has
        paths = _Paths(self.plan, *(taken(x[:, : last.max() + 1]) for x in self.chosen))
        ends = _Ends.of(*(taken(x) for x in (self.done, self.done_step, self.done_slot, self.done_log_prob)))
        found = paths.found(ends, reached, taken(self.may_win).tolist())
        if self.trace:
            of_each = zip(rows.tolist(), last.tolist(), paths.each(), ends.each(self.plan, len(rows)), strict=True)
            found = [replace(one, trace=self._trace(*each)) for one, each in zip(found, of_each, strict=True)]
        return list(zip(taken(self.sentences).tolist(), found, strict=True))

    def keep(self, rows: Tensor, real: int) -> "Beam":
        """The beams of some sentences only; after so many of them, they only fill the batch."""
        kept = replace(self)
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                setattr(kept, name, value[rows])
        kept.active[real:], kept.sentences[real:] = False, -1
        kept.chosen = tuple(x[rows] for x in self.chosen)  # type: ignore[assignment]
        kept.readings = [tuple(None if x is None else x[rows] for x in reading) for reading in self.readings]  # type: ignore[misc]
        return kept

    def _note(self, *chosen: Tensor) -> None:
        """Tokens, origins and log-probabilities of this step."""
        self._make_room()
        for record, value in zip(self.chosen, chosen, strict=True):
            self.clock.put(record, 1, value)

    def _make_room(self) -> None:
        if self.clock.is_full(self.chosen[0].size(1)):
            self.chosen = tuple(roomier(x, 1) for x in self.chosen)  # type: ignore[assignment]

    def _restricted(self, following: Distribution) -> Distribution:
        """Only the forced token, where there is one."""
        if self.forced is None:
            return following
        free = self.forced.size(-1) - 1
        if self.clock.taken is not None and self.clock.taken >= free:
            return following
        token = self.forced.index_select(-1, self.clock.step.clamp(max=free)[None])  # [B, D, 1]
        return following.only(token.expand_as(self.tokens))

    def _complete(self, ended: Tensor, slot: Tensor, log_prob: Tensor) -> None:
        """Merge hypotheses that end at this step into the complete ones; equal scores keep the earlier step first."""
        score = ended / length_norm((self.clock.step + 1).double(), self.plan.config.length_penalty)
        score = score.masked_fill(~self.active[:, None, None], -torch.inf)
        merged = torch.cat([self.done, score], dim=-1)
        places = first_ones(merged, self.done.size(-1))
        self.done = merged.gather(-1, places)
        self.done_step = torch.cat([self.done_step, self.clock.step.expand_as(slot)], dim=-1).gather(-1, places)
        self.done_slot = torch.cat([self.done_slot, slot], dim=-1).gather(-1, places)
        self.done_log_prob = torch.cat([self.done_log_prob, log_prob.float()], dim=-1).gather(-1, places)

    def _finish(self) -> None:
        """A sentence ends at its own limit, or when nothing live can still enter its n-best."""
        config = self.plan.config
        live = self.scores.masked_fill(~self.may_win[..., None], -torch.inf).flatten(1).amax(-1)
        finished = self.clock.step >= self.limits
        if config.greedy:
            finished = finished | (self.scores.flatten(1).amax(-1) == -torch.inf)
        elif config.early_stop:
            longest = (self.limits + 1).double()  # with the end mark
            reachable = live / length_norm(longest, config.length_penalty)
            nth = self.done.flatten(1).sort(dim=-1, descending=True).values[:, config.nbest - 1]
            finished = finished | ((nth > -torch.inf) & ~(reachable > nth))
        self.last_step = torch.where(self.active, self.clock.step, self.last_step)
        self.active = self.active & ~finished

    def _trace(self, row: int, last: int, chosen: tuple[np.ndarray, ...], ends: list[End]) -> Trace:
        D, K = self.tokens.shape[1:]
        tokens, origins, log_probs = chosen
        steps = []
        for t in range(last + 2):
            live, partners, weights = self.readings[t] if t <= last else (None, None, None)
            first = t == 0
            steps.append(
                TraceStep(
                    tokens=[[d.tag] * K for d in self.plan.directions] if first else tokens[t - 1].tolist(),
                    parents=[list(range(K))] * D if first else origins[t - 1].tolist(),
                    log_probs=[[0.0] * K] * D if first else log_probs[t - 1].tolist(),
                    live=(self.scores > -torch.inf)[row].tolist() if live is None else live[row].tolist(),
                    partners=[[[]] * K] * D if partners is None else partners[row].tolist(),
                    weights=[[[]] * K] * D if weights is None else weights[row].tolist(),
                )
            )
        return Trace(steps, ends)


@dataclass(frozen=True)
class _Ends:
    """Where the complete hypotheses of all sentences ended: those of a sentence together, best first."""

    sentence: np.ndarray
    direction: np.ndarray  # its index
    step: np.ndarray
    slot: np.ndarray
    score: np.ndarray
    log_prob: np.ndarray  # of the end mark

    @classmethod
    def of(cls, scores: np.ndarray, steps: np.ndarray, slots: np.ndarray, log_probs: np.ndarray) -> "_Ends":
        """From what beams keep, [n, D, C]; ties: earlier step, then l2r, then lower slot."""
        at = np.nonzero(scores > -np.inf)
        sentence, d = at[0], at[1]
        order = np.lexsort((slots[at], d, steps[at], -scores[at], sentence))
        return cls(*(x[order] for x in (sentence, d, steps[at], slots[at], scores[at], log_probs[at])))

    def each(self, plan: Plan, sentences: int) -> list[list[End]]:
        """All of each sentence."""
        found: list[list[End]] = [[] for _ in range(sentences)]
        for i, d, step, slot, log_prob in zip(
            *(x.tolist() for x in (self.sentence, self.direction, self.step, self.slot, self.log_prob)), strict=True
        ):
            found[i].append(End(step, plan.directions[d], slot, log_prob))
        return found

    def wanted(self, nbest: int) -> "_Ends":
        """Those that are handed out: the n-best of each sentence, and the best of each direction."""
        begins = np.searchsorted(self.sentence, self.sentence)
        _, firsts = np.unique(2 * self.sentence + self.direction, return_index=True)
        chosen = np.arange(len(begins)) - begins < nbest
        chosen[firsts] = True
        return _Ends(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class _Paths:
    """Follows the hypotheses of all sentences back to their tags: what was chosen, arrays [n, steps, D, K]."""

    plan: Plan
    tokens: np.ndarray
    origins: np.ndarray
    log_probs: np.ndarray

    def each(self) -> Iterator[tuple[np.ndarray, ...]]:
        """What was chosen in every sentence, [steps, D, K] each."""
        return zip(self.tokens, self.origins, self.log_probs, strict=True)

    def found(self, ends: _Ends, reached: np.ndarray, may_win: Sequence[Sequence[bool]]) -> list[Found]:
        """The results of all sentences: only hypotheses that are handed out are followed back."""
        nbest = self.plan.config.nbest
        winners: list[list[Hypothesis]] = [[] for _ in may_win]
        best: list[dict[Direction, Hypothesis]] = [{} for _ in may_win]
        for i, hypothesis in self._complete(ends.wanted(nbest)):
            if len(winners[i]) < nbest:
                winners[i].append(hypothesis)
            best[i].setdefault(hypothesis.direction, hypothesis)
        for i, hypothesis in self._cut_off(ends, reached):
            best[i][hypothesis.direction] = hypothesis
        for i, some in enumerate(winners):
            if not some:
                allowed = [h for h in best[i].values() if may_win[i][self.plan.directions.index(h.direction)]]
                some += sorted(allowed or best[i].values(), key=lambda h: (-h.score, int(h.direction)))[:1]
        return [Found(*one) for one in zip(winners, best, strict=True)]

    def _complete(self, ends: _Ends) -> Iterator[tuple[int, Hypothesis]]:
        paths = self._back(ends.sentence, ends.step, ends.direction, ends.slot)
        columns = (x.tolist() for x in (ends.sentence, ends.direction, ends.score, ends.log_prob))
        for i, d, score, log_prob, (tokens, scores) in zip(*columns, paths, strict=True):
            yield i, Hypothesis(tokens, [*scores, log_prob], score, self.plan.directions[d], False)

    def _cut_off(self, ends: _Ends, reached: np.ndarray) -> Iterator[tuple[int, Hypothesis]]:
        """Of a direction that has completed none, the best that is live after `reached` tokens.

        The token after the last one allowed is chosen as well, in case it is an end mark; it is not handed out.
        """
        n, _, D, _ = self.tokens.shape
        missing = np.ones((n, D), dtype=bool)
        missing[ends.sentence, ends.direction] = False
        is_live = self.tokens[np.arange(n), np.maximum(reached, 1) - 1, :, 0] != PAD
        sentence, d = np.nonzero(missing & (is_live | (reached == 0)[:, None]))
        lengths = reached[sentence]
        paths = self._back(sentence, lengths, d, np.zeros_like(d))
        columns = sentence, d, length_norm(lengths, self.plan.config.length_penalty)
        for i, k, norm, (tokens, scores) in zip(*(x.tolist() for x in columns), paths, strict=True):
            yield i, Hypothesis(tokens, scores, sum(scores) / norm, self.plan.directions[k], True)

    def _back(
        self, sentence: np.ndarray, lengths: np.ndarray, d: np.ndarray, slot: np.ndarray
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of hypotheses, by sentence, number of tokens, direction and slot then."""
        longest = int(lengths.max(initial=0))
        tokens = np.zeros((len(sentence), longest), dtype=np.int64)
        scores = np.zeros((len(sentence), longest), dtype=np.float64)
        for t in range(longest - 1, -1, -1):
            here = lengths > t
            at = sentence, t, d, np.where(here, slot, 0)
            tokens[:, t], scores[:, t] = self.tokens[at], self.log_probs[at]
            slot = np.where(here, self.origins[at], slot)
        rows = zip(tokens.tolist(), scores.tolist(), lengths.tolist(), strict=True)
        return [(words[:n], chances[:n]) for words, chances, n in rows]
