"""The command line: every command reads its arguments, calls one function of the package, and prints.

Progress and messages go to stderr, results to stdout. What a person can mend is said in one line, with exit status 2.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from bothways.config import split_override
from bothways.errors import BothwaysError, ConfigError, DataError
from bothways.version import version

if TYPE_CHECKING:
    from bothways.translator import Translation, Translator

SEPARATOR = "\x1f"  # joins the words of an option that takes any number of them
MANY_WORDS = ("--valid", "--test", "--hypotheses", "--candidates")
FUTURES = ("none", "decoded")
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click, or of typer's own copy of it
OVERRIDES: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Interrupted(Exception):
    """Ctrl-C, on its way past typer, which would leave without a word."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise _Interrupted(str(interrupt)) from None


app = typer.Typer(cls=_Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Quiet = Annotated[bool, typer.Option("--quiet", help="Print results and errors only.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")]


def main() -> None:
    """Run a command; turn what it raises into one line and an exit status."""
    try:
        try:
            status = app(_join_words(sys.argv[1:]) or ["--help"], prog_name="bothways", standalone_mode=False)
        finally:
            sys.stdout.flush()  # here, where a full disk can still be said
        raise SystemExit(status or 0)
    except UsageError as error:
        where, message = getattr(error, "ctx", None), getattr(error, "format_message", error.__str__)()
        command = where.command_path if where else "bothways COMMAND"
        _fail(f"{' '.join(message.split()).rstrip('.')}; `{command} --help` shows what is accepted", 2)
    except BothwaysError as error:
        _fail(str(error), 2)
    except (KeyboardInterrupt, _Interrupted) as error:
        _fail(str(error) or "interrupted", 130)
    except BrokenPipeError:
        _discard_output()  # the reader has gone; say nothing more
        raise SystemExit(1) from None
    except OSError as error:
        _discard_output()
        why = "no space left on device" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        _fail(f"{error.filename or 'output'}: {why}", 2)


def _discard_output() -> None:
    """What stdout could not take would be tried again, and complained about, when the interpreter exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> None:
    print(f"bothways: {message}", file=sys.stderr)
    raise SystemExit(status)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"bothways {version()}")
        raise typer.Exit


@app.callback()
def _options(
    show: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Sequence-to-sequence generation in both directions at once."""


@app.command()
def prepare(
    source: Annotated[str, typer.Option(help="Training sources, a line each (plain, .gz or SGML).")],
    target: Annotated[str, typer.Option(help="Their targets, line by line.")],
    output: Annotated[str, typer.Option(help="Folder to write.")],
    valid: Annotated[list[str] | None, typer.Option(metavar="NAME SRC REF [REF...]", help="A validation set.")] = None,
    test: Annotated[list[str] | None, typer.Option(metavar="NAME SRC REF [REF...]", help="A test set.")] = None,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary (30,000 in the paper).")] = 8_000,
    kind: Annotated[str, typer.Option(help="bpe, or words (the paper's summarization has 90,000).")] = "bpe",
    separate: Annotated[bool, typer.Option("--separate", help="A vocabulary for each side, not a joint one.")] = False,
    keep: Annotated[int | None, typer.Option(help="Cut to the N most frequent subwords; others are split.")] = None,
    quiet: Quiet = False,
) -> None:
    """Turn parallel text into a folder that training reads.

    Example: bothways prepare --source train.en --target train.de --valid dev dev.en dev.de --output data/
    """
    from bothways.data.prepare import prepare as run

    if kind not in ("bpe", "words"):
        raise ConfigError(f"--kind must be bpe or words, got {kind!r}")
    with _stages(quiet) as progress:
        prepared = run(
            source,
            target,
            _sets("--valid", valid),
            _sets("--test", test),
            output,
            vocab=vocab,
            kind="words" if kind == "words" else "bpe",
            joint=not separate,
            keep=keep,
            progress=progress,
        )
    if not quiet:
        print(
            f"{output}: {len(prepared.train):,} training pairs, {prepared.target_vocabulary.size:,} tokens",
            file=sys.stderr,
        )


@app.command()
def check(
    source: Annotated[str, typer.Option(help="Training sources.")],
    target: Annotated[str, typer.Option(help="Their targets.")],
    valid: Annotated[list[str] | None, typer.Option(metavar="NAME SRC REF [REF...]", help="A validation set.")] = None,
    test: Annotated[list[str] | None, typer.Option(metavar="NAME SRC REF [REF...]", help="A test set.")] = None,
    quiet: Quiet = False,
) -> None:
    """Say what is wrong with a corpus, the first offender of each kind with its line. Changes nothing.

    Example: bothways check --source train.en --target train.de --test news news.en news.de
    """
    from bothways.data.check import check as run
    from bothways.data.check import render

    report = run(source, target, _sets("--valid", valid), _sets("--test", test))
    print(render(report))
    if report.errors:
        raise typer.Exit(2)


@app.command()
def systems(quiet: Quiet = False) -> None:
    """List the systems that `system:` can name.

    Example: bothways systems
    """
    from bothways.models.table import SYSTEMS

    width = max(map(len, SYSTEMS))
    for name, system in SYSTEMS.items():
        print(f"{name:{width}}  {system.meaning}")


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="YAML file; docs/options.md lists all options.")],
    output: Annotated[str, typer.Option(help="Folder of the run. If the run is there already, it goes on.")],
    data: Annotated[str | None, typer.Option(help="Folder of prepared data, instead of the file's `data:`.")] = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train a system; any option can be overridden as --section.option=value.

    Examples: bothways train config.yaml --data data/ --output run/ --train.updates=2000

              torchrun --nproc-per-node 4 -m bothways train config.yaml --output run/
    """
    from bothways.experiment import train as run

    overrides = _overrides(context.args)
    if data is not None:
        overrides.append(f"--data={json.dumps(data)}")
    run(config, output, overrides, device=device, quiet=quiet)


# Longer than 60 lines because each of its options has a line.
@app.command(context_settings=OVERRIDES)
def decode(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Folder of a trained run.")],
    source: Annotated[str | None, typer.Option("--input", help="Sources, a line each; default: stdin.")] = None,
    output: Annotated[str | None, typer.Option(help="Where the results go; default: stdout.")] = None,
    split: Annotated[str | None, typer.Option(help="train, or a set's name: decode it into a folder.")] = None,
    data: Annotated[str | None, typer.Option(help="With --split: prepared data; default: the run's.")] = None,
    nbest: Annotated[int | None, typer.Option(help="Hypotheses per source (text: `i ||| text ||| score`).")] = None,
    form: Annotated[str, typer.Option("--format", help="text or jsonl.")] = "text",
    beam: Annotated[int | None, typer.Option(help="Hypotheses kept; both directions share them.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sentences decoded together; changes no result.")] = None,
    direction: Annotated[str | None, typer.Option(help="l2r, r2l or both; default: all the run has.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="α; the default is the run's.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, average, or an update's number.")] = "best",
    prefix: Annotated[str | None, typer.Option(help="File: how line i must begin (forces l2r).")] = None,
    suffix: Annotated[str | None, typer.Option(help="File: how line i must end (forces r2l).")] = None,
    score: Annotated[str | None, typer.Option(help="File of targets: print their forced scores instead.")] = None,
    rerank: Annotated[str | None, typer.Option(help="self: rescore with both directions; or none.")] = None,
    candidates: Annotated[
        list[str] | None, typer.Option(metavar="FILE...", help="n-best files: rescore them instead of searching.")
    ] = None,
    future: Annotated[
        str | None, typer.Option(help="With --score or rescoring: none, decoded; with --score also a file.")
    ] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="An empty line gives an empty one.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="jsonl: add every step of the search.")] = False,
    precision: Annotated[str, typer.Option(help="float32; or faster and not exact: bfloat16, int8.")] = "float32",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Decode text with a trained run; order is kept and results are written as they come.

    Examples: bothways decode run/ < in.en > out.de

              bothways decode run/ --input in.en --nbest 4 --format jsonl --rerank self --future decoded

              torchrun --nproc-per-node 4 -m bothways decode run/ --split train --output decoded/ --search.greedy=true
    """
    from bothways.data.files import read_nbest
    from bothways.decoding import decode_split
    from bothways.translator import Translator, settle

    _must_be_one_of("--format", form, ("text", "jsonl"))
    _must_be_one_of("--precision", precision, ("float32", "bfloat16", "int8"))
    if rerank is not None:
        _must_be_one_of("--rerank", rerank, ("none", "self"))
    if score is None and future not in (None, *FUTURES):
        raise ConfigError(f"--future must be none or decoded without --score FILE, got {future!r}")
    if score is not None and (prefix or suffix):
        raise ConfigError("--score takes no --prefix and no --suffix: the whole text is given")
    if candidates and (score is not None or prefix or suffix or trace):
        raise ConfigError("--candidates takes no --score, --prefix, --suffix or --trace: nothing is searched")
    nbest_files = [file for words in candidates or () for file in words.split(SEPARATOR)]
    _must_be_files(source, prefix, suffix, score, *nbest_files, None if future in FUTURES else future)
    _must_differ(source, output)
    seen = future if future in FUTURES else None
    given: dict[str, Any] = {"nbest": nbest, "beam": beam, "batch_sentences": batch, "direction": direction}
    given |= {"length_penalty": length_penalty, "rerank": rerank, "rerank_future": seen}
    options = {name: value for name, value in given.items() if value is not None} | _search_options(context.args)
    say = _say(quiet)
    if split is not None:
        if output is None:
            raise ConfigError("--split needs --output FOLDER, which training reads as `decoded:`")
        if source or prefix or suffix or score or candidates or trace or nbest or form != "text":
            raise ConfigError(
                "--split decodes prepared sources for training; it takes no option of text in or text out"
            )
        decode_split(
            run, split, output, data, checkpoint=checkpoint, device=device, precision=precision, say=say, **options
        )
        return
    translator = Translator.open(run, checkpoint=checkpoint, device=device, precision=precision, say=say, **options)
    settle()
    if score is None and future is not None and not (translator.rescores or candidates):
        raise ConfigError(f"--future belongs to --score FILE, --rerank self or --candidates, got {future!r} without")
    with _reading(source) as lines, _writing(output) as out:
        if score is not None:
            _write_scores(translator, list(translator.checked(lines, allow_empty)), score, future or "none", form, out)
            return
        results: Iterable[Translation] = translator.stream(lines, allow_empty, trace)
        if prefix or suffix:
            forced = [list(_lines(path)) if path else [] for path in (prefix, suffix)]
            sources = list(translator.checked(lines, allow_empty))
            results = translator.translate(sources, forced[0], forced[1], trace, allow_empty)
        if nbest_files:
            sources = list(translator.checked(lines))
            results = translator.rescore(sources, read_nbest(nbest_files, len(sources)))
        for i, result in enumerate(_counted(results, quiet)):
            out.write(_formatted(i, result, form, translator.config.nbest))
            out.flush()  # whoever reads a pipe need not wait for the rest


