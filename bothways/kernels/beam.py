"""A search step's bookkeeping, which is some forty operations on a few numbers of each sentence, in two kernels.

The rules are in search/beam.py: `Beam.advance`. Here an order is found by counting: as many as are before a number in
it, at that place it stands.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64  # candidates of one direction before they are cut to its best, or complete hypotheses kept


@triton.jit
def _before(a, b, i, j):
    """[n, m] whether a number of b comes before one of a: greater ones first, equal ones by their places j and i."""
    return (b[None, :] > a[:, None]) | ((b[None, :] == a[:, None]) & (j[None, :] < i[:, None]))


@triton.jit
def _length_norm(length, PENALTY: tl.constexpr):
    return tl.exp(tl.log((length.to(tl.float64) + 5) / 6) * PENALTY)


@triton.jit
def _at(wanted, x, nothing):
    """For each row of wanted [n, m], the number of x [m] that it is true for."""
    return tl.sum(tl.where(wanted, x[None, :], nothing), 1)


@triton.jit
def _complete(
    ended, counts, place, step, slot, own, done, done_step, done_slot, done_log_prob, row,
    KEPT: tl.constexpr, ALL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Put those candidates that end among the complete hypotheses, which stand in order; equal ones behind."""
    c = tl.arange(0, C)
    kept = c < KEPT
    held = tl.load(done + row * KEPT + c, mask=kept, other=float("-inf"))
    held_step = tl.load(done_step + row * KEPT + c, mask=kept, other=0)
    held_slot = tl.load(done_slot + row * KEPT + c, mask=kept, other=0)
    held_log_prob = tl.load(done_log_prob + row * KEPT + c, mask=kept, other=0.0)
    mine = c + tl.sum((ended[None, :] > held[:, None]).to(tl.int32), 1)
    theirs = tl.sum((_before(ended, ended, place, place) & counts[None, :]).to(tl.int32), 1)
    theirs += tl.sum(((held[None, :] >= ended[:, None]) & kept[None, :]).to(tl.int32), 1)
    to_held = row * KEPT + mine
    stays = kept & (mine < KEPT)
    to_ended = row * KEPT + theirs
    enters = counts & (theirs < KEPT)
    tl.debug_barrier()  # all is read before anything is written
    tl.store(done + to_held, held, mask=stays)
    tl.store(done_step + to_held, held_step, mask=stays)
    tl.store(done_slot + to_held, held_slot, mask=stays)
    tl.store(done_log_prob + to_held, held_log_prob, mask=stays)
    tl.store(done + to_ended, ended, mask=enters)
    tl.store(done_step + to_ended, tl.zeros([ALL], tl.int64) + step, mask=enters)
    tl.store(done_slot + to_ended, slot.to(tl.int64), mask=enters)
    tl.store(done_log_prob + to_ended, own, mask=enters)


