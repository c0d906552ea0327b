"""Attention over short texts as wholes: one program holds all keys of a row and head, and no mask is ever made.

Queries, keys and values are read where the projections left them, and the gradients are written to where those of the
projections are expected. What a query may read is said by one row of words for each text (`readable`) and, for a
decoder, by position: keys 0 .. i. The softmax is computed anew in the backward pass; it fits into the registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 128  # keys
WIDTHS = (16, 32, 64, 128)  # of a head
# Keys times width of a head, by the bytes of a number: what backward passes need of them fits into 99 KiB of a
# multiprocessor's shared memory, the least that GPUs since compute capability 8.0 have for one program.
LARGEST = {2: 8192, 4: 2048}
QUERIES = 64  # that a program holds at a time


def fits(x: Tensor, width: int, heads: int, keys: int) -> bool:
    """Whether the kernels can do it, for numbers of x's type."""
    head, most = width // heads, LARGEST.get(x.element_size(), 0)
    held = max(16, triton.next_power_of_2(keys)) * head
    return keys <= LONGEST and head in WIDTHS and width % heads == 0 and held <= most


def self_attention(qkv: Tensor, heads: int, readable: Tensor | None, causal: bool, partner: bool = False) -> Tensor:
    """[N, T, 3E] -> [N, T, E]; readable [N, T]. With `partner`, row n reads row n ^ 1, the other stream of a pair."""
    apply: Any = _SelfAttention.apply
    return apply(qkv, heads, readable, causal, partner)


def source_attention(q: Tensor, k: Tensor, v: Tensor, readable: Tensor | None) -> Tensor:
    """q [B, M, E] over k and v [B, H, S, d], readable [B, S] -> [B, M, E]."""
    apply: Any = _SourceAttention.apply
    return apply(q, k, v, readable)


class _SelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, readable: Tensor | None, causal: bool, partner: bool) -> Tensor:
        qkv = qkv.contiguous()
        q, k, v = _heads_of(qkv, 3, heads)
        out = qkv.new_empty(*qkv.shape[:2], qkv.size(2) // 3)
        _run(_attend, q, k, v, readable, causal, partner, _heads_of(out, 1, heads)[0])
        ctx.save_for_backward(qkv, readable)
        ctx.how = heads, causal, partner
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, readable = ctx.saved_tensors
        heads, causal, partner = ctx.how
        found = torch.empty_like(qkv)
        (grad,) = _heads_of(grads[0].contiguous(), 1, heads)
        _run(_attend_backward, *_heads_of(qkv, 3, heads), readable, causal, partner, grad, *_heads_of(found, 3, heads))
        return found, None, None, None, None


class _SourceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, readable: Tensor | None) -> Tensor:
        q = q.contiguous()
        heads = k.size(1)
        out = torch.empty_like(q)
        _run(_attend, *_heads_of(q, 1, heads), k, v, readable, False, False, *_heads_of(out, 1, heads))
        ctx.save_for_backward(q, k, v, readable)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, readable = ctx.saved_tensors
        heads = k.size(1)
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        views = *_heads_of(grads[0].contiguous(), 1, heads), *_heads_of(found[0], 1, heads), *found[1:]
        _run(_attend_backward, *_heads_of(q, 1, heads), k, v, readable, False, False, *views)
        return *found, None


def _heads_of(x: Tensor, parts: int, heads: int) -> list[Tensor]:
    """[N, T, parts * E] -> `parts` views [N, H, T, d]."""
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.chunk(parts, dim=-1)]


def _run(kernel: Any, q: Tensor, k: Tensor, v: Tensor, readable: Tensor | None, *rest: Any) -> None:
    causal, partner, *others = rest
    N, H, M, d = q.shape
    S = k.size(2)
    queries = min(QUERIES, max(16, triton.next_power_of_2(M)))
    keys = max(16, triton.next_power_of_2(S))
    grid = (N * H, triton.cdiv(M, queries)) if kernel is _attend else (N * H,)
    tensors = [q, k, v, *others]
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    assert all(x.stride(3) == 1 for x in tensors)
    words = None if readable is None else readable.contiguous()
    kernel[grid](
        *tensors, words, *strides, H, M, S, d**-0.5, d, queries, keys, causal, partner,
        num_warps=4 if queries * keys >= 2048 else 2,
    )  # fmt: skip


