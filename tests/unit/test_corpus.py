"""Reading parallel text, and the prepared folder: what is in it, and what is said when it cannot be made or opened."""

import errno
import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from bothways.data import files as reading
from bothways.data.corpus import Prepared, Texts, TextsWriter
from bothways.data.files import read_lines, read_pair, read_stream
from bothways.data.prepare import prepare
from bothways.errors import BothwaysError, ConfigError, DataError, VocabularyError
from bothways.text.vocabulary import Vocabulary
from bothways.tokens import END, PAD

SOURCE = ["the house is small", "a dog barks", "the dog is in the house", "12 dogs  bark"]
TARGET = ["das Haus ist klein", "ein Hund bellt", "der Hund ist im Haus", "12 Hunde bellen"]


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "train.en", SOURCE), write(tmp_path / "train.de", TARGET)


@pytest.fixture
def prepared(files: tuple[Path, Path], tmp_path: Path) -> Prepared:
    sets = [
        ("b", write(tmp_path / "b.en", SOURCE[2:]), [write(tmp_path / "b.de", TARGET[2:])]),
        ("a", files[0], [files[1], write(tmp_path / "a.de", ["eins", "", "drei", "vier\r"])]),
    ]
    return prepare(*files, valid=sets[:1], test=[sets[1], sets[0]], output=tmp_path / "data", vocab=300)


# Reading


@pytest.mark.parametrize(
    "raw, lines",
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb", ["a", "b"]),
        (b"a\rb\r\r\n", ["a\rb\r"]),
        ("a\u2028b\x0bc\x0cd\x85e\u2029\x1cf\n g ".encode(), ["a\u2028b\x0bc\x0cd\x85e\u2029\x1cf", " g "]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
    ],
)
def test_lines(raw: bytes, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(raw)
    (tmp_path / "text.gz").write_bytes(gzip.compress(raw))
    assert list(read_lines(tmp_path / "text")) == lines
    assert list(read_lines(str(tmp_path / "text.gz"))) == lines
    assert list(read_stream(io.BytesIO(raw), "standard input")) == lines


SGML = """<!DOCTYPE mteval SYSTEM "mteval-xml-1.3.dtd">
<refset setid="x" srclang="any" trglang="de"><doc sysid="ref" docid="1">
<p>
<seg id="1">Fish &amp; chips &lt;now&gt; &#228; &quot;so&quot;</seg>
<SEG id="2"> two</seg><seg id="3"></seg>
<seg id="4">over
two lines&#10;</seg>
</p></doc><doc sysid="ref" docid="2"><seg id="1">last</seg></doc></refset>
"""


@pytest.mark.parametrize("name", ["ref.sgm", "ref.sgml", "ref.sgm.gz"])
def test_segments(name: str, tmp_path: Path) -> None:
    raw = SGML.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    expected = ['Fish & chips <now> ä "so"', "two", "", "over two lines", "last"]
    assert list(read_lines(tmp_path / name)) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("<seg>a</seg>\n<seg>b", "line 2: <seg> is not closed by </seg>"),
        ("<seg>a\n<seg>b</seg>\n", "line 1: <seg> is not closed by </seg>"),
        ("<seg>a\n" + "b\n" * 2000 + "</seg>", "line 1: <seg> is not closed by </seg>"),
        ("plain\ntext\n", "holds no <seg>; a .sgm file must have its text in <seg> ... </seg>"),
        (SGML + SGML.replace('"ref"', '"ref2"'), "line 10: holds several translations .ref and ref2.; give a"),
    ],
)
def test_bad_sgml(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.sgm"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"a\.sgm(, |: ){message}"):
        list(read_lines(path))


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"nothing\.en: no such file"):
        list(read_lines(tmp_path / "nothing.en"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        list(read_lines(tmp_path))
    (tmp_path / "a.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a\.gz: is not a complete gzip file"):
        list(read_lines(tmp_path / "a.gz"))
    (tmp_path / "b.gz").write_bytes(gzip.compress(os.urandom(99_999))[:50_000])
    with pytest.raises(DataError, match=r"b\.gz(: is not a complete gzip file|, line 1: byte)"):
        list(read_lines(tmp_path / "b.gz"))
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"text\n" * 9)[:-4])
    with pytest.raises(DataError, match=r"c\.gz: is not a complete gzip file"):
        list(read_lines(tmp_path / "c.gz"))
    (tmp_path / "d").write_bytes(b"a\nb\xfcb\n")
    with pytest.raises(DataError, match=r"d, line 2: byte 0xfc at position 2 is not UTF-8; text must be encoded in"):
        list(read_lines(tmp_path / "d"))
    with pytest.raises(DataError, match="standard input, line 1: byte 0xff at position 1 is not UTF-8"):
        list(read_stream(io.BytesIO(b"\xff\xfea\0\n\0"), "standard input"))
    monkeypatch.setattr(reading, "LONGEST_LINE", 4)
    (tmp_path / "e").write_bytes(b"abcd\nabcdef\n")
    with pytest.raises(DataError, match=r"e, line 1: is longer than 4 bytes; is this text\?"):
        list(read_lines(tmp_path / "e"))


