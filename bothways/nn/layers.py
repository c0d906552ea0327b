"""Embeddings, positions, feed-forward layers, LSTM cells, additive attention, and the sub-layer around each of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways import kernels
from bothways.config import ModelConfig
from bothways.errors import ConfigError
from bothways.tokens import PAD

ROWS = 64  # of a product: what oneDNN packs for; measured, any number from 16 on gives the same order
BLOCK = 4096  # words of the output layer that are computed at a time
MANY = 1024  # rows of a product; fewer come from loops, which use a weight again and again: autocast keeps its cast


def _dtypes_of_onednn() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():
        return ()
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)


ONEDNN_DTYPES = _dtypes_of_onednn()


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal encodings of integer positions, [...] -> [..., E]; angles in float64, exact at every length."""
    rates = torch.exp(
        torch.arange(width // 2, device=positions.device, dtype=torch.float64) * (-2 * math.log(10000) / width)
    )
    angles = positions[..., None].double() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """x Wᵀ + b, and `then` ("relu" or "none") of it.

    When decoding on a CPU, by oneDNN, with the weight in the order in which its kernels read it: PyTorch's own choice
    in float32, MKL, leaves AVX-512 unused on other CPUs than Intel's and takes twice as long there. It has no
    gradient, so training goes the usual way.
    """
    if _by_onednn(x, weight):
        (whole,) = _packed(weight)
        return _product(x, whole, bias, then)
    if kernels.usable(x) and torch.is_grad_enabled() and x.numel() >= MANY * x.size(-1):
        from bothways.kernels.linear import linear as for_training

        product = for_training(x, weight, bias)
    elif then == "relu" and bias is not None and x.is_cuda and not torch.is_grad_enabled():
        return torch._addmm_activation(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)  # all in one kernel
    else:
        product = F.linear(x, weight, bias)
    return F.relu(product) if then == "relu" else product


def output_layer(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ over a whole vocabulary; in bfloat16 on a CPU, blocks of words are turned to float32 as they come.

    A block is still in the cache then, where all the numbers would have to be read from memory once more.
    """
    if x.dtype != torch.bfloat16 or not _by_onednn(x, weight):
        return linear(x, weight)
    out = torch.empty(*x.shape[:-1], weight.size(0), dtype=torch.float32)
    packed = _packing(weight)
    if packed is not None and packed.int8:
        rows, scale = _as_int8(x.float())
        for words, quantized in zip(out.split(BLOCK, dim=-1), packed.quantized(weight), strict=True):
            torch.mul(quantized.product(rows), scale, out=words)
    else:
        for words, block in zip(out.split(BLOCK, dim=-1), _packed(weight, BLOCK), strict=True):
            words.copy_(_product(x, block))
    return out


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and x.dtype == weight.dtype
        and x.dtype in ONEDNN_DTYPES
        and not torch.compiler.is_compiling()
    )


@dataclass(frozen=True)
class Quantized:
    """Some rows of a weight in int8, each with a scale of its own."""

    weight: Tensor  # packed
    scales: Tensor  # [n]
    zeros: Tensor  # [n]

    @classmethod
    def of(cls, weight: Tensor) -> "Quantized":
        """Rounded to the nearest of 255 steps between a row's largest number and its negative."""
        rows, scale = _as_int8(weight.float())
        packed = torch.ops.onednn.qlinear_prepack(rows, None)
        return cls(packed, scale.squeeze(1), torch.zeros(len(weight), dtype=torch.int64))

    def product(self, rows: Tensor) -> Tensor:
        """What rows of int8 make of it, in float32, before it is multiplied by their scale."""
        # Shifted to unsigned numbers: a CPU multiplies those with signed ones.
        shifted = rows.flatten(0, -2).view(torch.uint8) ^ 128
        return torch.ops.onednn.qlinear_pointwise(
            shifted, 1.0, 128, self.weight, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        ).view(*rows.shape[:-1], -1)


def _as_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of int8 and the scale [..., 1] of each: a row's own, so that it does not depend on its neighbours."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round_().to(torch.int8), scale


class Packed:
    """A weight in oneDNN's own order, made when it is first needed and again when the weight has changed."""

    def __init__(self, int8: bool = False) -> None:
        self.int8 = int8  # whether the output layer is to multiply in int8
        self.version, self.weight = -1, torch.empty(0)
        self.blocks: dict[int, list[Tensor]] = {}
        self.int8_blocks: list[Quantized] = []

    def of(self, weight: Tensor, rows: int) -> list[Tensor]:
        """The packed weight, in blocks of so many of its rows."""
        self._forget_if_changed(weight)
        found = self.blocks.get(rows)
        if found is None:  # two workers may both find it so; each returns what it made
            found = [torch.ops.mkldnn._reorder_linear_weight(block, ROWS) for block in weight.detach().split(rows)]
            self.blocks[rows] = found
        return found

    def quantized(self, weight: Tensor) -> list[Quantized]:
        """The weight in int8, in blocks of words."""
        self._forget_if_changed(weight)
        found = self.int8_blocks
        if not found:
            self.int8_blocks = found = [Quantized.of(block) for block in weight.detach().split(BLOCK)]
        return found

    def _forget_if_changed(self, weight: Tensor) -> None:
        if self.version != weight._version or self.weight.data_ptr() != weight.data_ptr():
            self.blocks, self.int8_blocks = {}, []
            # Held on to, so that no other weight can come to lie at the same place and be taken for this one.
            self.weight, self.version = weight.detach(), weight._version


def pack_when_used(module: nn.Module, wanted: bool) -> None:
    """Let every weight of a model be packed while it decodes; while it learns, none is, and no copy is kept.

    This hangs on the weights themselves, because a weight can serve several layers. It is for models that do not
    change: a fused Adam changes a weight and leaves its version as it was.
    """
    for weight in module.parameters():
        if not wanted:
            weight.__dict__.pop("packed", None)
        elif weight.dim() == 2:
            weight.__dict__["packed"] = Packed()


def _packing(weight: Tensor) -> Packed | None:
    """Where a weight is packed: nowhere while it learns, nor if made in inference mode, which counts no changes."""
    return None if weight.is_inference() else getattr(weight, "packed", None)


def _packed(weight: Tensor, rows: int | None = None) -> list[Tensor]:
    """A weight in blocks of `rows`, packed if it may be."""
    packed = _packing(weight)
    rows = rows or weight.size(0)
    return list(weight.split(rows)) if packed is None else packed.of(weight, rows)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")


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
        if kernels.usable(x) and torch.is_grad_enabled():
            from bothways.kernels.pointwise import relu_dropout

            return self.output(relu_dropout(self.inner(x), self.dropout if self.training else 0.0))
        inner = linear(x, self.inner.weight, self.inner.bias, then="relu")
        return self.output(F.dropout(inner, self.dropout, self.training))


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
        h = layer(x)
        if kernels.usable(h):
            from bothways.kernels.norm import add_norm

            dropout = self.dropout if self.training else 0.0
            return add_norm(x, h, self.norm.weight, self.norm.bias, self.norm.eps, dropout)
        return self.norm(x + F.dropout(h, self.dropout, self.training))


class LSTM(nn.LSTM):
    """One whose weights lie in one piece on a GPU also in bfloat16, which PyTorch sees to in other types only.

    Where they do not, cuDNN copies them together at every call, and PyTorch warns of it.
    """

    def flatten_parameters(self) -> None:
        """See nn.LSTM."""
        super().flatten_parameters()
        weights = [w for w in self._flat_weights if w is not None and w.is_cuda and w.dtype == torch.bfloat16]
        if len(weights) == len(self._flat_weights_names) == 4:
            sizes = self.input_size, 2, self.hidden_size, 0, self.num_layers, self.batch_first, False  # 2: an LSTM
            with torch.no_grad():
                torch._cudnn_rnn_flatten_weight(weights, 4, *sizes)


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
        one_mask = q.dim() == 3 and bias.size(1) == 1  # for all queries of a source
        if kernels.usable(q) and not torch.is_grad_enabled() and one_mask and q.dtype != torch.float64:
            from bothways.kernels.recall import attend_to_source

            return attend_to_source(self.query(q), keys, values, bias, self.v)
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
