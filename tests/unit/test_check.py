"""What `check` finds in a corpus: each kind, its count, its first offender and its severity."""

import gzip
from pathlib import Path

import pytest

from bothways.data.check import KINDS, Finding, check, excerpt, render

GOOD = [(b"a cat", b"eine Katze"), (b"the dog", b"der Hund"), (b"no\xc2\xa0one\tat all", b"niemand")]


def files(folder: Path, rows: list[tuple[bytes, bytes]], name: str = "train") -> tuple[Path, Path]:
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for path, lines in zip(paths, zip(*rows, strict=True), strict=True):
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    return paths


def test_good_data_has_no_findings(tmp_path: Path) -> None:
    report = check(*files(tmp_path, GOOD))
    assert report.findings == []
    assert report.pairs == 3
    assert render(report).endswith("no errors, no warnings: `bothways prepare` will accept this data")


@pytest.mark.parametrize(
    "kind, side, line, count, detail, rows",
    [
        ("bad encoding", "en", 4, 2, "byte 0xe9 at position 3 is not UTF-8", [(b"\xc3\xa9\xe9", b"x")] * 2),
        ("empty line", "de", 4, 2, "''", [(b"x", b""), (b" \xe3\x80\x80", b"y")]),
        ("carriage return", "en", 4, 1, r"at character 2: x\ry", [(b"x\ry", b"z")]),
        (
            "control character",
            "de",
            5,
            2,
            r"U+0007 at character 3: z \x07",
            [(b"x", b"y"), (b"x", b"z \x07"), (b"\x00", b"z")],
        ),
        ("replacement character", "en", 4, 1, "at character 3", [(b"x \xef\xbf\xbd", b"z")]),
        ("length ratio", "en", 4, 1, "2 words against 11: u v | w w w", [(b"u v", b"w " * 11), (b"u", b"w " * 10)]),
        ("length ratio", "en", 5, 1, "13 words against 4", [(b"u " * 12, b"w " * 4), (b"u " * 13, b"w " * 4)]),
        ("long line", "en", 5, 1, "201 words: x x x", [(b"x " * 200, b"y " * 200), (b"x " * 201, b"y " * 200)]),
        ("identical sides", "en", 4, 1, "x y", [(b"x y", b"x y")]),
        ("duplicate pair", "en", 5, 2, "the same pair as line 2", [(b"the dog", b"hund"), GOOD[1], GOOD[1]]),
    ],
)
def test_each_kind(
    kind: str, side: str, line: int, count: int, detail: str, rows: list[tuple[bytes, bytes]], tmp_path: Path
) -> None:
    report = check(*files(tmp_path, GOOD + rows))
    finding = report.found(kind)
    assert finding
    assert (finding.file, finding.line, finding.count) == (str(tmp_path / f"train.{side}"), line, count)
    assert detail in finding.detail
    assert finding.severity == KINDS[kind][0]
    assert [one.kind for one in report.findings if one.kind != "duplicate pair"] in ([kind], [])
    text = render(report)
    assert f"{finding.severity:<8} {kind} ({count}): " in text
    assert f"train.{side}, line {line}: {finding.detail}" in text
    assert "`bothways prepare` will " + ("refuse" if report.errors else "accept") in text


def test_all_is_reported_at_once(tmp_path: Path) -> None:
    source, target = files(tmp_path, [(b"\xff", b"x"), (b"", b"y"), (b"a", b"a"), (b"\xff\r\x01", b"")])
    with target.open("ab") as file:
        file.write(b"more\nand more\xff\n")
    report = check(source, target)
    assert report.pairs == 6
    counts = {finding.kind: finding.count for finding in report.findings}
    assert counts == {
        "bad encoding": 3,
        "line counts": 1,
        "empty line": 2,
        "carriage return": 1,
        "control character": 1,
        "identical sides": 1,
    }
    assert list(counts) == [kind for kind in KINDS if kind in counts]
    assert [one.kind for one in report.errors] == ["bad encoding", "line counts", "empty line"]
    assert [one.kind for one in report.warnings] == ["carriage return", "control character", "identical sides"]
    found = report.found("line counts")
    assert found
    assert found.detail == f"{source} has 4 lines but {target} has 6; line i of one must translate line i of the other"
    assert render(report).endswith("3 errors, 3 warnings: `bothways prepare` will refuse this data")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    source, target = files(tmp_path, GOOD)
    report = check(source, tmp_path / "nothing")
    assert report.findings == [Finding("unreadable file", str(tmp_path / "nothing"), None, "no such file", 1)]
    packed = tmp_path / "train.gz"
    packed.write_bytes(gzip.compress(source.read_bytes())[:-6])
    assert "is not a complete gzip file" in render(check(packed, target))
    (tmp_path / "a.sgm").write_bytes(b"\n<seg>a\n")
    (finding,) = check(tmp_path / "a.sgm", target).findings
    assert (finding.kind, finding.line, finding.detail) == ("unreadable file", 2, "<seg> is not closed by </seg>")
    (tmp_path / "empty").touch()
    (finding,) = check(source, tmp_path / "empty").findings
    assert (finding.kind, finding.severity, finding.detail) == ("empty file", "error", "holds no lines")


def test_sets(tmp_path: Path) -> None:
    train = files(tmp_path, GOOD)
    test = files(tmp_path, [(b"new", b"neu"), (b"the dog", b"dog"), (b"else", b"der Hund"), (b"", b"")], "test")
    report = check(*train, test=[("t", test[0], [train[1], test[1]])])
    found = report.found("line counts")
    assert found
    assert f"{test[0]} has 4 lines but {train[1]} has 3" in found.detail
    report = check(*train, valid=[("v", *[test[0], [test[1]]])], test=[("t", test[0], [test[1]])])
    assert {one.kind: one.count for one in report.findings} == {"empty evaluation line": 4, "overlap": 4}
    assert not report.errors
    overlap = report.found("overlap")
    assert overlap
    assert (overlap.file, overlap.line) == (str(test[0]), 2)
    assert overlap.detail == f"of v also stands in {train[0]}, line 2"


def test_a_set_is_compared_on_its_own_side(tmp_path: Path) -> None:
    train = files(tmp_path, GOOD)
    test = files(tmp_path, [(b"der Hund", b"the dog")], "test")
    assert check(*train, test=[("t", test[0], [test[1]])]).findings == []


def test_lines_of_sgml_are_those_of_the_file(tmp_path: Path) -> None:
    for name, second in (("a.sgm", "x"), ("b.sgm", "")):
        (tmp_path / name).write_text(f"<doc>\n<seg>1</seg>\n\n<seg>{second}</seg>\n", encoding="utf-8")
    found = check(tmp_path / "a.sgm", tmp_path / "b.sgm").found("empty line")
    assert found
    assert (found.file, found.line) == (str(tmp_path / "b.sgm"), 4)


def test_progress(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    check(*files(tmp_path, GOOD * 7_000), progress=lambda *one: said.append(one))
    assert said == [("check", 10_000, 0), ("check", 20_000, 0)]


@pytest.mark.parametrize(
    "text, at, expected",
    [
        ("short", 0, "short"),
        ("a\tb\u2028\x00", 3, r"a\tb\u2028\x00"),
        ("x" * 100, 0, "x" * 60 + "..."),
        ("x" * 100, 50, "..." + "x" * 60 + "..."),
        ("x" * 100, 99, "..." + "x" * 60),
    ],
)
def test_excerpt(text: str, at: int, expected: str) -> None:
    assert excerpt(text, at) == expected
