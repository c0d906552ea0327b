"""Batches in, weights out: the training loop, for one process or many.

An update is the same whoever computes it: its pairs come from the sampler, its loss is divided by the number of target
tokens in the whole update, and its dropout is seeded by its number. So a run that is interrupted goes on exactly, and
two processes compute what one would.
"""

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bothways import kernels
from bothways.config import TrainConfig
from bothways.data.batch import Batch, Builder
from bothways.data.sampler import Sampler, Update
from bothways.errors import CheckpointError, ConfigError
from bothways.models.interface import Seq2Seq
from bothways.train.checkpoint import (
    Checkpoints,
    Snapshot,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    weights_of,
)
from bothways.train.loss import Objective
from bothways.train.progress import Report
from bothways.train.recording import Recorder

Validate = Callable[[Seq2Seq], dict[str, float]]  # a model without wrapping -> metrics, `loss` among them
LOWER_IS_BETTER = ("loss", "ter")
AHEAD = 8  # updates whose batches are built ahead of time
T = TypeVar("T")


@dataclass
class Progress:
    """Where a run stands; stored with every checkpoint."""

    update: int = 0
    best: float | None = None
    metric: str = ""  # what `best` and `worse` are about
    best_update: int = 0
    worse: int = 0  # validations since the best one
    skipped: int = 0  # updates that were not finite
    loss_tokens: float = 0.0  # target tokens that bore a loss so far
    seconds: float = 0.0  # spent in updates, over all interruptions


