"""A table of systems -> its numbers: trains every system with every seed, chooses on validation text, scores on tests.

    python tools/table.py recipes/multi30k/table.yaml --raw FOLDER --work runs --rows docs/results/multi30k.json
    python tools/table.py recipes/multi30k/table.yaml --rows docs/results/multi30k.json --show

Each system of a seed is a process of its own, `--jobs` of them at a time, those of the first seed before those of the
next. Which checkpoint (the best one, or an average of the newest) is decided by the validation set; test sets are
decoded once, with the usual length penalty and rerank weight or, in rows named `+tuned`, with those that `bothways
tune` finds on the validation set. Rows are written as systems finish and merged with those of earlier calls. What was
trained before is not trained again, and what is interrupted goes on.

    work/data/                        prepared text
         SEED/SYSTEM/                 runs
         outputs/SYSTEM.SEED.SET.txt  what they made of the test sets
         rows/SYSTEM.SEED.json        their rows
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import yaml

SELF, TUNED = "+self-rerank", "+tuned"
VARIANTS = ("", SELF, TUNED, SELF + TUNED)
FLAGS = {"self_rerank": SELF, "tuned": TUNED}  # what a system says of itself
Row = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A system of the table."""

    name: str
    recipe: Path
    options: list[str]
    decoded: str | None  # whose greedy decoding of the training sources is read as well
    variants: list[str]  # of decoding: as it is, reranked by the model itself, with what is tuned
    base: str | None  # what it is compared to, if not the table's base

    def needs(self, names: Sequence[str]) -> list[str]:
        """The systems whose runs it is made from."""
        given = " ".join([*self.options, self.decoded or ""])
        return [name for name in names if "{" + name + "}" in given]


@dataclass(frozen=True)
class Job:
    """A table, where its runs are, and what is asked for."""

    file: Path
    prepare: list[str]
    valid: str
    tests: list[str]
    bases: list[str]
    systems: dict[str, Entry]
    work: Path
    average: int
    options: list[str]

    @classmethod
    def read(cls, given: argparse.Namespace) -> "Job":
        """The YAML file beside what the command line says."""
        raw = yaml.safe_load(given.table.read_text(encoding="utf-8"))
        folder = given.table.parent
        systems = {
            name: Entry(
                name,
                folder / one["recipe"],
                one.get("options", []),
                one.get("decoded"),
                [v for v in VARIANTS if all(one.get(flag) for flag, end in FLAGS.items() if end in v)],
                one.get("base"),
            )
            for name, one in raw["systems"].items()
        }
        prepare = shlex.split(raw["prepare"])
        return cls(
            given.table,
            prepare,
            raw["valid"],
            raw["tests"],
            raw["base"],
            systems,
            given.work,
            given.average,
            given.option,
        )

    def run(self, name: str, seed: int) -> Path:
        """The folder of a system's run."""
        return self.work / str(seed) / name

    def filled(self, text: str, seed: int) -> str:
        """{name} replaced by that system's run."""
        for name in self.systems:
            text = text.replace("{" + name + "}", str(self.run(name, seed)))
        return text

    def output(self, name: str, seed: int, test: str) -> Path:
        """What a system made of a test set."""
        return self.work / "outputs" / f"{name}.{seed}.{test}.txt"


def bothways(*words: str) -> str:
    """Run a command of ours in this process; returns it as a person would type it."""
    from bothways import cli

    said = shlex.join(["bothways", *words])
    print(f"$ {said}", file=sys.stderr, flush=True)
    sys.argv = ["bothways", *words]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
    return said


# -- one system -------------------------------------------------------------------------------------------------------


def measure(job: Job, name: str, seed: int) -> list[Row]:
    """Train, choose, decode and score a system with one seed."""
    entry, run = job.systems[name], job.run(name, seed)
    options = [f"--train.seed={seed}", *(job.filled(option, seed) for option in entry.options), *job.options]
    if entry.decoded is not None:
        decoded = run.with_name(f"{name}.decoded")
        bothways(
            *("decode", job.filled(entry.decoded, seed), "--split", "train", "--output", str(decoded)),
            *("--data", str(job.work / "data"), "--search.greedy=true"),
        )
        options.append(f"--decoded={decoded}")
    command = bothways(
        "train", str(entry.recipe), "--data", str(job.work / "data"), "--output", str(run), *options, "--quiet"
    )
    rows, best = [], {}  # of each way to decode: the checkpoint with its score, whatever is tuned afterwards
    for variant in entry.variants:
        search = usual_search(variant)
        if search["rerank"] not in best:
            best[search["rerank"]] = best_checkpoint(job, run, search)
        rows += chosen_rows(job, name, variant, seed, command, search, *best[search["rerank"]])
    return rows


