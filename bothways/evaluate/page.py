"""A report -> one HTML page that needs nothing else: no script, no font, no picture and no address to fetch.

Whatever comes from outside, a name or a hypothesis, passes `escape` on its way.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from typing import Any

from bothways.evaluate import plots
from bothways.evaluate.analysis import Bucket, Part
from bothways.evaluate.plots import Line, Share, Spot
from bothways.evaluate.report import Change, Example, Report, Side, finding
from bothways.evaluate.scores import digits, gain
from bothways.evaluate.style import STYLE
from bothways.evaluate.tables import heading, magnitude, signed, spelled

FEW = 30  # sentences; a score of fewer says little
SEEMS_EMPTY = '<span class="faint">(empty)</span>'


def page(report: Report) -> str:
    """The whole file."""
    told = finding(report)
    sections = [_scores, _ends, _parts, _lengths, _lengths_of_output, _directions, _speed, _changes, _recipe]
    body = "\n".join(section(report) for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(told.headline)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="eyebrow">bothways report</p>\n<h1>{escape(told.headline)}</h1>\n'
        f'<p class="detail">{_together(escape(told.detail))}</p>\n{_facts(report)}{_notes(report)}</header>\n'
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _together(text: str) -> str:
    """`p = 0.01` stays on one line."""
    for sign in ("=", "&lt;"):
        text = text.replace(f"p {sign} ", f"p\u00a0{sign}\u00a0")
    return text


def _facts(report: Report) -> str:
    sentences = sum(len(one.references[0]) for one in report.sets)
    facts = [
        f"<b>{len(report.systems)}</b> {_plural(len(report.systems), 'system')}",
        f"<b>{len(report.sets)}</b> {_plural(len(report.sets), 'test set')}",
        f"<b>{sentences:,}</b> {_plural(sentences, 'sentence')}",
    ]
    if len(report.systems) > 1:
        facts.append(f"base: <b>{escape(report.base)}</b>")
    return f'<ul class="facts">{"".join(f"<li>{fact}</li>" for fact in facts)}</ul>\n'


def _notes(report: Report) -> str:
    return "".join(f'<p class="small-print note">{escape(note)}</p>\n' for note in report.notes)


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def _section(name: str, title: str, about: str, *parts: str) -> str:
    lead = f'<p class="about">{about}</p>\n' if about else ""
    return f'<section id="{name}">\n<h2>{title}</h2>\n{lead}{"".join(parts)}</section>'


def _figure(drawn: str, caption: str, legend: str = "") -> str:
    return f"<figure>{legend}{drawn}<figcaption>{caption}</figcaption></figure>\n"


MARKS = (
    "* p &lt; 0.05, ** p &lt; 0.01 against the base, by approximate randomization. "
    "The interval holds 95\u00a0% of the bootstrap’s differences."
)
MARKED = '<span class="m"></span>'  # room in the head of a column with marks


def _table(head: Sequence[str], rows: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    """`rows`: the row's class, its name, its cells; all of them HTML."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = [f'<tr class="{kind}"><th scope="row">{name}</th>{"".join(cells)}</tr>' for kind, name, cells in rows]
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>\n"
    )


def _cell(text: str, mark: str | None = None, kind: str = "") -> str:
    """A number; where some cells of the column have marks, all keep room for one."""
    space = "" if mark is None else f'<span class="m">{mark}</span>'
    return f'<td class="{kind}">{text}{space}</td>'


def _name(report: Report, system: str) -> str:
    tag = '<span class="tag">base</span>' if system == report.base and len(report.systems) > 1 else ""
    return f'<span class="name" title="{escape(system)}">{escape(system)}</span>{tag}'


def _kind(report: Report, system: str) -> str:
    return "leads" if len(report.systems) > 1 and system == report.ranked()[0].system else ""


def _places(report: Report) -> dict[str, int]:
    """Which colour and marker each system has: the base 0, the others in their order."""
    return {report.base: 0} | {name: i for i, name in enumerate(report.others, 1)}


