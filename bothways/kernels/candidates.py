"""The best tokens of every hypothesis with their log-probabilities: the logits are read once, and never converted.

The formula is in stepwise.py: the softmax over all words, then `largest`. Here one kernel notes of every group of words
the maximum and the sum of exponentials; another finds the best groups, and the best words among theirs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128  # words whose maximum is noted
GROUPS = 32  # that a program reads


@triton.jit
def _note_groups(logits, highest, totals, words, first, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    word = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    possible = (word >= first) & (word < words)
    x = tl.load(logits + row * words + word, mask=possible, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 1)
    tl.store(highest + row * groups + group, top, mask=group < groups)
    base = tl.max(top, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    part = tl.program_id(1) + row * tl.num_programs(1)
    tl.store(totals + 2 * part, base)
    tl.store(totals + 2 * part + 1, tl.sum(tl.sum(tl.exp(x - base), 1), 0))


@triton.jit
def _find_largest(
    logits, highest, totals, values, tokens, words, first, groups, parts, count,
    GROUP: tl.constexpr, ALL: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    base = tl.load(totals + 2 * (row * parts + part), mask=part < parts, other=float("-inf"))
    total = tl.load(totals + 2 * (row * parts + part) + 1, mask=part < parts, other=0.0)
    top = tl.max(base, 0)
    norm = top + tl.log(tl.sum(total * tl.exp(base - top), 0))
    # The best words lie in the best groups: of equal ones in the first.
    group, place = tl.arange(0, ALL), tl.arange(0, COUNT)
    tops = tl.load(highest + row * groups + group, mask=group < groups, other=float("-inf"))
    left = group < groups
    best = tl.zeros([COUNT], tl.int32)
    for i in range(count):
        among = tl.where(left, tops, float("-inf"))
        most = tl.max(among, 0)
        one = tl.min(tl.where(left & (among == most), group, ALL), 0)
        best = tl.where(place == i, one, best)
        left = left & (group != one)
    word = best[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    open_ = (place < count)[:, None] & (word < words)
    x = tl.load(logits + row * words + word, mask=open_ & (word >= first), other=float("-inf")).to(tl.float32)
    for i in range(count):
        most = tl.max(tl.max(tl.where(open_, x, float("-inf")), 1), 0)
        one = tl.min(tl.min(tl.where(open_ & (x == most), word, 2147483647), 1), 0)
        tl.store(values + row * count + i, most - norm)
        tl.store(tokens + row * count + i, one.to(tl.int64))
        open_ = open_ & (word != one)


def largest_normalized(logits: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """What `largest` finds in log_softmax of logits [..., V] without the words before `first`: twice [..., count].

    Best first, and of equal ones the first first; log-probabilities in float32.
    """
    logits = logits.contiguous()
    words, rows = logits.size(-1), logits.numel() // logits.size(-1)
    groups = triton.cdiv(words, GROUP)
    parts = triton.cdiv(groups, GROUPS)
    highest = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    totals = torch.empty(rows, parts, 2, dtype=torch.float32, device=logits.device)
    values = torch.empty(*logits.shape[:-1], count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(*logits.shape[:-1], count, dtype=torch.long, device=logits.device)
    _note_groups[(rows, parts)](
        logits, highest, totals, words, first, groups, GROUP=GROUP, GROUPS=GROUPS, num_warps=4
    )  # fmt: skip
    _find_largest[(rows,)](
        logits, highest, totals, values, tokens, words, first, groups, parts, count,
        GROUP=GROUP, ALL=triton.next_power_of_2(groups), PARTS=triton.next_power_of_2(parts),
        COUNT=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    return values, tokens