def usual_search(variant: str) -> dict[str, Any]:
    """How a variant decodes before anything is tuned."""
    from bothways.config import SearchConfig

    usual = SearchConfig()
    search = {"rerank": "self" if SELF in variant else "none", "batch_sentences": 256}
    return search | {"length_penalty": usual.length_penalty, "rerank_weight": usual.rerank_weight}


def best_checkpoint(job: Job, run: Path, search: dict[str, Any]) -> tuple[str, float]:
    """The one that the validation set is decoded best with, and its BLEU."""
    from bothways.data.corpus import Prepared
    from bothways.evaluate.scores import score
    from bothways.translator import Translator

    valid, found = Prepared.open(job.work / "data").valid[job.valid], {}
    for checkpoint in checkpoints_of(run, job.average):
        translator = Translator.open(run, checkpoint=checkpoint, **search)
        texts = [result.text for result in translator.translate(valid.source_lines())]
        found[checkpoint] = score(texts, valid.references(), ["bleu"])[0].score
    best = max(found, key=found.__getitem__)
    return best, found[best]


def chosen_rows(
    job: Job, name: str, variant: str, seed: int, command: str, search: dict[str, Any], checkpoint: str, valid: float
) -> list[Row]:
    """A row for each test set, decoded with what was best on the validation set."""
    from bothways.data.corpus import Prepared
    from bothways.evaluate.scores import score
    from bothways.text.normalize import as_line
    from bothways.train.checkpoint import Checkpoints
    from bothways.translator import Translator
    from bothways.tuning import tune

    run, system, prepared = job.run(name, seed), name + variant, Prepared.open(job.work / "data")
    if TUNED in variant:
        best = tune(run, job.valid, checkpoint=checkpoint, **search).chosen
        valid, search = (
            best.score,
            {**search, "length_penalty": best.length_penalty, "rerank_weight": best.rerank_weight},
        )
    translator, rows = Translator.open(run, checkpoint=checkpoint, **search), []
    for test in job.tests:
        sources, references = prepared.test[test].source_lines(), prepared.test[test].references()
        began = time.monotonic()
        texts = [result.text for result in translator.translate(sources)]
        seconds = time.monotonic() - began
        output = job.output(system, seed, test)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(map(as_line, texts)), encoding="utf-8", newline="\n")
        bleu, ratio = score(texts, references, ["bleu", "length_ratio"])
        progress = Checkpoints(run).resolve("last").progress if (run / "checkpoints").exists() else {}
        rows.append(
            {
                "system": system,
                "seed": seed,
                "test": test,
                "bleu": round(bleu.score, 2),
                "length_ratio": round(ratio.score, 3),
                "updates": progress.get("update", 0),
                "updates_total": total(job, name, seed),
                "loss_tokens": round(progress.get("loss_tokens", 0)),
                "parameters": translator.model.parameter_count(),
                "valid_bleu": round(valid, 2),
                "checkpoint": checkpoint,
                "length_penalty": search["length_penalty"],
                "rerank_weight": search["rerank_weight"] if translator.rescores else None,
                "train_seconds": round(progress.get("seconds", 0.0), 1),
                "sentences_per_second": round(len(texts) / seconds, 1),
                "signature": bleu.signature,
                "command": command,
            }
        )
    return rows


def checkpoints_of(run: Path, average: int) -> list[str]:
    """What is chosen among: the best checkpoint and, of a run with enough of them, an average of the newest."""
    from bothways.train.checkpoint import Checkpoints

    checkpoints = Checkpoints(run)
    if not 1 < average <= len(checkpoints.updates()):
        return ["best"]
    checkpoints.average(average)
    return ["best", "average"]


def total(job: Job, name: str, seed: int) -> int:
    """Updates of a run and of all runs it was made from, each counted once."""
    runs = [name]
    for one in runs:
        runs += [other for other in job.systems[one].needs(list(job.systems)) if other not in runs]
    return sum(own_updates(job.run(one, seed)) for one in runs)


