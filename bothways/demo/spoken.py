"""Written English -> spoken English, generated: the first step of reading a text aloud.

    The parcel of 12 kg leaves at 9:45 a.m.   ->   the parcel of twelve kilograms leaves at nine forty five a m

A sentence is a frame, such as "The parcel of {weight} leaves at {time}.", with one or two expressions. An expression
has a kind and a value; the hash of both says which split it belongs to, so a value of the validation or test set is
never met in training, while every month, unit, currency and number word is.

What is written fixes what is spoken:
    date      month/day/year; "March 3, 2021", "3/3/2021" and "2021-03-03" are "march third twenty twenty one",
              "3 March 2021" is "the third of march twenty twenty one"
    time      "9:05 p.m." nine oh five p m, "9:00 p.m." nine p m, "08:05" oh eight oh five, "14:00" fourteen hundred,
              "00:30" zero thirty
    year      four digits without a comma, "1905" nineteen oh five; as a cardinal it would be "1,905"
    phone     digit by digit, 0 is oh; after a decimal point 0 is zero
Numbers read as num2words has them, "one hundred and five"; all is lower case, without punctuation or hyphens.
"""

import hashlib
import re
from calendar import monthrange
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from random import Random
from typing import Literal, TypeVar, get_args

from babel.dates import get_month_names
from babel.units import format_unit
from num2words import num2words

from bothways.errors import DataError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")


@dataclass(frozen=True)
class Expression:
    """What has to be read aloud, and how."""

    kind: str  # a name of KINDS
    value: str  # the same for all ways to write it: 2021-03-03 for "March 3, 2021" and for "3/3/2021"
    written: str
    spoken: str
    basic: bool = False  # teaches a word of its own ("12th", "1 kg"), so it is never held out


@dataclass(frozen=True)
class Pair:
    """One sentence, written and spoken."""

    written: str
    spoken: str
    kinds: tuple[str, ...]  # of its expressions, in order
    values: tuple[str, ...]  # of its expressions, in order

    @property
    def expressions(self) -> tuple[tuple[str, str], ...]:
        """(kind, value) of each expression."""
        return tuple(zip(self.kinds, self.values, strict=True))


# --- what comes out ---------------------------------------------------------------------------------------------------


def write(folder: Path, train: int = 30_000, valid: int = 1_000, test: int = 1_000, seed: int = 1) -> None:
    """Parallel files: line i of `train.spoken` is how line i of `train.written` is read; so for valid and test."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[Split, int] = {"train": train, "valid": valid, "test": test}
    for split, count in counts.items():
        pairs = generate(split, count, seed)
        for side, lines in {"written": [p.written for p in pairs], "spoken": [p.spoken for p in pairs]}.items():
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8", newline="\n")


def generate(split: Split, count: int, seed: int = 1) -> list[Pair]:
    """`count` different sentences whose expressions all belong to `split`; the same ones on every machine."""
    if split not in get_args(Split):
        raise DataError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}")
    if count < 0:
        raise DataError(f"count must be at least 0, got {count}")
    rng = Random(f"{seed} {split}")
    pairs: dict[str, Pair] = {}
    for _ in range(20 * count):
        if len(pairs) == count:
            break
        pair = sentence(split, rng)
        pairs.setdefault(pair.written, pair)
    if len(pairs) < count:
        raise DataError(f"split {split} has too few different sentences for {count}; {len(pairs)} were found")
    return list(pairs.values())


def sentence(split: Split, rng: Random) -> Pair:
    """A random frame, filled."""
    frame = pick(rng, TWO) if rng.random() < 0.3 else pick(rng, ONE[pick(rng, KINDS)])
    written, spoken, found = "", "", list[Expression]()
    for i, piece in enumerate(re.split(r"\{(\w+)\}", frame)):
        if i % 2 == 0:
            written, spoken = written + piece, spoken + re.sub(r"[.,?]", "", piece.lower())
        elif piece in FILLERS:
            word = pick(rng, FILLERS[piece])
            written, spoken = written + word, spoken + word.lower()
        else:
            found.append(held_by(split, piece, rng, found))
            written, spoken = written + found[-1].written, spoken + found[-1].spoken
    if written.endswith(".."):  # "at 9:45 a.m." ends the sentence too
        written = written[:-1]
    return Pair(written, spoken, tuple(x.kind for x in found), tuple(x.value for x in found))


def held_by(split: Split, slot: str, rng: Random, other_than: Sequence[Expression]) -> Expression:
    """A random expression for the slot that belongs to `split` and is not in the sentence yet."""
    while True:
        found = SLOTS[slot](rng)
        if split_of(found) == split and found.value not in [x.value for x in other_than]:
            return found


def split_of(expression: Expression) -> Split:
    """Where a value belongs, however it is written: 80 % train, 10 % valid, 10 % test of those that can be held out."""
    if expression.basic:
        return "train"
    digest = hashlib.sha256(f"{expression.kind} {expression.value}".encode()).digest()
    splits: dict[int, Split] = {0: "valid", 1: "test"}
    return splits.get(int.from_bytes(digest[:8], "big") % 10, "train")


# --- chance: only `Random.random` is promised to be the same in all versions of Python --------------------------------


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of the items, each as likely."""
    return items[int(rng.random() * len(items))]