class Trainer:
    """One stage of training, from its last checkpoint to its end."""

    def __init__(
        self,
        model: Seq2Seq,
        builder: Builder,
        config: TrainConfig,
        folder: Path,
        validate: Validate | None = None,
        fresh_model: Callable[[], Seq2Seq] | None = None,
        device: str | None = None,
        quiet: bool = False,
    ) -> None:
        self.config, self.builder, self.validate, self.fresh_model, self.quiet = (
            config,
            builder,
            validate,
            fresh_model,
            quiet,
        )
        self.sampler = Sampler(builder.lengths, config.batch_tokens, config.max_length, config.seed, builder.rows)
        self.accelerator = Accelerator(cpu=device == "cpu")
        self.device, self.world, self.rank = (
            self.accelerator.device,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        self.is_sharded = config.shard == "fsdp" and self.world > 1
        if config.compile and self.is_sharded:
            raise ConfigError("train.compile: is not supported with train.shard=fsdp, got true; accepted: false")
        objective = Objective(model.to(self.device), config.label_smoothing, config.compile)
        if self.is_sharded:  # torch's own: Accelerate's way to it is closed on CPU, where it is tested
            fully_shard(objective, mesh=init_device_mesh(self.device.type, (self.world,)))
        self.model = model
        self.optimizer: Any = _adam(model, config)
        self.objective: Any = objective if self.is_sharded else self.accelerator.prepare(objective)
        self.folder, self.checkpoints = folder, Checkpoints(folder, config.keep, self._say)
        records = config.record and self.device.type == "cuda" and self.world == 1
        self.recorder = Recorder(self._pass, model, self.device) if records else None
        self.has_fixed_shapes = records or config.compile
        self.progress = Progress()
        self.splits = 1  # parts that a batch is cut into since memory ran out
        # Since the last log: loss, likelihood, updates skipped, and the loss tokens of those.
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.tokens_since, self.saved, self.skipped_in_a_row = 0.0, -1, 0

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Progress:
        """Train to the last update, from wherever the newest intact checkpoint stands."""
        self._resume()
        config, progress = self.config, self.progress
        with Report(self.folder, config.updates, progress.update, self.quiet, self.rank == 0) as self.report:
            if self.sampler.left_out:
                self.report.say(
                    f"{self.sampler.left_out} training pairs of more than {config.max_length} tokens are left out "
                    "(train.max_length)"
                )
            if self.device.type == "cuda" and (reason := kernels.why_not(self.device)):
                self.report.say(f"training without kernels, which is slower: {reason}")
            if progress.update:
                self.report.say(f"going on after update {progress.update}")
            self.objective.train()
            batches = Ahead(self._batches(progress.update), AHEAD)
            started = self.logged_at = time.monotonic()
            seconds = progress.seconds
            with batches, Interrupt(heeded=self.world == 1) as interrupt:
                while progress.update < config.updates and not self._is_out_of_patience() and not interrupt.came:
                    update, parts, total = next(batches)
                    self._learn(update, parts, total)
                    progress.update = update.index + 1
                    progress.seconds = seconds + time.monotonic() - started
                    self.report.advance(progress.update)
                    self._after_update()
                if self.saved != progress.update:
                    self._save()
            if self._is_out_of_patience():
                self.report.say(f"{self._why_it_stopped()}; train.patience is {config.patience}")
            if interrupt.came:
                raise KeyboardInterrupt(
                    f"interrupted after update {progress.update}, which is saved; the same command goes on"
                )
        return progress

    def _after_update(self) -> None:
        config, update = self.config, self.progress.update
        last = update == config.updates
        if update % config.log_every == 0 or last:
            self._log()
        validates = self.validate is not None and (update % config.validate_every == 0 or last)
        if validates:
            self._validate()
        if update % config.save_every == 0 or validates:
            self._save()

    def _is_out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.progress.worse

    def _why_it_stopped(self) -> str:
        now = self.progress
        best = "" if now.best is None else f"; the best was {now.best:.4g} after update {now.best_update}"
        return f"stopped after update {now.update}: {now.worse} validations without a better {now.metric}{best}"

    # -- one update --------------------------------------------------------------------------------------------------

    def _batches(self, start: int) -> Iterator[tuple[Update, list[Batch], float]]:
        """Every update's parts of this process, and the loss tokens of the whole update."""
        per_process = self.config.accumulation
        for update in self.sampler.updates(start):
            mine = update.parts(self.world * per_process)[self.rank * per_process : (self.rank + 1) * per_process]
            parts = [self._batch(part, update.rows[:1]) for part in mine]
            yield update, parts, self.builder.loss_tokens(update.rows)

    def _batch(self, part: Update, stand_in: np.ndarray) -> Batch:
        """A part's batch; an empty part still takes its turn, with a loss of zero."""
        rows = part.rows if len(part.rows) else stand_in
        batch = self.builder.build(rows, part.width, part.size, self.has_fixed_shapes)
        if not len(part.rows):
            batch = replace(batch, weights=torch.zeros_like(batch.weights))
        return batch.pin() if self.device.type == "cuda" else batch

    def _learn(self, update: Update, parts: list[Batch], total: float) -> None:
        seed = np.random.SeedSequence([self.config.seed, self.rank, update.index]).generate_state(1, np.uint64)
        while True:
            try:
                batches = self._ready(parts)
                torch.manual_seed(int(seed[0]) >> 1)
                loss, likelihood = self._gradients(batches, total)
                break
            except torch.OutOfMemoryError:
                if not self.model.forget_recorded():  # steps of decoding, for validation
                    self._split_further(update)
        self._step(loss, likelihood, update.index, total)
        self.tokens_since += total
        self.progress.loss_tokens += total

    def _ready(self, batches: list[Batch]) -> list[Batch]:
        """Parts small enough for memory, in their place; and gradients of zero."""
        for _ in range(int(math.log2(self.splits))):
            batches = [half for batch in batches for half in (batch.halves() if len(batch.source) > 1 else (batch,))]
        if self.recorder is None:
            self.optimizer.zero_grad(set_to_none=True)
            return [batch.to(self.device) for batch in batches]
        for batch in batches:
            self.recorder.prepare(batch)
        self.recorder.clear()
        return batches

    def _pass(self, batch: Batch, factor: Tensor | float) -> tuple[Tensor, Tensor]:
        """Forward and backward over one part: its sums of loss and likelihood; gradients of the loss times `factor`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            loss, likelihood = self.objective(batch)
        (loss * factor).backward()
        return loss.detach(), likelihood

    def _gradients(self, batches: list[Batch], total: float) -> tuple[Tensor, Tensor]:
        """Forward and backward over all parts; processes exchange gradients at the last one."""
        losses = torch.zeros((), device=self.device)
        likelihoods = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            factor = self.world / total  # processes' gradients are averaged, so each counts its share `world` times
            with self._exchange(i == len(batches) - 1):
                loss, likelihood = (self.recorder.replay if self.recorder else self._pass)(batch, factor)
            losses, likelihoods = losses + loss, likelihoods + likelihood
        return losses, likelihoods

    def _exchange(self, wanted: bool) -> AbstractContextManager[None]:
        """Whether processes exchange gradients in the backward pass of what is run inside."""
        if self.is_sharded:
            self.objective.set_requires_gradient_sync(wanted)
            return nullcontext()
        return nullcontext() if wanted else self.accelerator.no_sync(self.objective)

    def _split_further(self, update: Update) -> None:
        if self.world > 1:
            raise CheckpointError(
                f"out of memory in update {update.index}; with several processes a batch is not split: "
                f"set train.accumulation to {2 * self.config.accumulation}, or lower train.batch_tokens"
            )
        if self.splits >= len(update.rows):
            raise CheckpointError(
                f"out of memory in update {update.index} with one sentence at a time; lower train.max_length"
            )
        self.splits *= 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.report.say(
            f"out of memory in update {update.index}: batches are split into {self.splits} parts from here on; "
            "results stay the same but for dropout"
        )

    def _step(self, loss: Tensor, likelihood: Tensor, index: int, total: float) -> None:
        """Clip and update the weights; where the gradient is not finite, all processes skip the update alike."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(list(self.model.parameters()), self.config.clip, norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        skip = (~torch.isfinite(norm)).float()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, index)
        # Adam's fused kernel leaves weights and averages alone where this is 1; no host has to wait for it.
        self.optimizer.found_inf = skip
        self.optimizer.step()
        kept = torch.where(skip.bool(), 0.0, torch.stack([loss.double(), likelihood.double()]))
        share = skip.double() / self.world  # all processes count it, and are summed
        self.sums += torch.stack([*kept, share, share * total])

    # -- now and then ------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        loss, likelihood, skipped, skipped_tokens = self._summed().tolist()
        now = time.monotonic()
        tokens = self.tokens_since - skipped_tokens
        self.progress.skipped += round(skipped)
        self.skipped_in_a_row = round(skipped) + (self.skipped_in_a_row if tokens < 1 else 0)
        values = {"loss": loss / tokens, "perplexity": math.exp(min(50.0, likelihood / tokens))} if tokens >= 1 else {}
        values |= {
            "learning_rate": learning_rate(self.config, self.progress.update - 1),
            "tokens_per_second": self.tokens_since / max(1e-9, now - self.logged_at),
        }
        if skipped:
            values["skipped"] = skipped
        self.report.log(self.progress.update, **values)
        self.sums.zero_()
        self.tokens_since, self.logged_at = 0.0, now
        if self.skipped_in_a_row > self.config.max_skipped:
            raise CheckpointError(
                f"{self.skipped_in_a_row} updates before update {self.progress.update} were not finite and were "
                f"skipped, more than train.max_skipped ({self.config.max_skipped}); "
                "lower train.learning_rate or lengthen train.warmup"
            )

    def _summed(self) -> Tensor:
        """The sums of all processes."""
        summed: Tensor = self.accelerator.reduce(self.sums.clone(), "sum")
        return summed

    def _validate(self) -> None:
        assert self.validate is not None
        progress, metric, began = self.progress, self.config.metric, time.monotonic()
        found: list[dict[str, float] | None] = [None]
        model = self._whole_model()
        if self.rank == 0:
            model.eval()
            with torch.no_grad(), torch.compiler.set_stance("force_eager" if self.config.compile else "default"):
                found[0] = self.validate(model)
            model.train()
        broadcast_object_list(found)
        values = found[0] or {}
        self.logged_at += time.monotonic() - began
        self.report.log(progress.update, **{f"valid_{name}": value for name, value in values.items()})
        if metric not in values:
            raise ConfigError(f"train.metric: must be one of {', '.join(values)}, got {metric!r}")
        progress.metric = metric
        is_better = progress.best is None or merit(metric, values[metric]) > merit(metric, progress.best)
        if is_better and math.isfinite(values[metric]):
            progress.best, progress.best_update, progress.worse = values[metric], progress.update, 0
        else:
            progress.worse += 1

    def _whole_model(self) -> Seq2Seq:
        """The model as one process can run it: of a sharded one, a copy."""
        if not self.is_sharded:
            return self.model
        assert self.fresh_model is not None, "a sharded model is validated in a copy"
        weights = weights_of(self.model)
        model = self.fresh_model()
        load_weights(model, weights, "validation")
        return model.to(self.device)

    def _save(self) -> None:
        skipped = self.progress.skipped + round(float(self._summed()[2]))  # those not yet logged as well
        progress = asdict(replace(self.progress, skipped=skipped))
        snapshot = Snapshot(weights_of(self.model), optimizer_state(self.model, self.optimizer), progress)
        self.saved = self.progress.update
        if self.rank == 0:
            self.checkpoints.save(snapshot)
            self._mark_best()
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        snapshot = self.checkpoints.newest()
        if snapshot is None:
            return
        load_weights(self.model, snapshot.weights, str(self.checkpoints.folder))
        if snapshot.optimizer:
            load_optimizer_state(self.model, self.optimizer, snapshot.optimizer)
        known = {field.name for field in fields(Progress)}
        self.progress = Progress(**{name: value for name, value in snapshot.progress.items() if name in known})
        self.saved = self.progress.update
        if self.progress.metric != self.config.metric:  # values of another metric cannot be compared with
            self.progress.best, self.progress.worse = None, 0
        if self.rank == 0:
            self._mark_best()  # the run may have ended between saving and marking

    def _mark_best(self) -> None:
        progress = self.progress
        if progress.best is not None and progress.best_update == progress.update:
            self.checkpoints.mark_best(progress.update, self.config.metric, progress.best)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            Report(self.folder, 1, 0, self.quiet).say(text)


def _adam(model: Seq2Seq, config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.adam_betas[0], config.adam_betas[1]),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def merit(metric: str, value: float) -> float:
    """What is larger for the better of two values of a metric; of length ratios, the one nearer to 1."""
    if metric == "length_ratio":
        return -abs(value - 1)
    return -value if metric in LOWER_IS_BETTER else value


def learning_rate(config: TrainConfig, index: int) -> float:
    """Linear warm-up to the peak, then the inverse square root; index counts updates from 0."""
    update = index + 1
    return config.learning_rate * min(update / config.warmup, math.sqrt(config.warmup / update))


class Ahead(Generic[T]):
    """An iterator whose items are made by a thread, a few ahead of their use."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.queue: queue.Queue[T | BaseException] = queue.Queue(depth)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self.thread.start()

    def __next__(self) -> T:
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.closed.set()
        while not self.queue.empty():
            self.queue.get_nowait()
        self.thread.join(timeout=10)

    def _fill(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: T | BaseException) -> bool:
        while not self.closed.is_set():
            try:
                self.queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


class Interrupt:
    """Ctrl-C once lets the update be finished and saved; twice stops at once."""

    def __init__(self, heeded: bool) -> None:
        self.heeded, self.came = heeded and threading.current_thread() is threading.main_thread(), False

    def __enter__(self) -> Self:
        if self.heeded:
            self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.heeded:
            signal.signal(signal.SIGINT, self.before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