def test_pairs(files: tuple[Path, Path], tmp_path: Path) -> None:
    assert list(read_pair(*files)) == list(zip(SOURCE, TARGET, strict=True))
    longer = write(tmp_path / "longer", [*TARGET, "noch", "mehr"])
    message = r"train\.en has 4 lines but .*longer has 6; line i of one must translate line i of the other"
    with pytest.raises(DataError, match=message):
        list(read_pair(files[0], longer))
    with pytest.raises(DataError, match=r"longer has 6 lines but .*train\.en has 4;"):
        list(read_pair(longer, files[0]))
    empty = write(tmp_path / "empty", [])
    for pair in ((files[0], empty), (empty, files[0]), (empty, empty)):
        with pytest.raises(DataError, match="empty: is empty; it must hold at least one line"):
            list(read_pair(*pair))


# Texts


@pytest.mark.parametrize("size, width", [(65_535, 2), (65_536, 4)])
def test_texts(size: int, width: int, tmp_path: Path) -> None:
    rows = [[5, 6, 7], [], [size - 1], [8, 9]]
    with TextsWriter(tmp_path / "new" / "folder", "side", size) as writer:
        writer.append(rows[:3])
        writer.append([])
        writer.append(rows[3:])
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["side.ids", "side.offsets"]
    assert (folder / "side.ids").stat().st_size == 6 * width
    assert np.fromfile(folder / "side.offsets", "<i8").tolist() == [0, 3, 3, 4, 6]
    texts = Texts.open(folder, "side")
    assert [texts[i].tolist() for i in range(len(texts))] == rows
    assert texts[-1].tolist() == [8, 9]
    with pytest.raises(IndexError):
        texts[4]
    assert texts.lengths.tolist() == [3, 0, 1, 2]
    assert (writer.texts, writer.tokens, writer.longest) == (4, 6, 3)


@pytest.mark.parametrize(
    "width, reverse, end, expected",
    [
        (4, False, True, [[5, 6, 7, END], [END, PAD, PAD, PAD], [8, 9, END, PAD]]),
        (4, True, True, [[7, 6, 5, END], [END, PAD, PAD, PAD], [9, 8, END, PAD]]),
        (3, False, True, [[5, 6, 7], [END, PAD, PAD], [8, 9, END]]),
        (2, True, True, [[7, 6], [END, PAD], [9, 8]]),
        (2, False, False, [[5, 6], [PAD, PAD], [8, 9]]),
        (0, False, True, [[], [], []]),
    ],
)
def test_gather(width: int, reverse: bool, end: bool, expected: list[list[int]], tmp_path: Path) -> None:
    with TextsWriter(tmp_path, "side", 300) as writer:
        writer.append([[5, 6, 7], [], [8, 9]])
    texts = Texts.open(tmp_path, "side")
    found = texts.gather(np.arange(3), width, reverse, end)
    assert found.tolist() == expected
    assert found.dtype == np.int64
    assert texts.gather(np.array([2, 0, 2]), width, reverse, end).tolist() == [expected[i] for i in (2, 0, 2)]
    assert texts.gather(np.zeros(0, np.int64), width, reverse, end).shape == (0, width)


