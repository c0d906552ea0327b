"""The demo's task: references by hand, and a test set whose values training never met."""

import hashlib
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from bothways.demo import spoken
from bothways.demo.job import SYSTEMS, compared, recipes
from bothways.demo.spoken import KINDS, Expression, Pair, Split, generate
from bothways.errors import DataError
from bothways.models.table import resolve

COUNTS: dict[Split, int] = {"train": 30_000, "valid": 1_000, "test": 1_000}


@pytest.fixture(scope="module")
def splits() -> dict[Split, list[Pair]]:
    return {split: generate(split, count) for split, count in COUNTS.items()}


@pytest.mark.parametrize(
    "made, written, read",
    [
        (spoken.ordinal_of(1), "1st", "first"),
        (spoken.ordinal_of(3), "3rd", "third"),
        (spoken.ordinal_of(11), "11th", "eleventh"),
        (spoken.ordinal_of(12), "12th", "twelfth"),
        (spoken.ordinal_of(22), "22nd", "twenty second"),
        (spoken.ordinal_of(40), "40th", "fortieth"),
        (spoken.ordinal_of(113), "113th", "one hundred and thirteenth"),
        (spoken.ordinal_of(200), "200th", "two hundredth"),
        (spoken.cardinal_of(2), "2", "two"),
        (spoken.cardinal_of(100), "100", "one hundred"),
        (spoken.cardinal_of(105), "105", "one hundred and five"),
        (spoken.cardinal_of(1284), "1,284", "one thousand two hundred and eighty four"),
        (spoken.cardinal_of(2021), "2,021", "two thousand and twenty one"),
        (spoken.cardinal_of(9000), "9,000", "nine thousand"),
        (spoken.year_of(2021), "2021", "twenty twenty one"),
        (spoken.year_of(2000), "2000", "two thousand"),
        (spoken.year_of(2005), "2005", "two thousand and five"),
        (spoken.year_of(1905), "1905", "nineteen oh five"),
        (spoken.year_of(1900), "1900", "nineteen hundred"),
        (spoken.money_of("$", 12, 50), "$12.50", "twelve dollars and fifty cents"),
        (spoken.money_of("$", 1, 1), "$1.01", "one dollar and one cent"),
        (spoken.money_of("$", 0, 75), "$0.75", "seventy five cents"),
        (spoken.money_of("€", 1, 0), "€1", "one euro"),
        (spoken.money_of("€", 1284, 0), "€1,284", "one thousand two hundred and eighty four euros"),
        (spoken.money_of("£", 1, 1), "£1.01", "one pound and one penny"),
        (spoken.money_of("£", 2, 2), "£2.02", "two pounds and two pence"),
        (spoken.decimal_of("3.14"), "3.14", "three point one four"),
        (spoken.decimal_of("0.05"), "0.05", "zero point zero five"),
        (spoken.decimal_of("12.305"), "12.305", "twelve point three zero five"),
        (spoken.percent_of("12.5"), "12.5%", "twelve point five percent"),
        (spoken.percent_of("1"), "1%", "one percent"),
        (spoken.measure_of("1", "kg"), "1 kg", "one kilogram"),
        (spoken.measure_of("2", "kg"), "2 kg", "two kilograms"),
        (spoken.measure_of("12", "km"), "12 km", "twelve kilometers"),
        (spoken.measure_of("0.5", "L"), "0.5 L", "zero point five liters"),
        (spoken.measure_of("1.5", "h"), "1.5 h", "one point five hours"),
        (spoken.measure_of("1", "ft"), "1 ft", "one foot"),
        (spoken.measure_of("6", "ft"), "6 ft", "six feet"),
        (spoken.measure_of("1", "mph"), "1 mph", "one mile per hour"),
        (spoken.measure_of("80", "km/h"), "80 km/h", "eighty kilometers per hour"),
        (spoken.measure_of("-3", "°C"), "-3°C", "minus three degrees celsius"),
        (spoken.measure_of("-1", "°F"), "-1°F", "minus one degree fahrenheit"),
        (spoken.measure_of("0", "°C"), "0°C", "zero degrees celsius"),
        (spoken.phone_of("555-0142"), "555-0142", "five five five oh one four two"),
        (spoken.fraction_of(0, 1, 2), "1/2", "one half"),
        (spoken.fraction_of(0, 2, 3), "2/3", "two thirds"),
        (spoken.fraction_of(2, 3, 4), "2 3/4", "two and three quarters"),
        (spoken.fraction_of(21, 1, 10), "21 1/10", "twenty one and one tenth"),
        (spoken.day_without_year(2, 29), "February 29", "february twenty ninth"),
        (spoken.day_without_year(5, 1), "May 1", "may first"),
    ],
)
def test_reads_as_a_person_would(made: Expression, written: str, read: str) -> None:
    assert (made.written, made.spoken) == (written, read)


