"""Parallel files (plain, .gz, WMT SGML; any number of references) -> a folder of memory-mapped ids.

    data/
      meta.json                                       what is here, and what it was made from
      source.vocabulary.json, target.vocabulary.json  the same if joint
      train/source.ids, source.offsets, target.ids, target.offsets
      valid/NAME/ ...                                 the same, and source.txt, reference.0.txt, reference.1.txt, ...
      test/NAME/ ...

Text i of a side is `ids[offsets[i]:offsets[i + 1]]`, in reading order, without end mark and tags. Ids are raw
little-endian uint16 if the vocabulary has fewer than 65,536 tokens and uint32 otherwise; offsets are int64. The target
ids of validation and test sets are those of the first reference.
"""

import errno
import gzip
import hashlib
import html
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from bothways.errors import ConfigError, DataError, VocabularyError
from bothways.text.normalize import clean_line
from bothways.text.vocabulary import Vocabulary, chunks
from bothways.tokens import END, PAD

Ids: TypeAlias = npt.NDArray[np.int64]
FileName: TypeAlias = str | Path
EvalFiles: TypeAlias = tuple[str, FileName, Sequence[FileName]]  # name, source, references
Progress: TypeAlias = Callable[[str, int, int], None]  # stage, lines done, lines in all (0 if not known yet)

FORMAT = "bothways data 1"
OWN_ENTRIES = {"meta.json", "source.vocabulary.json", "target.vocabulary.json", "train", "valid", "test"}
LONGEST_LINE = 16 * 2**20  # bytes; a file without line ends is not read into memory whole
LEARN_LINES = 4_000_000  # vocabularies are learned on at most this many lines a side, evenly spaced
REPORT_EVERY = 10_000
SIDES = ("source", "target")


# Reading text


def read_lines(path: FileName) -> Iterator[str]:
    """The lines of a text file, or the segments of a .sgm or .sgml file, plain or .gz; one at a time."""
    return (line for _, line in read_numbered(path))


def read_numbered(path: FileName, on_bad: Callable[[DataError], None] | None = None) -> Iterator[tuple[int, str]]:
    """The lines with their numbers in the file. Bad UTF-8 is raised, or handed to `on_bad` and replaced by U+FFFD."""
    name = str(path)
    try:
        with cast(IO[bytes], gzip.open(path) if name.endswith(".gz") else open(path, "rb")) as file:
            lines = _decoded(file, name, on_bad)
            yield from _segments(lines, name) if _is_sgml(name) else lines
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: is not a complete gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_stream(stream: BinaryIO, name: str) -> Iterator[str]:
    """The lines of an open binary stream such as a pipe; `name` stands in the errors."""
    return (line for _, line in _decoded(stream, name, None))


def read_pair(source: FileName, target: FileName) -> Iterator[tuple[str, str]]:
    """Lines that translate each other."""
    return ((s, t) for (_, s), (_, t) in _aligned([source, target]))


def _decoded(
    file: IO[bytes] | BinaryIO, name: str, on_bad: Callable[[DataError], None] | None
) -> Iterator[tuple[int, str]]:
    """Only `\\n` and `\\r\\n` end a line: U+2028, U+0085, form feeds and the like are part of the text."""
    number = 0
    while raw := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(raw) > LONGEST_LINE:
            raise DataError(f"{name}, line {number}: is longer than {LONGEST_LINE:,} bytes; is this text?")
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = f"{name}, line {number}: byte 0x{raw[error.start]:02x} at position {error.start + 1} is not UTF-8"
            if on_bad is None:
                raise DataError(f"{bad}; text must be encoded in UTF-8") from None
            on_bad(DataError(f"{bad}; text must be encoded in UTF-8"))
            line = raw.decode("utf-8", errors="replace")
        yield number, clean_line(line, first=number == 1)


def _is_sgml(name: str) -> bool:
    return name.removesuffix(".gz").endswith((".sgm", ".sgml"))


OPENING = re.compile(r"<seg\b[^>]*>", re.IGNORECASE)
CLOSING = re.compile(r"</seg\s*>", re.IGNORECASE)
SYSTEM = re.compile(r"""<doc\b[^>]*\bsysid\s*=\s*["']?([^"'\s>]+)""", re.IGNORECASE)


def _segments(lines: Iterator[tuple[int, str]], name: str) -> Iterator[tuple[int, str]]:
    """What stands between <seg> and </seg>, which may span lines; entities such as &amp; become their characters."""
    parts: list[str] | None = None  # of the segment that is open
    opened, found = 0, 0
    systems: set[str] = set()
    for number, line in lines:
        systems.update(SYSTEM.findall(line))
        if len(systems) > 1:
            listed = " and ".join(sorted(systems))
            raise DataError(f"{name}, line {number}: holds several translations ({listed}); give a file for each")
        position = 0
        while True:
            if parts is None:
                if not (opening := OPENING.search(line, position)):
                    break
                parts, opened, position = [], number, opening.end()
            closing, again = CLOSING.search(line, position), OPENING.search(line, position)
            if (again and (closing is None or again.start() < closing.start())) or number - opened > 1_000:
                raise DataError(f"{name}, line {opened}: <seg> is not closed by </seg>")
            parts.append(line[position : closing.start() if closing else None])
            if not closing:
                break
            yield opened, html.unescape(" ".join(parts)).replace("\n", " ").strip()
            parts, position, found = None, closing.end(), found + 1
    if parts is not None:
        raise DataError(f"{name}, line {opened}: <seg> is not closed by </seg>")
    if not found:
        raise DataError(f"{name}: holds no <seg>; a .sgm file must have its text in <seg> ... </seg>")