@app.command(context_settings=OVERRIDES)
def tune(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Folder of a trained run.")],
    on: Annotated[str | None, typer.Option(help="A validation set's name; default: the first.")] = None,
    metric: Annotated[str, typer.Option(help="What to choose by: bleu, chrf, ter, rouge1, ...")] = "bleu",
    data: Annotated[str | None, typer.Option(help="Prepared data; default: the run's.")] = None,
    rerank: Annotated[str | None, typer.Option(help="self: with rescoring in both directions; or none.")] = None,
    future: Annotated[str | None, typer.Option(help="With --rerank: none or decoded.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, average, or an update's number.")] = "best",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Choose the length penalty, and the weight where hypotheses are rescored, on a validation set; it is decoded once.

    The choice, and the search options given here, become the run's own: run/config.yaml. run/tuned.json has all values.

    Examples: bothways tune run/ --on valid

              bothways tune run/ --on valid --metric chrf --rerank self --search.beam=8
    """
    from bothways.tuning import table
    from bothways.tuning import tune as run_tuning

    if rerank is not None:
        _must_be_one_of("--rerank", rerank, ("none", "self"))
    if future is not None:
        _must_be_one_of("--future", future, FUTURES)
    given = {"rerank": rerank, "rerank_future": future}
    options = {name: value for name, value in given.items() if value is not None} | _search_options(context.args)
    tuned = run_tuning(run, on, metric, data, checkpoint=checkpoint, device=device, say=_say(quiet), **options)
    print(table(tuned))
    _say(quiet)(f"{run}/config.yaml now has the values chosen; {run}/tuned.json has all")


@app.command()
def score(
    hypotheses: Annotated[str, typer.Argument(help="File to score, a line each (plain, .gz or SGML).")],
    reference: Annotated[list[str], typer.Option(help="Reference file; may be given several times.")],
    metric: Annotated[list[str] | None, typer.Option(help="bleu (default), chrf, ter, rouge1, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON with a score for each line.")] = False,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    tokenize: Annotated[str, typer.Option(help="sacreBLEU's tokenizer: 13a, none, zh, intl, char, ...")] = "13a",
    stem: Annotated[bool | None, typer.Option("--stem/--no-stem", help="ROUGE; by default only rouge*-duc.")] = None,
    quiet: Quiet = False,
) -> None:
    """Score a file of hypotheses, ours or another toolkit's. docs/scores.md defines every metric.

    Example: bothways score --reference ref.de --metric bleu --metric length_ratio out.de
    """
    from bothways.evaluate.scores import notes, table, to_json
    from bothways.evaluate.scores import score as run

    texts = [list(_lines(path)) for path in (hypotheses, *reference)]
    results = run(texts[0], texts[1:], metric or ["bleu"], lowercase, tokenize, (hypotheses, *reference), stem)
    for note in notes(texts[1:], reference):
        _say(quiet)(f"bothways: {note}")
    print(json.dumps(to_json(results), ensure_ascii=False) if as_json else table(results))


@app.command()
def compare(
    systems: Annotated[list[str], typer.Argument(metavar="BASE NEW...", help="Files of hypotheses, the base first.")],
    reference: Annotated[list[str], typer.Option(help="Reference file; may be given several times.")],
    metric: Annotated[list[str] | None, typer.Option(help="bleu (default), chrf, ter, rouge1, ...")] = None,
    show: Annotated[int, typer.Option(help="Lines to show that gain most, and that lose most.")] = 0,
    resamples: Annotated[int, typer.Option(help="Draws of either test.")] = 1_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 12345,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    tokenize: Annotated[str, typer.Option(help="sacreBLEU's tokenizer: 13a, none, zh, intl, char, ...")] = "13a",
    stem: Annotated[bool | None, typer.Option("--stem/--no-stem", help="ROUGE; by default only rouge*-duc.")] = None,
    quiet: Quiet = False,
) -> None:
    """Say whether systems differ from a base by more than chance, and on which lines (by the first metric).

    Example: bothways compare base.de new.de --reference ref.de --metric bleu --metric chrf --show 10
    """
    from bothways.evaluate import significance
    from bothways.evaluate.scores import Reading, measure, notes

    if len(systems) < 2 or len(set(systems)) < len(systems):
        raise ConfigError(f"compare needs two or more different files, the base first; got {' '.join(systems)}")
    texts = {path: list(_lines(path)) for path in systems}
    references = [list(_lines(path)) for path in reference]
    measured = measure(texts, references, metric or ["bleu"], Reading(lowercase, tokenize, stem), reference)
    for note in notes(references, reference):
        _say(quiet)(f"bothways: {note}")
    comparisons = [row for one in measured for row in significance.compare(one, resamples=resamples, seed=seed)]
    contests = [significance.contest(measured[0], system) for system in systems[1:]]
    if as_json:
        print(json.dumps(significance.to_json(comparisons, contests, show, resamples, seed), ensure_ascii=False))
        return
    print(significance.table(comparisons))
    for one in contests:
        print("\n" + significance.side_by_side(one, texts, references, show))


# Longer than 60 lines because each of its options has a line.
@app.command(context_settings=OVERRIDES)
def report(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[NAME=]RUN...", help="Folders of runs.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Which system the others are compared to; default: the first.")
    ] = None,
    test: Annotated[
        list[str] | None, typer.Option(metavar="NAME...", help="Sets of the runs' data, or NAME SRC REF [REF...].")
    ] = None,
    hypotheses: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE...", help="Files to report on, a line each.")
    ] = None,
    reference: Annotated[list[str] | None, typer.Option(help="A test set in files: its reference(s).")] = None,
    source: Annotated[str | None, typer.Option(help="With --reference: what was translated.")] = None,
    output: Annotated[str | None, typer.Option(help="HTML file to write.")] = None,
    as_json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="JSON file to write.")] = None,
    latex: Annotated[str | None, typer.Option(help="LaTeX table to write.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="The first decides (default: bleu and chrf).")] = None,
    checkpoint: Annotated[str, typer.Option(help="Of every run: best, last, average, or an update's number.")] = "best",
    fresh: Annotated[bool, typer.Option("--fresh", help="Decode again what was decoded before.")] = False,
    examples: Annotated[int, typer.Option(min=0, help="Lines to show of each kind.")] = 6,
    resamples: Annotated[int, typer.Option(help="Draws of either test of significance.")] = 1_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 12345,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    tokenize: Annotated[str, typer.Option(help="sacreBLEU's tokenizer: 13a, none, zh, intl, char, ...")] = "13a",
    source_tokenize: Annotated[str, typer.Option(help="The tokenizer that counts words of sources.")] = "13a",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Compare runs, or files of hypotheses, on test sets: tables here, and on request a page, JSON and LaTeX.

    Examples: bothways report baseline/ bift/ --output report.html

              bothways report --hypotheses a=a.de b=b.de --reference ref.de --source src.en --json report.json
    """
    from rich.console import Console

    from bothways import reporting
    from bothways.evaluate import report as reports
    from bothways.evaluate.scores import Reading
    from bothways.evaluate.tables import PIPE_WIDTH, show

    given = [word for word in runs or () if not word.startswith("--")]  # unknown options arrive among the arguments
    search = _search_options([word for word in runs or () if word.startswith("--")])
    say = _say(quiet)
    chosen = reporting.choose(given, checkpoint=checkpoint, search=search, device=device)
    files = [file for words in hypotheses or () for file in words.split(SEPARATOR)]
    tests = [words.split(SEPARATOR) for words in test or ()]
    systems, sets = reporting.gather(chosen, files, tests, reference or (), source, fresh, say)
    found = reports.make(
        systems,
        sets,
        reporting.base_among([system.name for system in systems], chosen, base),
        metric or ["bleu", "chrf"],
        Reading(lowercase, tokenize),
        source_tokenize,
        resamples,
        seed,
        examples,
        reporting.settings(),
    )
    for note in found.notes:
        say(f"bothways: {note}")
    reporting.write(found, output, as_json, latex)
    show(found, Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH))
    for path in filter(None, (output, as_json, latex)):
        say(f"wrote {path}")