@pytest.mark.parametrize(
    "hour, minute, ways",
    [
        (21, 45, {"9:45 p.m.": "nine forty five p m", "21:45": "twenty one forty five"}),
        (12, 0, {"12:00 p.m.": "twelve p m", "12:00": "twelve hundred"}),
        (0, 0, {"12:00 a.m.": "twelve a m", "00:00": "zero hundred"}),
        (0, 30, {"12:30 a.m.": "twelve thirty a m", "00:30": "zero thirty"}),
        (14, 5, {"2:05 p.m.": "two oh five p m", "14:05": "fourteen oh five"}),
        (8, 5, {"8:05 a.m.": "eight oh five a m", "08:05": "oh eight oh five"}),
    ],
)
def test_a_time_has_two_ways_and_one_value(hour: int, minute: int, ways: dict[str, str]) -> None:
    found = [spoken.time_of(hour, minute, Random(seed)) for seed in range(20)]
    assert {x.written: x.spoken for x in found} == ways
    assert {x.value for x in found} == {f"{hour:02}:{minute:02}"}


@pytest.mark.parametrize(
    "year, month, day, ways",
    [
        (
            2021,
            3,
            3,
            {
                "March 3, 2021": "march third twenty twenty one",
                "3/3/2021": "march third twenty twenty one",
                "2021-03-03": "march third twenty twenty one",
                "3 March 2021": "the third of march twenty twenty one",
            },
        ),
        (
            2005,
            12,
            31,
            {
                "December 31, 2005": "december thirty first two thousand and five",
                "12/31/2005": "december thirty first two thousand and five",
                "2005-12-31": "december thirty first two thousand and five",
                "31 December 2005": "the thirty first of december two thousand and five",
            },
        ),
    ],
)
def test_a_date_has_four_ways_and_one_value(year: int, month: int, day: int, ways: dict[str, str]) -> None:
    found = [spoken.date_of(year, month, day, Random(seed)) for seed in range(40)]
    assert {x.written: x.spoken for x in found} == ways
    assert {x.value for x in found} == {f"{year}-{month:02}-{day:02}"}


def test_counts_and_no_sentence_twice(splits: dict[Split, list[Pair]]) -> None:
    written = [pair.written for pairs in splits.values() for pair in pairs]
    assert {split: len(pairs) for split, pairs in splits.items()} == COUNTS
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("held_out", ["valid", "test"])
def test_training_never_met_a_held_out_value(splits: dict[Split, list[Pair]], held_out: Split) -> None:
    others = {x for split, pairs in splits.items() if split != held_out for pair in pairs for x in pair.expressions}
    values = {x for pair in splits[held_out] for x in pair.expressions}
    assert not values & others
    assert {kind for kind, _ in values} == set(KINDS)


# Independent of the recorded values: everything with a digit in it, as it is written, with what belongs to it.
MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
SPAN = re.compile(
    rf"(?:{MONTH}) \d+(?:, \d{{4}})?|\d+ (?:{MONTH}) \d{{4}}|\d+ \d+/\d+(?![/\d])"
    r"|[$€£-]?\d(?:[\d,./:-]*\d)?"
    r"(?:%|°[CF]|st|nd|rd|th| [ap]\.m\.| (?:km/h|km|kg|g|lb|cm|mph|mi|min|ml|m|ft|L|h|MB|GB)\b)?"
)


def test_held_out_expressions_are_not_in_the_training_text(splits: dict[Split, list[Pair]]) -> None:
    found = {split: {x for pair in pairs for x in SPAN.findall(pair.written)} for split, pairs in splits.items()}
    assert len(found["test"]) > 700
    assert not found["test"] & found["train"]
    assert not found["valid"] & found["train"]
    assert not found["test"] & found["valid"]
    assert all(len(SPAN.findall(pair.written)) == len(pair.kinds) for pair in splits["test"])


