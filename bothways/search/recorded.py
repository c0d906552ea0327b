"""Search steps as CUDA graphs: a step is one launch, not some hundreds.

A step takes a state and a beam and gives others of the same shapes. It is recorded the first time that shapes come:
once over tensors of its own, the places, with the results written back into them. To search then is to copy state and
beam into the places, and to replay. Shapes come again because they are few: rows are filled up to one of a few
numbers, and what a state has room for is one of a few sizes (`fixed`), of which what is not filled yet is not read.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

ROOM = 32  # steps that a recorded search has room for at first; it doubles when full
MOST_RECORDINGS = 64
MOST_MEMORY = 0.25  # of a GPU's, for the places of all recordings but the newest
FEW_ROWS = 64  # of a batch: a step of fewer takes as long
FEW_WORDS = 8_192  # of a batch: to encode them takes as long as to launch it
LAG = 2  # steps between the one after which it is asked who goes on, and the last that is launched meanwhile
WARM_UP = 2  # eager steps before recording, in which libraries choose and allocate
T = TypeVar("T")
Advance = Callable[..., tuple[Any, Any]]  # state and beam -> the next ones
Record = Callable[[Callable[[], None], Any], Callable[[], None]]


@dataclass(frozen=True)
class Recording:
    """A step over its own places."""

    places: tuple[Any, Any]  # state and beam
    replay: Callable[[], None]
    room: int


class Recorder:
    """The recorded steps of one model; of those that were not used for longest, the oldest are forgotten."""

    def __init__(self, record: Record | None = None) -> None:
        self.record: Record = record or _as_graph
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self.known: dict[Hashable, Hashable] = {}  # shapes as they come -> shapes of places
        self.computations: dict[Hashable, Recording | None] = {}  # None: seen once
        is_on_gpu = self.record is _as_graph
        self.count = torch.zeros((), dtype=torch.long, pin_memory=is_on_gpu and torch.cuda.is_available())
        self.counted: torch.cuda.Event | None = None
        self.pool: Any = None  # of memory: graphs that never run at once share what is between their inputs and outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        return Recorder(self.record)  # a model's copy has other weights

    def size(self, count: int) -> int:
        """What so many rows or columns are filled up to: one of four numbers between powers of two."""
        grain = max(1, (1 << count.bit_length() - 1) // 4)
        return -(-count // grain) * grain

    def may_wait(self, rows: int, taken: int) -> bool:
        """Whether so many rows take no longer than half of them, and nothing is to be copied after so many steps."""
        return rows <= FEW_ROWS and _room(taken) == _room(taken + 1)

    def run(
        self,
        key: Hashable,
        advance: Advance,
        both: tuple[Any, Any],
        steps: range,
        going: Callable[[tuple[Any, Any]], Tensor],
    ) -> tuple[tuple[Any, Any], int]:
        """Some steps further; `key`: what a step depends on besides shapes. The result is gone at the next run.

        And how many rows were `going` on after one of the last steps: to ask it of the last one would let a GPU wait
        for the next.
        """
        recording = self._recording(key, advance, both, _room(steps.stop))
        if both is not recording.places:
            _fill(_tensors(recording.places), _tensors(both))
        asked = max(steps.start, steps.stop - 1 - LAG)
        for i in steps:
            recording.replay()
            if i == asked:
                self.count.copy_(going(recording.places).sum(), non_blocking=True)
                self.counted = torch.cuda.current_stream().record_event() if self.count.is_pinned() else None
        if self.counted is not None:
            self.counted.synchronize()
        return recording.places, int(self.count)

    def computed(self, compute: Callable[[Tensor], Any], x: Tensor) -> Any:
        """compute(x), recorded where launches cost more than the work, and only if such an x has come before."""
        if x.numel() > FEW_WORDS:
            return compute(x)
        key = (compute, x.shape)
        if key not in self.computations:
            if len(self.computations) >= MOST_RECORDINGS:
                self.computations.clear()
            self.computations[key] = None
            return compute(x)
        found = self.computations[key]
        if found is None:
            found = self.computations[key] = self._computation(compute, x)
        found.places[0].copy_(x)
        found.replay()
        return _copied(found.places[1])

    def _computation(self, compute: Callable[[Tensor], Any], x: Tensor) -> Recording:
        given, out = x.clone(), compute(x)  # the second says what there will be; its tensors are the places

        def again() -> None:
            _copy(_tensors(out), _tensors(compute(given)))

        return Recording((given, out), self._record(again), 0)

    def _recording(self, key: Hashable, advance: Advance, both: tuple[Any, Any], room: int) -> Recording:
        found = next((r for r in self.recordings.values() if r.places is both and r.room >= room), None)
        if found is not None:
            return found
        raw = (key, room, _shapes(both))
        if raw not in self.known:
            state, beam = changed(both, lambda x: x.to("meta"))
            sizes = state.fixed(room), beam.fixed(room)
            fixed = (key, room, _shapes(sizes))
            if fixed not in self.recordings:
                device = _tensors(both)[0].device
                places = changed(sizes, lambda x: torch.zeros_like(x, device=device))
                self.recordings[fixed] = Recording(places, self._recorded(advance, places), room)
                self._forget_oldest()
            self.known[raw] = fixed
        self.recordings.move_to_end(self.known[raw])
        return self.recordings[self.known[raw]]

    def _forget_oldest(self) -> None:
        while len(self.recordings) > MOST_RECORDINGS or (len(self.recordings) > 1 and self._is_large()):
            self.recordings.popitem(last=False)
            self.known = {raw: fixed for raw, fixed in self.known.items() if fixed in self.recordings}

    def _is_large(self) -> bool:
        tensors = [x for recording in self.recordings.values() for x in _tensors(recording.places)]
        if tensors[0].device.type != "cuda":
            return False
        held = torch.cuda.get_device_properties(tensors[0].device).total_memory
        return sum(x.nbytes for x in tensors) > MOST_MEMORY * held

    def _recorded(self, advance: Advance, places: tuple[Any, Any]) -> Callable[[], None]:
        def step() -> None:
            after = advance(*changed(places, lambda x: x))
            pairs = [(a, b) for a, b in zip(_tensors(places), _tensors(after), strict=True) if a is not b]
            _copy([place for place, _ in pairs], [x for _, x in pairs])

        return self._record(step)

    def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
        if self.pool is None and self.record is _as_graph:
            self.pool = torch.cuda.graph_pool_handle()
        return self.record(compute, self.pool)


def _room(steps: int) -> int:
    room = ROOM
    while room < steps:
        room *= 2
    return room


def _as_graph(compute: Callable[[], None], pool: Any) -> Callable[[], None]:
    graph, side = torch.cuda.CUDAGraph(), _aside(torch.cuda.current_device())
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            compute()
        side.synchronize()
        # Not by torch.cuda.graph, which collects garbage and empties the cache of memory at every recording.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            compute()
        except BaseException:
            with suppress(RuntimeError):  # which would hide what is wrong
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph.replay


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Where everything is recorded: libraries keep memory for each stream that they have worked on."""
    return torch.cuda.Stream(device)


