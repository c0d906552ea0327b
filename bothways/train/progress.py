"""What a person sees of training: a bar on a terminal, plain lines elsewhere, and the same numbers as files."""

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bothways.data.corpus import writing


class Report:
    """Progress of one stage on stderr, in `log.jsonl` and for TensorBoard. Other ranks write nothing."""

    def __init__(self, folder: Path, total: int, done: int, quiet: bool = False, main: bool = True) -> None:
        self.folder, self.total, self.main = folder, total, main
        self.console = Console(stderr=True, quiet=quiet or not main, highlight=False)
        self.bar: Progress | None = None
        self.started, self.first = time.monotonic(), done
        if self.console.is_terminal and main and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("training", total=total, completed=done)
        self.board: Any = None

    def __enter__(self) -> Self:
        self.hook, threading.excepthook = threading.excepthook, _unless_it_comes_again
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        try:
            if self.board is not None:
                with writing(self.folder / "tensorboard"):
                    self.board.close()
        finally:
            threading.excepthook = self.hook

    def say(self, text: str) -> None:
        """One line for a person."""
        self.console.print(text, markup=False, soft_wrap=True)

    def advance(self, update: int) -> None:
        """One more update was done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=update)

    def log(self, update: int, **values: float) -> None:
        """Numbers of this update, for the line, the file and TensorBoard."""
        if not self.main:
            return
        log = self.folder / "log.jsonl"
        with writing(log), log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": update, **values}) + "\n")
        with writing(self.folder / "tensorboard"):
            self._to_board(update, values)
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in values.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=update, description=shown)
        else:
            left = (time.monotonic() - self.started) / max(1, update - self.first) * (self.total - update)
            self.say(f"update {update}/{self.total}  {shown}  left {timedelta(seconds=round(left))}")

    def _to_board(self, update: int, values: dict[str, float]) -> None:
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self.board = SummaryWriter(str(self.folder / "tensorboard"))
        for name, value in values.items():
            self.board.add_scalar(name, value, update)


def _unless_it_comes_again(found: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread of its own, and raises a full disk again where it is next told something."""
    if not issubclass(found.exc_type, OSError):
        threading.__excepthook__(found)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def on_terminal() -> bool:
    """Whether a person is looking at stderr."""
    return sys.stderr.isatty()
