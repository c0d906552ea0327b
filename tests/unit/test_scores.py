"""Scores against hand-counted rows, and BLEU, chrF and TER against sacreBLEU itself on text made here."""

import gzip
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from bothways import cli
from bothways.errors import DataError
from bothways.evaluate import scores
from bothways.evaluate.positions import closest_length, matches_at

WORDS = 'The Minister said, that (in 1,234.5 cases) half-hearted Laws don\'t hold: Straße 7 and €5.50 . "No!"'.split()


def corpus(seed: int, lines: int = 60) -> tuple[list[str], list[list[str]]]:
    """Hypotheses that resemble both references; empty lines and one-word lines included."""
    draw = random.Random(seed)
    references = [[" ".join(draw.choices(WORDS, k=draw.randint(1, 25))) for _ in range(lines)]]
    references.append([corrupted(line, draw) for line in references[0]])
    hypotheses = [corrupted(line, draw) for line in references[0]]
    hypotheses[0], hypotheses[1] = "", "Laws"
    return hypotheses, references


def corrupted(line: str, draw: random.Random) -> str:
    words = [word.swapcase() if draw.random() < 0.1 else word for word in line.split() if draw.random() > 0.15]
    return " ".join(words) or line


def single(metric: str, hypotheses: list[str], *references: list[str], **options: object) -> scores.Result:
    (result,) = scores.score(hypotheses, references, [metric], **options)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("references", [1, 2])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tokenize", ["13a", "none"])
def test_sacrebleu_agrees(references: int, lowercase: bool, tokenize: str) -> None:
    hypotheses, texts = corpus(seed=1)
    theirs = {
        "bleu": BLEU(lowercase=lowercase, tokenize=tokenize),
        "chrf": CHRF(lowercase=lowercase),
        "ter": TER(case_sensitive=not lowercase),
    }
    for ours in scores.score(hypotheses, texts[:references], list(theirs), lowercase, tokenize):
        expected = theirs[ours.name].corpus_score(hypotheses, texts[:references])
        assert ours.score == expected.score
        assert ours.signature == str(theirs[ours.name].get_signature())
        assert 0 < ours.score < 100


@pytest.mark.parametrize("lowercase", [False, True])
def test_sacrebleu_agrees_on_segments(lowercase: bool) -> None:
    hypotheses, references = corpus(seed=2)
    theirs = {
        "bleu": BLEU(lowercase=lowercase, effective_order=True),
        "chrf": CHRF(lowercase=lowercase),
        "ter": TER(case_sensitive=not lowercase),
    }
    for ours in scores.score(hypotheses, references, list(theirs), lowercase):
        one_by_one = [
            theirs[ours.name].sentence_score(hypothesis, both).score
            for hypothesis, *both in zip(hypotheses, *references, strict=True)
        ]
        assert ours.segments == one_by_one


def test_sacrebleu_agrees_on_chinese() -> None:
    hypotheses, references = ["他们明天去北京。", "我有3本书"], [["他们后天去北京。", "我有 3 本书。"]]
    assert single("bleu", hypotheses, *references, tokenize="zh").score == (
        BLEU(tokenize="zh").corpus_score(hypotheses, references).score
    )


@pytest.mark.parametrize("name", list(scores.METRICS))
def test_rows_add_up_to_the_corpus(name: str) -> None:
    hypotheses, references = corpus(seed=3)
    metric = scores.make_metric(name)
    rows = metric.segments(hypotheses, references)
    assert rows.shape[0] == len(hypotheses)
    some = [5, 5, 17, 40]  # a resample draws segments more than once
    again = metric.segments([hypotheses[i] for i in some], [[text[i] for i in some] for text in references])
    np.testing.assert_array_equal(rows[some], again)
    assert metric.score(rows[some].sum(axis=0)) == metric.score(again.sum(axis=0))


# Without chrF: for an empty hypothesis all references are equally bad, and sacreBLEU counts the first one's length.
@pytest.mark.parametrize("name", [name for name in scores.METRICS if name != "chrf"])
def test_order_of_references_does_not_matter(name: str) -> None:
    hypotheses, (one, other) = corpus(seed=4)
    assert single(name, hypotheses, one, other).score == single(name, hypotheses, other, one).score


