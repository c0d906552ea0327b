"""What a report shows, on cases counted by hand."""

import pytest

from bothways.errors import DataError
from bothways.evaluate import scores
from bothways.evaluate.analysis import (
    Part,
    Winners,
    accuracy_by_part,
    count_winners,
    over_sets,
    score_by_length,
    sensible_bounds,
    word_counts,
)
from bothways.evaluate.positions import matches_in_parts, split
from bothways.evaluate.scores import Reading, measure

TEN = "a b c d e f g h i j"


@pytest.mark.parametrize(
    "words, parts, expected",
    [
        ("", 3, [[], [], []]),
        ("a", 3, [["a"], [], []]),  # floor(3 · 0 / 1)
        ("a b", 3, [["a"], ["b"], []]),  # floor(3 · 1 / 2) = 1
        ("a b c d", 3, [["a", "b"], ["c"], ["d"]]),  # 0, 0.75, 1.5, 2.25
        ("a b c d e f g", 3, [["a", "b", "c"], ["d", "e"], ["f", "g"]]),
        ("a b c d e", 10, [["a"], [], ["b"], [], ["c"], [], ["d"], [], ["e"], []]),
        (TEN, 10, [[word] for word in TEN.split()]),
    ],
)
def test_parts_are_equal(words: str, parts: int, expected: list[list[str]]) -> None:
    assert split(words.split(), parts) == expected


@pytest.mark.parametrize(
    "hypothesis, references, expected",
    [
        ("a b c d", ["a b c d"], [(2, 2), (2, 2)]),
        ("a b c d", ["b a d c"], [(2, 2), (2, 2)]),  # order within a part plays no part
        ("a b c d", ["c d a b"], [(0, 2), (0, 2)]),  # the right words in the wrong part
        ("a a b", ["a c b"], [(1, 2), (1, 1)]),  # clipped: the reference's first part has one a
        ("a b c d", ["a b c d e f g h"], [(2, 2), (0, 2)]),  # unequal lengths: halves a b | c d and a b c d | e f g h
        ("a b c d e f g h", ["a b c d"], [(2, 4), (0, 4)]),
        ("a", ["a"], [(1, 1), (0, 0)]),
        ("a", ["b a"], [(0, 1), (0, 0)]),
        ("a b", ["a"], [(1, 1), (0, 1)]),
        ("", ["a b"], [(0, 0), (0, 0)]),
        ("a", [""], [(0, 1), (0, 0)]),
        ("", [""], [(0, 0), (0, 0)]),
        ("a b c d", ["a x x x", "x b c x"], [(1, 2), (1, 2)]),  # two matches are better than one
        ("a b c d", ["x x c d", "a b x x"], [(2, 2), (0, 2)]),  # equally many: the one that matches earlier
        ("a b c d", ["", "x d"], [(0, 2), (1, 2)]),
    ],
)
def test_matches_in_two_parts(hypothesis: str, references: list[str], expected: list[tuple[int, int]]) -> None:
    words = [reference.split() for reference in references]
    assert matches_in_parts(hypothesis.split(), words, parts=2) == expected
    assert matches_in_parts(hypothesis.split(), words[::-1], parts=2) == expected


def test_accuracy_by_part_sums_over_the_corpus() -> None:
    hypotheses = [TEN, TEN, "a b", "a", ""]
    references = [TEN, "a x c x e x g x i x", "a c", "b", "a"]
    # The long sentences have a word in every part; of the short ones a lies in part 0 and b of `a b` in part 5.
    matched = [2 + 1, 1, 2, 1, 2, 1, 2, 1, 2, 1]
    words = [2 + 2, 2, 2, 2, 2, 2 + 1, 2, 2, 2, 2]
    found = accuracy_by_part(hypotheses, [references])
    assert found == [Part(*counts) for counts in zip(matched, words, strict=True)]
    assert [part.accuracy for part in found[:3]] == [75, 50, 100]
    assert found[5].accuracy == pytest.approx(100 / 3)
    assert Part(0, 0).accuracy == 0


def test_accuracy_by_part_reads_the_scorers_words() -> None:
    lines = ["Yes, he came."], [["yes; he came."]]
    assert [part.words for part in accuracy_by_part(*lines, parts=5)] == [1, 1, 1, 1, 1]
    assert [part.matched for part in accuracy_by_part(*lines, parts=5)] == [0, 0, 1, 1, 1]
    assert [part.matched for part in accuracy_by_part(*lines, Reading(lowercase=True), parts=5)] == [1, 0, 1, 1, 1]
    assert [part.words for part in accuracy_by_part(*lines, Reading(tokenize="none"), parts=3)] == [1, 1, 1]
    with pytest.raises(DataError, match="hypotheses has 1 lines but reference 1 has 2"):
        accuracy_by_part(["a"], [["a", "b"]])


def test_matching_accuracy_takes_the_best_reference() -> None:
    hypotheses = ["a b c d e", "a", "", "x y"]
    references = [["a b x x e", "b", "a b", "x"], ["a b c x x", "a", "a", "x y z"]]
    first, last = scores.score(hypotheses, references, ["first4", "last4"])
    assert first.score == pytest.approx(100 * (3 + 1 + 0 + 1) / (4 + 1 + 1 + 1))
    assert first.segments == [75, 100, 0, 100]
    assert last.segments == [50, 100, 0, 0]