def changed(x: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same with each of its tensors changed: dataclasses, tuples and lists are walked through, in a fixed order."""
    if isinstance(x, Tensor):
        return change(x)  # type: ignore[return-value]
    if isinstance(x, tuple | list):
        return type(x)(changed(part, change) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        copy = object.__new__(type(x))
        copy.__dict__.update({name: changed(part, change) for name, part in vars(x).items()})
        return copy
    return x


def _tensors(x: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    changed(x, note)
    return found


def _shapes(x: Any) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in _tensors(x))


def _copied(x: T) -> T:
    copy = changed(x, torch.empty_like)
    _copy(_tensors(copy), _tensors(x))
    return copy


def _copy(places: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Some launches instead of one for each: those of a type share one."""
    for dtype in {x.dtype for x in found}:
        some = [(place, x) for place, x in zip(places, found, strict=True) if x.dtype == dtype]
        torch._foreach_copy_([place for place, _ in some], [x for _, x in some])


def _fill(places: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Copy to where places begin; what lies beyond becomes zero, but where there is nothing yet at all."""
    pairs = [(place, x) for place, x in zip(places, found, strict=True) if x.numel()]
    same = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    _copy([place for place, _ in same], [x for _, x in same])
    for place, x in pairs:
        if place.shape != x.shape:
            place.zero_()
            place[tuple(slice(size) for size in x.shape)].copy_(x)
