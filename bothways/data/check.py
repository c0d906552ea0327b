"""A parallel corpus -> what is wrong with it, by kind, the first offender of each named. Nothing is ever re-aligned.

Errors are what `prepare` refuses: it accepts exactly the data that has none. Warnings are for a person to judge. Files
are read once, line by line; what stays in memory is sixteen bytes a training pair (its hash and its line number), and
a hash for each line of the validation and test sets.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import numpy as np

from bothways.data.files import FileName, different_counts, read_numbered
from bothways.data.prepare import EvalFiles, Progress
from bothways.errors import DataError

RATIO, RATIO_WORDS = 3, 10  # a pair is suspicious if one side has over 10 words, and over 3 times those of the other
LONG_WORDS = 200  # more words than this on a side is long: training leaves most of such lines out, by tokens
EXCERPT = 60  # characters
CONTROL = re.compile(
    "[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f-\x9f]"
)  # all but the tab, and the carriage return: a kind by itself

# In the order they are shown.
KINDS: dict[str, tuple[Literal["error", "warning"], str]] = {
    "unreadable file": ("error", "a file is missing, damaged or not of its format"),
    "empty file": ("error", "a file has no lines"),
    "bad encoding": ("error", "a line is not UTF-8"),
    "line counts": ("error", "files that must be parallel are not equally long"),
    "empty line": ("error", "a side of a training pair has no text"),
    "empty evaluation line": ("warning", "a line of a validation or test set has no text"),
    "carriage return": ("warning", "a carriage return stands inside a line"),
    "control character": ("warning", "a control character other than the tab"),
    "replacement character": ("warning", "U+FFFD, left by an earlier wrong decoding"),
    "length ratio": ("warning", f"one side has over {RATIO_WORDS} words, and over {RATIO} times those of the other"),
    "long line": ("warning", f"a side of a training pair has over {LONG_WORDS} words"),
    "identical sides": ("warning", "source and target of a training pair are the same"),
    "duplicate pair": ("warning", "a training pair has stood in the training data before"),
    "overlap": (
        "warning",
        "a source or reference of a validation or test set stands on that side of the training data",
    ),
}


@dataclass
class Finding:
    """One kind of thing that is wrong."""

    kind: str  # a key of KINDS
    file: str  # of the first offender
    line: int | None  # its number in the file; None if the file itself is meant
    detail: str  # about the first offender: an excerpt or a message
    count: int

    @property
    def severity(self) -> Literal["error", "warning"]:
        """Errors keep `prepare` from accepting the data."""
        return KINDS[self.kind][0]


@dataclass
class Report:
    """What `check` found."""

    source: str
    target: str
    pairs: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that `prepare` refuses."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """The findings to judge."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    def found(self, kind: str) -> Finding | None:
        """The finding of this kind."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def add(self, kind: str, file: FileName, line: int | None, detail: str, count: int = 1) -> None:
        """Count one more of this kind; the first one is kept."""
        if finding := self.found(kind):
            finding.count += count
        else:
            self.findings.append(Finding(kind, str(file), line, detail, count))
            self.findings.sort(key=lambda one: list(KINDS).index(one.kind))


def check(
    source: FileName,
    target: FileName,
    valid: Sequence[EvalFiles] = (),
    test: Sequence[EvalFiles] = (),
    progress: Progress | None = None,
) -> Report:
    """Read everything to its end and report what is wrong, without stopping at the first fault."""
    report = Report(str(source), str(target))
    sets = [_EvalHashes(report, name, first, others) for name, first, others in [*valid, *test]]
    # Hashes are 64 bits and live only as long as this process: among a hundred million pairs the chance that two
    # different ones meet is 1 in 3,700.
    pairs = array("q")
    places = array("q")  # the line of each pair in the source file, which for SGML is not its index
    for row in _rows(report, [source, target]):
        report.pairs += 1
        for side, numbered in enumerate(row):
            if numbered is not None:
                number, line = numbered
                _check_training_line(report, (source, target)[side], number, line)
                for one in sets:
                    one.meet(side, hash(line), number)
        if row[0] is not None and row[1] is not None:
            (number, left), (_, right) = row[0], row[1]
            _check_pair(report, source, number, left, right)
            pairs.append(hash((left, right)))
            places.append(number)
        if progress and report.pairs % 10_000 == 0:
            progress("check", report.pairs, 0)
    _report_duplicates(report, source, pairs, places)
    for one, (_, first, others) in zip(sets, [*valid, *test], strict=True):
        one.report_overlap(report, [source, target], [first, *others])
    return report


def render(report: Report) -> str:
    """The report as plain text for a terminal."""
    lines = [f"{report.pairs:,} pairs in {report.source} and {report.target}"]
    for finding in report.findings:
        place = finding.file if finding.line is None else f"{finding.file}, line {finding.line}"
        lines.append(f"{finding.severity:<8} {finding.kind} ({finding.count:,}): {KINDS[finding.kind][1]}")
        lines.append(f"         first: {place}: {finding.detail}")
    errors, warnings = len(report.errors), len(report.warnings)
    if errors:
        lines.append(
            f"{_kinds(errors, 'error')}, {_kinds(warnings, 'warning')}: `bothways prepare` will refuse this data"
        )
    else:
        lines.append(f"no errors, {_kinds(warnings, 'warning')}: `bothways prepare` will accept this data")
    return "\n".join(lines)


def _kinds(count: int, severity: str) -> str:
    return f"{count or 'no'} {severity}{'' if count == 1 else 's'}"


def _rows(report: Report, paths: Sequence[FileName]) -> Iterator[Sequence[tuple[int, str] | None]]:
    """Line i of every file, None where one has ended; afterwards, what was wrong with the files themselves."""
    unreadable: set[int] = set()
    counts = [0] * len(paths)

    def lines(i: int) -> Iterator[tuple[int, str]]:
        path = paths[i]
        try:
            for numbered in read_numbered(path, lambda error: _add_message(report, "bad encoding", path, error)):
                counts[i] += 1
                yield numbered
        except DataError as error:
            unreadable.add(i)
            _add_message(report, "unreadable file", path, error)

    yield from zip_longest(*(lines(i) for i in range(len(paths))))
    for i, path in enumerate(paths):
        if i in unreadable:
            continue
        if counts[i] == 0:
            report.add("empty file", path, None, "holds no lines")
        elif counts[0] and 0 not in unreadable and counts[i] != counts[0]:
            report.add("line counts", path, None, different_counts(paths[0], counts[0], path, counts[i]))


def _add_message(report: Report, kind: str, path: FileName, error: DataError) -> None:
    """Add a reader's error, whose message begins with the file and perhaps the line."""
    message = str(error).removeprefix(str(path))
    at = re.match(r", line (\d+): ", message)
    report.add(kind, path, int(at[1]) if at else None, message[at.end() :] if at else message.removeprefix(": "))


