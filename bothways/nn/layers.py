"""Embeddings, positions, feed-forward layers, and the sub-layer that wraps each of them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways.tokens import PAD

HAS_ONEDNN = torch.backends.mkldnn.is_available()


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal encodings of integer positions, [...] -> [..., E]; angles in float64, exact at every length."""
    rates = torch.exp(
        torch.arange(width // 2, device=positions.device, dtype=torch.float64) * (-2 * math.log(10000) / width)
    )
    angles = positions[..., None].double() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    When decoding on a CPU in float32, by oneDNN: PyTorch's own choice, MKL, leaves AVX-512 unused on other CPUs than
    Intel's and takes twice as long there. It has no gradient, so training goes the usual way.
    """
    if _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_grad_enabled()
        and HAS_ONEDNN
    )


class Linear(nn.Linear):
    """A linear layer that takes the fastest way."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Token embeddings, scaled by √E; the matrix may serve as the output layer too."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__(size, width)
        nn.init.normal_(self.weight, std=width**-0.5)
        with torch.no_grad():
            self.weight[PAD].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * math.sqrt(self.embedding_dim)


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.inner = Linear(width, inner)
        self.output = Linear(inner, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.dropout(F.relu(self.inner(x)), self.dropout, self.training))


class SubLayer(nn.Module):
    """Residual connection, dropout and layer normalization around a sub-layer, after it (post) or before it (pre)."""

    def __init__(self, width: int, dropout: float, norm: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout
        self.before = norm == "pre"

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.before:
            return x + F.dropout(layer(self.norm(x)), self.dropout, self.training)
        return self.norm(x + F.dropout(layer(x), self.dropout, self.training))


def initialize(module: nn.Module) -> None:
    """Xavier-uniform matrices and zero biases, for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