def _aligned(paths: Sequence[FileName]) -> Iterator[list[tuple[int, str]]]:
    """Line i of every file, with its number in the file (for SGML that is not i)."""
    files = [read_numbered(path) for path in paths]
    done = 0
    while True:
        row = [next(file, None) for file in files]
        if None in row:
            break
        yield cast(list[tuple[int, str]], row)
        done += 1
    counts = [done + (line is not None) + sum(1 for _ in file) for line, file in zip(row, files, strict=True)]
    for path, count in zip(paths, counts, strict=True):
        if count == 0:
            raise DataError(f"{path}: is empty; it must hold at least one line")
    for path, count in zip(paths, counts, strict=True):
        if count != counts[0]:
            raise DataError(different_counts(paths[0], counts[0], path, count))


def different_counts(source: FileName, n: int, target: FileName, m: int) -> str:
    """The message about files that cannot be parallel."""
    return f"{source} has {n} lines but {target} has {m}; line i of one must translate line i of the other"


def empty_line(path: FileName, number: int) -> str:
    """The message about a training pair with nothing on one side."""
    return f"{path}, line {number}: is empty; both sides of a training pair must have text (`bothways check` lists all)"


# Ids in memory-mapped files


class Texts:
    """The ids of one side of a corpus, on disk."""

    def __init__(self, ids: npt.NDArray[Any], offsets: Ids) -> None:
        self.ids = ids
        self.offsets = offsets

    @classmethod
    def open(cls, folder: FileName, name: str) -> Self:
        """Map `folder/name.ids` and `folder/name.offsets`, as `TextsWriter` leaves them."""
        path = Path(folder) / f"{name}.offsets"
        offsets = _map(path, np.dtype("<i8"))
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] < 0:
            raise DataError(f"{path}: is damaged: offsets must begin with 0")
        path = Path(folder) / f"{name}.ids"
        raw, total = _map(path, np.dtype("u1")), int(offsets[-1])
        if len(raw) not in (2 * total, 4 * total):
            raise DataError(f"{path}: is damaged: {len(raw)} bytes cannot be {total} ids of 2 or 4 bytes")
        return cls(raw.view("<u2" if len(raw) == 2 * total else "<u4"), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Ids:
        """The ids of text i."""
        i = range(len(self))[i]
        return self.ids[self.offsets[i] : self.offsets[i + 1]].astype(np.int64)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """How many ids each text has."""
        lengths = np.diff(self.offsets).astype(np.int32)
        if len(lengths) and lengths.min() < 0:
            raise DataError("prepared data is damaged: offsets must not fall; run `bothways prepare` again")
        return lengths

    def gather(self, rows: Ids, width: int, reverse: bool = False, end: bool = True) -> Ids:
        """Texts side by side [n, width]: ids (reversed if asked), end mark if asked, padding.

        A text of more than `width` ids is cut, in the order asked for; where no room is left there is no end mark.
        """
        starts, stops = self.offsets[rows], self.offsets[np.asarray(rows) + 1]
        lengths = stops - starts
        columns = np.arange(width)
        places = (stops - 1)[:, None] - columns if reverse else starts[:, None] + columns
        filled = columns < lengths[:, None]
        found = np.full((len(lengths), width), PAD, dtype=np.int64)
        found[filled] = self.ids[places[filled]]
        if end:
            found[columns == lengths[:, None]] = END
        return found


class TextsWriter:
    """Writes one side: `append` batches of ids; the files have their names only once all is written and synced.

    with TextsWriter(folder, "source", vocabulary.size) as writer:
        writer.append(vocabulary.encode_batch(lines))
    """

    def __init__(self, folder: FileName, name: str, vocabulary_size: int) -> None:
        self._type = np.dtype("<u2" if vocabulary_size < 2**16 else "<u4")
        self._paths = [Path(folder) / f"{name}.ids", Path(folder) / f"{name}.offsets"]
        self._partial = [path.with_name(path.name + ".partial") for path in self._paths]
        self.texts, self.tokens, self.longest = 0, 0, 0
        with writing(self._paths[0]):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._ids, self._offsets = (path.open("wb") for path in self._partial)
            self._offsets.write(bytes(8))

    def append(self, batch: Sequence[Sequence[int]]) -> None:
        """Add texts after those already there."""
        lengths = np.fromiter(map(len, batch), dtype=np.int64, count=len(batch))
        total = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(batch), dtype=self._type, count=total)
        with writing(self._paths[0]):
            self._ids.write(ids.tobytes())
            self._offsets.write((self.tokens + lengths.cumsum()).astype("<i8").tobytes())
        self.texts += len(batch)
        self.tokens += total
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def close(self) -> None:
        """Sync, and give the files their names."""
        with writing(self._paths[0]):
            for file in (self._ids, self._offsets):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            for partial, path in zip(self._partial, self._paths, strict=True):
                partial.replace(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            for file, partial in zip((self._ids, self._offsets), self._partial, strict=True):
                # What a full disk has not taken is still in the buffer; it was said already, or will be.
                with suppress(OSError):
                    file.close()
                partial.unlink(missing_ok=True)


@contextmanager
def writing(path: FileName) -> Iterator[None]:
    """What goes wrong while writing becomes a DataError that names the file."""
    try:
        yield
    except OSError as error:
        why = "no space left on device" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise DataError(f"{error.filename or path}: cannot be written: {why}") from None


def _map(path: Path, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        size = path.stat().st_size
        if size % kind.itemsize:
            raise DataError(f"{path}: is damaged: its {size} bytes are not a multiple of {kind.itemsize}")
        return np.memmap(path, dtype=kind, mode="r").view(np.ndarray) if size else np.zeros(0, kind)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; it belongs to a prepared folder") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


# The prepared folder


@dataclass(frozen=True)
class Pair:
    """Texts that translate each other."""

    source: Texts
    target: Texts

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class EvalSet:
    """A validation or test set: ids, and the text as it was given."""

    name: str
    pair: Pair  # the target is the first reference
    folder: Path
    reference_count: int

    def source_lines(self) -> list[str]:
        """The source text, line by line."""
        return self._text("source.txt")

    def references(self) -> list[list[str]]:
        """For each reference its lines."""
        return [self._text(f"reference.{i}.txt") for i in range(self.reference_count)]

    def _text(self, name: str) -> list[str]:
        path = self.folder / name
        try:
            lines = path.read_bytes().decode("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if lines.pop() or len(lines) != len(self.pair):
            raise DataError(f"{path}: is damaged: must hold {len(self.pair)} lines; run `bothways prepare` again")
        return lines


@dataclass(frozen=True)
class Prepared:
    """What `prepare` wrote."""

    folder: Path
    train: Pair
    valid: dict[str, EvalSet]  # in the order given
    test: dict[str, EvalSet]
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    joint: bool
    meta: dict[str, Any]
    fingerprint: str

    @classmethod
    def open(cls, folder: FileName) -> Self:
        """Open a prepared folder, checking that it is whole. No text is read yet."""
        folder = Path(folder)
        meta, fingerprint = _read_meta(folder)
        try:
            vocabularies = {side: _vocabulary(folder, side, meta) for side in ("source", "target")}
            return cls(
                folder=folder,
                train=_pair(folder / "train", meta["train"]),
                valid={item["name"]: _eval_set(folder / "valid", item) for item in meta["valid"]},
                test={item["name"]: _eval_set(folder / "test", item) for item in meta["test"]},
                source_vocabulary=vocabularies["source"],
                target_vocabulary=vocabularies["target"],
                joint=vocabularies["source"] == vocabularies["target"],
                meta=meta,
                fingerprint=fingerprint,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder / 'meta.json'}: is damaged: {type(error).__name__}: {error}") from None


def _read_meta(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "meta.json"
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; `bothways prepare` makes it")
    try:
        raw = path.read_bytes()
        meta = json.loads(raw)
    except FileNotFoundError:
        raise DataError(f"{folder}: is not a prepared folder (no meta.json); `bothways prepare` makes one") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"{path}: is damaged: not JSON: {error}; run `bothways prepare` again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(f"{path}: the key `format` must be {FORMAT!r}; run `bothways prepare` again")
    return meta, hashlib.sha256(raw).hexdigest()[:16]


def _vocabulary(folder: Path, side: str, meta: dict[str, Any]) -> Vocabulary:
    path = folder / f"{side}.vocabulary.json"
    vocabulary, expected = Vocabulary.load(path), meta["vocabulary"][side]["fingerprint"]
    if vocabulary.fingerprint != expected:
        raise VocabularyError(
            f"{path}: has fingerprint {vocabulary.fingerprint}, but this folder was made with {expected}; "
            "run `bothways prepare` again"
        )
    return vocabulary


def _pair(folder: Path, meta: dict[str, Any]) -> Pair:
    sides = []
    for side in ("source", "target"):
        texts, expected = Texts.open(folder, side), (meta["pairs"], meta[side]["tokens"])
        if (len(texts), len(texts.ids)) != expected:
            raise DataError(
                f"{folder / side}.ids: is damaged: holds {len(texts)} texts with {len(texts.ids)} tokens, "
                f"but meta.json says {expected[0]} with {expected[1]}; run `bothways prepare` again"
            )
        sides.append(texts)
    return Pair(*sides)


def _eval_set(folder: Path, meta: dict[str, Any]) -> EvalSet:
    folder = folder / meta["name"]
    return EvalSet(meta["name"], _pair(folder, meta), folder, meta["references"])


# Preparing


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
    for row in _aligned(paths):
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
