"""The kernels against the formula they stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from bothways.kernels.attention import fits, self_attention, source_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H = 2


def drawn(*shape: int) -> Tensor:
    """Random numbers that want a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE).requires_grad_()


def heads(x: Tensor) -> Tensor:
    """[N, T, E] -> [N, H, T, d]"""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def agree(ours: Tensor, theirs: Tensor, used: Tensor, *inputs: Tensor) -> None:
    """Results and gradients, over the queries that are used."""
    torch.testing.assert_close(ours[used], theirs[used], rtol=1e-4, atol=1e-5)
    weights = torch.cos(torch.arange(ours.numel(), device=DEVICE)).view(ours.shape) * used[..., None]
    for one, other in zip(*(torch.autograd.grad(x, inputs, weights) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def texts(N: int, T: int) -> Tensor:
    """Which places are words: every text of another length, at least one word."""
    lengths = torch.arange(N) * 3 % T + 1
    return (torch.arange(T) < lengths[:, None]).to(DEVICE)


@pytest.mark.parametrize("T", [1, 7, 16, 33, 100])
@pytest.mark.parametrize("causal, partner", [(False, False), (True, False), (True, True)])
def test_self_attention_is_the_formula(T: int, causal: bool, partner: bool) -> None:
    N, E = 4, 32
    qkv, words = drawn(N, T, 3 * E), texts(N, T)
    q, k, v = (heads(x) for x in qkv.chunk(3, dim=-1))
    other = torch.arange(N, device=DEVICE) ^ int(partner)
    mask = words[other][:, None, None, :].expand(-1, -1, T, -1)
    mask = mask & torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril() if causal else mask
    theirs = F.scaled_dot_product_attention(q, k[other], v[other], attn_mask=mask).transpose(1, 2).flatten(2)
    agree(self_attention(qkv, H, words, causal, partner), theirs, words, qkv)


def test_causal_needs_no_words() -> None:
    qkv, every = drawn(3, 9, 96), torch.ones(3, 9, dtype=torch.bool, device=DEVICE)
    theirs = F.scaled_dot_product_attention(*(heads(x) for x in qkv.chunk(3, dim=-1)), is_causal=True)
    agree(self_attention(qkv, H, None, True), theirs.transpose(1, 2).flatten(2), every, qkv)


@pytest.mark.parametrize("M, S", [(3, 5), (70, 20), (150, 1), (64, 128)])
def test_source_attention_is_the_formula(M: int, S: int) -> None:
    B, E = 3, 32
    q, kv, words = drawn(B, M, E), drawn(B, S, 2 * E), texts(B, S)
    k, v = (heads(x) for x in kv.chunk(2, dim=-1))
    theirs = (
        F.scaled_dot_product_attention(heads(q), k, v, attn_mask=words[:, None, None, :]).transpose(1, 2).flatten(2)
    )
    used = torch.ones(B, M, dtype=torch.bool, device=DEVICE)
    agree(source_attention(q, k, v, words), theirs, used, q, kv)


@pytest.mark.parametrize(
    "dtype, width, heads, keys, fit",
    [
        (torch.bfloat16, 512, 8, 128, True),
        (torch.bfloat16, 512, 8, 129, False),
        (torch.bfloat16, 512, 4, 64, True),
        (torch.bfloat16, 512, 4, 65, False),  # held as 128
        (torch.bfloat16, 192, 4, 20, False),  # 48 a head
        (torch.float32, 512, 8, 32, True),
        (torch.float32, 512, 8, 33, False),
        (torch.float64, 64, 4, 5, False),
    ],
)
def test_what_does_not_fit_is_left_to_the_formula(
    dtype: torch.dtype, width: int, heads: int, keys: int, fit: bool
) -> None:
    assert fits(torch.zeros(1, dtype=dtype), width, heads, keys) == fit