def between(rng: Random, low: int, high: int) -> int:
    """One of low, low + 1, ..., high, each as likely."""
    return low + int(rng.random() * (high - low + 1))


def short(rng: Random, low: int, digits: int) -> int:
    """A number from `low` on with at most so many digits, two of them most often."""
    length = min(digits, pick(rng, (1, 2, 2, 2, 3, 4)))
    return between(rng, max(low, 10 ** (length - 1)), 10**length - 1)


# --- words of numbers -------------------------------------------------------------------------------------------------


@cache
def words(number: int, form: Literal["cardinal", "ordinal", "year"] = "cardinal") -> str:
    """1284 -> one thousand two hundred and eighty four."""
    text: str = num2words(number, lang="en", to=form)
    return text.replace("-", " ").replace(",", "")


def digit_words(digits: str, zero: str) -> str:
    """ "205" -> two oh five."""
    return " ".join(zero if digit == "0" else words(int(digit)) for digit in digits)


def number_words(written: str) -> str:
    """ "-2.05" -> minus two point zero five."""
    whole, point, part = written.removeprefix("-").partition(".")
    sign = "minus " if written.startswith("-") else ""
    return sign + words(int(whole)) + (f" point {digit_words(part, 'zero')}" if point else "")


@cache
def month_name(month: int) -> str:
    """3 -> March."""
    return str(get_month_names("wide", locale="en")[month])


@cache
def unit_words(unit: str, one: bool) -> str:
    """km -> kilometer, kilometers."""
    text = format_unit(1 if one else 2, UNITS[unit], "long", locale="en")
    return text.split(maxsplit=1)[1].lower()


# --- kinds of expression: each draws one at random --------------------------------------------------------------------


def date(rng: Random) -> Expression:
    """A day, three times in four with its year, from 1960 to 2039 (but see `year`)."""
    year = pick(rng, (between(rng, 1960, 1999), between(rng, 2010, 2039)))
    month = between(rng, 1, 12)
    if rng.random() < 0.25:
        return day_without_year(month, between(rng, 1, monthrange(2000, month)[1]))
    return date_of(year, month, between(rng, 1, monthrange(year, month)[1]), rng)


def date_of(year: int, month: int, day: int, rng: Random) -> Expression:
    """One of four ways to write it."""
    written = [
        f"{month_name(month)} {day}, {year}",
        f"{month}/{day}/{year}",
        f"{year}-{month:02}-{day:02}",
        f"{day} {month_name(month)} {year}",
    ]
    form = between(rng, 0, 3)
    return Expression("date", f"{year}-{month:02}-{day:02}", written[form], date_words(month, day, year, form == 3))


def day_without_year(month: int, day: int) -> Expression:
    """March 3 -> march third."""
    return Expression("date", f"{month:02}-{day:02}", f"{month_name(month)} {day}", date_words(month, day))


def date_words(month: int, day: int, year: int | None = None, day_first: bool = False) -> str:
    """The third of march twenty twenty one, or march third twenty twenty one."""
    name, nth = month_name(month).lower(), words(day, "ordinal")
    text = f"the {nth} of {name}" if day_first else f"{name} {nth}"
    return text if year is None else f"{text} {words(year, 'year')}"


def time(rng: Random) -> Expression:
    """A minute of the day; the full hour and its first minutes come more often than by chance."""
    return time_of(
        between(rng, 0, 23), pick(rng, (0, between(rng, 1, 9), between(rng, 10, 59), between(rng, 10, 59))), rng
    )


