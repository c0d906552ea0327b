"""A tiny parallel corpus, a prepared folder of it, configurations for it, and the command line: what tests of training
and decoding share. The task is to copy a line of letters and turn it around half of the time (a leading `<`)."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bothways.config import parse
from bothways.data.corpus import Prepared
from bothways.data.prepare import prepare
from bothways.models.table import resolve
from bothways.run import Run
from bothways.tokens import END, UNKNOWN
from bothways.train.checkpoint import Checkpoints, Snapshot, weights_of
from bothways.translator import Translator

ROOT = Path(__file__).parents[1]
LETTERS = "abcdefgh"
SOURCES = ["a b c d", "h", "< a b", "e f g h a b c", "d d", "< c"]


def pairs(count: int, seed: int = 0, longest: int = 7) -> list[tuple[str, str]]:
    """Different pairs of lines, the same for the same seed."""
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        letters = [draw.choice(LETTERS) for _ in range(draw.randint(1, longest))]
        turned = draw.random() < 0.5
        found[" ".join(["<", *letters] if turned else letters)] = " ".join(letters[::-1] if turned else letters)
    return list(found.items())


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """A text file."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_pairs(folder: Path, name: str, rows: Sequence[tuple[str, str]]) -> tuple[Path, Path]:
    """Two text files of parallel lines."""
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(write_lines(folder / f"{name}.{s}", [row[i] for row in rows]) for i, s in enumerate(("src", "tgt")))  # type: ignore[return-value]


def make_prepared(folder: Path, train: int = 120, valid: int = 6, seed: int = 0) -> Prepared:
    """A corpus and its prepared folder `folder/data`, with a vocabulary of words."""
    rows = pairs(train + valid, seed)
    files = write_pairs(folder, "train", rows[valid:])
    dev = write_pairs(folder, "valid", rows[:valid])
    return prepare(*files, [("dev", dev[0], [dev[1]])], (), folder / "data", vocab=50, kind="words")


def tiny(data: Path, system: str = "transformer-l2r", **sections: Any) -> dict[str, Any]:
    """A configuration of a model that trains in a second; sections are merged into it."""
    of_transformers = {} if "rnmt" in system else {"heads": 2, "feed_forward": 32}
    config: dict[str, Any] = {
        "system": system,
        "data": str(data),
        "model": {"encoder_layers": 1, "decoder_layers": 2, "width": 16, **of_transformers, "dropout": 0.1},
        "search": {"beam": 2, "max_length_offset": 5},
        "train": {
            "updates": 10,
            "batch_tokens": 160,
            "learning_rate": 3e-3,
            "warmup": 5,
            "validate_every": 1000,
            "save_every": 1000,
            "log_every": 1,
        },
    }
    for name, value in sections.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    return config


def random_run(prepared: Prepared, folder: Path, system: str, seed: int = 1, ending: float = 0, **more: Any) -> Path:
    """A run with random weights, sharper than fresh ones; with `ending`, hypotheses of all lengths are complete."""
    stronger = {} if "rnmt" in system else {"future_weight": 0.8}
    settings = tiny(prepared.folder, system, model=stronger, **more)
    config = resolve(parse({**settings, "train": {"seed": seed}}))
    model = Run.create(folder, config, prepared).fresh_model()
    with torch.no_grad():
        model.output_weight.mul_(2 if ending else 3)
        if ending:  # the end mark is likely wherever some words are
            model.output_weight[END] = 0.5 * model.output_weight[END] + ending * model.output_weight[UNKNOWN:].sum(0)
    Checkpoints(folder).save(Snapshot(weights_of(model), {}, {"update": 1}))
    return folder


def translator_of(
    prepared: Prepared, folder: Path, system: str, seed: int = 1, ending: float = 0, **search: Any
) -> Translator:
    """The same, ready to decode."""
    options = {"beam": 4, "nbest": 4, **search}
    return Translator.open(random_run(prepared, folder, system, seed, ending), device="cpu", **options)


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """A configuration file (JSON is YAML)."""
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """What a subprocess needs to find the checkout, on one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "PYT"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*arguments: str | Path, before: str = "", **options: Any) -> subprocess.Popen[str]:
    """The command line as a process; `before` is Python to run ahead of it."""
    program = ["-m", "bothways"] if not before else ["-c", f"{before}\nfrom bothways.cli import main; main()"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    # Ctrl-C is heeded, also where the tests themselves run in the background of a shell, which turns it off.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, *program, *map(str, arguments)], env=environment(), **options)


def command(*arguments: str | Path, before: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line, run to its end."""
    process = start(*arguments, before=before, stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def log_of(run: Path) -> list[dict[str, float]]:
    """What training wrote down."""
    path = run / "log.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