def _check_training_line(report: Report, path: FileName, number: int, line: str) -> None:
    if not line or line.isspace():
        report.add("empty line", path, number, repr(line))
    elif len(line) > 2 * LONG_WORDS and (words := len(line.split())) > LONG_WORDS:
        report.add("long line", path, number, f"{words} words: {excerpt(line)}")
    _check_characters(report, path, number, line)


def _check_characters(report: Report, path: FileName, number: int, line: str) -> None:
    if line.isprintable() and "\ufffd" not in line:
        return
    if (at := line.find("\r")) >= 0:
        report.add("carriage return", path, number, f"at character {at + 1}: {excerpt(line, at)}")
    if control := CONTROL.search(line):
        at = control.start()
        report.add(
            "control character", path, number, f"U+{ord(line[at]):04X} at character {at + 1}: {excerpt(line, at)}"
        )
    # A line that is not UTF-8 has got its U+FFFD from us, and is an error already.
    if (at := line.find("\ufffd")) >= 0 and report.found("bad encoding") is None:
        report.add("replacement character", path, number, f"at character {at + 1}: {excerpt(line, at)}")


def _check_pair(report: Report, source: FileName, number: int, left: str, right: str) -> None:
    if left == right:
        report.add("identical sides", source, number, excerpt(left))
    n, m = len(left.split()), len(right.split())
    if max(n, m) > RATIO_WORDS and max(n, m) > RATIO * min(n, m):
        report.add("length ratio", source, number, f"{n} words against {m}: {excerpt(left)} | {excerpt(right)}")


def _report_duplicates(report: Report, source: FileName, pairs: "array[int]", places: "array[int]") -> None:
    hashes = np.frombuffer(pairs, dtype=np.int64) if pairs else np.zeros(0, np.int64)
    order = np.argsort(hashes, kind="stable")  # equal ones in the order they were read
    again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]) + 1
    if len(again):
        first = int(order[again].min())
        before = int(np.flatnonzero(hashes == hashes[first])[0])
        report.add("duplicate pair", source, places[first], f"the same pair as line {places[before]}", len(again))


class _EvalHashes:
    """The lines of a validation or test set as hashes, and where the training data first has one of them."""

    def __init__(self, report: Report, name: str, source: FileName, references: Sequence[FileName]) -> None:
        self.name = name
        self.rows: list[list[tuple[int, int] | None]] = []  # for each line, of each file: its number and hash
        self.met: list[dict[int, int | None]] = [{}, {}]  # for each side: hash -> training line
        for row in _rows(report, [source, *references]):
            hashed: list[tuple[int, int] | None] = []
            for i, (path, numbered) in enumerate(zip([source, *references], row, strict=True)):
                text = numbered[1] if numbered else ""
                if numbered and (not text or text.isspace()):
                    report.add("empty evaluation line", path, numbered[0], repr(text))
                if numbered:
                    _check_characters(report, path, *numbered)
                    self.met[min(i, 1)].setdefault(hash(text), None)
                hashed.append((numbered[0], hash(text)) if numbered and text else None)
            self.rows.append(hashed)

    def meet(self, side: int, hashed: int, number: int) -> None:
        """A line of the training data passes by."""
        if hashed in self.met[side] and self.met[side][hashed] is None:
            self.met[side][hashed] = number

    def report_overlap(self, report: Report, training: Sequence[FileName], paths: Sequence[FileName]) -> None:
        """Each line of the set counts once, whichever of its sides the training data has."""
        for row in self.rows:
            for i, numbered in enumerate(row):
                if numbered and (place := self.met[min(i, 1)][numbered[1]]) is not None:
                    where = f"{training[min(i, 1)]}, line {place}"
                    report.add("overlap", paths[i], numbered[0], f"of {self.name} also stands in {where}")
                    break


def excerpt(text: str, at: int = 0) -> str:
    """A short piece of a line around character `at`, with what cannot be seen escaped."""
    start = max(0, min(at - EXCERPT // 2, len(text) - EXCERPT))
    piece = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[start : start + EXCERPT]
    )
    return f"{'...' if start else ''}{piece}{'...' if start + EXCERPT < len(text) else ''}"