@pytest.mark.parametrize(
    "hypothesis, references, first, last",
    [
        ("a b c d e", ["a b c d e"], (4, 4), (4, 4)),
        ("a b c d e", ["a b x d e"], (3, 4), (3, 4)),
        ("a b c d e f", ["a b c d f"], (4, 4), (1, 4)),  # last four: c d e f against b c d f
        ("the cat sat on the mat", ["the cat lay on it"], (3, 4), (0, 4)),
        ("b c d e", ["a b c d e"], (0, 4), (4, 4)),
        ("a b", ["a b c"], (2, 3), (0, 3)),
        ("a b c", ["a b"], (2, 2), (0, 2)),
        ("a", ["a"], (1, 1), (1, 1)),
        ("a", ["b"], (0, 1), (0, 1)),
        ("", ["a b c d e"], (0, 4), (0, 4)),
        ("", ["a b"], (0, 2), (0, 2)),
        ("a", [""], (0, 0), (0, 0)),
        ("", [""], (0, 0), (0, 0)),
        ("a b c d", ["a x x x", "a b x x"], (2, 4), (2, 4)),
        ("a b c d", ["x x x d", "a b"], (2, 2), (1, 4)),  # each end chooses for itself
        ("a b c d", ["a b", "a b c d"], (4, 4), (4, 4)),  # equal shares: more matches
        ("a b c d", ["x x x", "x"], (0, 1), (0, 1)),  # no match: fewer words
        ("a b c d", ["", "x x"], (0, 2), (0, 2)),  # an empty reference excuses nothing
    ],
)
def test_matching_positions(
    hypothesis: str, references: list[str], first: tuple[int, int], last: tuple[int, int]
) -> None:
    split = [reference.split() for reference in references]
    assert matches_at("first", hypothesis.split(), split) == first
    assert matches_at("last", hypothesis.split(), split) == last
    assert matches_at("first", hypothesis.split()[::-1], [words[::-1] for words in split]) == last


def test_matching_accuracy_sums_over_the_corpus() -> None:
    hypotheses, references = ["a b c d e", "a", ""], ["a b x d e", "a", "x y"]
    result = single("first4", hypotheses, references)
    assert result.score == pytest.approx(100 * (3 + 1 + 0) / (4 + 1 + 2))
    assert result.segments == [75, 100, 0]
    assert single("last4", hypotheses, references).segments == [75, 100, 0]


def test_words_are_the_tokenizers() -> None:
    assert single("first4", ["Yes, he came."], ["Yes; he came."]).score == 75  # Yes , he came
    assert single("first4", ["Yes, he came."], ["Yes; he came."], tokenize="none").score == pytest.approx(200 / 3)
    assert single("last4", ["YES!"], ["yes!"]).score == 50
    assert single("last4", ["YES!"], ["yes!"], lowercase=True).score == 100
    assert single("length_ratio", ["Yes!"], ["Yes"]).score == 2
    assert single("length_ratio", ["Yes!"], ["Yes"], tokenize="none").score == 1


@pytest.mark.parametrize(
    "hypotheses, references, expected",
    [
        (["a b"], [["a b"]], 100),
        (["a b "], [[" a b"]], 100),
        (["a b"], [["A b"]], 0),
        (["a"], [["b"], ["a"]], 100),
        (["", "a"], [["a", "a"]], 50),
        ([""], [[""]], 100),
    ],
)
def test_exact_match(hypotheses: list[str], references: list[list[str]], expected: float) -> None:
    assert single("exact_match", hypotheses, *references).score == expected


def test_exact_match_ignores_case_on_request() -> None:
    assert single("exact_match", ["A b"], ["a B"], lowercase=True).score == 100


@pytest.mark.parametrize(
    "hypotheses, references, expected",
    [
        (["a b c"], [["a b c d"]], 0.75),
        (["a b c", "a"], [["a b c d", "a b c d"]], 0.5),
        (["a b c"], [["a"], ["a b c d"]], 0.75),  # 4 is closer to 3 than 1 is
        (["a b c"], [["a b c d"], ["a b"]], 1.5),  # equally close: the shorter
        ([""], [["a"]], 0),
        (["a"], [[""]], 0),
        ([""], [[""]], 0),
    ],
)
def test_length_ratio(hypotheses: list[str], references: list[list[str]], expected: float) -> None:
    assert single("length_ratio", hypotheses, *references).score == expected


@pytest.mark.parametrize("length, references, expected", [(3, [4, 2], 2), (3, [2, 4], 2), (3, [9], 9), (0, [5, 0], 0)])
def test_closest_length(length: int, references: list[int], expected: int) -> None:
    assert closest_length(length, references) == expected


