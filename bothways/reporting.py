"""Runs, or files of hypotheses, and test sets -> a report. What runs decode is kept in their folders.

run/decoded-sets/NAME-KEY.jsonl     first what it was made with and how fast, then a line for each sentence

KEY is a digest of the checkpoint, the search settings, the device, the sources and the package version, so a second
report decodes nothing, and one that would decode something else finds nothing to reuse.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch

from bothways.config import SearchConfig, changed
from bothways.data.corpus import EvalSet, Prepared, writing
from bothways.data.files import read_lines
from bothways.errors import BothwaysError, CheckpointError, ConfigError, DataError
from bothways.evaluate.page import page
from bothways.evaluate.report import Decoded, NamedSet, Report, Side, System, to_json
from bothways.evaluate.scores import check_lines
from bothways.evaluate.tables import latex
from bothways.run import Run, Say, device_of
from bothways.train.checkpoint import Checkpoints, write_text
from bothways.translator import Translation, Translator
from bothways.version import version

FORMAT = "bothways decoded set 1"


def quiet(_: str) -> None:
    """Say nothing."""


# What was asked for


def gather(
    runs: Sequence["Chosen"],
    hypotheses: Sequence[str] = (),
    tests: Sequence[Sequence[str]] = (),
    references: Sequence[str] = (),
    source: str | None = None,
    fresh: bool = False,
    say: Say = quiet,
) -> tuple[list[System], list[NamedSet]]:
    """Systems and test sets from runs, files, or both on the same sets.

    `tests` are names of prepared sets or NAME SRC REF [REF...]; `references` (and `source`) are one set in files.
    `fresh` decodes again what was decoded before.
    """
    if not runs and not hypotheses:
        raise ConfigError("report needs a run, or files: --hypotheses NAME=FILE --reference FILE")
    if references and tests:
        raise ConfigError("--test and --reference both name test sets; give one of them")
    if source is not None and not references:
        raise ConfigError("--source belongs to --reference FILE")
    sets = _named_sets(runs, tests, references, source, say)
    without = [one.name for one in sets if one.sources is None]
    if runs and without:
        raise ConfigError(f"--source: runs decode it, but it is not given for {without[0]}")
    files = systems_of_files(hypotheses, sets)  # first, since what is wrong with a file is said at once
    return [*systems_of_runs(runs, sets, fresh, say), *files], sets


def _named_sets(
    runs: Sequence["Chosen"],
    tests: Sequence[Sequence[str]],
    references: Sequence[str],
    source: str | None,
    say: Say,
) -> list[NamedSet]:
    """In the order given; without any, all test sets of the first run's data."""
    if references:
        return [set_of_files(Path(references[0]).stem, source, references)]
    if not runs and not tests:
        raise ConfigError("--hypotheses needs a test set: --reference FILE [--source FILE] or --test NAME SRC REF")
    sets: list[NamedSet] = []
    for words in tests:
        if not runs or (len(words) > 2 and Path(words[1]).is_file()):
            if len(words) < 3:
                raise ConfigError(f"--test must be NAME SRC REF [REF...] without runs, got {' '.join(words)!r}")
            sets.append(set_of_files(words[0], words[1], words[2:]))
        else:
            sets += sets_of_runs(runs, words, say)
    return sets if tests else sets_of_runs(runs, (), say)


# Runs


@dataclass(frozen=True)
class Chosen:
    """A run to report on, and how it decodes."""

    name: str
    folder: Path
    checkpoint: str = "best"
    search: Mapping[str, Any] = field(default_factory=dict)
    """Search options in place of the run's own."""
    device: str | None = None


def choose(given: Sequence[str], **options: Any) -> list[Chosen]:
    """`run/` or `NAME=run/`; a run is called by its folder, or by its whole path where that is another's name too."""
    named = [_name_and_path(text) for text in given]
    short = [name or Path(path).resolve().name for name, path in named]
    names = [s if name or short.count(s) == 1 else path for (name, path), s in zip(named, short, strict=True)]
    return [Chosen(name, Path(path), **options) for name, (_, path) in zip(names, named, strict=True)]


def base_among(names: Sequence[str], chosen: Sequence[Chosen], given: str | None) -> str | None:
    """`--base` is a system's name, or a run's folder."""
    if given is None or given in names:
        return given
    _, path = _name_and_path(given)
    return next((one.name for one in chosen if one.folder.resolve() == Path(path).resolve()), given)


