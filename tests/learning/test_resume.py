"""Training through the command line: interrupted and gone on, on several processes, and when updates go wrong."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus import command, environment, log_of, start, tiny, write_config
from torch import Tensor
from toy import FAMILIES

from bothways import experiment
from bothways.config import TrainConfig, parse
from bothways.data.batch import Batch, PairBuilder
from bothways.data.corpus import Prepared
from bothways.errors import BothwaysError
from bothways.experiment import train
from bothways.models.table import build
from bothways.run import Run
from bothways.tokens import L2R
from bothways.train import loop
from bothways.train.checkpoint import Checkpoints, Snapshot
from bothways.train.loop import Trainer

# -- interrupted -----------------------------------------------------------------------------------------------------


def newest(run: Path) -> Snapshot:
    found = Checkpoints(run).newest()
    assert found is not None
    return found


def assert_same_state(found: Path, expected: Path) -> None:
    """Bit for bit: weights, the optimizer's averages, and progress but for the clock."""
    a, b = newest(found), newest(expected)
    assert {**a.progress, "seconds": 0} == {**b.progress, "seconds": 0}
    for x, y in ((a.weights, b.weights), (a.optimizer, b.optimizer)):
        assert x.keys() == y.keys() and y
        different = [name for name in y if not torch.equal(x[name], y[name])]
        assert not different, f"{len(different)} of {len(y)} tensors differ, for instance {different[0]}"


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until the moment has come, while the process is running."""
    limit = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, f"it ended before the moment: {process.communicate()}"
        assert time.monotonic() < limit
        time.sleep(0.002)


def stop(arguments: list[str | Path], reached: Callable[[], bool], how: int, before: str = "") -> tuple[int, str]:
    """Start a command, send it a signal at a moment; its exit status and what it said."""
    process = start(*arguments, before=before, stdin=subprocess.DEVNULL)
    try:
        wait_for(reached, process)
        process.send_signal(how)
        err = process.communicate(timeout=60)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, err


def updates_done(run: Path) -> int:
    return max((int(row["update"]) for row in log_of_partial(run)), default=0)


def log_of_partial(run: Path) -> list[dict[str, float]]:
    """The log while another process writes it."""
    path = run / "log.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def checkpoints_done(run: Path) -> list[int]:
    return Checkpoints(run).updates()


MANY = {
    "updates": 60,
    "save_every": 7,
    "validate_every": 9,
    "patience": 100,
    "keep": 3,
    "metric": "exact_match",
    "validate_sentences": 3,
}


@pytest.fixture(scope="module", params=[family.l2r for family in FAMILIES.values()])
def straight(
    request: pytest.FixtureRequest, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A configuration, and the run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    config = write_config(folder / "config.yaml", tiny(prepared.folder, request.param, train=MANY))
    done = command("train", config, "--output", folder / "run", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return config, folder / "run"


def test_killed_and_gone_on_is_the_same_as_never_killed(straight: tuple[Path, Path], tmp_path: Path) -> None:
    config, expected = straight
    run = tmp_path / "run"
    arguments: list[str | Path] = ["train", config, "--output", run, "--device", "cpu"]
    first = random.Random(os.getpid()).randint(17, 30)  # any moment: not where a checkpoint is written
    status, _ = stop(arguments, lambda: updates_done(run) >= first, signal.SIGKILL)
    assert status == -signal.SIGKILL
    reached = checkpoints_done(run)
    assert reached and reached[-1] < 60
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"going on after update {reached[-1]}" in done.stderr
    assert_same_state(run, expected)
    assert newest(run).progress["best"] is not None
    marks = [json.loads((r / "checkpoints" / "best.json").read_text()) for r in (run, expected)]
    assert marks[0] == marks[1]
    validations = {row["update"]: row["valid_loss"] for row in log_of(run) if "valid_loss" in row}
    assert validations == {row["update"]: row["valid_loss"] for row in log_of(expected) if "valid_loss" in row}


def test_ctrl_c_finishes_the_update_saves_it_and_goes_on_exactly(straight: tuple[Path, Path], tmp_path: Path) -> None:
    config, expected = straight
    run = tmp_path / "run"
    arguments: list[str | Path] = ["train", config, "--output", run, "--device", "cpu", "--quiet"]
    status, err = stop(arguments, lambda: updates_done(run) >= 12, signal.SIGINT)
    (saved,) = checkpoints_done(run)[-1:]
    assert (status, err) == (
        130,
        f"bothways: interrupted after update {saved}, which is saved; the same command goes on\n",
    )
    assert 12 <= saved < 60
    done = command(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_same_state(run, expected)


def test_a_finished_run_has_nothing_to_do_and_can_be_asked_for_more(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny(prepared.folder, train={"updates": 3, "validate_every": 3})
    train(config, tmp_path / "run", device="cpu")
    before = newest(tmp_path / "run")
    train(config, tmp_path / "run", device="cpu")
    assert newest(tmp_path / "run").progress == before.progress
    config["train"]["updates"] = 5
    capfd.readouterr()
    train(config, tmp_path / "run", device="cpu")
    assert "going on after update 3" in capfd.readouterr().err
    assert newest(tmp_path / "run").progress["update"] == 5


def test_a_damaged_newest_checkpoint_is_said_and_made_again(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny(prepared.folder, train={"updates": 9, "save_every": 4})
    for name in ("run", "straight"):
        train(config, tmp_path / name, device="cpu")
    path = tmp_path / "run" / "checkpoints" / "000009" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    capfd.readouterr()
    train(config, tmp_path / "run", device="cpu")
    said = capfd.readouterr().err
    assert f"{path}: is damaged (its checksum differs); going back to the checkpoint before it" in said
    assert "going on after update 8" in said
    assert_same_state(tmp_path / "run", tmp_path / "straight")


def test_patience_is_kept_over_an_interruption(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A validation that never gets better after the second: with and without an interruption it stops at the same."""
    values = iter([float("nan"), 2.0, 2.5, float("nan"), 2.5, 2.0, 1.0])  # NaN is never the best, not even the first

    def run(folder: Path, updates: int) -> Trainer:
        config = TrainConfig(updates=updates, batch_tokens=100, validate_every=2, patience=3, save_every=1000)
        model = build(parse({**tiny(prepared.folder), "model": SMALL}), 14, 14)
        folder.mkdir(exist_ok=True)
        trainer = Trainer(
            model, PairBuilder(prepared.train, (L2R,)), config, folder, lambda _: {"loss": next(values)}, None, "cpu"
        )  # fmt: skip
        trainer.run()
        return trainer

    assert run(tmp_path / "run", 6).progress.worse == 1
    assert "stopped" not in capfd.readouterr().err
    ended = run(tmp_path / "run", 100).progress
    assert (ended.update, ended.best, ended.best_update, ended.worse) == (10, 2.0, 4, 3)
    assert run(tmp_path / "run", 100).progress.update == 10  # it stays stopped
    assert Checkpoints(tmp_path / "run").best() == 4
    said = "stopped after update 10: 3 validations without a better loss; the best was 2 after update 4; train.patience"
    assert capfd.readouterr().err.count(said) == 2  # whoever asks again is told why again


