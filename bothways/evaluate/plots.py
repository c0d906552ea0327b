"""Numbers -> figures as inline SVG, drawn by hand so that they follow the page: its fonts, light or dark.

No colour stands here. Classes say what a mark is, and the style sheet (page.py) says how it looks: `c0` is the base,
`c1` ... `c6` are the other systems, each with a marker of its own for who cannot tell the colours. Every figure exists
wide and narrow, since a wide one scaled to a phone has letters that nobody can read; the style sheet shows one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

STYLES = 6  # colours and markers besides the base's
LETTER = 7.2  # mean width of a letter at the size of the figures' text


@dataclass(frozen=True)
class Size:
    """One of the two forms of a figure."""

    name: str
    width: int
    names: int
    """Room for names beside their rows; 0 puts them above."""


WIDE, NARROW = Size("wide", 840, 210), Size("narrow", 360, 0)


def both(draw: Callable[[Size], str]) -> str:
    """The wide and the narrow form, of which one is seen."""
    return draw(WIDE) + draw(NARROW)


def style_of(place: int) -> str:
    """The class of system number `place`; 0 is the base."""
    return f"c{1 + (place - 1) % STYLES}" if place else "c0"


# Lines


@dataclass(frozen=True)
class Line:
    """One system in a figure of lines."""

    name: str
    place: int
    """0 for the base; decides colour and marker."""
    values: Sequence[float | None]


def lines(
    series: Sequence[Line], labels: Sequence[str], below: Sequence[str], title: str, x_title: str, size: Size
) -> str:
    """A point for each label and system; `below` stands under the labels in small type."""
    left, right, top, height = 44, 10, 12, 240 if size is WIDE else 210
    known = [value for line in series for value in line.values if value is not None]
    marks = ticks(min(known, default=0.0), max(known, default=1.0), 5)
    inner = size.width - left - right

    def x(i: int) -> float:
        return left + inner * (i + 0.5) / len(labels)

    def y(value: float) -> float:
        return top + height * (1 - (value - marks[0]) / (marks[-1] - marks[0]))

    parts = []
    for mark in marks:
        parts.append(f'<path class="grid" d="M{left} {y(mark):.1f}H{size.width - right}"/>')
        parts.append(_text(left - 8, y(mark) + 4, _number(mark, marks), "tick end"))
    for i, text in enumerate(labels):
        parts.append(_text(x(i), top + height + 20, text, "tick mid"))
        if below:
            parts.append(_text(x(i), top + height + 36, below[i], "small mid"))
    bottom = top + height + (56 if below else 42)
    parts.append(_text(left + inner / 2, bottom, x_title, "axis mid"))
    parts += [_line(line, labels, x, y) for line in sorted(series, key=lambda line: line.place)]
    return _svg(size, bottom + 8, title, parts)


def _line(line: Line, labels: Sequence[str], x: Callable[[int], float], y: Callable[[float], float]) -> str:
    """A gap stands where there is no value."""
    places = [
        (x(i), y(v), v, label) for i, (v, label) in enumerate(zip(line.values, labels, strict=True)) if v is not None
    ]
    drawn, pen = "", "M"
    for i, value in enumerate(line.values):
        if value is None:
            pen = "M"
            continue
        drawn += f"{pen}{x(i):.1f} {y(value):.1f}"
        pen = "L"
    markers = "".join(
        f"<g>{marker(line.place, a, b)}<title>{escape(f'{line.name}, {label}: {value:.1f}')}</title></g>"
        for a, b, value, label in places
    )
    return f'<g class="{style_of(line.place)}"><path class="line" d="{drawn}"/>{markers}</g>'


# Rows


@dataclass(frozen=True)
class Spot:
    """A system's row in a figure of rows: one value, with an interval or a second value."""

    name: str
    place: int
    value: float
    text: str
    """What is written at the row's end."""
    mark: str | None = None
    """Behind it, outside of the column of numbers; None leaves no room for marks."""
    low: float | None = None
    """The interval's ends, if there is one."""
    high: float | None = None
    other: float | None = None
    """A second value, drawn hollow."""