def _legend(report: Report) -> str:
    items = [f"<li>{plots.legend_mark(place)}{escape(name)}</li>" for name, place in _places(report).items()]
    return f'<ul class="legend">{"".join(items)}</ul>'


# Scores


def _scores(report: Report) -> str:
    alone = len(report.systems) == 1
    sign = ", ".join(dict.fromkeys(report.signatures[report.main].values()))
    about = f"{spelled(report.main)} <code>{escape(sign)}</code>"
    marks = "" if alone else f'<p class="small-print">{_together(MARKS)}</p>\n'
    further = f"<h3>Further scores{_on_mean(report)}</h3>\n{_further_table(report)}"
    return _section("scores", "Scores", about, _main_table(report), marks, "" if alone else _forest(report), further)


def _on_mean(report: Report) -> str:
    return "" if len(report.sets) == 1 else f", mean of {len(report.sets)} test sets"


def _main_table(report: Report) -> str:
    several, alone, d = len(report.sets) > 1, len(report.systems) == 1, digits(report.main)
    head = ["system", *(escape(one.name) + MARKED for one in report.sets), *([f"mean{MARKED}"] if several else [])]
    head += [] if alone else ["difference", "95 % interval", "p bootstrap", "p randomization"]
    rows = []
    for row in report.scores[report.main]:
        cells = []
        for one in report.sets:
            tested = report.test(report.main, row.system, one.name)
            cells.append(_cell(f"{row.scores[one.name]:.{d}f}", tested.mark if tested else "", "main"))
        tested = report.test(report.main, row.system)
        if several:
            cells.append(_cell(f"{row.mean:.{d}f}", tested.mark if tested else "", "main"))
        if tested is not None:
            low, high = (signed(end, d) for end in tested.interval)
            cells += [_cell(signed(row.difference, d)), _cell(f"{low} to {high}")]
            cells += [_cell(f"{p:.3f}") for p in (tested.p_bootstrap, tested.p_randomization)]
        elif not alone:
            cells += [_cell('<span class="faint">–</span>')] * 4
        rows.append((_kind(report, row.system), _name(report, row.system), cells))
    return _table(head, rows)


def _further_table(report: Report) -> str:
    metrics = report.metrics[1:]
    rows = []
    for system in report.systems:
        cells = []
        for metric in metrics:
            tested = report.test(metric, system.name)
            cells.append(
                _cell(f"{report.row(metric, system.name).mean:.{digits(metric)}f}", tested.mark if tested else "")
            )
        rows.append((_kind(report, system.name), _name(report, system.name), cells))
    return _table(["system", *(escape(heading(metric)) + MARKED for metric in metrics)], rows)


def _forest(report: Report) -> str:
    d = digits(report.main)
    rows = []
    for name, place in _places(report).items():
        tested = report.test(report.main, name)
        if tested is not None:
            low, high = tested.interval
            rows.append(Spot(name, place, tested.difference, signed(tested.difference, d), tested.mark, low, high))
    x_title = f"{spelled(report.main)} less that of {report.base}"
    drawn = plots.both(lambda size: plots.spots(rows, x_title, plots.shortened(x_title, size.width), size, line_at=0.0))
    better = "Right of" if gain(report.main, 2.0, 1.0) > 0 else "Left of"
    if report.main == "length_ratio":
        caption = "The dashed line is the base."
    else:
        caption = f"<b>{better} the dashed line is better than {escape(report.base)}.</b>"
    return _figure(
        drawn, f"{caption} A bar that crosses the line is a difference that other test sentences might turn around."
    )


# Where in the sentence


