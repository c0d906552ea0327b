"""Forward and backward passes as CUDA graphs: a small model's update costs one launch, not a thousand.

Every padded shape is recorded the first time it comes, and replayed with new contents from then on. Gradients are
added to the parameters' own buffers, all in a few launches at a pass' end, dropout follows the generator's seed: a
replay computes what an eager pass does.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from bothways.data.batch import Batch

Compute = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]  # a batch and its factor -> two sums, gradients added
WARM_UP = 3  # eager passes before recording, in which libraries choose and allocate


@dataclass(frozen=True)
class Recording:
    """One shape's graph with the places of its inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    factor: Tensor
    sums: tuple[Tensor, Tensor]


class Recorder:
    """Replays a computation for every shape of batch."""

    def __init__(self, compute: Compute, model: nn.Module, device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.gradients: list[Tensor] = []
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
            self.gradients.append(parameter.grad)
        self.recordings: dict[tuple[torch.Size, ...], Recording] = {}
        # Only one graph runs at a time and nothing of it is read after the next has begun: all share their memory.
        self.pool = torch.cuda.graph_pool_handle()

    def clear(self) -> None:
        """Zero the gradients where they stand; graphs know their places."""
        torch._foreach_zero_(self.gradients)

    def prepare(self, batch: Batch) -> None:
        """Record a new shape. It adds to the gradients and draws random numbers: clear and seed afterwards."""
        if _shape(batch) in self.recordings:
            return
        place, factor = batch.to(self.device), torch.zeros((), device=self.device)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._compute(place, factor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            sums = self._compute(place, factor)
        self.recordings[_shape(batch)] = Recording(graph, place, factor, sums)

    def _compute(self, batch: Batch, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients are found apart and added together: one by one, each addition would be a launch."""
        for parameter in self.parameters:
            parameter.grad = None
        sums = self.compute(batch, factor)
        found = [(own, p.grad) for own, p in zip(self.gradients, self.parameters, strict=True) if p.grad is not None]
        torch._foreach_add_([own for own, _ in found], [grad for _, grad in found])
        for parameter, own in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = own
        return sums

    def replay(self, batch: Batch, factor: float) -> tuple[Tensor, Tensor]:
        """The two sums of a batch whose shape was prepared."""
        recording = self.recordings[_shape(batch)]
        for field in fields(Batch):
            getattr(recording.batch, field.name).copy_(getattr(batch, field.name), non_blocking=True)
        recording.factor.fill_(factor)
        recording.graph.replay()
        loss, likelihood = recording.sums
        return loss.clone(), likelihood.clone()


def _shape(batch: Batch) -> tuple[torch.Size, ...]:
    return tuple(getattr(batch, field.name).shape for field in fields(Batch))
