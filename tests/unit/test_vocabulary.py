"""Vocabularies: what is learned, that text comes back exactly, and what is said about files that are none."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bothways.errors import ConfigError, DataError, VocabularyError
from bothways.text.normalize import as_line, clean_line
from bothways.text.vocabulary import SMALLEST, Vocabulary
from bothways.tokens import END, SPECIAL_TOKENS, UNKNOWN

LINES = ["the low lower lowest don't in 1984", "lower the lowest boundary", "die niedrigere Grenze größer"] * 3
AWKWARD = [
    "",
    " ",
    "   ",
    "a",
    " a ",
    "a  b   c",
    "\t tab\tand\t",
    "▁ and ▁▁",
    "Ġ and Ċ",
    "😀👩‍👩‍👧 e\u0301 n\u0303",
    "\x01\x02\x1b[0m\x7f\x85",
    "a\rb",
    "form\x0cfeed\x0bvertical",
    "one\u2028two\u2029three",
    "ᚠᛇᚻ ᬅᬓ 漢字 नमस्ते עִבְרִית",
    "\ufeffmark",
    "12 345,67 ٣٤ ½",
    "\U0010ffff\ufffd",
    *SPECIAL_TOKENS,
    "<0x41>",
    "a </s> b <pad><l2r>",
]


@pytest.fixture(scope="module")
def subwords() -> Vocabulary:
    return Vocabulary.learn_subwords(LINES, 330)


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return Vocabulary.learn_words(LINES, 6)


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("keep", [None, 280])
def test_subwords_give_back_the_text(text: str, keep: int | None) -> None:
    vocabulary = Vocabulary.learn_subwords([*LINES, *AWKWARD], 330, keep)
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert all(len(SPECIAL_TOKENS) <= i < vocabulary.size for i in ids)


def test_special_tokens_learned_as_text_stay_text() -> None:
    vocabulary = Vocabulary.learn_subwords(["</s></s> <pad> <unk> <0x41>"] * 50, 300)
    assert vocabulary.decode(vocabulary.encode("</s> <pad>")) == "</s> <pad>"
    assert min(vocabulary.encode("</s></s> <pad> <unk> <l2r>")) >= len(SPECIAL_TOKENS)


def test_a_word_is_the_same_token_everywhere(subwords: Vocabulary) -> None:
    assert subwords.encode("lower the lower") == [
        i for word in ("lower", "the", "lower") for i in subwords.encode(word)
    ]


def test_digits_stand_alone() -> None:
    vocabulary = Vocabulary.learn_subwords(["in 1984 and 1985, x12y"] * 20, 400)
    assert vocabulary.pieces(vocabulary.encode("1984 x12y")) == ["▁", "1", "9", "8", "4", "▁x", "1", "2", "y"]


def test_size_counts_special_tokens_and_bytes(subwords: Vocabulary) -> None:
    assert Vocabulary.learn_subwords(LINES, SMALLEST).tokens == subwords.tokens[:256]
    assert Vocabulary.learn_subwords(LINES, 270).size == 270 == len(Vocabulary.learn_subwords(LINES, 270))
    assert subwords.size <= 330
    assert subwords.kind == "subwords"


def test_pieces_can_be_read(subwords: Vocabulary) -> None:
    assert subwords.pieces([END, *subwords.encode("the ß")[:1]]) == ["</s>", "▁the"]
    assert subwords.pieces(subwords.encode("😀"))[-4:] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


def test_decode_skips_special_tokens_and_never_breaks_a_line(subwords: Vocabulary) -> None:
    the = subwords.encode("the")
    assert subwords.decode([0, 2, *the, UNKNOWN, *the, END, 0]) == "the the"
    assert subwords.decode([subwords.tokens.index("Ċ") + len(SPECIAL_TOKENS)] * 2) == " "
    assert subwords.decode(subwords.encode("😀")[:-1]) == "\ufffd"


def test_a_batch_equals_its_texts(subwords: Vocabulary) -> None:
    assert subwords.encode_batch(AWKWARD) == [subwords.encode(text) for text in AWKWARD]
    assert subwords.encode_batch([]) == []


def test_keep_splits_what_is_rare() -> None:
    lines = ["abcd"] * 9 + ["abcx"] * 3
    full = Vocabulary.learn_subwords(lines, 400)
    assert full.pieces(full.encode("abcd abcx")) == ["▁abcd", "▁abcx"]
    kept = Vocabulary.learn_subwords(iter(lines), 400, keep=SMALLEST + 1)
    assert kept.size == SMALLEST + 1
    assert kept.pieces(kept.encode("abcd abcx")) == ["▁abcd", "▁", "a", "b", "c", "x"]
    assert Vocabulary.learn_subwords(lines, 400, keep=400) == full


def test_learning_is_the_same_in_every_process(subwords: Vocabulary) -> None:
    program = (
        "import sys, json; from bothways.text.vocabulary import Vocabulary\n"
        "print(Vocabulary.learn_subwords(json.loads(sys.argv[1]), 330).fingerprint)"
    )
    root = Path(__file__).parents[2]
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", program, json.dumps(LINES)], capture_output=True, text=True, cwd=root
        )
        assert run.stdout.strip() == subwords.fingerprint, run.stderr


def test_words(words: Vocabulary) -> None:
    assert words.kind == "words"
    assert words.tokens == ("lower", "lowest", "the", "1984", "Grenze", "boundary")
    ids = words.encode(" the  </s> <unk>\tlower ")
    assert ids == [7, UNKNOWN, UNKNOWN, 5]
    assert words.decode([*ids, END]) == "the <unk> <unk> lower"
    assert words.pieces([*ids, END]) == ["the", "<unk>", "<unk>", "lower", "</s>"]
    assert words.encode("") == []
    assert Vocabulary.learn_words(["</s> </s>"], 5).encode("</s>") == [5]


@pytest.mark.parametrize("kind", ["subwords", "words"])
def test_a_saved_vocabulary_is_the_same(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(kind)
    vocabulary.save(tmp_path / "v.json")
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]
    for again in (Vocabulary.load(tmp_path / "v.json"), pickle.loads(pickle.dumps(vocabulary))):
        assert again == vocabulary
        assert hash(again) == hash(vocabulary)
        assert again.fingerprint == vocabulary.fingerprint
        assert again.encode_batch(LINES + AWKWARD) == vocabulary.encode_batch(LINES + AWKWARD)


def test_a_cut_vocabulary_is_the_same_when_loaded(tmp_path: Path) -> None:
    vocabulary = Vocabulary.learn_subwords(LINES, 330, keep=265)
    vocabulary.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json").encode_batch(LINES) == vocabulary.encode_batch(LINES)


def test_vocabularies_differ(subwords: Vocabulary, words: Vocabulary) -> None:
    assert subwords != words
    assert subwords != Vocabulary.learn_subwords(LINES, 280)
    assert subwords != "the"
    assert "subwords" in repr(subwords)


def test_loading_a_missing_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"v\.json: no such vocabulary file"):
        Vocabulary.load(tmp_path / "v.json")
    with pytest.raises(VocabularyError, match=r"cannot be read: Is a directory"):
        Vocabulary.load(tmp_path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text[:100], "is damaged: not JSON"),
        (lambda text: "[]", "`format` must be 'bothways vocabulary 1'"),
        (lambda text: text.replace("<l2r>", "<2l>"), "its special tokens must be " + " ".join(SPECIAL_TOKENS)),
        (lambda text: text.replace('"subwords"', '"letters"'), "`kind` must be subwords or words"),
        (lambda text: text.replace('"tokens"', '"token"'), "is not a vocabulary, or damaged: KeyError: 'tokens'"),
        (
            lambda text: text.replace('"merges": [\n', '"merges": [\n"a",\n'),
            "is not a vocabulary, or damaged: ValueError",
        ),
        (lambda text: text.replace('"merges": [\n', '"merges": [\n"a b",\n'), None),
        (lambda text: text.replace('"tokens": [\n', '"tokens": [\n"a",\n'), "do not follow from its merges"),
    ],
)
def test_loading_a_damaged_vocabulary(
    damage: Callable[[str], str], message: str | None, subwords: Vocabulary, tmp_path: Path
) -> None:
    path = tmp_path / "v.json"
    path.write_text(damage(subwords.serialized), encoding="utf-8")
    if message is None:  # another vocabulary, but a sound one
        Vocabulary.load(path)
        return
    with pytest.raises(VocabularyError, match=r"v\.json: .*" + message):
        Vocabulary.load(path)


def test_loading_words_that_stand_twice(words: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    path.write_text(words.serialized.replace("lowest", "lower"), encoding="utf-8")
    with pytest.raises(VocabularyError, match="a token stands twice"):
        Vocabulary.load(path)


def test_saving_where_nothing_can_be_written(subwords: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"v\.json: cannot be written: No such file or directory"):
        subwords.save(tmp_path / "missing" / "v.json")


def test_impossible_sizes() -> None:
    with pytest.raises(ConfigError, match=r"vocab must be at least 261 for subwords .*, got 260"):
        Vocabulary.learn_subwords(LINES, 260)
    with pytest.raises(ConfigError, match=r"keep must be at least 261 for subwords .*, got 5"):
        Vocabulary.learn_subwords(LINES, 300, keep=5)
    with pytest.raises(ConfigError, match=r"keep must be at most vocab \(300\), got 301"):
        Vocabulary.learn_subwords(LINES, 300, keep=301)
    with pytest.raises(ConfigError, match="vocab must be at least 1, got 0"):
        Vocabulary.learn_words(LINES, 0)


def test_text_that_no_file_can_hold(subwords: Vocabulary) -> None:
    with pytest.raises(DataError, match=r"lone surrogate '\\ud800' at position 3"):
        subwords.encode("abc\ud800")
    with pytest.raises(TypeError):
        subwords.encode(b"abc")


@pytest.mark.parametrize(
    "line, first, text",
    [
        ("a\n", False, "a"),
        ("a\r\n", False, "a"),
        ("a\r", False, "a\r"),
        ("a\r\r\n", False, "a\r"),
        ("a\n\n", False, "a\n"),
        ("a \u2028", False, "a \u2028"),
        ("\ufeffa", True, "a"),
        ("\ufeffa", False, "\ufeffa"),
        ("", True, ""),
    ],
)
def test_only_the_line_end_is_taken_off(line: str, first: bool, text: str) -> None:
    assert clean_line(line, first) == text


@pytest.mark.parametrize(
    "text, line", [("a b", "a b\n"), ("", "\n"), ("a\nb", "a b\n"), ("a\r\nb\n", "a b \n"), ("a\u2028b", "a\u2028b\n")]
)
def test_a_text_becomes_one_line(text: str, line: str) -> None:
    """Whatever a model writes, line i of the output belongs to line i of the input."""
    assert as_line(text) == line and as_line(text).count("\n") == 1