def _ends(report: Report) -> str:
    rows = []
    for name, place in _places(report).items():
        first, last = report.row("first4", name).mean, report.row("last4", name).mean
        rows.append(Spot(name, place, first, f"{first:.1f} / {last:.1f}", other=last))
    title = "accuracy of the first four and the last four words, per cent"
    drawn = plots.both(lambda size: plots.spots(rows, title, "words that match, %", size))
    gaps = {row.name: (row.other or 0.0) - row.value for row in rows}
    even = min(gaps, key=lambda name: abs(gaps[name]))
    uneven = max(gaps, key=lambda name: abs(gaps[name]))
    said = f"<b>Filled: the first four words; hollow: the last four</b>{_on_mean(report)}."
    if len(rows) > 1:
        said += (
            f" The two ends are closest for {escape(even)} ({abs(gaps[even]):.1f} points apart) and furthest apart "
            f"for {escape(uneven)} ({abs(gaps[uneven]):.1f}, better at the "
            f"{'last' if gaps[uneven] > 0 else 'first'} words)."
        )
    about = "A direction tends to be best where it begins: l2r at the first words of a sentence, r2l at the last."
    return _section("ends", "Both ends of the sentence", about, _figure(drawn, said))


def _parts(report: Report) -> str:
    count = len(next(iter(report.parts.values())))
    places = _places(report)
    series = [
        Line(name, places[name], [part.accuracy if part.words else None for part in parts])
        for name, parts in report.parts.items()
    ]
    labels = [str(i) for i in range(1, count + 1)]
    title = "accuracy of each tenth of the sentence, per cent"
    drawn = plots.both(lambda size: plots.lines(series, labels, [], title, "tenth of the sentence", size))
    caption = "Hypothesis words that stand in the same tenth of the reference, per cent"
    caption += "; all test sets together." if len(report.sets) > 1 else "."
    leader = report.ranked()[0].system
    if leader != report.base:
        caption += _largest_gain(report.parts[leader], report.parts[report.base], leader, report.base)
    return _section(
        "parts",
        "From the first word to the last",
        "",
        _figure(drawn, caption, _legend(report)),
    )


def _largest_gain(ours: Sequence[Part], base: Sequence[Part], system: str, base_name: str) -> str:
    gains = [a.accuracy - b.accuracy if a.words and b.words else -1.0 for a, b in zip(ours, base, strict=True)]
    best = max(range(len(gains)), key=lambda i: gains[i])
    if gains[best] <= 0:
        return f" In no tenth is {escape(system)} above {escape(base_name)}."
    return (
        f" <b>{escape(system)} is furthest above {escape(base_name)} in part {best + 1} of {len(gains)}: "
        f"{gains[best]:+.1f} points.</b>"
    )


# Lengths


def _lengths(report: Report) -> str:
    title = f"{spelled(report.main)} by source length"
    buckets = [bucket for bucket in report.lengths if bucket.segments]
    if not buckets:
        missing = "<p>The sources were not given, so there are no scores by their length (<code>--source</code>).</p>\n"
        return _section("lengths", title, "", missing)
    places = _places(report)
    series = [Line(name, place, [bucket.scores[name] for bucket in buckets]) for name, place in places.items()]
    labels = [_interval(bucket) for bucket in buckets]
    counts = [f"{bucket.segments:,}" for bucket in buckets]
    x_title = "words in the source; small: how many sentences"
    drawn = plots.both(lambda size: plots.lines(series, labels, counts, title, x_title, size))
    caption = f"{spelled(report.main)} of the sentences of each length, scored as a corpus of their own"
    caption += "; all test sets together." if len(report.sets) > 1 else "."
    caption += _on_longest(report, [bucket for bucket in buckets if bucket.segments >= FEW])
    few = [_interval(bucket) for bucket in buckets if bucket.segments < FEW]
    if few:
        caption += f" Fewer than {FEW} sentences, so to be read with care: {escape(' and '.join(few))}."
    return _section("lengths", title, "", _figure(drawn, caption, _legend(report)))


def _on_longest(report: Report, buckets: Sequence[Bucket]) -> str:
    leader = report.ranked()[0].system
    if leader == report.base or not buckets:
        return ""
    longest = buckets[-1]
    ours, theirs = longest.scores[leader], longest.scores[report.base]
    assert ours is not None and theirs is not None
    return (
        f" <b>At {escape(_interval(longest))} words {escape(leader)} differs from {escape(report.base)} by "
        f"{signed(ours - theirs, digits(report.main))}.</b>"
    )


def _interval(bucket: Bucket) -> str:
    if bucket.up_to is None:
        return "all" if bucket.above < 0 else f"> {bucket.above}"
    return f"{max(bucket.above + 1, 1)}–{bucket.up_to}" if bucket.up_to > 1 else "0–1"