def _name_and_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return ("", text) if not equals or not name or Path(text).exists() else (name, path)


def systems_of_runs(chosen: Sequence[Chosen], sets: Sequence[NamedSet], fresh: bool, say: Say) -> list[System]:
    """Decode each set with each run, or take what was decoded before."""
    return [_system(one, sets, fresh, say) for one in chosen]


def _system(chosen: Chosen, sets: Sequence[NamedSet], fresh: bool, say: Say) -> System:
    run = Run.open(chosen.folder)
    config = changed(run.config, search=dict(chosen.search)).search
    place = _Place(run, _checkpoint(run, chosen.checkpoint), config, device_of(chosen.device))
    translator: Translator | None = None
    kept: list[_Kept] = []
    for one in sets:
        assert one.sources is not None
        found = None if fresh else _recall(place, one)
        if found is None:
            if translator is None:
                translator = Translator.open(
                    chosen.folder, checkpoint=place.checkpoint, device=place.device, say=say, **config.model_dump()
                )
            say(f"{chosen.name}: decoding {one.name} ({len(one.sources):,} sentences)")
            began = time.monotonic()
            results = list(translator.stream(one.sources, allow_empty=True))
            found = _keep(place, translator, one, results, time.monotonic() - began, say)
            say(f"{chosen.name}: {found.about['sentences'] / found.about['seconds']:,.1f} sentences per second")
        kept.append(found)
    about = kept[0].about
    return System(
        name=chosen.name,
        outputs={one.name: found.output for one, found in zip(sets, kept, strict=True)},
        parameters=about["parameters"],
        sentences_per_second=sum(k.about["sentences"] for k in kept) / sum(k.about["seconds"] for k in kept),
        updates_per_second=_updates_per_second(run),
        recipe={
            "run": str(chosen.folder),
            "system": run.config.system,
            "checkpoint": f"{place.checkpoint} ({chosen.checkpoint})",
            "weights": place.weights,
            "data": _data_fingerprint(run),
            "vocabularies": [run.source_vocabulary.fingerprint, run.target_vocabulary.fingerprint],
            "search": config.model_dump(exclude={"batch_sentences"}),
            "batch_sentences": config.batch_sentences,
            "machine": about["machine"],
        },
    )


def _checkpoint(run: Run, name: str) -> str:
    """The folder that `best`, `last`, ... stands for. A damaged one is an error here: a report names what it shows.

    Of a run that consists of others, each has one of its own, and the name stands as it is.
    """
    if run.members:
        return name
    checkpoints = Checkpoints(run.folder)
    updates = checkpoints.updates()
    if name not in ("best", "last"):
        return f"{int(name):06d}" if name.isdigit() else name
    best = checkpoints.best() if name == "best" else None
    if best is None and not updates:
        raise CheckpointError(f"{checkpoints.folder}: holds no checkpoint; train the run first")
    return f"{best if best is not None else updates[-1]:06d}"


def _updates_per_second(run: Run) -> float | None:
    """Of the run's last stage, over all interruptions; an update of several runs is one of each."""
    if run.members:
        speeds = [_updates_per_second(member) for member in run.members]
        return 1 / sum(1 / speed for speed in speeds if speed) if all(speeds) else None
    for update in reversed(Checkpoints(run.folder).updates()):
        path = run.folder / "checkpoints" / f"{update:06d}" / "progress.json"
        try:
            progress = json.loads(path.read_text(encoding="utf-8"))
            return float(progress["update"]) / float(progress["seconds"])
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            continue
    return None


def _data_fingerprint(run: Run) -> str | None:
    try:
        return str(json.loads((run.folder / "data.json").read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# What was decoded


@dataclass(frozen=True)
class _Kept:
    about: dict[str, Any]
    output: Decoded


def _weights(run: Run, checkpoint: str) -> str:
    """A digest of them; of a run that consists of others, of all of theirs."""
    if run.members:
        parts = [_weights(member, _checkpoint(member, checkpoint)) for member in run.members]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()
    path = run.folder / "checkpoints" / checkpoint / "checksums.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model.safetensors"])
    except FileNotFoundError:
        Checkpoints(run.folder).load(checkpoint)  # says which there are
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is damaged ({' '.join(str(error).split())})") from None


