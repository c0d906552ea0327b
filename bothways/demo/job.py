"""The demo: generated data in, a table out in which two directions meet one.

One model learns both directions without interaction. It is then trained on twice, for the same further updates: with
interaction (the fine-tuning strategy), and without, so that nothing is flattered.

    demo/data/       train, valid and test text, and prepared/
    demo/runs/       no-interaction, bift, no-interaction-longer; or the LSTM family's
    demo/results.json
    demo/report.html what `bothways report` shows of them
"""

import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bothways import config as configuration
from bothways import reporting
from bothways.config import Config
from bothways.data.corpus import Prepared
from bothways.data.prepare import prepare
from bothways.demo.spoken import write
from bothways.errors import ConfigError
from bothways.evaluate import report as reports
from bothways.evaluate.scores import score
from bothways.experiment import train
from bothways.train.checkpoint import Checkpoints, write_json
from bothways.translator import Translation, Translator

METRICS = ("exact_match", "bleu", "first4", "last4", "length_ratio")
RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny", "dropout": 0.1},
    "search": {"beam": 4, "batch_sentences": 64},
    "train": {
        "batch_tokens": 2_500,
        "learning_rate": 3e-3,
        "warmup": 180,
        "validate_every": 10_000,
        "validate_sentences": 200,
        "save_every": 300,
        "log_every": 50,
    },
}
SYSTEMS = {"bift": "no-interaction", "bi-rnmt": "rnmt-no-interaction"}  # and the system of its first run
UPDATES = {"bift": (1_000, 300), "bi-rnmt": (300, 150)}  # of the first run and of those after it; LSTMs learn sooner
SHARE = 0.5  # of the sources, decoded for the stage with interaction
FURTHER = {"learning_rate": 1e-3, "warmup": 50}


@dataclass(frozen=True)
class Row:
    """One system on the test set."""

    system: str
    exact_match: float
    bleu: float
    first4: float
    last4: float
    length_ratio: float
    sentences_per_second: float
    parameters: int
    train_seconds: float


def run(system: str, folder: Path, quiet: bool = False) -> list[Row]:
    """Make the data, train, decode, compare; goes on where it stopped."""
    if system not in SYSTEMS:
        raise ConfigError(f"--system: must be {' or '.join(SYSTEMS)}, got {system!r}")
    console = Console(stderr=True, quiet=quiet, highlight=False)
    data = folder / "data"
    if not (data / "prepared").exists():
        console.print("Writing 30,000 training and 1,000 test pairs: written English and how it is spoken")
        write(data)
        sides = {split: (f"{data}/{split}.written", f"{data}/{split}.spoken") for split in ("train", "valid", "test")}
        sets = {split: [(split, sides[split][0], [sides[split][1]])] for split in ("valid", "test")}
        prepare(*sides["train"], sets["valid"], sets["test"], data / "prepared", vocab=1_000)
    seconds = _train_all(system, folder, console, quiet)
    rows, shown = _decode_all(system, folder, seconds, console)
    write_json(folder / "results.json", [asdict(row) for row in rows])
    Console(quiet=quiet, highlight=False).print(_table(rows))
    _show(shown, Console(quiet=quiet, highlight=False))
    console.print(f"Results: {folder}/results.json   runs: {folder}/runs   try: bothways decode {folder}/runs/{system}")
    page = _write_report(system, folder)
    Console(quiet=quiet, highlight=False, soft_wrap=True).print(f"Report: {page}")
    return rows


def recipes(system: str, folder: Path) -> dict[str, Config]:
    """The three runs, in the order in which they are trained."""
    apart, (updates, further) = SYSTEMS[system], UPDATES[system]
    start, again = str(folder / "runs" / apart), {**FURTHER, "updates": further}
    first = {**RECIPE, "system": apart, "data": str(folder / "data/prepared")}
    first["train"] = {**RECIPE["train"], "updates": updates}
    longer = {**first, "train": {**first["train"], **again, "start_from": start}}
    tuned = {**first, "system": system}
    tuned["strategy"] = {"name": "fine-tuning", "first": start, "share": SHARE, **again}
    return {
        name: configuration.parse(raw, "the demo")
        for name, raw in ((apart, first), (system, tuned), (f"{apart}-longer", longer))
    }