@pytest.mark.parametrize("split", COUNTS)
def test_held_out_sentences_need_no_word_that_training_lacks(splits: dict[Split, list[Pair]], split: Split) -> None:
    known = Counter(word for pair in splits["train"] for word in pair.spoken.split())
    assert all(known[word] >= 5 for pair in splits[split] for word in pair.spoken.split())


@pytest.mark.parametrize("split", COUNTS)
def test_kinds_have_comparable_shares(splits: dict[Split, list[Pair]], split: Split) -> None:
    counts = Counter(kind for pair in splits[split] for kind in pair.kinds)
    assert set(counts) == set(KINDS) and len(KINDS) >= 7
    assert max(counts.values()) <= 2 * min(counts.values())


def test_lengths(splits: dict[Split, list[Pair]]) -> None:
    for pairs in splits.values():
        lengths = [len(pair.spoken.split()) for pair in pairs]
        assert 8 <= sum(lengths) / len(lengths) <= 16
        assert max(lengths) < 26
        assert {len(pair.kinds) for pair in pairs} == {1, 2}


def test_what_is_written_fixes_what_is_spoken(splits: dict[Split, list[Pair]]) -> None:
    rng = Random(1)
    spans: dict[str, set[str]] = {}
    for draw in spoken.SLOTS.values():
        for found in (draw(rng) for _ in range(2_000)):
            spans.setdefault(found.written, set()).add(f"{found.kind} {found.value} {found.spoken}")
    assert [ways for ways in spans.values() if len(ways) > 1] == []
    read: dict[str, str] = {}
    for pairs in [*splits.values(), generate("train", 5_000, seed=2)]:
        for pair in pairs:
            assert read.setdefault(pair.written, pair.spoken) == pair.spoken


def test_spoken_text_is_lower_case_words(splits: dict[Split, list[Pair]]) -> None:
    for pairs in splits.values():
        assert all(re.fullmatch(r"[a-z]+( [a-z]+)*", pair.spoken) for pair in pairs)
        assert all(re.fullmatch(r"\S+( \S+)*[.?]", pair.written) for pair in pairs)
        assert not any(".." in pair.written for pair in pairs)


def test_the_same_seed_gives_the_same_sentences() -> None:
    def digest(split: Split, seed: int) -> str:
        return hashlib.sha256(repr(generate(split, 200, seed)).encode()).hexdigest()

    assert digest("test", 1) == digest("test", 1)
    assert len({digest("test", 1), digest("test", 2), digest("valid", 1), digest("train", 1)}) == 4
    assert generate("train", 50) == generate("train", 100)[:50]


def test_writes_parallel_files(tmp_path: Path) -> None:
    spoken.write(tmp_path / "data", train=30, valid=20, test=10)
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (tmp_path / "data").iterdir()}
    expected = {"train": 30, "valid": 20, "test": 10}
    assert sizes == {f"{split}.{side}": n for split, n in expected.items() for side in ("written", "spoken")}
    pair = generate("test", 10)[-1]
    assert (tmp_path / "data" / "test.written").read_bytes().endswith(f"\n{pair.written}\n".encode())
    assert (tmp_path / "data" / "test.spoken").read_bytes().endswith(f"\n{pair.spoken}\n".encode())


def test_refuses_what_it_cannot_generate() -> None:
    assert generate("train", 0) == []
    with pytest.raises(DataError, match="count must be at least 0, got -1"):
        generate("train", -1)
    with pytest.raises(DataError, match="split must be one of train, valid, test, got 'dev'"):
        generate("dev", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_runs_of_the_demo_are_one_model_three_times(system: str, tmp_path: Path) -> None:
    """Without interaction, then with it and without for as many updates again; all from one shape."""
    runs = {name: resolve(config) for name, config in recipes(system, tmp_path).items()}
    apart, longer = SYSTEMS[system], f"{SYSTEMS[system]}-longer"
    assert [(name, run.system) for name, run in runs.items()] == [(apart, apart), (system, system), (longer, apart)]
    first, tuned, again = runs.values()
    assert tuned.strategy is not None and tuned.strategy.first == again.train.start_from == str(
        tmp_path / "runs" / apart
    )
    assert tuned.strategy.updates == again.train.updates and tuned.strategy.learning_rate == again.train.learning_rate
    assert {run.model.width for run in runs.values()} == {first.model.width}
    assert {one.folder.name for one in compared(system, tmp_path)} == set(runs)