@pytest.mark.parametrize("name", list(scores.METRICS))
@pytest.mark.parametrize("references", [["a b c d e", ""], ["", ""], ["a", "a b c d e f g"]])
def test_empty_hypotheses_have_a_score(name: str, references: list[str]) -> None:
    result = single(name, ["", ""], references)
    assert np.isfinite([result.score, *result.segments]).all()
    if name in ("bleu", "chrf", "length_ratio", "first4", "last4"):
        assert result.score == 0


@pytest.mark.parametrize("name", ["bleu", "chrf", "exact_match", "first4", "last4"])
def test_a_perfect_hypothesis_scores_a_hundred(name: str) -> None:
    lines = ["The cat sat on the mat.", "It did not move at all."]
    assert single(name, lines, lines).score == pytest.approx(100)


def test_bleu_by_hand() -> None:
    # a b c d e | a b c d x y: 4/5, 3/4, 2/3, 1/2 and a brevity penalty of exp(1 - 6/5)
    expected = 100 * np.exp(1 - 6 / 5) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert single("bleu", ["a b c d e"], ["a b c d x y"]).score == pytest.approx(expected)


def test_json_and_table() -> None:
    results = scores.score(["a b c d", ""], [["a b c d", "e"]], ["bleu", "length_ratio", "exact_match"])
    read = json.loads(json.dumps(scores.to_json(results)))
    assert [list(metric) for metric in read["metrics"]] == [["name", "score", "signature", "segments"]] * 3
    assert [metric["name"] for metric in read["metrics"]] == ["bleu", "length_ratio", "exact_match"]
    assert read["metrics"][2]["segments"] == [100, 0]
    lines = scores.table(results).splitlines()
    assert lines[0].startswith("BLEU         77.88  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert lines[1].startswith("length_ratio 0.800  nrefs:1|case:mixed|tok:13a|version:bothways-")
    assert lines[2].startswith("exact_match  50.00  nrefs:1|case:mixed|version:bothways-")
    assert scores.table(results[:1]).startswith("BLEU 77.88  nrefs:1|")
    assert scores.table([]) == ""


@pytest.mark.parametrize(
    "hypotheses, references, options, message",
    [
        (["a", "b"], [["a"]], {}, "hypotheses has 2 lines but reference 1 has 1; line i of one must be scored against"),
        (["a"], [["a"], ["a", "b"]], {}, "hypotheses has 1 lines but reference 2 has 2"),
        (["a"], [["a"], []], {"names": ("out.de", "a.de", "b.de")}, "out.de has 1 lines but b.de has 0"),
        (["a"], [], {}, "no references: a score needs at least one reference text"),
        ([], [[]], {}, "hypotheses is empty: there is nothing to score"),
        ([], [[]], {"names": ("out.de", "ref.de")}, "out.de is empty"),
        (["a"], ["a"], {}, "references must be a list of texts, each a list of lines"),
        (
            ["a"],
            [["a"]],
            {"metrics": ["blue"]},
            "unknown metric 'blue'; accepted: bleu, chrf, ter, rouge1, rouge2, rougeL, ",
        ),
        (["a"], [["a"]], {"tokenize": "14a"}, "unknown tokenizer '14a'; accepted: none, zh, 13a"),
    ],
)
def test_what_cannot_be_scored_says_why(
    hypotheses: list[str], references: list[list[str]], options: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        scores.score(hypotheses, references, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, score, base, expected",
    [
        ("bleu", 30, 20, 10),
        ("ter", 30, 20, -10),
        ("length_ratio", 0.9, 0.8, 0.1),
        ("length_ratio", 1.2, 1.1, -0.1),
        ("length_ratio", 1.1, 0.9, 0),
    ],
)
def test_gain(name: str, score: float, base: float, expected: float) -> None:
    assert scores.gain(name, score, base) == pytest.approx(expected)


@pytest.mark.parametrize(
    "references, expected",
    [
        ([["a", "b"]], []),
        ([["a", " "]], ["one: line 2 is empty; no word of a hypothesis matches there"]),
        ([["a", "b"], ["", ""]], ["two: 2 lines are empty (the first: line 1); no word of a hypothesis matches there"]),
    ],
)
def test_empty_references_are_named(references: list[list[str]], expected: list[str]) -> None:
    assert scores.notes(references, ["one", "two"][: len(references)]) == expected


def test_every_metric_and_key_of_a_signature_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scores.md").read_text(encoding="utf-8")
    for name in scores.METRICS:
        assert f"`{name}`" in text
        for pair in single(name, ["a"], ["a"]).signature.split("|"):
            assert f"`{pair.partition(':')[0]}`" in text


# `bothways score`


HYPOTHESES, REFERENCES = ["Grün, aber nicht gelb.", "Ja & nein"], ["Grün, aber nie gelb.", "Ja & doch"]
PLAIN = b"Gr\xc3\xbcn, aber nie gelb.\nJa & doch\n"
SGML = b"""<?xml version="1.0" encoding="UTF-8"?>
<refset setid="x" srclang="any" trglang="de"><doc docid="1" sysid="ref"><p>
<seg id="1">Gr\xc3\xbcn, aber nie gelb.</seg>
<seg id="2"> Ja &amp; doch </seg></p></doc></refset>
"""


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["bothways", "score", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def hypotheses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("out.de").write_text("".join(f"{line}\n" for line in HYPOTHESES), encoding="utf-8")
    return "out.de"


@pytest.mark.parametrize(
    "name, content",
    [
        ("ref.de", PLAIN),
        ("no-end.de", PLAIN.removesuffix(b"\n")),
        ("windows.de", PLAIN.replace(b"\n", b"\r\n")),
        ("mixed.de", PLAIN.replace(b"\n", b"\r\n", 1)),
        ("mark.de", b"\xef\xbb\xbf" + PLAIN),
        ("ref.de.gz", gzip.compress(PLAIN)),
        ("ref.sgm", SGML),
        ("ref.sgm.gz", gzip.compress(SGML)),
    ],
)
def test_frame_of_a_file_changes_no_score(
    name: str, content: bytes, hypotheses: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(content)
    assert run([hypotheses, "--reference", name, "--json", "--metric", "chrf", "--metric", "bleu"], monkeypatch) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == scores.to_json(scores.score(HYPOTHESES, [REFERENCES], ["chrf", "bleu"]))
    assert printed.err == ""


@pytest.mark.parametrize(
    "content, message",
    [
        (
            b"Gr\xc3\xbcn\n",
            "out.de has 2 lines but ref.de has 1; line i of one must be scored against line i of the other",
        ),
        (PLAIN + b"\n", "out.de has 2 lines but ref.de has 3"),
        (b"", "out.de has 2 lines but ref.de has 0"),
        (PLAIN.replace(b"\n", b"\r"), "out.de has 2 lines but ref.de has 1"),  # a return alone ends no line
        (b"Gr\xfcn\nJa\n", "ref.de, line 1: byte 0xfc at position 3 is not UTF-8"),
    ],
)
def test_references_that_do_not_fit_say_why(
    content: bytes, message: str, hypotheses: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ref.de").write_bytes(content)
    assert run([hypotheses, "--reference", "ref.de"], monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"bothways: {message}")
    assert printed.out == ""


def test_empty_reference_is_scored_and_named(
    hypotheses: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ref.de").write_bytes(PLAIN)
    Path("holes.de").write_text("\nJa & doch\n", encoding="utf-8")
    assert run([hypotheses, "--reference", "ref.de", "--reference", "holes.de"], monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.err == "bothways: holes.de: line 1 is empty; no word of a hypothesis matches there\n"
    assert printed.out.startswith("BLEU ") and "nrefs:2|" in printed.out


def test_options_reach_the_metrics(
    hypotheses: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ref.de").write_bytes(PLAIN)
    arguments = [hypotheses, "--reference", "ref.de", "--lowercase", "--tokenize", "char", "--metric", "bleu"]
    arguments += ["--metric", "rouge1", "--metric", "rouge1-duc"]
    for option, stemmed in (("--stem", "porter porter"), ("--no-stem", "no no"), ("", "no porter")):
        assert run([*arguments, *([option] if option else [])], monkeypatch) == 0
        bleu, f1, duc = capsys.readouterr().out.splitlines()
        assert "case:lc|eff:no|tok:char" in bleu
        assert [f"stem:{word}|" in line for word, line in zip(stemmed.split(), (f1, duc), strict=True)] == [True, True]


@pytest.mark.parametrize("tokenize", ["13a", "none", "zh", "intl", "char"])
def test_tokenizers(tokenize: str) -> None:
    hypotheses, references = corpus(seed=5)
    expected = BLEU(tokenize=tokenize).corpus_score(hypotheses, references).score
    assert single("bleu", hypotheses, *references, tokenize=tokenize).score == expected