def _train_all(system: str, folder: Path, console: Console, quiet: bool) -> dict[str, float]:
    """Seconds that each run took, those of the run it starts from and of decoding included."""
    seconds: dict[str, float] = {}
    apart = SYSTEMS[system]
    what = {
        apart: "one model, both directions, which do not see each other",
        system: "the same model goes on with interaction, on decoded futures",
        f"{apart}-longer": "the same model goes on for as many updates without interaction",
    }
    for name, config in recipes(system, folder).items():
        console.rule(f"{name}: {what[name]}")
        output = folder / "runs" / name
        train(config, output, device="cpu", quiet=quiet)
        spent = float(Checkpoints(output).resolve("last").progress["seconds"])
        if (output / "manifest.json").exists():
            stages = json.loads((output / "manifest.json").read_text(encoding="utf-8"))["stages"]
            spent = sum(stage["seconds"] for stage in stages.values())
        seconds[name] = spent + seconds.get(apart, 0.0)
    return seconds


def compared(system: str, folder: Path) -> list[reporting.Chosen]:
    """The runs as they are decoded: one model three times, then the two that went on from it."""
    apart = SYSTEMS[system]
    decoded = (
        *((f"{apart}, {direction}", apart, direction) for direction in ("l2r", "r2l", "both")),
        (f"{apart}-longer", f"{apart}-longer", "both"),
        (system, system, "both"),
    )
    return [
        reporting.Chosen(name, folder / "runs" / run, search={"direction": direction}, device="cpu")
        for name, run, direction in decoded
    ]


def _decode_all(
    system: str, folder: Path, seconds: dict[str, float], console: Console
) -> tuple[list[Row], list[tuple[str, Translation]]]:
    """A row for every system, and some sentences of the bidirectional one."""
    test = Prepared.open(folder / "data/prepared").test["test"]
    sources, references = test.source_lines(), test.references()
    rows, shown = [], []
    for chosen in compared(system, folder):
        name = chosen.name
        translator = Translator.open(chosen.folder, device="cpu", **chosen.search)
        began = time.monotonic()
        results = translator.translate(sources)
        spent = time.monotonic() - began
        reporting.keep(chosen, translator, reporting.as_named(test), results, spent)
        speed = len(sources) / spent
        values = {r.name: round(r.score, 4) for r in score([r.text for r in results], references, METRICS)}
        parameters = translator.model.parameter_count()
        rows.append(
            Row(
                name,
                **values,
                sentences_per_second=round(speed, 1),
                parameters=parameters,
                train_seconds=round(seconds[chosen.folder.name], 1),
            )
        )
        console.print(f"decoded the test set with {name}: {speed:.0f} sentences per second")
        if name == system:
            shown = _telling(references[0], results)
    return rows, shown


def _write_report(system: str, folder: Path) -> Path:
    """A page of what was decoded; the base is the run that went on as long as ours without interaction."""
    named = [replace(one, name=re.sub(r", (\w+)$", r" (\1)", one.name)) for one in compared(system, folder)]
    systems, sets = reporting.gather(named, tests=[["test"]])
    base = next(one.name for one in named if one.folder.name.endswith("-longer"))
    report = reports.make(systems, sets, base, ("bleu", "exact_match"), settings=reporting.settings())
    reporting.write(report, folder / "report.html")
    return folder / "report.html"


def _telling(references: list[str], results: list[Translation]) -> list[tuple[str, Translation]]:
    """Sentences whose two directions differ, both winners among them."""
    differing = [
        (reference, result)
        for reference, result in zip(references, results, strict=True)
        if len({output.text for output in result.best.values()}) > 1
    ]
    won = [[pair for pair in differing if pair[1].direction == direction][:2] for direction in ("l2r", "r2l")]
    return [*won[0], *won[1]] or list(zip(references, results, strict=True))[:2]


def _table(rows: list[Row]) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(
        title="Written English to spoken form: 1,000 test sentences with unseen values",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    names = ("system", "exact", "BLEU", "first4", "last4", "length", "sent/s", "params", "train s")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row.system,
            *(f"{value:.1f}" for value in (row.exact_match, row.bleu, row.first4, row.last4)),
            f"{row.length_ratio:.3f}",
            f"{row.sentences_per_second:.0f}",
            f"{row.parameters / 1e6:.2f}M",
            f"{row.train_seconds:.0f}",
        )
    return table


def _show(shown: list[tuple[str, Translation]], console: Console) -> None:
    """What each direction found, where they differ; the winner is marked."""
    console.print("Where the two directions differ (> is the winner):")
    for reference, result in shown:
        console.print(f"\n  written    {result.source}", markup=False)
        console.print(f"  reference  {reference}", markup=False)
        for direction, output in sorted(result.best.items()):
            mark = ">" if direction == result.direction else " "
            console.print(f"{mark} {direction}  {output.score:6.3f}  {output.text}", markup=False)
