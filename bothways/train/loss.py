"""Batches in, one number out: the label-smoothed negative log-likelihood of every stream that bears a loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bothways import kernels
from bothways.data.batch import Batch
from bothways.models.interface import Seq2Seq
from bothways.tokens import FIRST_PREDICTED

CHUNK = 4096  # positions whose logits are held at a time, on a GPU at least
MOST_LOGITS = 2**28  # that a GPU holds at a time: larger products, and fewer sums of the weight's gradient


class Objective(nn.Module):
    """A model with its loss, so that one forward call is all that data parallelism has to wrap."""

    def __init__(self, model: Seq2Seq, smoothing: float, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.smoothing = smoothing
        if compiled:
            torch._dynamo.config.cache_size_limit = 256  # a shape for each padded length
            for layer in model.layers():
                layer.compile(dynamic=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Weighted sums over the batch: the loss, and the plain negative log-likelihood (which has no gradient)."""
        hidden = self.model.hidden(self.model.encode(batch.source), batch.inputs).flatten(0, 2)
        loss, likelihood = linear_cross_entropy(
            hidden.index_select(0, batch.positions),
            self.model.output_weight,
            batch.labels,
            batch.weights,
            self.smoothing,
        )
        return loss, likelihood


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Output layer, softmax and label-smoothed cross-entropy in one, never holding the logits of all positions.

    hidden [N, E], weight [V, E], labels and weights [N]. Smoothing spreads its mass over the tokens that can be
    predicted. Under autocast the matrix products use its type.
    """
    dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
    apply: Callable[..., tuple[Tensor, Tensor]] = _LinearCrossEntropy.apply
    return apply(hidden, weight, labels, weights, smoothing, dtype or hidden.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are taken chunk by chunk on the way forward, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, smoothing: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        needs_grad = hidden.requires_grad or weight.requires_grad
        exact = torch.promote_types(dtype, torch.float32)
        matrix = weight.to(dtype)
        loss, likelihood = (torch.zeros((), dtype=exact, device=hidden.device) for _ in range(2))
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        chunk_of = _chunk_in_a_kernel if kernels.usable(hidden) and exact == torch.float32 else _chunk
        rows = max(CHUNK, MOST_LOGITS // len(weight)) if hidden.is_cuda else CHUNK
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), rows):
                part = slice(begin, begin + rows)
                x, label, share = hidden[part].to(dtype), labels[part, None], weights[part].to(exact)
                chunk_loss, chunk_likelihood, grad = chunk_of(x @ matrix.T, label, share, smoothing, exact, needs_grad)
                loss, likelihood = loss + chunk_loss, likelihood + chunk_likelihood
                if grad_hidden is not None and grad_weight is not None and grad is not None:
                    grad_hidden[part] = grad.to(dtype) @ matrix
                    grad_weight += grad.to(dtype).T @ x
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(likelihood)
        return loss, likelihood

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None, None


def _chunk(
    logits: Tensor, label: Tensor, share: Tensor, smoothing: float, exact: torch.dtype, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, likelihood and the logits' gradient of one chunk [n, V]."""
    logits = logits.to(exact)
    logits[:, :FIRST_PREDICTED] = -torch.inf
    predicted = logits.size(1) - FIRST_PREDICTED
    total = logits.logsumexp(1)
    likelihood = total - logits.gather(1, label).squeeze(1)
    spread = total - logits[:, FIRST_PREDICTED:].mean(1)
    loss = ((1 - smoothing) * likelihood + smoothing * spread) @ share
    grad = None
    if needs_grad:
        grad = (logits - total[:, None]).exp_()
        grad[:, FIRST_PREDICTED:] -= smoothing / predicted
        grad.scatter_add_(1, label, torch.full_like(label, smoothing - 1, dtype=exact))
        grad *= share[:, None]
    return loss, likelihood @ share, grad


def _chunk_in_a_kernel(
    logits: Tensor, label: Tensor, share: Tensor, smoothing: float, exact: torch.dtype, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same, and the gradient stands where the logits stood."""
    from bothways.kernels.cross_entropy import cross_entropy_

    loss, likelihood = cross_entropy_(logits, label.squeeze(1), share, smoothing, FIRST_PREDICTED, needs_grad)
    return loss.sum(), likelihood.sum(), logits if needs_grad else None