def spots(rows: Sequence[Spot], title: str, x_title: str, size: Size, line_at: float | None = None) -> str:
    """A dot for each system on a common axis, with what lies to either side of it."""
    step, top, ends = (38, 6, 92) if size is WIDE else (52, 4, 0)
    left = size.names or 8
    right = ends or 8
    known = [v for row in rows for v in (row.value, row.low, row.high, row.other, line_at) if v is not None]
    marks = ticks(min(known), max(known), 5 if size is WIDE else 4)
    bottom = top + step * len(rows)
    inset = max(
        10.0, max(len(_number(mark, marks)) for mark in marks) * LETTER / 2 - min(left, right)
    )  # for half a label

    def x(value: float) -> float:
        return left + inset + (size.width - left - right - 2 * inset) * (value - marks[0]) / (marks[-1] - marks[0])

    at = [top + step * i + (step / 2 if size is WIDE else 34) for i in range(len(rows))]
    # Upright lines run through; on a phone, where names stand between the rows, they stop before them.
    reach = [(top, bottom)] if size is WIDE else [(y - 11, y + 11) for y in at]
    parts = []
    for mark in marks:
        parts.append(f'<path class="grid" d="{_upright(x(mark), reach)}"/>')
        parts.append(_text(x(mark), bottom + 18, _number(mark, marks), "tick mid"))
    if line_at is not None:
        parts.append(f'<path class="zero" d="{_upright(x(line_at), reach)}"/>')
    for i, (row, y) in enumerate(zip(rows, at, strict=True)):
        parts += _row_names(row, top + step * i, y, size)
        parts.append(_spot(row, y, x))
    parts.append(_text((x(marks[0]) + x(marks[-1])) / 2, bottom + 40, x_title, "axis mid"))
    return _svg(size, bottom + 48, title, parts)


def _upright(x: float, reach: Sequence[tuple[float, float]]) -> str:
    return "".join(f"M{x:.1f} {a:.1f}V{b:.1f}" for a, b in reach)


def _spot(row: Spot, y: float, x: Callable[[float], float]) -> str:
    drawn = ""
    if row.low is not None and row.high is not None:
        a, b = x(row.low), x(row.high)
        drawn += f'<path class="span" d="M{a:.1f} {y:.1f}H{b:.1f}M{a:.1f} {y - 5:.1f}v10M{b:.1f} {y - 5:.1f}v10"/>'
    if row.other is not None:
        drawn += f'<path class="span" d="M{x(row.value):.1f} {y:.1f}H{x(row.other):.1f}"/>'
        drawn += f'<circle class="hollow" cx="{x(row.other):.1f}" cy="{y:.1f}" r="6"/>'
    drawn += marker(row.place, x(row.value), y, 6) if row.other is None else _disc(x(row.value), y)
    return f'<g class="{style_of(row.place)}">{drawn}<title>{escape(f"{row.name}: {row.text}")}</title></g>'


def _disc(x: float, y: float) -> str:
    return f'<circle class="full" cx="{x:.1f}" cy="{y:.1f}" r="6"/>'


def _row_names(row: Spot, top: float, y: float, size: Size) -> list[str]:
    """The name before and the number after a row, or both above it."""
    beside = 16 if row.mark is not None else 0
    if size is WIDE:
        name = _text(size.names - 6, y + 4, shortened(row.name, size.names - 12), "name end", row.name)
        baseline, edge = y + 4, size.width - 2 - beside
    else:
        name = _text(8, top + 18, shortened(row.name, size.width - 40 - len(row.text) * LETTER), "name", row.name)
        baseline, edge = top + 18, size.width - 8 - beside
    return [name, _text(edge, baseline, row.text, "value end"), _text(edge + 1, baseline, row.mark or "", "value")]


@dataclass(frozen=True)
class Share:
    """A bar cut in two."""

    name: str
    first: float
    """Per cent."""
    second: float


