"""ROUGE against cases counted by hand, and against rouge-score itself on random text."""

import random

import pytest
from rouge_score.rouge_scorer import RougeScorer

from bothways.errors import DataError
from bothways.evaluate import scores
from bothways.evaluate.rouge import Rouge, cut

CAT = ("the cat sat", ["the cat lay on the mat"])
SHORT_AND_LONG = ("a b c d e f g h", ["a", "a b c d e f x y"])
POOL = ("a b c", ["a b", "c d e f g h"])
NUMBERED = " ".join(f"w{i:02}" for i in range(1, 25))  # every word takes 4 bytes: the 19th ends at byte 75


def single(name: str, hypotheses: list[str], *references: list[str], **options: object) -> scores.Result:
    (result,) = scores.score(hypotheses, references, [name], **options)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize(
    "unit, hypothesis, references, f1, recall",
    [
        ("rouge1", *CAT, 2 * (2 / 3 * 2 / 6) / (2 / 3 + 2 / 6), 2 / 6),
        ("rouge2", *CAT, 2 * (1 / 2 * 1 / 5) / (1 / 2 + 1 / 5), 1 / 5),
        ("rougeL", *CAT, 4 / 9, 2 / 6),
        ("rouge1", "b a c", ["a b c"], 1, 1),
        ("rouge2", "b a c", ["a b c"], 0, 0),
        ("rougeL", "b a c", ["a b c"], 2 / 3, 2 / 3),
        ("rouge1", "the the the the", ["the cat the"], 4 / 7, 2 / 3),  # a word counts as often as both have it
        ("rouge1", "A-b, C!", ["a B c"], 1, 1),  # case and punctuation play no part
        ("rouge1", "a b c d", ["a b x y", "a b c z"], 3 / 4, 3 / 4),
        ("rouge1", "a b c d", ["a b c z", "a b x y"], 3 / 4, 3 / 4),
        ("rouge1", *SHORT_AND_LONG, 6 / 8, 1),  # the best reference for F1 is not the best one for recall
        ("rouge2", "a", ["a"], 0, 0),  # no pair of words anywhere
        ("rouge1", "", ["a b"], 0, 0),
        ("rougeL", "", ["a b"], 0, 0),
        ("rouge1", "a", [""], 0, 0),
        ("rouge1", "a", ["", "a"], 1, 1),
        ("rouge1", "", [""], 0, 0),
    ],
)
def test_by_hand(unit: str, hypothesis: str, references: list[str], f1: float, recall: float) -> None:
    assert Rouge(unit).f1(hypothesis, references) == pytest.approx(f1)
    assert Rouge(unit).recall(hypothesis, references) == pytest.approx(recall)


@pytest.mark.parametrize(
    "unit, hypothesis, references, recall",
    [
        ("rouge1", *POOL, 3 / 8),  # not 1, the best one, nor the mean of 2/2 and 1/6
        ("rouge2", *POOL, 1 / 6),
        ("rougeL", *POOL, 3 / 8),
        ("rougeL", "b a", ["a b", "b a"], 3 / 4),
        ("rouge1", "a b", ["a b", "a c", "c d", "a b c"], 5 / 9),
        ("rouge1", NUMBERED, ["w18 w19", "w20 w21"], 2 / 4),  # nothing after byte 75 counts
        ("rouge1", "x" * 74 + " yz", ["y yz"], 0),
        ("rouge1", "x" * 73 + " yz", ["y yz"], 1 / 2),  # the cut leaves y, which is a word like any other
        ("rouge1", "a", ["a " * 50], 1 / 38),  # of a reference 75 bytes count as well: 38 words and 37 spaces
        ("rouge1", "é" * 37 + " a", ["a"], 0),  # bytes, not characters
        ("rouge1", "é" * 36 + " a", ["a"], 1),
        ("rouge1", "", ["a b", "c"], 0),
        ("rouge1", "a", ["", "a"], 1),
        ("rouge1", "a", ["", ""], 0),
        ("rouge1", "", [""], 0),
    ],
)
def test_protocol_of_duc_by_hand(unit: str, hypothesis: str, references: list[str], recall: float) -> None:
    assert Rouge(unit).pooled_recall(hypothesis, references) == pytest.approx(recall)
    assert Rouge(unit).pooled_recall(hypothesis, references[::-1]) == pytest.approx(recall)