def own_updates(run: Path) -> int:
    """Updates in all folders of a run: its own, and those of the stages that its strategy trained in it."""
    from bothways.train.checkpoint import Checkpoints

    folders = [path.parent for path in run.rglob("checkpoints")]
    return sum(int(Checkpoints(folder).resolve("last").progress["update"]) for folder in folders)


# -- all of them ------------------------------------------------------------------------------------------------------


def run_all(job: Job, names: Sequence[str], seeds: Sequence[int], jobs: int, minutes: float, rows: Path) -> list[str]:
    """Every system that is asked for, after what it is made from; no new one after `minutes`. Returns what failed."""
    failed = []
    begun = time.monotonic()
    (job.work / "rows").mkdir(parents=True, exist_ok=True)
    waiting = {seed: Order(job, names) for seed in seeds}
    running: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
    while True:
        for seed, order in waiting.items():
            for name in order.ready():
                if len(running) < jobs and time.monotonic() < begun + 60 * minutes:
                    order.begin(name)
                    running[seed, name] = start(job, name, seed)
        if not running:
            break
        for (seed, name), process in [item for item in running.items() if item[1].poll() is not None]:
            del running[seed, name]
            took = f"{name}, seed {seed}: {'done' if process.returncode == 0 else 'FAILED'}"
            print(took, f"after {time.monotonic() - begun:.0f} s", flush=True)
            if process.returncode == 0:
                waiting[seed].done(name)
                merge(job, rows, [seed])
            else:
                failed.append(str(job.work / "rows" / f"{name}.{seed}.log"))
        time.sleep(0.2)
    merge(job, rows, seeds)
    return failed


class Order:
    """What can begin, given what is done; a system whose needs failed never begins."""

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        wanted = list(names)
        needs: dict[str, list[str]] = {}
        for name in wanted:
            needs[name] = job.systems[name].needs(list(job.systems))
            wanted += [other for other in needs[name] if other not in wanted]
        self.sorter = TopologicalSorter(needs)
        self.sorter.prepare()
        self.place = {name: i for i, name in enumerate(job.systems)}
        self.open: list[str] = []

    def ready(self) -> list[str]:
        """In the order of the table."""
        self.open += self.sorter.get_ready()
        return sorted(self.open, key=self.place.__getitem__)

    def begin(self, name: str) -> None:
        """It is no longer waiting."""
        self.open.remove(name)

    def done(self, name: str) -> None:
        """What needs it may begin."""
        self.sorter.done(name)


def start(job: Job, name: str, seed: int) -> "subprocess.Popen[bytes]":
    """A process of its own for one system and seed; its messages go to a file beside its rows."""
    job.run(name, seed).parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, str(job.file), "--work", str(job.work), "--average", str(job.average)]
    words += [f"--option={option}" for option in job.options]
    with open(job.work / "rows" / f"{name}.{seed}.log", "ab") as log:
        return subprocess.Popen([*words, "--one", name, "--seeds", str(seed)], stdout=log, stderr=log)


def merge(job: Job, target: Path, seeds: Sequence[int]) -> list[Row]:
    """All rows there are, in the order of the table; a new row replaces an old one. p-values anew for these seeds."""
    from bothways.train.checkpoint import write_json

    found: dict[tuple[str, int, str], Row] = {}
    old = json.loads(target.read_text(encoding="utf-8")) if target.exists() else []
    new = [row for path in sorted((job.work / "rows").glob("*.json")) for row in json.loads(path.read_text())]
    for row in [*old, *new]:
        found[row["system"], row["seed"], row["test"]] = row
    place = {name + v: (i, n) for i, name in enumerate(job.systems) for n, v in enumerate(VARIANTS)}
    last = (len(place), 0)  # what the table no longer names keeps its rows
    rows = sorted(found.values(), key=lambda row: (place.get(row["system"], last), row["seed"], row["test"]))
    if new:
        significant(job, rows, seeds)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, rows)
    return rows