@triton.jit
def _tile(at, row, head, place, column, on_row, on_head, on_place, count):
    """Rows `place` of one text and head, zero beyond `count`."""
    where = row.to(tl.int64) * on_row + head * on_head + place[:, None] * on_place + column[None, :]
    return tl.load(at + where, mask=(place < count)[:, None], other=0.0)


@triton.jit
def _put(at, x, row, head, place, column, on_row, on_head, on_place, count):
    where = row.to(tl.int64) * on_row + head * on_head + place[:, None] * on_place + column[None, :]
    tl.store(at + where, x.to(at.dtype.element_ty), mask=(place < count)[:, None])


@triton.jit
def _shares(q, k, query, key, words_at, text, S, scale, CAUSAL: tl.constexpr):
    """The softmax over the keys that each query may read."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    may = (key < S)[None, :] & (query >= 0)[:, None]
    if words_at is not None:
        word = tl.load(words_at + text.to(tl.int64) * S + key, mask=key < S, other=0)
        may &= (word != 0)[None, :]
    if CAUSAL:
        may &= key[None, :] <= query[:, None]
    scores = tl.where(may, scores, -1e30)
    powers = tl.exp(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _attend(
    q_at, k_at, v_at, out_at, words_at,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, out_row, out_head, out_place,
    H, M, S, scale, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, PARTNER: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    text = row ^ 1 if PARTNER else row
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    key, column = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    q = _tile(q_at, row, head, query, column, q_row, q_head, q_place, M)
    k = _tile(k_at, text, head, key, column, k_row, k_head, k_place, S)
    v = _tile(v_at, text, head, key, column, v_row, v_head, v_place, S)
    shares = _shares(q, k, query, key, words_at, text, S, scale, CAUSAL)
    out = tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    _put(out_at, out, row, head, query, column, out_row, out_head, out_place, M)


@triton.jit
def _attend_backward(
    q_at, k_at, v_at, grad_at, for_q_at, for_k_at, for_v_at, words_at,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, grad_row, grad_head, grad_place,
    for_q_row, for_q_head, for_q_place, for_k_row, for_k_head, for_k_place, for_v_row, for_v_head, for_v_place,
    H, M, S, scale, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, PARTNER: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    text = row ^ 1 if PARTNER else row
    key, column = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    k = _tile(k_at, text, head, key, column, k_row, k_head, k_place, S)
    v = _tile(v_at, text, head, key, column, v_row, v_head, v_place, S)
    for_k = tl.zeros([KEYS, WIDTH], tl.float32)
    for_v = tl.zeros([KEYS, WIDTH], tl.float32)
    for begin in range(0, M, QUERIES):
        query = begin + tl.arange(0, QUERIES)
        q = _tile(q_at, row, head, query, column, q_row, q_head, q_place, M)
        grad = _tile(grad_at, row, head, query, column, grad_row, grad_head, grad_place, M)
        shares = _shares(q, k, query, key, words_at, text, S, scale, CAUSAL)
        for_v += tl.dot(tl.trans(shares.to(grad.dtype)), grad, input_precision="ieee")
        on_shares = tl.dot(grad, tl.trans(v), input_precision="ieee")
        on_scores = shares * (on_shares - tl.sum(shares * on_shares, 1)[:, None]) * scale
        on_scores = on_scores.to(k.dtype)
        for_q = tl.dot(on_scores, k, input_precision="ieee")
        _put(for_q_at, for_q, row, head, query, column, for_q_row, for_q_head, for_q_place, M)
        for_k += tl.dot(tl.trans(on_scores), q, input_precision="ieee")
    _put(for_k_at, for_k, text, head, key, column, for_k_row, for_k_head, for_k_place, S)
    _put(for_v_at, for_v, text, head, key, column, for_v_row, for_v_head, for_v_place, S)
