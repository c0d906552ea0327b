"""Embeddings, positions, feed-forward layers, LSTM cells, additive attention, and the sub-layer around each of them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways.config import ModelConfig
from bothways.errors import ConfigError
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


def embeddings_of(config: ModelConfig, source_size: int, target_size: int) -> tuple[Embedding, Embedding, Embedding]:
    """Target and source embeddings and the output layer, shared as `model.share_embeddings` says."""
    share = config.share_embeddings
    if share == "all" and source_size != target_size:
        raise ConfigError(
            f"model.share_embeddings: `all` needs a joint vocabulary, but source and target have {source_size} and "
            f"{target_size} tokens; prepare with a joint vocabulary or set it to `target` or `none`"
        )
    target = Embedding(target_size, config.width)
    source = target if share == "all" else Embedding(source_size, config.width)
    return target, source, Embedding(target_size, config.width) if share == "none" else target


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


class Cell(nn.Module):
    """One step of an LSTM: gates = W x + b + U [what it recalls], h first among that.

    W x + b is the caller's to compute, for as many steps at once as he knows the inputs of.
    """

    def __init__(self, width: int, recalled: int) -> None:
        super().__init__()
        self.inputs = Linear(width, 4 * width)
        self.recurrent = Linear(recalled, 4 * width, bias=False)

    def forward(self, given: Tensor, recalled: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """given [..., 4E] = inputs(x), recalled [..., n] and c [..., E] -> h and c of this step."""
        return lstm(given.to(c.dtype), self.recurrent(recalled).to(c.dtype), c)


def lstm(given: Tensor, gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """c' = σ(f) c + σ(i) tanh(g), h' = σ(o) tanh(c'), from the sum of both parts of the gates (i, f, g, o)."""
    if c.device.type == "cuda":  # the sum and all that follows in one kernel, which autocast would have in bfloat16
        rows = (x.flatten(0, -2) for x in (given, gates, c))
        with torch.autocast("cuda", enabled=False):
            h, new, _ = torch.ops.aten._thnn_fused_lstm_cell(*rows)
        return h.view(c.shape), new.view(c.shape)
    i, f, g, o = (given + gates).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class AdditiveAttention(nn.Module):
    """softmax(vᵀ tanh(W q + U k)) over keys, whose U k are computed once: `prepare`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = Linear(width, width, bias=False)
        self.key = Linear(width, width, bias=False)
        self.v = nn.Parameter(torch.empty(width).uniform_(-(width**-0.5), width**-0.5))

    def prepare(self, states: Tensor) -> Tensor:
        """U k of states [..., N, E]."""
        return self.key(states)

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Queries [..., Q, E], prepared keys and values [..., N, E], `bias_of` a mask [..., Q, N] -> [..., Q, E].

        Where a query may read no key at all, what it gets is finite and means nothing.
        """
        scores = torch.tanh(self.query(q)[..., :, None, :] + keys[..., None, :, :]) @ self.v
        return torch.softmax(scores + bias, dim=-1).to(values.dtype) @ values


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: nothing where a query may read a key, the smallest number where it may not.

    Made once, it costs every position one addition, which has no gradient of its own.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def initialize(module: nn.Module) -> None:
    """Xavier-uniform matrices and zero biases, for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