@app.command()
def average(
    run: Annotated[str, typer.Argument(help="Folder of a run.")],
    last: Annotated[int, typer.Option(help="How many of its newest checkpoints.")] = 5,
    quiet: Quiet = False,
) -> None:
    """Average the newest checkpoints' weights; decode with `--checkpoint average`.

    Example: bothways average run/ --last 5
    """
    from bothways.run import Run
    from bothways.train.checkpoint import Checkpoints

    snapshot = Checkpoints(Run.open(run).folder, say=_say(quiet)).average(last)
    _say(quiet)(f"{run}: averaged updates {', '.join(map(str, snapshot.progress['averaged']))}")


@app.command()
def demo(
    system: Annotated[str, typer.Option(help="bift or bi-rnmt.")] = "bift",
    output: Annotated[str, typer.Option(help="Folder for data, runs and results.")] = "demo",
    quiet: Quiet = False,
) -> None:
    """Train and compare on a generated task: written English to its spoken form, in minutes on a laptop.

    Example: bothways demo
    """
    from bothways.demo.job import run

    run(system, Path(output), quiet)


@app.command()
def bench(
    shape: Annotated[str, typer.Option(help="tiny, small, base or big; of LSTMs tiny, small or paper.")] = "base",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "16,64",
    system: Annotated[str, typer.Option(help="Ours, with commas; the first is the base.")] = "transformer-l2r,bift",
    against: Annotated[str, typer.Option(help="Peers, with commas: ctranslate2, transformers.")] = "",
    precision: Annotated[str, typer.Option(help="Ours, with commas: float32, bfloat16, int8.")] = "float32",
    beam: Annotated[int, typer.Option(help="Hypotheses; 1 is greedy.")] = 4,
    training: Annotated[
        bool, typer.Option("--training", help="Measure training instead; the peer is transformers.")
    ] = False,
    batch_tokens: Annotated[int, typer.Option(help="Training: target tokens of an update.")] = 25_088,
    repeats: Annotated[int, typer.Option(help="Measurements of each; the median is shown.")] = 3,
    output: Annotated[str | None, typer.Option("--json", help="Also write the rows to this file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Decoding speed with random weights: one direction and both, beside peers, on the same work.

    Example: bothways bench --shape base --device cpu --batch 16,64 --against ctranslate2,transformers
    """
    from bothways import bench as decoding_speed
    from bothways import bench_training as training_speed

    peers, precisions = ([name.strip() for name in names.split(",") if name] for names in (against, precision))
    if beam != 1 and (beam < 1 or beam % 2):
        raise ConfigError(f"--beam must be 1 or even, because two directions share it, got {beam}")
    sizes = batch.split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--batch must be numbers from 1 on, with commas, got {batch!r}")
    systems = [name for name in system.split(",") if name]
    rows: list[decoding_speed.Row] | list[training_speed.TrainingRow]
    if training:
        rows = [
            row
            for precision in precisions
            for row in training_speed.run(shape, device, batch_tokens, precision, repeats, _say(quiet), systems, peers)
        ]
        print(training_speed.table(rows))
    else:
        rows = decoding_speed.run(
            shape, device, [int(size) for size in sizes], peers, precisions, beam, repeats, _say(quiet), systems
        )
        print(decoding_speed.table(rows))
    if output:
        Path(output).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


# -- arguments ---------------------------------------------------------------------------------------------------------


def _join_words(arguments: Sequence[str]) -> list[str]:
    """`--valid NAME SRC REF REF` takes all words up to the next option: join them into one."""
    joined: list[str] = []
    collecting = False
    for word in arguments:
        if word in MANY_WORDS:
            joined.append(word)
            collecting = True
        elif collecting and not word.startswith("--"):
            if joined[-1] in MANY_WORDS:
                joined.append(word)
            else:
                joined[-1] += SEPARATOR + word
        else:
            joined.append(word)
            collecting = False
    return joined


def _sets(option: str, given: Sequence[str] | None) -> list[tuple[str, str, list[str]]]:
    sets = []
    for words in given or ():
        name, *files = words.split(SEPARATOR)
        if len(files) < 2:
            raise ConfigError(f"{option} must be NAME SRC REF [REF...], got {' '.join([name, *files])!r}")
        sets.append((name, files[0], files[1:]))
    return sets


def _overrides(arguments: Sequence[str]) -> list[str]:
    for argument in arguments:
        if not argument.startswith("--") or "=" not in argument:
            raise ConfigError(f"unknown argument {argument!r}; an override has the form --section.option=value")
    return list(arguments)


def _search_options(arguments: Sequence[str]) -> dict[str, Any]:
    options = {}
    for override in _overrides(arguments):
        name, value = split_override(override)
        if not name.startswith("search."):
            raise ConfigError(f"{override}: decoding takes --search.option=value only; the rest is the run's")
        options[name.removeprefix("search.")] = value
    return options


# -- reading and writing -----------------------------------------------------------------------------------------------


def _lines(path: str) -> Iterator[str]:
    from bothways.data.files import read_lines

    return read_lines(path)


def _must_be_one_of(option: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ConfigError(f"{option} must be {' or '.join(accepted)}, got {value!r}")


def _must_be_files(*paths: str | None) -> None:
    """Said before a model is loaded and before an output is overwritten."""
    for path in paths:
        if path is not None and not Path(path).exists():
            raise DataError(f"{path}: no such file")
        if path is not None and Path(path).is_dir():
            raise DataError(f"{path}: is a folder, but must be a file")


def _must_differ(source: str | None, output: str | None) -> None:
    if source and output and Path(output).exists() and Path(source).samefile(output):
        raise ConfigError(f"--output: {output} is the input, which would be overwritten; name another file")


@contextmanager
def _reading(path: str | None) -> Iterator[Iterator[str]]:
    from bothways.data.files import read_stream

    if path is not None:
        yield _lines(path)
    else:
        if sys.stdin.isatty():
            print("reading from the terminal; end with Ctrl-D", file=sys.stderr)
        yield read_stream(sys.stdin.buffer, "stdin")


@contextmanager
def _writing(path: str | None) -> Iterator[TextIO]:
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        sys.stdout.flush()
    else:
        from bothways.data.corpus import writing

        with writing(path), open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file


def _formatted(i: int, result: "Translation", form: str, nbest: int) -> str:
    from bothways.text.normalize import as_line

    if form == "jsonl":
        row: dict[str, Any] = {"source": result.source, "hypotheses": [asdict(h) for h in result.hypotheses]}
        if result.trace is not None:
            row["trace"] = asdict(result.trace)
        return json.dumps(row, ensure_ascii=False) + "\n"
    if nbest == 1:
        return as_line(result.text)
    return "".join(as_line(f"{i} ||| {h.text} ||| {h.score:.6f}") for h in result.hypotheses[:nbest])


def _write_scores(translator: "Translator", sources: list[str], file: str, future: str, form: str, out: TextIO) -> None:
    targets = list(_lines(file))
    if len(sources) != len(targets):
        raise DataError(
            f"there are {len(sources)} sources but {file} has {len(targets)} lines; line i belongs to line i"
        )
    other = future if future in FUTURES else list(_lines(future))
    if translator.is_panel:  # one score, of all its runs together
        _must_be_one_of("--future", future, FUTURES)
        rows = [[one.hypotheses[0] for one in translator.rescore(sources, [[target] for target in targets])]]
    else:
        rows = [translator.score(sources, targets, d, other) for d in translator.directions]
    for source, scored in zip(sources, zip(*rows, strict=True), strict=True):
        if form == "jsonl":
            row = {"source": source, "future": future, "hypotheses": [asdict(output) for output in scored]}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            out.write("\t".join(f"{output.score:.6f}" for output in scored) + "\n")


def _counted(results: Iterable["Translation"], quiet: bool) -> Iterator["Translation"]:
    """Say on stderr how far it is, about once a second."""
    began = said = time.monotonic()
    count = 0
    for count, result in enumerate(results, 1):
        yield result
        now = time.monotonic()
        if not quiet and now - said > 1:
            print(f"decoded {count:,} sentences, {count / (now - began):.1f} per second", file=sys.stderr)
            said = now
    if not quiet:
        seconds = time.monotonic() - began
        print(
            f"decoded {count:,} sentences in {seconds:.1f} s, {count / max(seconds, 1e-9):.1f} per second",
            file=sys.stderr,
        )


def _say(quiet: bool) -> Any:
    return (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))


@contextmanager
def _stages(quiet: bool) -> Iterator[Any]:
    """A bar for each stage of a long job: progress(stage, done, total)."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield progress