def test_texts_without_any_ids(tmp_path: Path) -> None:
    for name, rows in (("nothing", []), ("empty", [[], []])):
        with TextsWriter(tmp_path, name, 300) as writer:
            writer.append(rows)
        texts = Texts.open(tmp_path, name)
        assert (len(texts), texts.lengths.tolist()) == (len(rows), [0] * len(rows))
        rows_at = np.arange(len(rows))
        assert texts.gather(rows_at, 2).tolist() == [[END, PAD]] * len(rows)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TextsWriter(tmp_path, "side", 300) as writer:
        writer.append([[5]])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_damaged_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"side\.offsets: no such file; it belongs to a prepared folder"):
        Texts.open(tmp_path, "side")
    with TextsWriter(tmp_path, "side", 300) as writer:
        writer.append([[5, 6], [7]])
    ids, offsets = tmp_path / "side.ids", tmp_path / "side.offsets"
    raw = offsets.read_bytes()
    ids.write_bytes(ids.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"side\.ids: is damaged: 4 bytes cannot be 3 ids of 2 or 4 bytes"):
        Texts.open(tmp_path, "side")
    offsets.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=r"side\.offsets: is damaged: its 23 bytes are not a multiple of 8"):
        Texts.open(tmp_path, "side")
    offsets.write_bytes(raw[8:])
    with pytest.raises(DataError, match="offsets must begin with 0"):
        Texts.open(tmp_path, "side")
    offsets.write_bytes(np.array([0, 5, 2], "<i8").tobytes())
    with pytest.raises(DataError, match="offsets must not fall; run `bothways prepare` again"):
        _ = Texts.open(tmp_path, "side").lengths


# Preparing


def test_prepared_text_is_the_text(prepared: Prepared, tmp_path: Path) -> None:
    assert prepared.joint
    assert prepared.source_vocabulary == prepared.target_vocabulary
    for texts, vocabulary, lines in (
        (prepared.train.source, prepared.source_vocabulary, SOURCE),
        (prepared.train.target, prepared.target_vocabulary, TARGET),
        (prepared.valid["b"].pair.source, prepared.source_vocabulary, SOURCE[2:]),
        (prepared.test["a"].pair.target, prepared.target_vocabulary, TARGET),
    ):
        assert [vocabulary.decode(texts[i]) for i in range(len(texts))] == lines
    assert len(prepared.train) == 4
    assert list(prepared.valid) == ["b"]
    assert list(prepared.test) == ["a", "b"]
    assert prepared.test["a"].source_lines() == SOURCE
    assert prepared.test["a"].references() == [TARGET, ["eins", "", "drei", "vier"]]
    assert prepared.test["b"].references() == [TARGET[2:]]


def test_meta_says_what_is_there(prepared: Prepared, tmp_path: Path) -> None:
    meta = json.loads((tmp_path / "data" / "meta.json").read_text(encoding="utf-8"))
    assert meta["train"]["pairs"] == 4
    for side, texts in (("source", prepared.train.source), ("target", prepared.train.target)):
        lengths = texts.lengths
        assert meta["train"][side]["tokens"] == lengths.sum()
        assert meta["train"][side]["mean_length"] == round(float(lengths.mean()), 2)
        assert meta["train"][side]["max_length"] == lengths.max()
        assert meta["vocabulary"][side] == {
            "kind": "subwords",
            "size": prepared.source_vocabulary.size,
            "fingerprint": prepared.source_vocabulary.fingerprint,
        }
    assert [item["name"] for item in meta["test"]] == ["a", "b"]
    assert [item["file"] for item in meta["inputs"]][:4] == ["train.en", "train.de", "b.en", "b.de"]
    assert str(tmp_path) not in json.dumps(meta)


def test_preparing_again_is_the_same(prepared: Prepared, files: tuple[Path, Path], tmp_path: Path) -> None:
    one = prepare(*files, output=tmp_path / "one", vocab=300)
    two = prepare(*files, output=tmp_path / "two" / "deep", vocab=300)
    assert one.fingerprint == two.fingerprint != prepared.fingerprint
    assert Prepared.open(tmp_path / "one").fingerprint == one.fingerprint


def test_separate_vocabularies_and_words(files: tuple[Path, Path], tmp_path: Path) -> None:
    separate = prepare(*files, output=tmp_path / "separate", vocab=300, joint=False)
    assert not separate.joint
    assert separate.source_vocabulary == Vocabulary.learn_subwords(SOURCE, 300)
    assert separate.target_vocabulary == Vocabulary.learn_subwords(TARGET, 300)
    words = prepare(*files, output=tmp_path / "words", vocab=3, kind="words")
    assert words.source_vocabulary == Vocabulary.learn_words(SOURCE + TARGET, 3)
    assert words.train.source[0].tolist() == words.source_vocabulary.encode(SOURCE[0])
    cut = prepare(*files, output=tmp_path / "cut", vocab=300, keep=265)
    assert cut.source_vocabulary == Vocabulary.learn_subwords(SOURCE + TARGET, 300, keep=265)