def significant(job: Job, rows: list[Row], seeds: Sequence[int]) -> None:
    """To every row whose outputs are here: the p-value of the mean over all test sets beside the base of its seed."""
    from bothways.data.corpus import Prepared
    from bothways.data.files import read_lines
    from bothways.evaluate import report
    from bothways.reporting import as_named

    test_sets = Prepared.open(job.work / "data").test
    sets = [as_named(test_sets[test]) for test in job.tests]
    for seed in seeds:
        here = {}
        for name in dict.fromkeys(row["system"] for row in rows if row["seed"] == seed):
            paths = {test: job.output(name, seed, test) for test in job.tests}
            if all(path.exists() for path in paths.values()):
                texts = {test: list(read_lines(path)) for test, path in paths.items()}
                here[name] = report.System(name, {test: report.Decoded(lines) for test, lines in texts.items()})
        valid = {row["system"]: row["valid_bleu"] for row in rows if row["seed"] == seed}
        usual = max((name for name in job.bases if name in here), key=lambda name: valid[name], default=None)
        against: dict[str, list[str]] = {}
        for name in here:
            entry = job.systems.get(name.removesuffix(TUNED).removesuffix(SELF))
            base = (entry and entry.base) or usual
            if base in here and base != name:
                against.setdefault(base, []).append(name)
        for base, names in against.items():
            made = report.make([here[name] for name in (base, *names)], sets, base, ["bleu"], examples=0)
            for row in rows:
                tested = made.test("bleu", row["system"], report.MEAN if len(sets) > 1 else sets[0].name)
                if row["seed"] == seed and tested is not None:
                    row |= {"base": base, "p_bootstrap": round(tested.p_bootstrap, 4)}


def show(job: Job, rows: Sequence[Row]) -> Iterator[str]:
    """The table for a page: means over seeds, with their spread where there are several."""
    yield "| system | seeds | updates | in all | " + " | ".join(f"{t} | length" for t in job.tests) + " | mean | p |"
    yield "|---" * (6 + 2 * len(job.tests)) + "|"
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == name]
        by_test = {test: [row for row in mine if row["test"] == test] for test in job.tests}
        cells = [name, str(len(by_test[job.tests[0]])), f"{mine[0]['updates']:,}", f"{mine[0]['updates_total']:,}"]
        for test in job.tests:
            scores = [row["bleu"] for row in by_test[test]]
            spread = f" ± {pstdev(scores):.2f}" if len(scores) > 1 else ""
            cells += [f"{mean(scores):.2f}{spread}", f"{mean(row['length_ratio'] for row in by_test[test]):.3f}"]
        cells.append(f"{mean(row['bleu'] for row in mine):.2f}")
        cells.append(", ".join(f"{row['p_bootstrap']:.3f}" for row in by_test[job.tests[0]] if "p_bootstrap" in row))
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="YAML file: data, systems, what they need")
    parser.add_argument("--raw", type=Path, help="folder of the text that the table's `prepare` names")
    parser.add_argument("--work", type=Path, default=Path("runs/table"), help="folder for data, runs and outputs")
    parser.add_argument("--rows", type=Path, help="JSON file of rows to merge into")
    parser.add_argument("--systems", help="only these, with commas, and what they need")
    parser.add_argument("--seeds", default="1", help="with commas")
    parser.add_argument("--jobs", type=int, default=1, help="systems trained side by side")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing new after so long")
    parser.add_argument("--average", type=int, default=5, help="newest checkpoints that are averaged")
    parser.add_argument("--option", action="append", default=[], help="--a.b=c for every training, for a small trial")
    parser.add_argument("--show", action="store_true", help="print the table of the rows that are there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    job, seeds = Job.read(given), [int(seed) for seed in given.seeds.split(",")]
    if given.one:
        rows = measure(job, given.one, seeds[0])
        (job.work / "rows" / f"{given.one}.{seeds[0]}.json").write_text(json.dumps(rows), encoding="utf-8")
        return
    if given.rows is None:
        sys.exit("--rows FILE: where the rows are")
    failed: list[str] = []
    if not given.show:
        if not (job.work / "data").exists():
            if given.raw is None:
                sys.exit(f"--raw FOLDER: where the text is that {job.file} prepares")
            files = [str(given.raw / word) if (given.raw / word).exists() else word for word in job.prepare]
            bothways("prepare", *files, "--output", str(job.work / "data"), "--quiet")
        names = given.systems.split(",") if given.systems else list(job.systems)
        failed = run_all(job, names, seeds, given.jobs, given.minutes, given.rows)
    print("\n".join(show(job, json.loads(given.rows.read_text(encoding="utf-8")))))
    if failed:
        sys.exit(f"failed, with the reason at the end of: {', '.join(failed)}")


if __name__ == "__main__":
    main()