def time_of(hour: int, minute: int, rng: Random) -> Expression:
    """On a clock of 24 or of 12 hours: 21:45 -> twenty one forty five; 9:45 p.m. -> nine forty five p m."""
    value = f"{hour:02}:{minute:02}"
    minutes = "" if minute == 0 else f" oh {words(minute)}" if minute < 10 else f" {words(minute)}"
    if rng.random() < 0.5:
        hours = f"oh {words(hour)}" if 0 < hour < 10 else words(hour)
        return Expression("time", value, value, hours + (minutes or " hundred"))
    half, on_clock = "ap"[hour // 12], (hour - 1) % 12 + 1
    return Expression("time", value, f"{on_clock}:{minute:02} {half}.m.", f"{words(on_clock)}{minutes} {half} m")


def money(rng: Random) -> Expression:
    """A whole amount below 10,000, or one with cents below 100."""
    currency = pick(rng, list(CURRENCIES))
    if rng.random() < 0.4:
        return money_of(currency, short(rng, 1, 4), 0)
    whole = 1 if rng.random() < 0.1 else 0 if rng.random() < 0.1 else between(rng, 2, 99)
    return money_of(currency, whole, 1 if rng.random() < 0.05 else between(rng, 2, 99))


def money_of(currency: str, whole: int, cents: int) -> Expression:
    """$12.50 -> twelve dollars and fifty cents; $12 -> twelve dollars; $0.01 -> one cent."""
    unit, units, cent, cents_name = CURRENCIES[currency]
    parts = [f"{words(whole)} {unit if whole == 1 else units}"] if whole else []
    parts += [f"{words(cents)} {cent if cents == 1 else cents_name}"] if cents else []
    written = f"{currency}{whole:,}" + (f".{cents:02}" if cents else "")
    return Expression("money", written, written, " and ".join(parts))


def ordinal(rng: Random) -> Expression:
    """1st to 999th."""
    return ordinal_of(short(rng, 1, 3))


def ordinal_of(number: int) -> Expression:
    """22nd -> twenty second."""
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return Expression("ordinal", str(number), f"{number}{ending}", words(number, "ordinal"), basic=is_basic(number))


def cardinal(rng: Random) -> Expression:
    """2 to 9,999."""
    return cardinal_of(short(rng, 2, 4))


def cardinal_of(number: int) -> Expression:
    """1,284 -> one thousand two hundred and eighty four."""
    return Expression("cardinal", str(number), f"{number:,}", words(number), basic=is_basic(number))


def is_basic(number: int) -> bool:
    """Whether its name is made for it alone: twelve, forty."""
    return number <= 20 or number in range(30, 100, 10)


def decimal(rng: Random) -> Expression:
    """One to three digits after the point, the last of them not zero: 3.10 would be another way to write 3.1."""
    whole = 0 if rng.random() < 0.15 else short(rng, 1, 2)
    part = "".join(str(between(rng, 0, 9)) for _ in range(between(rng, 0, 2))) + str(between(rng, 1, 9))
    return decimal_of(f"{whole}.{part}")


def decimal_of(number: str) -> Expression:
    """3.14 -> three point one four."""
    return Expression("decimal", number, number, number_words(number))


def percent(rng: Random) -> Expression:
    """1% to 99.9%."""
    return percent_of(f"{short(rng, 1, 2)}" + (f".{between(rng, 1, 9)}" if rng.random() < 0.6 else ""))


def percent_of(number: str) -> Expression:
    """12.5% -> twelve point five percent."""
    return Expression("percent", number, f"{number}%", f"{number_words(number)} percent")


def year(rng: Random) -> Expression:
    """1100 to 2049, most of them since 1900; not 2000 to 2009, the only years that are read like cardinals."""
    return year_of(pick(rng, (between(rng, 1100, 1899), between(rng, 1900, 1999), between(rng, 2010, 2049))))


def year_of(number: int) -> Expression:
    """1905 -> nineteen oh five."""
    return Expression("year", str(number), str(number), words(number, "year"), basic=number % 100 == 0)


def phone(rng: Random) -> Expression:
    """Seven digits."""
    return phone_of(f"{between(rng, 200, 999)}-{between(rng, 0, 9999):04}")


def phone_of(number: str) -> Expression:
    """555-0142 -> five five five oh one four two."""
    return Expression("phone", number, number, digit_words(number.replace("-", ""), "oh"))


def fraction(rng: Random) -> Expression:
    """A half to 39 and nine tenths, in lowest terms."""
    return fraction_of(0 if rng.random() < 0.2 else between(rng, 1, 39), *pick(rng, FRACTIONS))


def fraction_of(whole: int, top: int, bottom: int) -> Expression:
    """2 3/4 -> two and three quarters."""
    name = f"{words(top)} {PARTS[bottom][top != 1]}"
    if whole == 0:
        return Expression("fraction", f"{top}/{bottom}", f"{top}/{bottom}", name, basic=True)
    written = f"{whole} {top}/{bottom}"
    return Expression("fraction", written, written, f"{words(whole)} and {name}")


def measure(units: Sequence[str], low: int = 1, high: int = 999) -> Callable[[Random], Expression]:
    """A quantity in one of the units: whole, or below 100 with one digit after the point."""

    def draw(rng: Random) -> Expression:
        if low < 0:
            return measure_of(str(between(rng, low, high)), pick(rng, units))
        if rng.random() < 0.1:  # as often as singular forms need to be learned
            return measure_of("1", pick(rng, units))
        if rng.random() < 0.25:
            return measure_of(f"{between(rng, 0, 99)}.{between(rng, 1, 9)}", pick(rng, units))
        return measure_of(str(short(rng, low, len(str(high)))), pick(rng, units))

    return draw


def measure_of(number: str, unit: str) -> Expression:
    """1 kg -> one kilogram; 2.5 kg -> two point five kilograms; -3°C -> minus three degrees celsius."""
    written = f"{number}{unit}" if unit.startswith("°") else f"{number} {unit}"
    one = number in ("1", "-1")
    return Expression("measure", written, written, f"{number_words(number)} {unit_words(unit, one)}", basic=one)


# --- tables -----------------------------------------------------------------------------------------------------------

# symbol -> one of it, several; its hundredth, several
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
}
# symbol -> its name in CLDR, which knows singular and plural
UNITS = {
    "g": "mass-gram",
    "kg": "mass-kilogram",
    "lb": "mass-pound",
    "cm": "length-centimeter",
    "m": "length-meter",
    "ft": "length-foot",
    "km": "length-kilometer",
    "mi": "length-mile",
    "ml": "volume-milliliter",
    "L": "volume-liter",
    "min": "duration-minute",
    "h": "duration-hour",
    "km/h": "speed-kilometer-per-hour",
    "mph": "speed-mile-per-hour",
    "MB": "digital-megabyte",
    "GB": "digital-gigabyte",
    "°C": "temperature-celsius",
    "°F": "temperature-fahrenheit",
}
# denominator -> one of it, several
PARTS = {
    2: ("half", "halves"),
    3: ("third", "thirds"),
    4: ("quarter", "quarters"),
    5: ("fifth", "fifths"),
    6: ("sixth", "sixths"),
    8: ("eighth", "eighths"),
    10: ("tenth", "tenths"),
}
FRACTIONS = [(top, bottom) for bottom in PARTS for top in range(1, bottom) if gcd(top, bottom) == 1]