class _Place:
    """Where the output of a checkpoint under some settings is kept."""

    def __init__(self, run: Run, checkpoint: str, config: SearchConfig, device: str) -> None:
        self.run, self.checkpoint, self.config, self.device = run, checkpoint, config, device
        self.weights = _weights(run, checkpoint)

    def file(self, one: NamedSet) -> Path:
        """The file for a test set."""
        assert one.sources is not None
        made_with = (FORMAT, version(), self.weights, self.config.model_dump(), self.device, digest(one.sources))
        key = hashlib.sha256(json.dumps(made_with).encode()).hexdigest()[:16]
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in one.name)
        return self.run.folder / "decoded-sets" / f"{name[:60]}-{key}.jsonl"


def _recall(place: _Place, one: NamedSet) -> _Kept | None:
    """What was decoded before; None if nothing was, or if the file is damaged."""
    assert one.sources is not None
    try:
        about, *rows = map(json.loads, place.file(one).read_text(encoding="utf-8").splitlines())
        if about["format"] != FORMAT or len(rows) != len(one.sources) or about["sentences"] != len(rows):
            return None
        best = [{direction: Side(**side) for direction, side in row["best"].items()} for row in rows]
        directions = [row["direction"] for row in rows]
        output = Decoded([row["text"] for row in rows], directions, best if _both(best) else ())
        return _Kept(about, output)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep(
    place: _Place, translator: Translator, one: NamedSet, results: Sequence[Translation], seconds: float, say: Say
) -> _Kept:
    """Write down what was decoded; a folder that cannot be written costs the next report its time, no more."""
    best = [
        {name: Side(side.text, side.score, side.cut_off) for name, side in result.best.items()} for result in results
    ]
    machine = "cpu" if place.device == "cpu" else torch.cuda.get_device_name(torch.device(place.device))
    threads = torch.get_num_threads()
    about = {
        "format": FORMAT,
        "set": one.name,
        "checkpoint": place.checkpoint,
        "weights": place.weights,
        "search": place.config.model_dump(),
        "machine": f"{machine}, {threads} {'thread' if threads == 1 else 'threads'}",
        "parameters": translator.model.parameter_count(),
        "sentences": len(results),
        "seconds": max(seconds, 1e-9),
    }
    rows = [
        {
            "text": result.text,
            "direction": result.direction,
            "score": result.score,
            "best": {name: asdict(side) for name, side in sides.items()},
        }
        for result, sides in zip(results, best, strict=True)
    ]
    path = place.file(one)
    try:
        path.parent.mkdir(exist_ok=True)
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (about, *rows)))
    except OSError as error:
        say(f"{path}: cannot be written ({error.strerror or error}); the next report will decode again")
    texts, directions = [result.text for result in results], [result.direction for result in results]
    return _Kept(about, Decoded(texts, directions, best if _both(best) else ()))


def _both(best: Sequence[Mapping[str, Side]]) -> bool:
    return any(len(sides) == 2 for sides in best)


def keep(chosen: Chosen, translator: Translator, one: NamedSet, results: Sequence[Translation], seconds: float) -> None:
    """Hand over what the caller has decoded with this choice, so that a report need not decode it again."""
    place = _Place(
        translator.run, _checkpoint(translator.run, chosen.checkpoint), translator.config, str(translator.device)
    )
    _keep(place, translator, one, results, seconds, quiet)


# Test sets


def sets_of_runs(chosen: Sequence[Chosen], names: Sequence[str], say: Say) -> list[NamedSet]:
    """The named sets, or all test sets, of the first run's prepared data; every run decodes these very lines."""
    first = chosen[0]
    prepared = _prepared(first)
    known = prepared.valid | prepared.test
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--test: must be one of {', '.join(known) or '(none)'} ({prepared.folder}), or NAME SRC REF [REF...]; "
                f"got {name!r}"
            )
    if not names and not prepared.test:
        raise DataError(
            f"{prepared.folder}: has no test set; name a validation set ({', '.join(prepared.valid) or 'it has none'}) "
            "or files: --test NAME SRC REF"
        )
    sets = {name: known[name] for name in (names or prepared.test)}
    for other in chosen:
        if other is not first:
            _must_be_same_text(first, prepared, other, sets, say)
    return [as_named(one) for one in sets.values()]


