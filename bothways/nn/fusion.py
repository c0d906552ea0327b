"""How past and future combine, per head and before the output projection: [B, D, H, Q, d] twice -> once."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways import kernels
from bothways.config import ModelConfig


class Fusion(nn.Module):
    """Past and future -> one. Dropout falls on what the future branch returns."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        return self.combine(past, F.dropout(future, self.dropout, self.training))

    def combine(self, past: Tensor, future: Tensor) -> Tensor:
        """The formula itself."""
        raise NotImplementedError


class Weighted(Fusion):
    """past + λ · f(future), λ fixed or one learned scalar."""

    name: ClassVar[str]

    def __init__(self, weight: float, learned: bool, dropout: float) -> None:
        super().__init__(dropout)
        self.weight: float | nn.Parameter = nn.Parameter(torch.tensor(weight)) if learned else weight

    def combine(self, past: Tensor, future: Tensor) -> Tensor:
        return past + self.weight * self.squash(future)

    def squash(self, future: Tensor) -> Tensor:
        """f of the formula."""
        raise NotImplementedError


class Tanh(Weighted):
    """past + λ · tanh(future), the paper's."""

    name = "tanh"

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        if isinstance(self.weight, float) and kernels.usable(past) and torch.is_grad_enabled():
            from bothways.kernels.fusion import add_tanh

            return add_tanh(past, future, self.weight, self.dropout if self.training else 0.0)
        return super().forward(past, future)

    def squash(self, future: Tensor) -> Tensor:
        return torch.tanh(future)


class Linear(Weighted):
    """past + λ · future."""

    name = "linear"

    def squash(self, future: Tensor) -> Tensor:
        return future


class Gate(Fusion):
    """r ⊙ past + z ⊙ future, where (r, z) = sigmoid(W · [past; future] + b), each head with its own W."""

    def __init__(self, heads: int, head_width: int, dropout: float) -> None:
        super().__init__(dropout)
        self.projection = nn.Parameter(torch.empty(heads, 2 * head_width, 2 * head_width))
        self.bias = nn.Parameter(torch.zeros(heads, 1, 2 * head_width))
        nn.init.normal_(self.projection, std=(2 * head_width) ** -0.5)

    def combine(self, past: Tensor, future: Tensor) -> Tensor:
        r, z = torch.sigmoid(torch.cat([past, future], dim=-1) @ self.projection + self.bias).chunk(2, dim=-1)
        return r * past + z * future


def fusion_of(config: ModelConfig) -> Fusion:
    """The fusion that `model.fusion` names."""
    if config.fusion == "gate":
        return Gate(config.heads, config.width // config.heads, config.future_dropout)
    weighted = {"tanh": Tanh, "linear": Linear}[config.fusion]
    return weighted(config.future_weight, config.future_weight_learned, config.future_dropout)
