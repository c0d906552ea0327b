"""Training speed with random weights and random text: shape, device and tokens an update in; tokens per second out.

Every pair has 32 tokens a side, end marks among them, so nothing is padded. What is measured is the training loop as
`bothways train` runs it. The share of the peak counts the matrix products of the forward pass and twice as many
backward, attention's among them, against a large product of the same type on the same machine.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bothways.bench import OURS, VOCABULARY, check_machine, random_model
from bothways.config import TrainConfig
from bothways.data.batch import Batch
from bothways.errors import ConfigError
from bothways.models.interface import Seq2Seq
from bothways.models.table import SYSTEMS
from bothways.models.transformer import Transformer
from bothways.peers import marian_trainer
from bothways.tokens import DIRECTIONS, END, SPECIAL_TOKENS, Direction
from bothways.train.loop import Trainer
from bothways.train.loss import Objective

WIDTH = 32  # tokens a side
EACH = {"cpu": 1, "cuda": 20}  # updates of one measurement


@dataclass(frozen=True)
class TrainingRow:
    """One measurement."""

    peer: str
    system: str
    shape: str
    device: str
    dtype: str
    batch_tokens: int  # target tokens of one direction in an update
    target_tokens_per_second: float  # that bear a loss; median of the repeats
    spread: float  # (largest - smallest) / median
    share_of_peak: float
    peak_teraflops: float
    memory_gib: float  # the most that a GPU held; on a CPU, the most that the process held so far


class RandomText:
    """Random pairs: with interaction, a source has a row for each direction, as training on decoded text has."""

    def __init__(self, pairs: int, directions: tuple[Direction, ...], interaction: bool) -> None:
        self.pairs, self.directions, self.both = pairs, directions, interaction
        self.random = np.random.default_rng(1)

    @property
    def rows(self) -> np.ndarray:
        """See Builder."""
        return np.arange(self.pairs)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See Builder."""
        return np.full(self.pairs, WIDTH - 1), np.full(self.pairs, WIDTH - 1)

    def loss_tokens(self, rows: np.ndarray) -> float:
        """See Builder."""
        return float(len(rows) * WIDTH * len(self.directions))

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """See Builder."""
        D = len(self.directions)
        shape = (len(rows) * (2 if self.both else 1), D, WIDTH)
        weights = np.tile(np.eye(2), (len(rows), 1)) if self.both else np.ones(shape[:2])
        tags = [d.tag for d in self.directions]
        return Batch.of_streams(self._text((len(rows), WIDTH)), self._text(shape), tags, weights, fixed)

    def _text(self, shape: tuple[int, ...]) -> np.ndarray:
        text = self.random.integers(len(SPECIAL_TOKENS), VOCABULARY, shape)
        text[..., -1] = END
        return text