def test_the_best_of_another_metric_is_not_compared_with(prepared: Prepared, tmp_path: Path) -> None:
    """`train.metric` may change when a run goes on: a loss of 2.0 is no worse than a BLEU of 0."""
    config = tiny(prepared.folder, train={"updates": 4, "validate_every": 2, "save_every": 2, "metric": "exact_match"})
    train(config, tmp_path / "run", device="cpu", quiet=True)
    config["train"] |= {"updates": 6, "metric": "loss", "patience": 1}
    train(config, tmp_path / "run", device="cpu", quiet=True)
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text(encoding="utf-8"))
    assert (best["metric"], best["update"]) == ("loss", 6)


def test_validation_by_workers_leaves_training_as_it_was(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are packed and threads are set while it decodes; what training computes is the same, bit for bit."""
    real, validated = experiment.text_metrics, []

    def by_two_workers(*arguments: Any) -> dict[str, float]:
        torch.set_num_threads(2)
        validated.append(real(*arguments))
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)  # tiny products on two threads wait for each other
        return validated[-1]

    monkeypatch.setattr(experiment, "text_metrics", by_two_workers)
    for name, every in (("watched", 2), ("alone", 1000)):
        options = {"updates": 9, "validate_every": every, "metric": "exact_match"}
        train(tiny(prepared.folder, "no-interaction", train=options), tmp_path / name, device="cpu", quiet=True)
    assert len(validated) == 5 + 1
    watched, alone = (newest(tmp_path / name) for name in ("watched", "alone"))
    for a, b in ((watched.weights, alone.weights), (watched.optimizer, alone.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- a strategy, killed in each of its stages ------------------------------------------------------------------------

SHARDS = "import bothways.decoding as d; d.SHARD = 6"  # so that decoding has a middle
STRATEGIES: dict[str, dict[str, Any]] = {
    "two-pass": {"updates": 20, "share": 0.5},
    "fine-tuning": {"updates": 24, "share": 0.5},
    "online": {"updates": 24, "refresh": 12, "average": 3},
    "asynchronous": {"updates": 24, "share": 0.5},
}
# Each stage in turn, with a folder of updates or of shards and how many of them have to be there.
MIDDLES: dict[str, dict[str, tuple[str, int]]] = {
    "two-pass": {"l2r": ("l2r", 9), "r2l": ("r2l", 9), "decoded": ("decoded", 2), "final": ("", 8)},
    "fine-tuning": {"first": ("first", 9), "decoded": ("decoded", 2), "final": ("", 8)},
    "online": {
        "first": ("first", 9),
        "decoded-1": ("decoded-1", 2),
        "final-1": ("", 5),
        "decoded-2": ("decoded-2", 2),
        "final-2": ("", 17),
    },
    "asynchronous": {"r2l": ("r2l", 9), "decoded": ("decoded", 2), "final": ("", 8)},
}


def recipe(prepared: Prepared, name: str = "fine-tuning", system: str = "bift") -> dict[str, Any]:
    learned = {"future_weight_learned": True} if system == "bift" else {}
    return tiny(
        prepared.folder,
        "abd-transformer" if name == "asynchronous" else system,
        model={"future_dropout": 0.1, **learned},
        train={"updates": 25, "save_every": 6},
        strategy={"name": name, **STRATEGIES[name]},
    )


def stages_done(run: Path) -> list[str]:
    manifest = run / "manifest.json"
    return list(json.loads(manifest.read_text())["stages"]) if manifest.exists() else []


@pytest.mark.parametrize("system, name", [*product(["bift"], STRATEGIES), ("bi-rnmt", "fine-tuning")])
def test_a_strategy_killed_in_each_stage_ends_as_one_that_was_not(
    prepared: Prepared, tmp_path: Path, system: str, name: str
) -> None:
    config = write_config(tmp_path / "config.yaml", recipe(prepared, name, system))
    expected, run = tmp_path / "expected", tmp_path / "run"

    def arguments(output: Path) -> list[str | Path]:
        return ["train", config, "--output", output, "--device", "cpu"]

    def reached(stage: str) -> bool:
        folder, count = MIDDLES[name][stage]
        if "decoded" not in stage:
            return updates_done(run / folder) >= count
        return len(list((run / folder).glob("shards-*/0*[0-9].npz"))) >= count

    done = command(*arguments(expected), before=SHARDS)
    assert done.returncode == 0, done.stderr
    stages = list(MIDDLES[name])
    for number, stage in enumerate(stages):
        status, err = stop(arguments(run), lambda stage=stage: reached(stage), signal.SIGKILL, SHARDS)  # type: ignore[misc]
        assert status == -signal.SIGKILL
        assert stages_done(run) == stages[:number], err
    done = command(*arguments(run), before=SHARDS)
    assert done.returncode == 0, done.stderr
    assert all(f"stage {i}/{len(stages)} {stage}: done before" in done.stderr for i, stage in enumerate(stages[:-1], 1))
    directions = ("r2l",) if name == "asynchronous" else ("l2r", "r2l")
    files = ["rows.npy", *(f"{d}.{kind}" for d in directions for kind in ("ids", "offsets", "usable.npy"))]
    for folder in {MIDDLES[name][stage][0] for stage in stages}:
        if "decoded" not in folder:
            assert_same_state(run / folder, expected / folder)
            continue
        assert all((run / folder / file).read_bytes() == (expected / folder / file).read_bytes() for file in files)
        assert not list((run / folder).glob("shards-*"))
    done = command(*arguments(run))
    assert done.returncode == 0 and done.stderr.count("done before") == len(stages)
    made = json.loads((run / "manifest.json").read_text())
    assert made["recipe"]["strategy"]["name"] == name and list(made["stages"]) == stages
    for stage in made["stages"].values():
        assert stage["seconds"] > 0 and stage["data"]["fingerprint"] == prepared.fingerprint
        assert len(stage["data"]["inputs"][0]["sha256"]) == 64 and len(stage["program"]["code"]) == 16


def test_killed_while_the_first_checkpoint_is_written_it_still_starts_from_the_other_run(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tiny(prepared.folder, train={"updates": 2}), tmp_path / "first", device="cpu")
    config = tiny(prepared.folder, train={"updates": 2, "start_from": str(tmp_path / "first")})
    (tmp_path / "run" / "checkpoints" / ".000002.tmp").mkdir(parents=True)
    train(config, tmp_path / "run", device="cpu")
    assert f"starting from {tmp_path / 'first'}" in capfd.readouterr().err


def test_shards_of_another_decoding_are_not_taken(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows, changed while decoding is interrupted, would change whose text is whose."""
    from bothways import decoding
    from bothways.train.strategy import Part

    run = train(tiny(prepared.folder, "no-interaction"), tmp_path / "first", device="cpu", quiet=True)

    def decode(first: int, output: str) -> None:
        rows = np.arange(first, len(prepared.train))
        job = decoding.Job(prepared, "train", run.config.search, tmp_path / output, "cpu")
        decoding.decode_parts(job, [Part(run.folder, rows, "both")], lambda text: None)

    def fails(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(decoding, "_join", fails)
        with pytest.raises(KeyboardInterrupt):
            decode(7, "run")
    assert list((tmp_path / "run").glob("shards-*/*.npz"))
    decode(0, "run")
    decode(0, "straight")
    assert not list((tmp_path / "run").glob("shards-*"))
    for name in ("rows.npy", "l2r.ids", "r2l.ids", "l2r.offsets", "r2l.offsets", "l2r.usable.npy", "r2l.usable.npy"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_decoding_a_split_survives_a_kill_and_repeats_no_finished_shard(prepared: Prepared, tmp_path: Path) -> None:
    run = train(tiny(prepared.folder, "no-interaction"), tmp_path / "first", device="cpu", quiet=True)

    def arguments(output: str) -> list[str | Path]:
        return ["decode", run.folder, "--split", "train", "--output", tmp_path / output, "--device", "cpu"]

    def shards() -> list[Path]:
        return sorted((tmp_path / "killed").glob("shards-*/0*[0-9].npz"))

    status, _ = stop(arguments("killed"), lambda: len(shards()) >= 3, signal.SIGKILL, SHARDS)
    assert status == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in shards()}
    listed = "import atexit, glob, os; s = lambda: [(p, os.stat(p).st_mtime_ns) for p in glob.glob(F)]"
    watch = f"{SHARDS}; F = {str(tmp_path / 'killed' / 'shards-*' / '0*[0-9].npz')!r}; {listed}"
    watch += "; real = d._join; d._join = lambda *a: (print(dict(s())), real(*a))"
    done = command(*arguments("killed"), before=watch)
    assert done.returncode == 0, done.stderr
    after = eval(done.stdout)
    assert len(after) == 20 and all(after[str(path)] == time for path, time in before.items())
    assert f"{6 * len(before)} of 120 sources of train were decoded before" in done.stderr
    assert "decoded 120 of 120 sources of train, " in done.stderr and " per second, 0:00:00 left" in done.stderr
    assert command(*arguments("straight")).returncode == 0
    for name in ("rows.npy", "l2r.ids", "r2l.ids", "l2r.offsets", "r2l.offsets", "l2r.usable.npy", "r2l.usable.npy"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_the_last_stage_can_be_asked_for_more_and_nothing_else(prepared: Prepared, tmp_path: Path) -> None:
    config = recipe(prepared)
    config["train"]["updates"] = config["strategy"]["updates"] = 2
    train(config, tmp_path / "run", device="cpu", quiet=True)
    config["strategy"]["updates"] = 4
    train(config, tmp_path / "run", device="cpu", quiet=True)
    assert newest(tmp_path / "run").progress["update"] == 4
    for section, option, value, message in (
        ("strategy", "share", 0.7, r"was started with strategy\.share = 0\.5, but is now asked for 0\.7"),
        ("model", "dropout", 0.5, r"was started with model\.dropout = 0\.1, but is now asked for 0\.5"),
        ("train", "updates", 9, "stage first is done with 2 updates, .* but is now asked for 9; give another --output"),
    ):
        other = {**config, section: {**config[section], option: value}}
        with pytest.raises(BothwaysError, match=message):
            train(other, tmp_path / "run", device="cpu", quiet=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    config["strategy"]["updates"] = 5
    train(config, tmp_path / "moved", device="cpu", quiet=True)


# -- several processes -----------------------------------------------------------------------------------------------

TOGETHER = {"updates": 8, "save_every": 5, "validate_every": 4, "log_every": 1, "batch_tokens": 120}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def on_two(
    config: Path, run: Path, *options: str, program: Sequence[str] = ("-m", "bothways")
) -> subprocess.CompletedProcess[str]:
    """The command line on two gloo processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    arguments = [*program, "train", str(config), "--output", str(run), "--device", "cpu", *options]
    return subprocess.run([*launch, *arguments], env=environment(), capture_output=True, text=True, timeout=120)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in log_of(run) if "loss" in row]


def validations(run: Path) -> list[float]:
    return [row["valid_loss"] for row in log_of(run) if "valid_loss" in row]


def assert_close_averages(found: Snapshot, expected: Snapshot) -> None:
    """By Adam's average of the gradients. (Weights would not do: a key's bias has no gradient but rounding noise, which
    Adam scales up.)"""
    averages = [name for name in expected.optimizer if name.startswith("exp_avg/")]
    assert averages and found.optimizer.keys() == expected.optimizer.keys()
    for name in averages:
        torch.testing.assert_close(found.optimizer[name], expected.optimizer[name], rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module", params=[family.apart for family in FAMILIES.values()])
def alone(
    request: pytest.FixtureRequest, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A configuration without dropout, and its run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    config = tiny(prepared.folder, request.param, model={"dropout": 0.0}, train=TOGETHER)
    train(config, folder / "run", device="cpu", quiet=True)
    return write_config(folder / "config.yaml", config), folder / "run"


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(alone: tuple[Path, Path], tmp_path: Path, shard: str) -> None:
    """With a part that goes on from a checkpoint; and the checkpoint of a sharded model is that of a whole one."""
    config, expected = alone
    options = [f"--train.shard={shard}"]
    for updates in (5, 8):
        done = on_two(config, tmp_path / "run", *options, f"--train.updates={updates}")
        assert done.returncode == 0, done.stderr
    assert "going on after update 5" in done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(expected), abs=1e-5)
    assert len(losses(expected)) == 8
    # Validated at the end of the first part as well.
    assert [validations(tmp_path / "run")[i] for i in (0, 2)] == pytest.approx(validations(expected), abs=1e-5)
    assert_close_averages(newest(tmp_path / "run"), newest(expected))


WATCHED = """
import os
from dataclasses import replace
import bothways.train.loop as loop
from bothways.cli import main

class Watched(loop.Trainer):
    def _save(self):
        state = [x for own in self.optimizer.state.values() for x in own.values() if x.dim()]
        held = [sum(x.to_local().numel() for x in some) for some in (self.model.parameters(), state)]
        os.write(1, f"HELD {self.rank} {held[0]} {held[1]} {self.model.parameter_count()}\\n".encode())
        super()._save()

    def _gradients(self, batches, total):
        if self.rank == 1 and self.progress.update == 1:
            batches = [replace(batch, weights=batch.weights * float("nan")) for batch in batches]
        return super()._gradients(batches, total)

import bothways.experiment
bothways.experiment.Trainer = Watched
main()
"""


def test_a_sharded_model_is_sharded(alone: tuple[Path, Path], tmp_path: Path) -> None:
    """Not silently copied to every process, which the losses could not tell. And what is not finite on one process is
    skipped on both."""
    config, _ = alone
    script = tmp_path / "watched.py"
    script.write_text(WATCHED, encoding="utf-8")
    options = ["--quiet", "--train.shard=fsdp", "--train.updates=2", "--train.save_every=1"]
    done = on_two(config, tmp_path / "run", *options, program=[str(script)])
    assert done.returncode == 0, done.stderr
    held = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HELD")]
    assert sorted(row[0] for row in held) == ["0", "0", "1", "1"]
    total = int(held[0][3])
    for rank, parameters, state, _ in held:
        assert 0.4 * total < int(parameters) < 0.6 * total, rank
        assert 0.8 * total < int(state) < 1.2 * total, rank  # Adam's two averages
    before, after = (Checkpoints(tmp_path / "run").load(f"{update:06d}") for update in (1, 2))
    assert (before.progress["skipped"], after.progress["skipped"]) == (0, 1)
    for a, b in ((before.weights, after.weights), (before.optimizer, after.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SHARED = """
import os, bothways.decoding as decoding
from bothways.cli import main

real, decoding.SHARD = decoding._decode_shard, 6

def watched(*arguments):
    os.write(1, f"SHARD {os.environ['RANK']} {arguments[-1].name}\\n".encode())
    real(*arguments)

decoding._decode_shard = watched
main()
"""


def test_a_strategy_on_two_processes_is_that_of_one(prepared: Prepared, tmp_path: Path) -> None:
    """All stages, decoding included: processes share the shards out, and one of them joins them."""
    script = tmp_path / "shared.py"
    script.write_text(SHARED, encoding="utf-8")
    settings = recipe(prepared)
    settings["model"] |= {"dropout": 0.0, "future_dropout": 0.0}
    settings["train"] |= {"updates": 3}
    settings["strategy"] |= {"updates": 3}
    config = write_config(tmp_path / "config.yaml", settings)
    train(settings, tmp_path / "one", device="cpu", quiet=True)
    done = on_two(config, tmp_path / "two", program=[str(script)])
    assert done.returncode == 0, done.stderr
    shards = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SHARD")]
    assert sorted(shards) == [[str(number % 2), f"{number:05d}.npz"] for number in (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)]
    assert stages_done(tmp_path / "two") == ["first", "decoded", "final"]
    for name in ("rows.npy", "l2r.ids", "r2l.ids", "l2r.usable.npy"):
        assert (tmp_path / "two" / "decoded" / name).read_bytes() == (tmp_path / "one" / "decoded" / name).read_bytes()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_changes_nothing(alone: tuple[Path, Path], tmp_path: Path, accumulation: int) -> None:
    config, expected = alone
    train(config, tmp_path / "run", [f"--train.accumulation={accumulation}"], device="cpu", quiet=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(expected), abs=1e-5)
    assert_close_averages(newest(tmp_path / "run"), newest(expected))


# -- when an update goes wrong ---------------------------------------------------------------------------------------

SMALL = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "width": 16,
    "heads": 2,
    "feed_forward": 16,
    "dropout": 0.0,
    "direction": "l2r",
}


class Poisoned(PairBuilder):
    """Batches of some updates have a loss that is not finite."""

    poisoned: tuple[int, ...] = ()
    value = float("nan")

    def __init__(self, prepared: Prepared, *poisoned: int) -> None:
        super().__init__(prepared.train, (L2R,))
        self.poisoned, self.made = poisoned, 0

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        batch = super().build(rows, width, size, fixed)
        self.made += 1
        weights = batch.weights * self.value if self.made - 1 in self.poisoned else batch.weights
        return replace(batch, weights=weights)


def trainer_of(prepared: Prepared, builder: PairBuilder, folder: Path, **options: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    model = build(parse({**tiny(prepared.folder), "model": SMALL}), 14, 14)
    defaults = {"updates": 8, "batch_tokens": 120, "warmup": 2, "learning_rate": 1e-3, "log_every": 4, "save_every": 1}
    config = TrainConfig(**{**defaults, "keep": 100, **options})
    return Trainer(model, builder, config, folder, device="cpu", quiet=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_updates_that_are_not_finite_are_skipped_and_counted(
    prepared: Prepared, tmp_path: Path, clip: float, value: float
) -> None:
    builder = Poisoned(prepared, 2, 5, 6)
    builder.value = value
    progress = trainer_of(prepared, builder, tmp_path / "run", clip=clip).run()
    assert (progress.update, progress.skipped) == (8, 3)
    checkpoints = Checkpoints(tmp_path / "run")
    for update in (3, 6, 7):  # the skipped one is as the one before it
        before, after = checkpoints.load(f"{update - 1:06d}"), checkpoints.load(f"{update:06d}")
        for a, b in ((before.weights, after.weights), (before.optimizer, after.optimizer)):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    stored = [checkpoints.load(f"{update:06d}").progress["skipped"] for update in range(1, 9)]
    assert stored == [0, 0, 1, 1, 1, 2, 3, 3]  # also between two log lines
    assert all(torch.isfinite(x).all() for x in checkpoints.load("000008").weights.values())
    rows = log_of(tmp_path / "run")
    assert [row.get("skipped", 0) for row in rows] == [1, 2]
    whole = trainer_of(prepared, Poisoned(prepared), tmp_path / "whole", clip=clip)
    whole.run()
    healthy = log_of(tmp_path / "whole")
    assert rows[0]["loss"] == pytest.approx(healthy[0]["loss"], rel=0.02)  # the mean over what was not skipped


def test_too_many_skipped_updates_are_an_error(prepared: Prepared, tmp_path: Path) -> None:
    trainer = trainer_of(prepared, Poisoned(prepared, 0, 1, 2), tmp_path / "run", max_skipped=2)
    with pytest.raises(BothwaysError) as caught:
        trainer.run()
    assert str(caught.value) == (
        "3 updates before update 4 were not finite and were skipped, more than train.max_skipped (2); "
        "lower train.learning_rate or lengthen train.warmup"
    )


def test_skipped_updates_in_a_row_are_an_error_however_often_it_logs(prepared: Prepared, tmp_path: Path) -> None:
    """And no loss is shown where there was none."""
    trainer = trainer_of(prepared, Poisoned(prepared, *range(2, 8)), tmp_path / "run", max_skipped=2, log_every=1)
    with pytest.raises(BothwaysError, match="3 updates before update 5 were not finite and were skipped, more than"):
        trainer.run()
    assert ["loss" in row for row in log_of(tmp_path / "run")] == [True, True, False, False, False]
    now_and_then = Poisoned(prepared, 1, 3, 5, 7)
    assert trainer_of(prepared, now_and_then, tmp_path / "other", max_skipped=2, log_every=1).run().skipped == 4


@pytest.mark.parametrize(
    "metric, better, worse",
    [("loss", 1.0, 2.0), ("ter", 30.0, 40.0), ("bleu", 40.0, 30.0), ("length_ratio", 0.98, 1.04),
     ("length_ratio", 1.02, 0.5)],
)  # fmt: skip
def test_what_is_better_depends_on_the_metric(metric: str, better: float, worse: float) -> None:
    assert loop.merit(metric, better) > loop.merit(metric, worse)


def test_out_of_memory_splits_the_batch_and_says_so(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights after it are those of a machine with more memory."""
    builder = PairBuilder(prepared.train, (L2R,))
    trainer_of(prepared, builder, tmp_path / "roomy").run()
    real = loop.Objective.forward
    sizes: list[int] = []

    def cramped(self: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        found = real(self, batch)
        sizes.append(len(batch.source))
        if len(batch.source) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    monkeypatch.setattr(loop.Objective, "forward", cramped)
    trainer = trainer_of(prepared, builder, tmp_path / "cramped")
    trainer.quiet = False
    capfd.readouterr()
    trainer.run()
    said = capfd.readouterr().err
    assert trainer.splits == 4 and max(sizes[3:]) <= 4
    assert "out of memory in update 0: batches are split into 2 parts from here on; results stay the same" in said
    assert "are split into 4 parts from here on" in said
    assert_close_averages(newest(tmp_path / "cramped"), newest(tmp_path / "roomy"))
    assert losses(tmp_path / "cramped") == pytest.approx(losses(tmp_path / "roomy"), abs=1e-5)


def test_out_of_memory_with_one_sentence_is_an_error(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loop.Objective, "forward", never)
    with pytest.raises(BothwaysError, match=r"out of memory in update 0 with one sentence at a time; lower train\.max"):
        trainer_of(prepared, PairBuilder(prepared.train, (L2R,)), tmp_path / "run").run()


def test_a_batch_that_cannot_be_built_is_an_error_in_the_loop(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong in the thread that builds ahead is raised where the batch is used."""

    def fails(*arguments: object) -> Batch:
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(PairBuilder, "build", fails)
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        trainer_of(prepared, PairBuilder(prepared.train, (L2R,)), tmp_path / "run").run()


def test_a_full_disk_while_saving_is_one_message(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bothways.train.checkpoint as checkpoint

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(BothwaysError, match="checkpoints/000001: cannot be written, no space left on device; free"):
        trainer_of(prepared, PairBuilder(prepared.train, (L2R,)), tmp_path / "run").run()


@pytest.mark.parametrize("place", ["log.jsonl", "tensorboard"])
def test_a_full_disk_while_logging_is_one_message(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    """TensorBoard writes in a thread, which would print a traceback of its own."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    if place == "tensorboard":
        monkeypatch.setattr(RecordWriter, "write", full)
    else:
        monkeypatch.setattr("bothways.train.progress.json.dumps", full)
    with pytest.raises(BothwaysError, match=f"{place}: cannot be written: no space left on device"):
        trainer_of(prepared, PairBuilder(prepared.train, (L2R,)), tmp_path / "run", log_every=1, updates=200).run()
    assert "Traceback" not in capfd.readouterr().err


def test_run_opens_what_training_left(straight: tuple[Path, Path]) -> None:
    run = Run.open(straight[1])
    assert run.config.train.updates == 60 and run.model().training is False