def _prepared(chosen: Chosen) -> Prepared:
    run = Run.open(chosen.folder)
    try:
        return Prepared.open(run.config.data)
    except BothwaysError as error:
        raise DataError(
            f"{chosen.folder}: its test sets cannot be read: {error}; name files instead: --test NAME SRC REF"
        ) from None


def _must_be_same_text(base: Chosen, prepared: Prepared, other: Chosen, sets: Mapping[str, EvalSet], say: Say) -> None:
    """Runs on other data are compared on the base's text, but a set of the same name must be the same text."""
    run = Run.open(other.folder)
    if _data_fingerprint(run) == prepared.fingerprint:
        return
    say(f"{other.folder}: was trained on other prepared data than {base.folder}; both decode the text of the latter")
    try:
        theirs = Prepared.open(run.config.data)
    except BothwaysError:
        return  # it has moved, or is gone; the run itself holds all that decoding needs
    for name, ours in sets.items():
        same = (theirs.valid | theirs.test).get(name)
        if same is not None and as_named(same).recipe != as_named(ours).recipe:
            raise DataError(
                f"the test set {name!r} is not the same text in {prepared.folder} ({base.folder}) and in "
                f"{theirs.folder} ({other.folder}); say which is meant: --test {name} SRC REF"
            )


def as_named(one: EvalSet) -> NamedSet:
    """A prepared set as text."""
    names = [str(one.folder / f"reference.{i}.txt") for i in range(one.reference_count)]
    return named_set(one.name, one.source_lines(), one.references(), names)


def set_of_files(name: str, source: str | None, references: Sequence[str]) -> NamedSet:
    """A test set in files: a line each (plain, .gz or SGML)."""
    sources = list(read_lines(source)) if source is not None else None
    texts = [list(read_lines(path)) for path in references]
    if sources is not None:
        check_lines(sources, texts, (str(source), *references))
    return named_set(name, sources, texts, list(references))


def named_set(name: str, sources: list[str] | None, references: list[list[str]], files: Sequence[str]) -> NamedSet:
    """With its checksums."""
    recipe: dict[str, Any] = {} if sources is None else {"source_sha256": digest(sources)}
    recipe["reference_sha256"] = [digest(lines) for lines in references]
    return NamedSet(name, references, sources, list(files), recipe)


def digest(lines: Sequence[str]) -> str:
    """SHA-256 of the lines, each ended by one \\n, whatever ended them in the file."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


# Files of hypotheses


def systems_of_files(given: Sequence[str], sets: Sequence[NamedSet]) -> list[System]:
    """`NAME=FILE` or `FILE`; with several test sets a name is given once for each, in their order."""
    paths: dict[str, list[str]] = {}
    for text in given:
        name, path = _name_and_path(text)
        paths.setdefault(name or Path(path).stem, []).append(path)
    systems = []
    for name, files in paths.items():
        if len(files) != len(sets):
            raise ConfigError(
                f"--hypotheses: {name} has {len(files)} files ({', '.join(files)}) for {len(sets)} test sets "
                f"({', '.join(one.name for one in sets)}); give NAME=FILE once for each, in their order"
            )
        outputs, checksums = {}, {}
        for path, one in zip(files, sets, strict=True):
            lines = list(read_lines(path))
            check_lines(lines, one.references, (path, *one.files))
            outputs[one.name] = Decoded(lines)
            checksums[path] = digest(lines)
        systems.append(System(name, outputs, recipe={"files": list(checksums), "sha256": list(checksums.values())}))
    return systems


# Writing


def settings() -> dict[str, Any]:
    """Versions, for the recipe card."""
    packages = ("sacrebleu", "torch")
    versions = {"bothways": version(), "python": platform.python_version()}
    return {"versions": versions | {package: installed_version(package) for package in packages}}


def write(report: Report, output: str | Path | None = None, as_json: str | None = None, tex: str | None = None) -> None:
    """The forms that were asked for, each to its file."""
    forms: list[tuple[str | Path | None, Callable[[], str]]] = [
        (output, lambda: page(report)),
        (as_json, lambda: json.dumps(to_json(report), indent=1, ensure_ascii=False) + "\n"),
        (tex, lambda: latex(report)),
    ]
    for path, form in forms:
        if path is not None:
            text = form()
            with writing(path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(text, encoding="utf-8", newline="\n")
