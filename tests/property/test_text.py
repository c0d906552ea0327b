"""True of any text: subwords give it back exactly, and `check` and `prepare` agree on what they accept."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bothways.data.check import check, render
from bothways.data.corpus import Texts, TextsWriter
from bothways.data.files import read_lines
from bothways.data.prepare import prepare
from bothways.errors import DataError
from bothways.text.vocabulary import Vocabulary
from bothways.tokens import END, PAD, SPECIAL_TOKENS

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\n\r")
LINE = st.one_of(
    st.text(CHARACTERS),
    st.lists(
        st.sampled_from([" ", "  ", "\t", "▁", "the", "lower", "7", "é", "e\u0301", "😀", *SPECIAL_TOKENS, "<0x41>"])
    ).map("".join),
)
SETTINGS = settings(deadline=None, max_examples=100)


@cache
def vocabulary(keep: int | None) -> Vocabulary:
    lines = ["the low lower lowest 1984 don't", "größer  als </s> <pad> <0x41>", "▁ e\u0301 😀 漢字"] * 4
    return Vocabulary.learn_subwords(lines, 320, keep)


@SETTINGS
@given(st.lists(LINE, max_size=5), st.sampled_from([None, 270]))
def test_subwords_give_back_any_text(lines: list[str], keep: int | None) -> None:
    batch = vocabulary(keep).encode_batch(lines)
    assert [vocabulary(keep).decode(ids) for ids in batch] == lines
    assert all(len(SPECIAL_TOKENS) <= i < vocabulary(keep).size for ids in batch for i in ids)


@settings(deadline=None, max_examples=20)
@given(st.lists(LINE, max_size=20))
def test_what_was_learned_from_gives_back_any_text(lines: list[str]) -> None:
    learned = Vocabulary.learn_subwords(lines, 300)
    assert [learned.decode(ids) for ids in learned.encode_batch(lines)] == lines


@SETTINGS
@given(st.lists(LINE), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_only_line_feeds_end_lines(lines: list[str], closed: bool, end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_bytes(("".join(line + end for line in lines) if closed else end.join(lines)).encode())
        if not closed and lines and not lines[-1]:
            lines = lines[:-1]  # nothing after the last line end is no line
        if lines:
            lines = [lines[0].removeprefix("\ufeff"), *lines[1:]]
        assert list(read_lines(path)) == lines


@SETTINGS
@given(
    st.lists(st.lists(st.integers(5, 70_000), max_size=8), min_size=1, max_size=9),
    st.integers(0, 10),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_gathered_rows_are_the_rows(rows: list[list[int]], width: int, reverse: bool, end: bool, random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with TextsWriter(folder, "side", 70_001) as writer:
            writer.append(rows[:4])
            writer.append(rows[4:])
        texts = Texts.open(folder, "side")
        assert [list(texts[i]) for i in range(len(texts))] == rows
        assert list(texts.lengths) == [len(row) for row in rows]
        picked = np.array([random.randrange(len(rows)) for _ in range(5)])
        expected = []
        for i in picked:
            row = (rows[i][::-1] if reverse else rows[i]) + ([END] if end else [])
            expected.append((row + [PAD] * width)[:width])
        assert texts.gather(picked, width, reverse, end).tolist() == expected


GOOD = st.sampled_from([b"a b", b"c", b"\xc3\xa9 \xe2\x80\xa8", b"x\ry", b"\xef\xbb\xbf1", b"\x00", b"a b" * 300])
ANY = st.one_of(GOOD, st.sampled_from([b"", b" \t", b"\xff", b"\r"]))
TWO_FILES = st.one_of(
    st.lists(st.tuples(GOOD, GOOD), min_size=1, max_size=4).map(lambda rows: list(zip(*rows, strict=True))),
    st.lists(st.tuples(ANY, ANY), min_size=1, max_size=4).map(lambda rows: list(zip(*rows, strict=True))),
    st.tuples(st.lists(ANY, max_size=3), st.lists(ANY, max_size=3)),
)


@settings(deadline=None, max_examples=60)
@given(TWO_FILES, st.one_of(st.none(), TWO_FILES))
def test_prepare_accepts_what_check_finds_no_errors_in(train, dev) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [folder / file for file in ("source", "target", "first", "second")]
        for path, lines in zip(files, [*train, *(dev or [])], strict=False):
            path.write_bytes(b"".join(line + b"\n" for line in lines))
        sets = [("dev", files[2], [files[3], files[2]])] if dev else []
        report = check(files[0], files[1], valid=sets)
        assert render(report)
        try:
            prepare(files[0], files[1], sets, output=folder / "out", vocab=261)
        except DataError:
            assert report.errors
        else:
            assert not report.errors
        assert {path.name for path in folder.iterdir()} <= {"source", "target", "first", "second", "out"}