@pytest.mark.parametrize(
    "text, size, expected", [("äöü", 4, "äö"), ("äöü", 5, "äö"), ("äöü", 6, "äöü"), ("日本", 5, "日"), ("", 75, "")]
)
def test_cut_keeps_characters_whole(text: str, size: int, expected: str) -> None:
    assert cut(text, size) == expected


@pytest.mark.parametrize("stem, f1", [(False, 0), (True, 3 / 4)])
def test_stemming(stem: bool, f1: float) -> None:
    # run, dog and bark meet; loudly becomes loudli
    assert Rouge("rouge1", stem).f1("running dogs barked loudly", ["run dog bark loud"]) == pytest.approx(f1)
    assert Rouge("rouge1", stem).f1("its", ["it"]) == 0  # words of three letters stay


def test_stemming_is_an_option_of_scores() -> None:
    hypotheses, references = ["dogs barked"], ["dog bark"]
    assert single("rouge1", hypotheses, references).score == 0
    assert single("rouge1", hypotheses, references, stem=True).score == 100
    assert single("rouge1-duc", hypotheses, references).score == 100  # DUC stems ...
    assert single("rouge1-duc", hypotheses, references, stem=False).score == 0  # ... unless told otherwise


def test_corpus_score_is_the_mean_of_segments() -> None:
    for name, segments in [("rouge1", [400 / 9, 0]), ("rouge2-recall", [20, 0]), ("rougeL-duc", [100 / 3, 0])]:
        result = single(name, [CAT[0], ""], [CAT[1][0], "a dog"])
        assert result.segments == pytest.approx(segments)
        assert result.score == pytest.approx(sum(segments) / 2)


@pytest.mark.parametrize("stem", [False, True])
def test_rouge_score_agrees(stem: bool) -> None:
    draw = random.Random(7)
    words = "the The cats, cat running runs ran half-hearted 1,234.5 (nationally) Straße don't relational".split()
    texts = [" ".join(draw.choices(words, k=draw.randint(0, 12))) for _ in range(2_000)]
    hypotheses, references = texts[:1_000], texts[1_000:]
    theirs = RougeScorer(list(scores.ROUGE), use_stemmer=stem)
    expected = [
        theirs.score(reference, hypothesis) for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    for unit in scores.ROUGE:
        f1 = single(unit, hypotheses, references, stem=stem)
        assert f1.segments == [100 * scored[unit].fmeasure for scored in expected]
        recall = single(f"{unit}-recall", hypotheses, references, stem=stem)
        assert recall.segments == [100 * scored[unit].recall for scored in expected]
        assert 5 < f1.score < 95


def test_best_reference_is_that_of_rouge_score() -> None:
    hypothesis, references = "the cat sat on the mat", ["a cat sat", "the dog sat on the mat", "mat the on sat"]
    theirs = RougeScorer(["rougeL"]).score_multi(references, hypothesis)
    assert Rouge("rougeL").f1(hypothesis, references) == theirs["rougeL"].fmeasure


@pytest.mark.parametrize(
    "name, options, signature",
    [
        ("rouge1", {}, "nrefs:2|case:lc|tok:rouge|stem:no|measure:f1|refs:best|by:rouge-score-"),
        ("rougeL", {"stem": True}, "nrefs:2|case:lc|tok:rouge|stem:porter|measure:f1|refs:best|by:rouge-score-"),
        ("rouge2-recall", {}, "nrefs:2|case:lc|tok:rouge|stem:no|measure:recall|refs:best|by:rouge-score-"),
        ("rouge2-duc", {}, "nrefs:2|case:lc|tok:rouge|stem:porter|measure:recall|refs:pooled|bytes:75|by:rouge-score-"),
    ],
)
def test_signature(name: str, options: dict[str, object], signature: str) -> None:
    assert single(name, ["a"], ["a"], ["b"], **options).signature.startswith(signature)


@pytest.mark.parametrize("name", ["rouge1", "rougeL-recall", "rouge2-duc"])
def test_text_of_another_script_is_not_scored_as_wrong(name: str) -> None:
    with pytest.raises(
        DataError, match=r"knows only words of a-z and 0-9, and no reference has one \(the first: '他们"
    ):
        single(name, ["他们去北京"], ["他们去北京"])
    assert single(name, ["他们 a b"], ["他们 a b"]).score == 100