SLOTS: dict[str, Callable[[Random], Expression]] = {
    "date": date,
    "time": time,
    "money": money,
    "ordinal": ordinal,
    "decimal": decimal,
    "phone": phone,
    "cardinal": cardinal,
    "year": year,
    "percent": percent,
    "fraction": fraction,
    # all of these are measures
    "weight": measure(["g", "kg", "lb"]),
    "size": measure(["cm", "m", "ft"]),
    "distance": measure(["km", "mi", "m"]),
    "volume": measure(["ml", "L"]),
    "duration": measure(["min", "h"], high=99),
    "speed": measure(["km/h", "mph"]),
    "memory": measure(["MB", "GB"]),
    "temperature": measure(["°C", "°F"], low=-20, high=99),
}
FILLERS = {
    slot: line.split()
    for slot, line in {
        "name": "Ada Ben Clara David Emma Frank Grace Henry Iris Jack Maria Nora Oscar Paula Simon Tina",
        "place": "London Paris Berlin Rome Madrid Vienna Boston Dublin Oslo Lisbon Denver Prague",
        "thing": "lamp table chair bike camera clock guitar jacket printer mirror tent vase",
    }.items()
}

# Frames with one expression, by its kind: at the beginning, in the middle, at the end.
ONE = {
    "date": [
        "{name} was born on {date}.",
        "The office in {place} closes on {date}.",
        "{date} is a good day for us.",
        "The letter of {date} came from {place}.",
        "Can we meet {name} on {date}?",
        "We left {place} on {date}.",
    ],
    "time": [
        "The train to {place} leaves at {time}.",
        "{name} gets up at {time}.",
        "{time} is too late for {name}.",
        "The {time} bus to {place} is full.",
        "Does the shop open at {time}?",
        "At {time} we were still in {place}.",
    ],
    "money": [
        "The {thing} costs {money}.",
        "{name} paid {money} for the {thing}.",
        "{money} is too much for a {thing}.",
        "I owe {name} {money}.",
        "Did {name} save {money} in {place}?",
        "A ticket to {place} is {money} today.",
    ],
    "ordinal": [
        "The {ordinal} guest gets a {thing}.",
        "{name} finished {ordinal} in {place}.",
        "{ordinal} place goes to {name}.",
        "This is the {ordinal} letter from {name}.",
        "Was {name} the {ordinal} visitor?",
        "Turn left at {ordinal} street.",
    ],
    "decimal": [
        "The value in {place} rose to {decimal}.",
        "{name} scored {decimal} in the test.",
        "{decimal} is the best result so far.",
        "The index fell by {decimal} today.",
        "Is {decimal} the right answer?",
        "We use a factor of {decimal} for {place}.",
    ],
    "measure": [
        "The {thing} weighs {weight}.",
        "{weight} of rice is enough for us.",
        "The {thing} is {size} wide.",
        "{name} lives {distance} from {place}.",
        "Add {volume} of water to the soup.",
        "{name} waited for {duration} in {place}.",
        "The wind in {place} reached {speed}.",
        "Is {memory} enough for the file of {name}?",
        "It was {temperature} in {place}.",
    ],
    "phone": [
        "Please call {name} at {phone}.",
        "{phone} is the number of the shop.",
        "The number in {place} is {phone} now.",
        "{name} has a new number, {phone}.",
        "Is {phone} your number?",
        "Call {phone} for help.",
    ],
    "cardinal": [
        "{cardinal} people live near {place}.",
        "{name} sold {cardinal} tickets.",
        "The shop in {place} has {cardinal} clients.",
        "There were {cardinal} letters for {name}.",
        "Did you count {cardinal} birds?",
        "The pages of the book are {cardinal}.",
    ],
    "year": [
        "{name} moved to {place} in {year}.",
        "{year} was a cold year in {place}.",
        "The bridge of {year} still stands.",
        "In {year} the school had no roof.",
        "Was the {thing} made in {year}?",
        "The {thing} dates from {year}.",
    ],
    "percent": [
        "Prices in {place} rose by {percent}.",
        "{percent} of the guests were late.",
        "{name} got {percent} of the votes.",
        "The rate is {percent} this month.",
        "Is {percent} of the work done?",
        "We lost {percent} last week.",
    ],
    "fraction": [
        "The recipe needs {fraction} cups of milk.",
        "{fraction} hours is too long for {name}.",
        "The {thing} is {fraction} inches wide.",
        "{name} walked {fraction} miles to {place}.",
        "Is {fraction} the right answer?",
        "The answer of {name} is {fraction}.",
    ],
}
KINDS = list(ONE)

