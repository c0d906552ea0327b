"""A report -> tables for a terminal (rich) and for LaTeX (booktabs)."""

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bothways.evaluate.report import Report, finding
from bothways.evaluate.scores import digits, label

PIPE_WIDTH = 200  # columns where nobody's window says how wide it is


def heading(metric: str) -> str:
    """How a column of this metric is headed."""
    names = {"first4": "first 4", "last4": "last 4", "length_ratio": "length", "exact_match": "exact", "ter": "TER ↓"}
    return names.get(metric, label(metric))


def spelled(metric: str) -> str:
    """A metric's name in a sentence: BLEU, exact match."""
    return label(metric).replace("_", " ")


def magnitude(count: int | None) -> str:
    """207.8M, 52.1K."""
    if count is None:
        return "–"
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def signed(value: float, d: int) -> str:
    """With its sign, and no sign before 0."""
    shown = f"{value:+.{d}f}".replace("-", "−")
    return shown if float(f"{value:.{d}f}") else f"{0:.{d}f}"


# Terminal


def show(report: Report, console: Console) -> None:
    """The headline and all tables."""
    told = finding(report)
    console.print(Text(told.headline, style="bold"), soft_wrap=True)
    console.print(Text(told.detail), soft_wrap=True)
    console.print()
    console.print(tables(report))


def tables(report: Report) -> RenderableType:
    """Scores, further scores, tenths of the sentence, source lengths, directions."""
    found = [_scores(report), _further(report), _parts(report)]
    if report.lengths:
        found.append(_lengths(report))
    if report.directions:
        found.append(_directions(report))
    return Group(*(part for table in found for part in (table, Text())))


def _table(title: str, names: Iterable[str], caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i, name in enumerate(names):
        table.add_column(escape(name), justify="right" if i else "left", overflow="fold")
    return table


def _scores(report: Report) -> Table:
    several, alone, d = len(report.sets) > 1, len(report.systems) == 1, digits(report.main)
    names = ["system", *(one.name for one in report.sets), *(["mean"] if several else [])]
    names += [] if alone else ["difference", "95 % interval", "p boot.", "p rand."]
    caption = None if alone else "* p < 0.05, ** p < 0.01 against the base, by approximate randomization"
    table = _table(spelled(report.main), names, caption)
    for row in report.scores[report.main]:
        cells = [_marked(report, report.main, row.system, one.name, row.scores[one.name]) for one in report.sets]
        if several:
            cells.append(f"{row.mean:.{d}f}")
        tested = report.test(report.main, row.system)
        if tested is not None:
            low, high = (signed(end, d) for end in tested.interval)
            cells += [signed(row.difference, d) + tested.mark, f"{low} to {high}"]
            cells += [f"{tested.p_bootstrap:.3f}", f"{tested.p_randomization:.3f}"]
        elif not alone:
            cells += ["base", "", "", ""]
        table.add_row(escape(row.system), *cells)
    return table


def _marked(report: Report, metric: str, system: str, on: str, score: float) -> str:
    tested = report.test(metric, system, on)
    return f"{score:.{digits(metric)}f}{tested.mark if tested else ''}"


def _further(report: Report) -> Table:
    metrics = report.metrics[1:]
    mean = "" if len(report.sets) == 1 else f" (mean of {len(report.sets)} sets)"
    names = ["system", *map(heading, metrics), "parameters", "sent/s", "updates/s"]
    table = _table(f"Further scores{mean}, size and speed", names)
    for system in report.systems:
        speeds = (system.sentences_per_second, system.updates_per_second)
        table.add_row(
            escape(system.name),
            *(f"{report.row(metric, system.name).mean:.{digits(metric)}f}" for metric in metrics),
            magnitude(system.parameters),
            *("–" if speed is None else f"{speed:,.{d}f}" for speed, d in zip(speeds, (1, 2), strict=True)),
        )
    return table


def _parts(report: Report) -> Table:
    count = len(next(iter(report.parts.values())))
    table = _table("Accuracy in each tenth of the sentence, %", ["system", *map(str, range(1, count + 1))])
    for name, parts in report.parts.items():
        table.add_row(escape(name), *(f"{part.accuracy:.1f}" if part.words else "–" for part in parts))
    return table


def _lengths(report: Report) -> Table:
    buckets = [bucket for bucket in report.lengths if bucket.segments]
    names = ["system", *(f"{bucket.label} ({bucket.segments:,})" for bucket in buckets)]
    table = _table(f"{spelled(report.main)} by words in the source (sentences)", names)
    for system in report.systems:
        scores = [bucket.scores[system.name] for bucket in buckets]
        table.add_row(
            escape(system.name), *("–" if score is None else f"{score:.{digits(report.main)}f}" for score in scores)
        )
    return table


def _directions(report: Report) -> Table:
    table = _table("Which direction won, %", ["system", "l2r", "r2l", "sentences on which they differ"])
    for name, one in report.directions.items():
        shares = (one.winners.l2r_share, one.winners.r2l_share)
        table.add_row(escape(name), *(f"{share:.1f}" for share in shares), f"{one.differing:,}")
    return table


# LaTeX

LATEX = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}


def latex_text(text: str) -> str:
    """Text in which LaTeX sees nothing but text; on one line."""
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))


def latex(report: Report) -> str:
    """A table for a paper; it needs the package booktabs. Signatures stand above it as comments."""
    several, alone = len(report.sets) > 1, len(report.systems) == 1
    further = report.metrics[1:]
    sized = any(system.parameters is not None for system in report.systems)
    names = ["System", *(one.name for one in report.sets), *(["Mean"] if several else [])]
    heads = [latex_text(name) for name in names] + ([] if alone else [r"$\Delta$"])
    heads += [latex_text(heading(metric).removesuffix(" ↓")) for metric in further]
    heads += ["Params", "Sent/s", "Updates/s"] if sized else []
    rows = [" & ".join(_latex_cells(report, system, several, sized)) + r" \\" for system in _names(report)]
    notes = [
        f"% {label(metric)} {' '.join(dict.fromkeys(signatures.values()))}"
        for metric, signatures in report.signatures.items()
    ]
    marks = [] if alone else [r"% $^{*}$ p < 0.05, $^{**}$ p < 0.01 against the base, by approximate randomization"]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}; the first scores are " + label(report.main),
            *notes,
            *marks,
            f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            " & ".join(heads) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _names(report: Report) -> Sequence[str]:
    return [system.name for system in report.systems]


def _latex_cells(report: Report, name: str, several: bool, sized: bool) -> list[str]:
    d, row = digits(report.main), report.row(report.main, name)
    cells = [latex_text(name)]
    for on, score in [*row.scores.items(), *([("mean", row.mean)] if several else [])]:
        tested = report.test(report.main, name, on)
        mark = f"$^{{{tested.mark}}}$" if tested and tested.mark else ""
        cells.append(f"{score:.{d}f}{mark}")
    if len(report.systems) > 1:
        cells.append("--" if name == report.base else f"${row.difference:+.{d}f}$")
    cells += [f"{report.row(metric, name).mean:.{digits(metric)}f}" for metric in report.metrics[1:]]
    if sized:
        system = next(system for system in report.systems if system.name == name)
        speeds = (system.sentences_per_second, system.updates_per_second)
        cells.append(magnitude(system.parameters).replace("–", "--"))
        cells += ["--" if speed is None else f"{speed:.{d}f}" for speed, d in zip(speeds, (1, 2), strict=True)]
    return cells