def _lengths_of_output(report: Report) -> str:
    rows = []
    for name, place in _places(report).items():
        ratio = report.row("length_ratio", name).mean
        rows.append(Spot(name, place, ratio, f"{ratio:.3f}"))
    title = "length of the output over length of the reference"
    drawn = plots.both(lambda size: plots.spots(rows, title, "words of the output per word of reference", size, 1.0))
    shortest = min(rows, key=lambda row: row.value)
    caption = f"<b>Left of the dashed line outputs are shorter than references.</b> Shortest: {escape(shortest.name)}."
    about = "Two directions that compete by normalized score favour short outputs, so the length is always reported."
    return _section("length-ratio", "Length of the output", about, _figure(drawn, caption))


# Directions


def _directions(report: Report) -> str:
    if not report.directions:
        about = "No system here decoded both directions, so there is no winner to count."
        return _section("directions", "Which direction won", about)
    rows = [Share(name, one.winners.l2r_share, one.winners.r2l_share) for name, one in report.directions.items()]
    title = "share of sentences whose best hypothesis came from l2r and from r2l"
    drawn = plots.both(lambda size: plots.shares(rows, ("l2r", "r2l"), title, size))
    caption = "Share of sentences whose best hypothesis was generated from left to right, and from right to left."
    ranked = [row.system for row in report.ranked() if row.system in report.directions]
    shown = []
    for place, name in enumerate(ranked):
        one = report.directions[name]
        total = one.winners.l2r + one.winners.r2l
        differ = f"the directions differ on {one.differing:,} of {total:,} sentences"
        examples = "".join(_example(example) for example in one.examples)
        opened = " open" if place == 0 else ""
        summary = f'{escape(name)} <span class="faint">— {differ}</span>'
        shown.append(f"<details{opened}><summary>{summary}</summary>{examples}</details>\n")
    how = (
        '<h3>Side by side</h3>\n<p class="about">What each direction found where they differ; the arrow marks the '
        "winner. Scores are length-normalized log-probabilities. Marked words are not in the reference there.</p>\n"
    )
    return _section("directions", "Which direction won", "", _figure(drawn, caption), how, *shown)


def _example(example: Example) -> str:
    rows = _given(example.source, example.references)
    for direction in sorted(example.best):
        side = example.best[direction]
        won = direction == example.winner
        arrow = "▸ " if won else ""
        said = '<span class="faint"> wins</span>' if won else ""
        rows.append(
            f'<dt class="{"won" if won else ""}">{arrow}{escape(direction)}{said}</dt>'
            f'<dd dir="auto">{_differing(side.text, example.references)}{_score_of(side)}</dd>'
        )
    return _card(example.set, example.line, rows)


def _score_of(side: Side) -> str:
    unfinished = ", unfinished when the search ended" if side.cut_off else ""
    return f' <span class="score">{signed(side.score, 3)}{unfinished}</span>'


def _given(source: str | None, references: Sequence[str]) -> list[str]:
    rows = [] if source is None else [f'<dt>source</dt><dd dir="auto">{escape(source) or SEEMS_EMPTY}</dd>']
    rows += [f'<dt>reference</dt><dd dir="auto">{escape(reference) or SEEMS_EMPTY}</dd>' for reference in references]
    return [*rows, "<hr>"]


def _card(name: str, line: int, rows: Sequence[str]) -> str:
    where = f'<p class="where">{escape(name)}, line {line:,}</p>'
    return f'<div class="example">{where}<dl>{"".join(rows)}</dl></div>\n'


def _differing(text: str, references: Sequence[str]) -> str:
    """The text with the words marked that do not stand there in the closest reference; of unspaced scripts, letters."""
    if not text.strip():
        return SEEMS_EMPTY
    spaced = " " in text or any(" " in reference for reference in references)
    ours = text.split() if spaced else list(text)
    matchers = [SequenceMatcher(None, r.split() if spaced else list(r), ours, autojunk=False) for r in references]
    closest = max(matchers, key=lambda matcher: matcher.ratio())
    joint = " " if spaced else ""
    parts = []
    for operation, _, _, begin, end in closest.get_opcodes():
        words = escape(joint.join(ours[begin:end]))
        if words:
            parts.append(words if operation == "equal" else f"<mark>{words}</mark>")
    return joint.join(parts)


