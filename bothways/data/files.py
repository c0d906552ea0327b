"""Files of text -> lines: plain or .gz, UTF-8, one text a line; or WMT SGML, one text a segment.

What cannot be read is said with the file, the line and what was found there.
"""

import gzip
import html
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, TypeAlias, cast

from bothways.errors import DataError
from bothways.text.normalize import clean_line

FileName: TypeAlias = str | Path
LONGEST_LINE = 16 * 2**20  # bytes; a file without line ends is not read into memory whole


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
    return ((s, t) for (_, s), (_, t) in aligned([source, target]))


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


def aligned(paths: Sequence[FileName]) -> Iterator[list[tuple[int, str]]]:
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


def read_nbest(paths: Sequence[FileName], sources: int) -> list[list[str]]:
    """Each source's texts, files in turn, from lines `i ||| text ||| ...` as most toolkits write them; i from 0."""
    found: list[list[str]] = [[] for _ in range(sources)]
    for path in paths:
        for number, line in read_numbered(path):
            place, *fields = line.split("|||")
            if not place.strip().isdecimal() or not fields:
                raise DataError(f"{path}, line {number}: must be `i ||| text ||| score`, got {line[:60]!r}")
            if int(place) >= sources:
                raise DataError(
                    f"{path}, line {number}: belongs to source {int(place)}, but there are {sources}, counted from 0"
                )
            found[int(place)].append(fields[0].strip())
    empty = [i for i, texts in enumerate(found) if not texts]
    if empty:
        raise DataError(f"{' '.join(map(str, paths))}: holds no candidate of source {empty[0]}, counted from 0")
    return found


def different_counts(source: FileName, n: int, target: FileName, m: int) -> str:
    """The message about files that cannot be parallel."""
    return f"{source} has {n} lines but {target} has {m}; line i of one must translate line i of the other"


def empty_line(path: FileName, number: int) -> str:
    """The message about a training pair with nothing on one side."""
    return f"{path}, line {number}: is empty; both sides of a training pair must have text (`bothways check` lists all)"
