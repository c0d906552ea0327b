"""Parallel files, any number of validation and test sets and references -> the folder that `Prepared` opens."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bothways.data.corpus import FORMAT, Prepared, TextsWriter, writing
from bothways.data.files import FileName, aligned, empty_line, read_lines
from bothways.errors import ConfigError, DataError
from bothways.text.vocabulary import Vocabulary, chunks

EvalFiles: TypeAlias = tuple[str, FileName, Sequence[FileName]]  # name, source, references
Progress: TypeAlias = Callable[[str, int, int], None]  # stage, lines done, lines in all (0 if not known yet)

OWN_ENTRIES = {"meta.json", "source.vocabulary.json", "target.vocabulary.json", "train", "valid", "test"}
LEARN_LINES = 4_000_000  # vocabularies are learned on at most this many lines a side, evenly spaced
REPORT_EVERY = 10_000
SIDES = ("source", "target")


def prepare(
    source: FileName,
    target: FileName,
    valid: Sequence[EvalFiles] = (),
    test: Sequence[EvalFiles] = (),
    output: FileName = "data",
    *,
    vocab: int = 8000,
    kind: Literal["bpe", "words"] = "bpe",
    joint: bool = True,
    keep: int | None = None,
    learn_lines: int = LEARN_LINES,
    progress: Progress | None = None,
) -> Prepared:
    """Check the files, learn the vocabulary, encode all text into the folder `output`, and open it.

    `vocab` counts all subwords, bytes and special tokens (for words, only words); with `joint` both sides share one
    vocabulary. An `output` that is a prepared folder is replaced; any other folder must be empty. Until all is written,
    nothing appears under its name, and what does not get that far is removed.
    """
    output = Path(output).resolve()
    say: Progress = progress or (lambda stage, done, total: None)
    _check_options(valid, test, kind, keep)
    files = [source, target, *(path for _, first, others in chain(valid, test) for path in (first, *others))]
    _check_places(files, output)
    pairs = _scan([source, target], say)
    sets = {
        split: [(*given, _scan([given[1], *given[2]], say, may_be_empty=True)) for given in named]
        for split, named in (("valid", valid), ("test", test))
    }
    folder = output.with_name(f".{output.name}.{os.getpid()}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with writing(output):
            folder.mkdir(parents=True)
            sample = Sample([source, target], pairs, learn_lines, say)
            vocabularies = _learn(sample, vocab, kind, joint, keep)
            for side, vocabulary in zip(SIDES, vocabularies, strict=True):
                _write_text(folder / f"{side}.vocabulary.json", vocabulary.serialized)
            make = _Maker(folder, vocabularies, say)
            meta = {
                "format": FORMAT,
                "settings": {"vocab": vocab, "kind": kind, "joint": joint, "keep": keep, "learn_lines": learn_lines},
                "vocabulary": {side: _describe(found) for side, found in zip(SIDES, vocabularies, strict=True)},
                "train": make.pair("train", source, target, pairs),
                **{split: [make.eval_set(split, *given) for given in named] for split, named in sets.items()},
                "inputs": [{"file": Path(path).name, "sha256": _sha256(path)} for path in files],
            }
            _write_text(folder / "meta.json", json.dumps(meta, ensure_ascii=False, indent=1) + "\n")
            _replace(folder, output)
    except DataError as error:  # the person knows the folder by the name it would have had
        raise DataError(str(error).replace(str(folder), str(output))) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Prepared.open(output)


@dataclass(frozen=True)
class Sample:
    """At most `most` lines of each file, evenly spaced over its `lines`; it can be read again."""

    paths: Sequence[FileName]
    lines: int
    most: int
    say: Progress

    def __iter__(self) -> Iterator[str]:
        every = -(-self.lines // max(self.most, 1))
        total = len(self.paths) * -(-self.lines // every)
        lines = chain.from_iterable(islice(read_lines(path), 0, None, every) for path in self.paths)
        return counted(lines, "learn the vocabulary", total, self.say)


@dataclass(frozen=True)
class _Maker:
    """Writes the encoded text of a folder in the making, and returns what meta.json says about it."""

    folder: Path
    vocabularies: tuple[Vocabulary, Vocabulary]
    say: Progress

    def pair(self, name: str, source: FileName, target: FileName, lines: int) -> dict[str, Any]:
        """Ids of both sides into `folder/name`."""
        written: dict[str, Any] = {"pairs": lines}
        for side, path, vocabulary in zip(SIDES, (source, target), self.vocabularies, strict=True):
            texts = counted(read_lines(path), f"encode {name}, {side}", lines, self.say)
            with TextsWriter(self.folder / name, side, vocabulary.size) as writer:
                for chunk in chunks(texts):
                    writer.append(vocabulary.encode_batch(chunk))
            if writer.texts != lines:
                raise DataError(f"{path}: changed while it was read: had {lines} lines, now has {writer.texts}")
            mean = round(writer.tokens / lines, 2)
            written[side] = {"tokens": writer.tokens, "mean_length": mean, "max_length": writer.longest}
        return written

    def eval_set(
        self, split: str, name: str, source: FileName, references: Sequence[FileName], lines: int
    ) -> dict[str, Any]:
        """Ids and text of a validation or test set."""
        written = self.pair(f"{split}/{name}", source, references[0], lines)
        texts = {"source.txt": source} | {f"reference.{i}.txt": path for i, path in enumerate(references)}
        for file, path in texts.items():
            _write_text(self.folder / split / name / file, "".join(f"{line}\n" for line in read_lines(path)))
        return {"name": name, "references": len(references), **written}


def _learn(sample: Sample, vocab: int, kind: str, joint: bool, keep: int | None) -> tuple[Vocabulary, Vocabulary]:
    def learn(lines: Sample) -> Vocabulary:
        if kind == "words":
            return Vocabulary.learn_words(lines, vocab)
        return Vocabulary.learn_subwords(lines, vocab, keep)

    if joint:
        shared = learn(sample)
        return shared, shared
    source, target = (learn(replace(sample, paths=[path])) for path in sample.paths)
    return source, target


def _describe(vocabulary: Vocabulary) -> dict[str, Any]:
    return {"kind": vocabulary.kind, "size": vocabulary.size, "fingerprint": vocabulary.fingerprint}


def counted(lines: Iterable[str], stage: str, total: int, say: Progress) -> Iterator[str]:
    """The same lines; how many have passed is said now and then, and at the end."""
    done = 0
    for done, line in enumerate(lines, start=1):
        yield line
        if done % REPORT_EVERY == 0:
            say(stage, done, total)
    if done % REPORT_EVERY:
        say(stage, done, total)


def _scan(paths: Sequence[FileName], say: Progress, may_be_empty: bool = False) -> int:
    """Read parallel files to the end, so that whatever is wrong with them is said before anything is made."""
    done = 0
    for row in aligned(paths):
        done += 1
        if not may_be_empty:
            for path, (number, line) in zip(paths, row, strict=True):
                if not line or line.isspace():
                    raise DataError(empty_line(path, number))
        if done % REPORT_EVERY == 0:
            say(f"read {Path(paths[0]).name}", done, 0)
    return done


def _check_options(valid: Sequence[EvalFiles], test: Sequence[EvalFiles], kind: str, keep: int | None) -> None:
    if kind not in ("bpe", "words"):
        raise ConfigError(f"kind must be bpe or words, got {kind!r}")
    if kind == "words" and keep is not None:
        raise ConfigError("keep is for subwords; for words, vocab already is the number that stay")
    for option, named in (("valid", valid), ("test", test)):
        names = [name for name, _, _ in named]
        for name, _, references in named:
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise ConfigError(f"{option}: a name must be letters, digits and any of . + - _, got {name!r}")
            if names.count(name) > 1:
                raise ConfigError(f"{option}: names must differ, but {name!r} is given twice")
            if not references:
                raise ConfigError(f"{option}: {name} must have at least one reference")


def _check_places(files: Sequence[FileName], output: Path) -> None:
    """Nothing that `prepare` did not write is ever replaced, and the input can be read more than once."""
    for path in files:
        if Path(path).exists() and not Path(path).is_file():
            raise DataError(f"{path}: must be a regular file (it is read more than once)")
        if Path(path).resolve().is_relative_to(output):
            raise DataError(f"{path}: lies in the folder that would be written, {output}; choose another output")
    if output.exists() and not output.is_dir():
        raise DataError(f"{output}: is a file, but the output must be a folder")
    entries = {path.name for path in output.iterdir()} if output.exists() else set()
    if not entries:
        return
    try:
        is_ours = json.loads((output / "meta.json").read_bytes())["format"].startswith("bothways data")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise DataError(
            f"{output}: is neither empty nor a prepared folder (no meta.json of ours); choose another output"
        )
    if others := sorted(entries - OWN_ENTRIES):
        raise DataError(f"{output}: holds {others[0]}, which `bothways prepare` did not write; move it away first")


def _replace(folder: Path, output: Path) -> None:
    """Give the finished folder its name; the one that had it goes only when the new one is in place."""
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    if output.exists():
        output.rename(old)
    try:
        folder.rename(output)
    except BaseException:
        if old.exists():
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)
    parent = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _write_text(path: Path, text: str) -> None:
    with writing(path), path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: FileName) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