def shares(rows: Sequence[Share], labels: tuple[str, str], title: str, size: Size) -> str:
    """A bar of full length for each system, cut in two parts that are named inside."""
    step, top = (44, 6) if size is WIDE else (62, 4)
    left = size.names + 10 if size.names else 8
    width = size.width - left - 8
    parts = []
    for i, row in enumerate(rows):
        begin = top + step * i
        y = begin + (7 if size is WIDE else 26)
        cut = width * row.first / 100
        parts.append(
            f'<rect class="first" x="{left}" y="{y:.1f}" width="{max(0.0, cut - 1):.1f}" height="30" rx="3"/>'
            f'<rect class="second" x="{left + cut + 1:.1f}" y="{y:.1f}" width="{max(0.0, width - cut - 1):.1f}" '
            f'height="30" rx="3"/>'
        )
        texts = [f"{label} {share:.1f} %" for label, share in zip(labels, (row.first, row.second), strict=True)]
        if cut > len(texts[0]) * LETTER + 16:
            parts.append(_text(left + 10, y + 20, texts[0], "in-first"))
        if width - cut > len(texts[1]) * LETTER + 16:
            parts.append(_text(left + width - 10, y + 20, texts[1], "in-second end"))
        if size is WIDE:
            parts.append(_text(left - 16, y + 20, shortened(row.name, left - 22), "name end", row.name))
        else:
            parts.append(_text(left, begin + 18, shortened(row.name, width), "name", row.name))
    return _svg(size, top + step * len(rows) + 4, title, parts)


# Pieces


def marker(place: int, x: float, y: float, r: float = 4.5) -> str:
    """The base has a hollow circle, the other systems filled shapes, one after the other."""
    if not place:
        return f'<circle class="hollow" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    shape = (place - 1) % STYLES
    if shape == 0:
        return f'<circle class="full" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if shape == 1:
        s = 0.9 * r
        return f'<rect class="full" x="{x - s:.1f}" y="{y - s:.1f}" width="{2 * s:.1f}" height="{2 * s:.1f}"/>'
    s = 1.25 * r
    corners = {
        2: [(0, -s), (s, 0.8 * s), (-s, 0.8 * s)],
        3: [(0, -s), (s, 0), (0, s), (-s, 0)],
        4: [(0, s), (s, -0.8 * s), (-s, -0.8 * s)],
        5: [(-s, -s / 3), (0, -s), (s, -s / 3), (0.6 * s, s), (-0.6 * s, s)],
    }[shape]
    points = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)
    return f'<polygon class="full" points="{points}"/>'


def legend_mark(place: int) -> str:
    """A system's line and marker, for the legend beside its name."""
    line = '<path class="line" d="M1 7H27"/>'
    return (
        f'<svg class="mark {style_of(place)}" viewBox="0 0 28 14" aria-hidden="true">{line}{marker(place, 14, 7)}</svg>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` of them."""
    if not high - low > 1e-9 * max(1.0, abs(high)):
        low, high = low - max(1e-3, 0.01 * abs(low)), high + max(1e-3, 0.01 * abs(high))
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def shortened(text: str, room: float) -> str:
    """As much of a name as there is room for."""
    most = max(3, int(room / LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def _number(value: float, marks: Sequence[float]) -> str:
    """With as many digits as tell the ticks apart."""
    step = min(b - a for a, b in pairwise(marks))
    digits = next((d for d in range(6) if abs(round(step, d) - step) < 1e-9 * max(1.0, step)), 6)
    shown = f"{value:.{digits}f}".replace("-", "−")
    return shown if float(f"{value:.{digits}f}") else f"{0:.{digits}f}"  # no -0


def _text(x: float, y: float, text: str, kind: str, whole: str = "") -> str:
    title = f"<title>{escape(whole)}</title>" if whole and whole != text else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}{title}</text>'


def _svg(size: Size, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="plot {size.name}" viewBox="0 0 {size.width} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