def test_the_vocabulary_is_learned_on_evenly_spaced_lines(files: tuple[Path, Path], tmp_path: Path) -> None:
    some = prepare(*files, output=tmp_path / "some", vocab=9, kind="words", learn_lines=2)
    assert some.source_vocabulary == Vocabulary.learn_words([*SOURCE[::2], *TARGET[::2]], 9)


def test_gzip_and_sgml_are_prepared_alike(files: tuple[Path, Path], tmp_path: Path) -> None:
    packed = tmp_path / "train.en.gz"
    packed.write_bytes(gzip.compress(files[0].read_bytes()))
    sgml = tmp_path / "train.sgm"
    sgml.write_text("".join(f'<seg id="1">{line}</seg>\n' for line in TARGET), encoding="utf-8")
    one, two = (
        prepare(packed, sgml, output=tmp_path / "1", vocab=300),
        prepare(*files, output=tmp_path / "2", vocab=300),
    )
    assert one.source_vocabulary == two.source_vocabulary
    assert one.train.target.ids.tolist() == two.train.target.ids.tolist()


def test_a_very_long_line_is_kept(tmp_path: Path) -> None:
    long = " ".join(str(i % 10) for i in range(5000))
    files = write(tmp_path / "a", [long, "1 2"]), write(tmp_path / "b", ["1", long])
    assert prepare(*files, output=tmp_path / "data", vocab=300).train.source.lengths[0] >= 5000


def test_progress_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    prepare(*files, output=tmp_path / "data", vocab=300, progress=lambda *one: said.append(one))
    assert said == [
        ("learn the vocabulary", 8, 8),
        ("encode train, source", 4, 4),
        ("encode train, target", 4, 4),
    ]


def test_a_prepared_folder_is_replaced_and_no_other(files: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "data"
    output.mkdir()
    prepare(*files, output=output, vocab=290)
    again = prepare(*files, output=output, vocab=280)
    assert again.source_vocabulary.size == 280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "train.de", "train.en"]
    (output / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"data: holds notes\.txt, which `bothways prepare` did not write; move it"):
        prepare(*files, output=output, vocab=270)
    assert Prepared.open(output).fingerprint == again.fingerprint
    (output / "meta.json").unlink()
    with pytest.raises(DataError, match=r"data: is neither empty nor a prepared folder .*; choose another output"):
        prepare(*files, output=output, vocab=270)
    with pytest.raises(DataError, match=r"train\.de: is a file, but the output must be a folder"):
        prepare(files[0], files[0], output=files[1], vocab=270)
    with pytest.raises(
        DataError, match=r"train\.en: lies in the folder that would be written, .*choose another output"
    ):
        prepare(*files, output=tmp_path, vocab=270)


@pytest.mark.parametrize(
    "source, target, message",
    [
        (b"a\n", None, r"target: no such file"),
        (b"a\n", b"", r"target: is empty; it must hold at least one line"),
        (b"a\nb\n", b"a\n", r"source has 2 lines but .*target has 1; line i of one must translate line i of the other"),
        (b"a\nb\n", b"a\n\n", r"target, line 2: is empty; both sides of a training pair must have text"),
        (b"a\n \t\n", b"a\nb\n", r"source, line 2: is empty; both sides of a training pair must have text"),
        (b"a\n\xe4\n", b"a\nb\n", r"source, line 2: byte 0xe4 at position 1 is not UTF-8"),
    ],
)
def test_training_text_that_is_refused(source: bytes, target: bytes | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(source)
    if target is not None:
        (tmp_path / "target").write_bytes(target)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "source", tmp_path / "target", output=tmp_path / "data")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("source", "target")]