def test_score_by_length_is_the_score_of_the_bucket() -> None:
    references = ["a b c d", "a b c d e f", "x y z u v w", "k l m n"]
    systems = {"good": references, "bad": ["a b c x", "a b c d e f", "x x x x", ""]}
    (measured,) = measure(systems, [references])
    buckets = score_by_length(measured, [2, 3, 4, 20], bounds=[2, 4, 10])
    assert [(bucket.above, bucket.up_to, bucket.segments) for bucket in buckets] == [
        (-1, 2, 1),
        (2, 4, 2),
        (4, 10, 0),
        (10, None, 1),
    ]
    assert [bucket.label for bucket in buckets] == ["0-2", "3-4", "5-10", "over 10"]
    middle = [lines[1:3] for lines in (systems["bad"], references)]
    (expected,) = scores.score(middle[0], [middle[1]])
    assert buckets[1].scores == {"good": pytest.approx(100), "bad": expected.score}
    assert 0 < expected.score < 100
    assert buckets[2].scores == {"good": None, "bad": None}
    assert buckets[3].scores == {"good": pytest.approx(100), "bad": 0}


def test_score_by_length_takes_any_metric_and_any_length() -> None:
    (measured,) = measure({"one": ["a", "b", "x"]}, [["a", "b", "c"]], ["exact_match"])
    assert [bucket.scores["one"] for bucket in score_by_length(measured, [0, 5, 6], [5])] == [100, 0]
    (whole,) = score_by_length(measured, [0, 5, 6], [])
    assert (whole.label, whole.segments, whole.scores["one"]) == ("all", 3, pytest.approx(200 / 3))


@pytest.mark.parametrize(
    "lengths, bounds, message",
    [
        ([1, 2], None, "one has 1 segments but there are 2 source lengths"),
        ([1], [5, 5], "bounds of source lengths must rise from 0 on, got 5, 5"),
        ([1], [10, 5], "bounds of source lengths must rise from 0 on, got 10, 5"),
        ([1], [-1, 5], "bounds of source lengths must rise from 0 on, got -1, 5"),
    ],
)
def test_buckets_that_cannot_be_say_why(lengths: list[int], bounds: list[int] | None, message: str) -> None:
    (measured,) = measure({"one": ["a"]}, [["a"]])
    with pytest.raises(DataError, match=message):
        score_by_length(measured, lengths, bounds)


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([], []),
        ([0, 0], [1]),
        ([1], [1]),
        ([3, 1, 2], [1, 2, 3]),
        ([19] * 20, [5, 10, 15, 20]),
        ([45] * 20, [10, 20, 30, 40, 50]),
        ([45] * 19 + [900], [10, 20, 30, 40, 50]),  # one in twenty does not stretch the buckets
        ([45] * 18 + [900] * 2, [200, 400, 600, 800, 1000]),
    ],
)
def test_sensible_bounds(lengths: list[int], expected: list[int]) -> None:
    assert sensible_bounds(lengths) == expected


def test_word_counts() -> None:
    assert word_counts(["Yes, he came.", "", "a"]) == [5, 0, 1]
    assert word_counts(["Yes, he came."], Reading(tokenize="none")) == [3]
    assert word_counts(["我有书"], Reading(tokenize="zh")) == [3]


def test_winners() -> None:
    winners = count_winners(["l2r", "r2l", "l2r", "l2r"])
    assert winners == Winners(l2r=3, r2l=1)
    assert (winners.l2r_share, winners.r2l_share) == (75, 25)
    assert count_winners(["r2l"]).l2r_share == 0


@pytest.mark.parametrize(
    "directions, message",
    [([], "no sentences: no direction has won"), (["l2r", "both"], "a direction must be l2r or r2l, got 'both'")],
)
def test_winners_that_cannot_be_counted_say_why(directions: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        count_winners(directions)


def test_over_sets() -> None:
    base, new = over_sets({"base": {"dev": 20, "test": 30}, "new": {"test": 33, "dev": 21}}, "base")
    assert (base.system, base.mean, base.difference, base.differences) == ("base", 25, 0, {"dev": 0, "test": 0})
    assert (new.system, new.scores, new.mean) == ("new", {"dev": 21, "test": 33}, 27)
    assert list(new.scores) == ["dev", "test"]
    assert (new.differences, new.difference) == ({"dev": 1, "test": 3}, 2)


@pytest.mark.parametrize(
    "table, message",
    [
        ({"base": {"dev": 1}, "new": {}}, "new has no score on dev; systems must be scored on the same sets"),
        ({"base": {"dev": 1}, "new": {"dev": 1, "test": 2}}, "base has no score on test"),
        ({"base": {}}, "base has no test set"),
        ({"new": {"dev": 1}}, "the base 'base' is none of the systems: new"),
    ],
)
def test_sets_that_differ_say_why(table: dict[str, dict[str, float]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        over_sets(table, "base")