@triton.jit
def _go_on(
    values, words, scores, active, may_win, done, done_step, done_slot, done_log_prob,
    tokens, origins, chosen_tokens, chosen_origins, chosen_log_probs, clock, room,
    DIRECTIONS: tl.constexpr, SLOTS: tl.constexpr, OWN: tl.constexpr, CANDIDATES: tl.constexpr, KEPT: tl.constexpr,
    PENALTY: tl.constexpr, END: tl.constexpr, PAD: tl.constexpr,
    ALL: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: one direction of a sentence."""
    row = tl.program_id(0).to(tl.int64)  # b * D + d
    b = row // DIRECTIONS
    step = tl.load(clock)
    i, s = tl.arange(0, ALL), tl.arange(0, S)
    real = i < SLOTS * OWN
    slot = i // OWN
    own = tl.load(values + row * SLOTS * OWN + i, mask=real, other=float("-inf"))
    word = tl.load(words + row * SLOTS * OWN + i, mask=real, other=PAD)
    before = tl.load(scores + row * SLOTS + slot, mask=real, other=float("-inf"))
    total = before + own.to(tl.float64)
    place = tl.sum(_before(total, total, i, i).to(tl.int32), 1)
    best = place < CANDIDATES
    ends = best & (word == END) & (total > float("-inf"))
    going = tl.where(ends | (place >= CANDIDATES), float("-inf"), total)
    goes = tl.sum((_before(going, going, place, place) & best[None, :]).to(tl.int32), 1)

    wanted = (goes[None, :] == s[:, None]) & best[None, :]
    score = tl.max(tl.where(wanted, going[None, :], float("-inf")), 1)
    origin = _at(wanted, slot, 0)
    token = tl.where(score > float("-inf"), _at(wanted, word, 0), PAD)
    log_prob = tl.max(tl.where(wanted, own[None, :], float("-inf")), 1)
    there = s < SLOTS
    tl.debug_barrier()  # all is read before anything is written
    tl.store(scores + row * SLOTS + s, score, mask=there & tl.load(active + b + 0 * s, mask=there, other=False))
    tl.store(tokens + row * SLOTS + s, token, mask=there)
    tl.store(origins + row * SLOTS + s, origin.to(tl.int64), mask=there)
    record = ((b * room + step) * DIRECTIONS + row % DIRECTIONS) * SLOTS + s
    tl.store(chosen_tokens + record, token, mask=there)
    tl.store(chosen_origins + record, origin.to(tl.int64), mask=there)
    tl.store(chosen_log_probs + record, log_prob, mask=there)

    counts = ends & tl.load(active + b + 0 * i) & tl.load(may_win + row + 0 * i)
    ended = tl.where(counts, total / _length_norm(step + 1, PENALTY), float("-inf"))
    _complete(ended, counts, place, step, slot, own, done, done_step, done_slot, done_log_prob, row, KEPT, ALL, C)


@triton.jit
def _finish(
    scores, active, limits, last_step, may_win, done, clock,
    DIRECTIONS: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, NBEST: tl.constexpr, PENALTY: tl.constexpr,
    GREEDY: tl.constexpr, STOPS: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: one sentence."""
    b = tl.program_id(0).to(tl.int64)
    step, limit = tl.load(clock), tl.load(limits + b)
    s, c = tl.arange(0, S), tl.arange(0, C)
    there = s < DIRECTIONS * SLOTS
    score = tl.load(scores + b * DIRECTIONS * SLOTS + s, mask=there, other=float("-inf"))
    finished = step >= limit
    if GREEDY:
        finished = finished | (tl.max(score, 0) == float("-inf"))
    elif STOPS:
        wins = tl.load(may_win + b * DIRECTIONS + s // SLOTS, mask=there, other=False)
        reachable = tl.max(tl.where(wins, score, float("-inf")), 0) / _length_norm(limit + 1, PENALTY)
        held = tl.load(done + b * DIRECTIONS * KEPT + c, mask=c < DIRECTIONS * KEPT, other=float("-inf"))
        place = tl.sum(_before(held, held, c, c).to(tl.int32), 1)
        nth = tl.max(tl.where(place == NBEST - 1, held, float("-inf")), 0)
        finished = finished | ((nth > float("-inf")) & (reachable <= nth))
    if tl.load(active + b):
        tl.store(last_step + b, step)
        if finished:
            tl.store(active + b, False)


@triton.jit
def _pair(scores, partners, shares, SLOTS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr):
    """One program: one direction of a sentence."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    there = s < SLOTS
    alive = tl.load(scores + (row ^ 1) * SLOTS + s, mask=there, other=float("-inf")) > float("-inf")
    partner = tl.where(alive, s, 0) if RANK else 0 * s
    tl.store(partners + row * SLOTS + s, partner.to(tl.int64), mask=there)
    some = tl.max(alive.to(tl.float32), 0)
    tl.store(shares + row * SLOTS + s, some + 0.0 * s, mask=there)


def pair(scores: Tensor, by_rank: bool) -> tuple[Tensor, Tensor]:
    """`partners_of`, by rank or all to the best: [B, 2, K] -> slots and shares [B, 2, K, 1]."""
    B, D, K = scores.shape
    partners = torch.empty(B, D, K, 1, dtype=torch.long, device=scores.device)
    shares = torch.empty(B, D, K, 1, device=scores.device)
    _pair[(B * D,)](scores, partners, shares, SLOTS=K, RANK=by_rank, S=triton.next_power_of_2(K), num_warps=1)
    return partners, shares


def fits(slots: int, candidates: int, kept: int) -> bool:
    """Whether the numbers of a sentence are few enough for one program."""
    return slots * candidates <= MOST and 2 * kept <= MOST


def advance(
    values: Tensor, words: Tensor, scores: Tensor, tokens: Tensor, active: Tensor, limits: Tensor, last_step: Tensor,
    may_win: Tensor, done: tuple[Tensor, Tensor, Tensor, Tensor], chosen: tuple[Tensor, Tensor, Tensor], step: Tensor,
    candidates: int, nbest: int, penalty: float, greedy: bool, stops: bool, end: int, pad: int,
) -> Tensor:  # fmt: skip
    """`Beam.advance` in place, from each hypothesis' best tokens [B, D, K, n]; returns the origins [B, D, K]."""
    B, D, K, n = values.shape
    origins, kept, room = torch.empty_like(tokens), done[0].size(-1), chosen[0].size(1)
    _go_on[(B * D,)](
        values, words, scores, active, may_win, *done, tokens, origins, *chosen, step, room,
        DIRECTIONS=D, SLOTS=K, OWN=n, CANDIDATES=candidates, KEPT=kept, PENALTY=penalty, END=end, PAD=pad,
        ALL=triton.next_power_of_2(K * n), S=triton.next_power_of_2(K), C=triton.next_power_of_2(kept), num_warps=1,
    )  # fmt: skip
    _finish[(B,)](
        scores, active, limits, last_step, may_win, done[0], step,
        DIRECTIONS=D, SLOTS=K, KEPT=kept, NBEST=nbest, PENALTY=penalty, GREEDY=greedy, STOPS=stops,
        S=triton.next_power_of_2(D * K), C=triton.next_power_of_2(D * kept), num_warps=1,
    )  # fmt: skip
    return origins
