"""A folder of memory-mapped ids -> the texts of a corpus, row by row or many side by side.

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
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from bothways.data.files import FileName
from bothways.errors import DataError, VocabularyError
from bothways.text.vocabulary import Vocabulary
from bothways.tokens import END, PAD

Ids: TypeAlias = npt.NDArray[np.int64]
FORMAT = "bothways data 1"


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
