"""A search step's attention to the source: the few queries of a sentence over its keys and values, which are read once.

The formula is `attend` in nn/attention.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16  # that a program has: fewer cannot be multiplied by tensor cores
FEW = 4096  # programs: then each reads all it can at once, while many had better not read padding
WARPS = 2  # of a program


@triton.jit
def _attend_to_source(
    q, keys, values, mask, out, scale, rows, width,
    heads: tl.constexpr, head: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one head of some queries of a sentence."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, e = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, HEAD)
    places = (b * rows + row)[:, None] * heads * head + h * head + e[None, :]
    wanted = (row < rows)[:, None] & (e < head)[None, :]
    x = tl.load(q + places, mask=wanted, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, HEAD], tl.float32)
    for begin in range(0, width, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        reads = tl.load(mask + b * width + s, mask=s < width, other=0) != 0
        if tl.max(reads.to(tl.int32), 0) > 0:
            keyed = ((b * heads + h) * width + s)[:, None] * head + e[None, :]
            known = reads[:, None] & (e < head)[None, :]
            k = tl.load(keys + keyed, mask=known, other=0.0)
            v = tl.load(values + keyed, mask=known, other=0.0)
            scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(reads[None, :], scores, float("-inf"))
            top = tl.maximum(highest, tl.max(scores, 1))
            base = tl.where(top == float("-inf"), 0.0, top)  # nothing to read so far
            share, shares = tl.exp(highest - base), tl.exp(scores - base[:, None])
            total = total * share + tl.sum(shares, 1)
            found = found * share[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
            highest = top
    tl.store(out + places, found / tl.where(total > 0, total, 1.0)[:, None], mask=wanted)


def attend_to_source(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Queries [B, R, E] over keys and values [B, H, S, d], where mask [B, 1, 1, S] is true -> [B, R, E]."""
    B, H, S, d = keys.shape
    R, out = q.size(1), torch.empty_like(q, memory_format=torch.contiguous_format)
    keys_at_once = 64 if B * H < FEW else 32
    _attend_to_source[(B, H, triton.cdiv(R, QUERIES))](
        q.contiguous(), keys, values, mask.contiguous().view(torch.uint8), out, d**-0.5, R, S,
        heads=H, head=d, HEAD=max(16, triton.next_power_of_2(d)), QUERIES=QUERIES,
        BLOCK=min(keys_at_once, max(16, triton.next_power_of_2(S))), num_warps=WARPS,
    )  # fmt: skip
    return out