# Frames with two expressions; each kind occurs 6 to 8 times.
TWO = [
    "The parcel of {weight} leaves at {time}.",
    "{name} paid {money} on {date}.",
    "The price rose from {money} to {money}.",
    "The shop is open from {time} to {time}.",
    "On {date} it was {temperature} in {place}.",
    "{name} finished {ordinal} in {year}.",
    "Call {phone} before {time}.",
    "{cardinal} people came in {year}.",
    "Prices rose by {percent} in {year}.",
    "The {ordinal} guest won {money}.",
    "{percent} of {cardinal} clients answered.",
    "The value fell from {decimal} to {decimal}.",
    "{name} ran {distance} in {duration}.",
    "Mix {fraction} cups with {volume}.",
    "The {ordinal} train leaves at {time}.",
    "{date} was the {ordinal} day of the tour.",
    "A score of {decimal} is worth {percent}.",
    "The number since {year} is {phone}.",
    "{fraction} inches cost {money}.",
    "We sold {cardinal} tickets on {date}.",
    "The board of {fraction} inches holds {weight}.",
    "{name} needs {fraction} hours for {cardinal} pages.",
    "Call {phone} to win {money}.",
    "The {ordinal} caller at {phone} wins.",
    "Is {fraction} more than {decimal}?",
    "Between {year} and {year} nothing changed.",
    "The factor was {decimal} on {date}.",
    "We have {percent} of {volume} left.",
    "At {time} about {percent} were asleep.",
    "{name} came {ordinal} with {decimal} points.",
    "The number {phone} works until {date}.",
    "Is {fraction} the same as {percent}?",
    "The {thing} of {year} costs {money}.",
    "Only {cardinal} of {cardinal} letters arrived.",
    "Is {decimal} times {cardinal} right?",
    "The {ordinal} letter came on {date}.",
    "{fraction} hours after {time} we left.",
    "{percent} of calls to {phone} fail.",
    "Since {year} about {cardinal} birds left {place}.",
]