def run(
    shape: str,
    device: str,
    batch_tokens: int,
    precision: str,
    repeats: int,
    say: Callable[[str], None],
    systems: Sequence[str] = OURS,
    peers: Sequence[str] = (),
) -> list[TrainingRow]:
    """Measure our systems, then the peers, one after the other."""
    check_machine(shape, device, [precision])
    if precision == "int8":
        raise ConfigError("precision: int8 is for decoding; accepted for training: float32, bfloat16")
    if batch_tokens < WIDTH or repeats < 1:
        raise ConfigError(f"batch-tokens and repeats: must be at least {WIDTH} and 1, got {batch_tokens} and {repeats}")
    able = [name for name, one in SYSTEMS.items() if not (one.of_runs or one.has_two_passes)]
    for system in systems or [""]:
        if system not in able:
            raise ConfigError(f"system: must be any of {', '.join(able)} with --training, got {system!r}")
    for peer in peers:
        if peer != "transformers":
            raise ConfigError(f"against: with --training it must be transformers, got {peer!r}")
    rows = []
    for system in systems:
        rows.append(_measured(system, shape, device, batch_tokens // WIDTH, precision, repeats))
        say(f"{system}: measured {repeats} times")
    if peers:
        rows.append(_peer_measured(shape, device, batch_tokens // WIDTH, precision, repeats))
        say(f"{rows[-1].system}: measured {repeats} times")
    return rows


def table(rows: list[TrainingRow]) -> str:
    """Rows for a person to read."""
    heads = ("tokens/s", "spread", "of peak", "peak TFLOP/s", "GiB")
    lines = [f"{'system':<16}  {'dtype':<9}" + "".join(f"{head:>14}" for head in heads)]
    for row in rows:
        peak, memory = f"{row.peak_teraflops:.2f}", f"{row.memory_gib:.1f}"
        numbers = (
            f"{row.target_tokens_per_second:,.0f}",
            f"{row.spread:.0%}",
            f"{row.share_of_peak:.0%}",
            peak,
            memory,
        )
        lines.append(f"{row.system:<16}  {row.dtype:<9}" + "".join(f"{number:>14}" for number in numbers))
    return "\n".join(lines)


def _measured(system: str, shape: str, device: str, pairs: int, precision: str, repeats: int) -> TrainingRow:
    model = random_model(system, shape)
    text = RandomText(pairs, DIRECTIONS[SYSTEMS[system].direction], SYSTEMS[system].interaction)
    each, peak, flops = EACH[device], matrix_peak(device, precision), _flops(model, text)
    options = {"updates": each * (repeats + 1), "batch_tokens": pairs * WIDTH, "log_every": each}
    config = TrainConfig.model_validate({**options, "precision": precision})
    _forget_memory(device)
    with tempfile.TemporaryDirectory(prefix="bothways-bench-") as folder:
        Trainer(model, text, config, Path(folder), device=device, quiet=True).run()
        log = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = [line["tokens_per_second"] for line in log][1:]  # the first is for warming up
    labels = {"peer": "bothways", "system": system, "shape": shape, "device": device, "dtype": precision}
    return _row(labels, text, speeds, flops, peak)


def _peer_measured(shape: str, device: str, pairs: int, precision: str, repeats: int) -> TrainingRow:
    """MarianMT on the same pairs, in the same turns."""
    model = random_model("transformer-l2r", shape)
    text = RandomText(pairs, DIRECTIONS["l2r"], False)
    each, peak, flops = EACH[device], matrix_peak(device, precision), _flops(model, text)
    _forget_memory(device)
    update = marian_trainer(cast(Transformer, model), torch.device(device), precision, WIDTH)
    speeds = []
    for repeat in range(repeats + 1):
        batches = [text.build(text.rows, WIDTH, pairs, True) for _ in range(each)]
        began = time.perf_counter()
        for batch in batches:
            update(batch.source.to(device), batch.labels.view(pairs, WIDTH).to(device))
        _wait(device)
        if repeat:  # the first is for warming up
            speeds.append(each * text.loss_tokens(text.rows) / (time.perf_counter() - began))
    system = "MarianMT compiled" if device == "cuda" else "MarianMT"
    labels = {"peer": "transformers", "system": system, "shape": shape, "device": device, "dtype": precision}
    return _row(labels, text, speeds, flops, peak)


def _row(labels: dict[str, str], text: "RandomText", speeds: list[float], flops: float, peak: float) -> TrainingRow:
    median = statistics.median(speeds)
    return TrainingRow(
        **labels,
        batch_tokens=text.pairs * WIDTH,
        target_tokens_per_second=median,
        spread=(max(speeds) - min(speeds)) / median,
        share_of_peak=median / text.loss_tokens(text.rows) * flops / peak,
        peak_teraflops=peak / 1e12,
        memory_gib=_most_memory(labels["device"]) / 2**30,
    )


def _forget_memory(device: str) -> None:
    """What was measured before counts no more."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def matrix_peak(device: str, precision: str) -> float:
    """FLOP per second of a large square product, the best of several."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, precision)) for _ in range(2))
    seconds = []
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        a @ b
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)


def _most_memory(device: str) -> int:
    """Bytes at the highest: of the GPU, or of this process since it began."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource  # which Windows does not have: there only this is not measured

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _flops(model: Seq2Seq, text: RandomText) -> float:
    """Of an update's matrix products, counted on one pair and multiplied."""
    batch = text.build(text.rows[:1], WIDTH, 1, False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss, _ = Objective(model.train(), 0.1)(batch)
        loss.backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) * text.pairs