# Size, speed, changes


def _speed(report: Report) -> str:
    measured = [s for s in report.systems if s.parameters is not None]
    if not measured:
        return _section("speed", "Size and speed", "Files of hypotheses have neither; runs do.")
    rows = []
    for system in report.systems:
        values = (
            magnitude(system.parameters),
            "–" if system.sentences_per_second is None else f"{system.sentences_per_second:,.1f}",
            "–" if system.updates_per_second is None else f"{system.updates_per_second:,.2f}",
        )
        rows.append((_kind(report, system.name), _name(report, system.name), [_cell(value) for value in values]))
    machines = dict.fromkeys(str(s.recipe["machine"]) for s in measured if "machine" in s.recipe)
    about = f"Decoded on {escape(' and '.join(machines))}. " if machines else ""
    about += "Training speed is that of the run’s last stage, as trained."
    return _section(
        "speed", "Size and speed", about, _table(["system", "parameters", "sentences / s", "updates / s"], rows)
    )


def _changes(report: Report) -> str:
    if report.compared is None or not report.changes:
        return ""
    about = (
        f"Lines that {escape(report.compared)} improves most over {escape(report.base)}, and those it harms most, "
        f"by {spelled(report.main)} of the single line."
    )
    better = [change for change in report.changes if change.gain > 0]
    worse = [change for change in report.changes if change.gain < 0]
    parts = []
    for title, changes in (("Better", better), ("Worse", worse)):
        if changes:
            parts.append(f"<h3>{title}</h3>\n{''.join(_change(report, change) for change in changes)}")
    return _section("changes", "What changed most", about, *parts)


def _change(report: Report, change: Change) -> str:
    rows = _given(change.source, change.references)
    d = digits(report.main)
    for name, text, score, kind in (
        (report.base, change.base_text, change.base_score, ""),
        (report.compared or "", change.text, change.score, "ours"),
    ):
        rows.append(
            f'<dt class="{kind}">{escape(name)}</dt><dd dir="auto">{_differing(text, change.references)}'
            f' <span class="score">{score:.{d}f}</span></dd>'
        )
    return _card(change.set, change.line, rows)


# The recipe


def _recipe(report: Report) -> str:
    cards = []
    for system in report.systems:
        cards.append(f"<h3>{escape(system.name)}</h3>\n{_definitions(system.recipe)}")
    for one in report.sets:
        counts = {"sentences": f"{len(one.references[0]):,}", "references": len(one.references)}
        cards.append(f"<h3>Test set {escape(one.name)}</h3>\n{_definitions({**counts, **one.recipe})}")
    signatures = {
        spelled(metric): "; ".join(dict.fromkeys(report.signatures[metric].values())) for metric in report.metrics
    }
    cards.append(f"<h3>Metrics</h3>\n{_definitions(signatures)}")
    cards.append(f"<h3>Settings</h3>\n{_definitions(report.settings)}")
    about = "What is needed to make these numbers again. Every metric and test is defined in docs/scores.md."
    return _section("recipe", "Recipe", about, f'<div class="recipe">{"".join(cards)}</div>\n')


def _definitions(values: Mapping[str, Any]) -> str:
    rows = [f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_value(value)}</dd>" for name, value in values.items()]
    return f"<dl>{''.join(rows)}</dl>\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return " · ".join(_pairs(value))
    if isinstance(value, list | tuple):
        return "<br>".join(_value(item) for item in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    text = escape(str(value))
    return f"<code>{text}</code>" if isinstance(value, str) and _is_code(value) else text


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{escape(name.replace('_', ' '))} {_value(value)}"


def _is_code(text: str) -> bool:
    """Checksums, paths and signatures, which read better in letters of one width."""
    return " " not in text and (len(text) > 15 or "/" in text or "|" in text)