def test_sets_that_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    short = write(tmp_path / "short", TARGET[:2])
    with pytest.raises(DataError, match=r"train\.en has 4 lines but .*short has 2;"):
        prepare(*files, test=[("t", files[0], [files[1], short])], output=tmp_path / "data")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=r"pipe: must be a regular file \(it is read more than once\)"):
        prepare(pipe, files[1], output=tmp_path / "data")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab": 200}, "vocab must be at least 261 for subwords .*, got 200"),
        ({"vocab": 300, "keep": 301}, r"keep must be at most vocab \(300\), got 301"),
        ({"kind": "letters"}, "kind must be bpe or words, got 'letters'"),
        ({"kind": "words", "keep": 300}, "keep is for subwords"),
        ({"valid": [("a/b", "x", ["y"])]}, "valid: a name must be letters, digits and any of .*, got 'a/b'"),
        ({"valid": [(".", "x", ["y"])]}, r"valid: a name must be letters, digits and any of .*, got '\.'"),
        ({"test": [("a", "x", ["y"]), ("a", "x", ["y"])]}, "test: names must differ, but 'a' is given twice"),
        ({"test": [("a", "x", [])]}, "test: a must have at least one reference"),
    ],
)
def test_impossible_options(options: dict, message: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(*files, **options, output=tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.de", "train.en"]


@pytest.mark.parametrize("call", range(5))
def test_a_full_disk_leaves_no_folder(
    call: int, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is the one that no longer fits, and whether or not a folder of that name stands there already."""
    output = tmp_path / "data"
    before = prepare(*files, output=output, vocab=280).fingerprint if call % 2 else None
    calls = iter(range(100))

    def fsync(_: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match=rf"^{output}(/.*)?: cannot be written: no space left on device$"):
        prepare(*files, output=output, vocab=270)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "data") == ["train.de", "train.en"]
    assert (Prepared.open(output).fingerprint if output.exists() else None) == before


def test_an_interrupt_leaves_no_folder(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Vocabulary, "encode_batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(*files, output=tmp_path / "data", vocab=270)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.de", "train.en"]


def test_a_rename_that_fails_brings_the_old_folder_back(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(*files, output=tmp_path / "data", vocab=280)
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial") and self.is_dir():
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DataError, match="cannot be written: Input/output error"):
        prepare(*files, output=tmp_path / "data", vocab=270)
    assert Prepared.open(tmp_path / "data").fingerprint == before.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "train.de", "train.en"]


def test_files_that_change_meanwhile(files: tuple[Path, Path], tmp_path: Path) -> None:
    def grow(stage: str, done: int, total: int) -> None:
        if stage.startswith("learn"):
            write(files[0], SOURCE * 2)

    with pytest.raises(DataError, match=r"train\.en: changed while it was read: had 4 lines, now has 8"):
        prepare(*files, output=tmp_path / "data", vocab=270, progress=grow)


# Opening


def test_folders_that_are_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder; `bothways prepare` makes it"):
        Prepared.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"is not a prepared folder \(no meta\.json\); `bothways prepare` makes one"):
        Prepared.open(tmp_path)


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("meta.json", lambda raw: raw[:50], r"meta\.json: is damaged: not JSON"),
        ("meta.json", lambda raw: raw.replace(b"data 1", b"data 9"), "the key `format` must be 'bothways data 1'"),
        ("meta.json", lambda raw: raw.replace(b'"train"', b'"brain"'), r"meta\.json: is damaged: KeyError: 'train'"),
        ("train/source.ids", lambda raw: raw[:-3], r"train/source\.ids: is damaged"),
        ("train/target.ids", None, r"train/target\.ids: no such file"),
        ("test/a/target.offsets", None, r"test/a/target\.offsets: no such file"),
        ("valid/b/source.offsets", lambda raw: raw[:8], r"valid/b/source\.ids: is damaged: \d+ bytes cannot be 0 ids"),
    ],
)
def test_damaged_folders(file: str, change, message: str, prepared: Prepared) -> None:
    path = prepared.folder / file
    raw = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(raw))
    with pytest.raises(DataError, match=message):
        Prepared.open(prepared.folder)


def test_a_set_that_is_shorter_than_meta_says(prepared: Prepared) -> None:
    with TextsWriter(prepared.folder / "train", "source", 300) as writer:
        writer.append([[5, 6]])
    with pytest.raises(
        DataError, match=r"train/source\.ids: is damaged: holds 1 texts with 2 tokens, but meta.json says"
    ):
        Prepared.open(prepared.folder)


def test_a_folder_with_another_vocabulary(prepared: Prepared) -> None:
    Vocabulary.learn_words(SOURCE, 9).save(prepared.folder / "target.vocabulary.json")
    with pytest.raises(
        VocabularyError, match=r"target\.vocabulary\.json: has fingerprint \w+, but this folder was made"
    ):
        Prepared.open(prepared.folder)
    (prepared.folder / "source.vocabulary.json").unlink()
    with pytest.raises(VocabularyError, match=r"source\.vocabulary\.json: no such vocabulary file"):
        Prepared.open(prepared.folder)


def test_a_damaged_reference(prepared: Prepared) -> None:
    path = prepared.folder / "test" / "b" / "reference.0.txt"
    path.write_text("only one\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"reference\.0\.txt: is damaged: must hold 2 lines; run `bothways prepare` again"
    ):
        prepared.test["b"].references()
    path.unlink()
    with pytest.raises(BothwaysError, match=r"reference\.0\.txt: cannot be read"):
        prepared.test["b"].references()
