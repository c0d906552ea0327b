"""Label-smoothed cross-entropy of rows of logits, and the logits' gradient in their place.

A row that fits is read once; of a longer one, the second pass finds in the cache what the first has read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_ROW = 8192  # words that a program can hold
BLOCK = 4096  # words of a longer row that it holds at a time


def cross_entropy_(
    logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float, first: int, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Logits [N, V] -> loss and negative log-likelihood of every row, times its weight, [N] in float32 each.

    Words before `first` cannot be predicted. Where a gradient is needed, that of the loss replaces the logits.
    """
    N, V = logits.shape
    loss, likelihood = logits.new_empty(2, N, dtype=torch.float32)
    block = triton.next_power_of_2(V) if V <= LARGEST_ROW else BLOCK
    _cross_entropy[(N,)](
        logits, labels, weights, loss, likelihood, V, smoothing, first, needs_grad, V <= LARGEST_ROW, block, num_warps=8
    )
    return loss, likelihood


@triton.jit
def _cross_entropy(
    logits_at, labels_at, weights_at, loss_at, likelihood_at, V, smoothing, FIRST: tl.constexpr,
    NEEDS_GRAD: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_at += row.to(tl.int64) * V
    label, share = tl.load(labels_at + row), tl.load(weights_at + row).to(tl.float32)
    chosen = tl.load(logits_at + label).to(tl.float32)
    if IS_WHOLE:
        word = tl.arange(0, BLOCK)
        counts = (word >= FIRST) & (word < V)
        x = tl.load(logits_at + word, mask=counts, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        total = top + tl.log(tl.sum(tl.exp(x - top), 0))
        mean = tl.sum(tl.where(counts, x, 0.0), 0) / (V - FIRST)
    else:
        largest = tl.full([BLOCK], -float("inf"), tl.float32)
        powers = tl.zeros([BLOCK], tl.float32)  # sums of exp(logit - largest), for each place in the block
        plain = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, V, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            counts = (word >= FIRST) & (word < V)
            x = tl.load(logits_at + word, mask=counts, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(largest, x)
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            powers = powers * tl.exp(largest - safe) + tl.exp(x - safe)
            plain += tl.where(counts, x, 0.0)
            largest = higher
        top = tl.max(largest, 0)
        total = top + tl.log(tl.sum(powers * tl.exp(largest - top), 0))
        mean = tl.sum(plain, 0) / (V - FIRST)
    likelihood, spread = total - chosen, total - mean
    tl.store(loss_at + row, ((1 - smoothing) * likelihood + smoothing * spread) * share)
    tl.store(likelihood_at + row, likelihood * share)
    if NEEDS_GRAD:
        floor = smoothing / (V - FIRST)
        if IS_WHOLE:
            grad = _gradient(x, word, label, total, share, smoothing, floor, FIRST)
            tl.store(logits_at + word, grad.to(logits_at.dtype.element_ty), mask=word < V)
        else:
            for begin in range(0, V, BLOCK):
                word = begin + tl.arange(0, BLOCK)
                x = tl.load(logits_at + word, mask=word < V, other=0.0).to(tl.float32)
                grad = _gradient(x, word, label, total, share, smoothing, floor, FIRST)
                tl.store(logits_at + word, grad.to(logits_at.dtype.element_ty), mask=word < V)


@triton.jit
def _gradient(x, word, label, total, share, smoothing, floor, FIRST: tl.constexpr):
    grad = tl.exp(x - total) - floor - tl.where(word == label, 1 - smoothing, 0.0)
    return tl.where(word >= FIRST, grad * share, 0.0)
