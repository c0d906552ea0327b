"""A report of hand-made systems: its numbers, its page, its LaTeX; and of small runs: what is decoded, how often."""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from corpus import pairs, tiny, write_lines, write_pairs

from bothways import cli, reporting
from bothways.data.corpus import Prepared
from bothways.data.prepare import prepare
from bothways.errors import BothwaysError, CheckpointError
from bothways.evaluate import plots, tables
from bothways.evaluate import report as reports
from bothways.evaluate.page import page
from bothways.evaluate.report import Decoded, NamedSet, Report, Side, System, make, to_json
from bothways.experiment import train
from bothways.translator import Translator

REFERENCE = ["the cat sat on the mat", "a dog barks at night", "birds sing in the early morning", "rain falls on roofs"]
SOURCE = ["die Katze saß", "ein Hund bellt nachts", "Vögel singen am frühen Morgen und am Abend", "Regen fällt"]
WORSE = ["the cat lay on a mat", "one dog barks at night", "birds sing in the morning", "rain falls on streets"]
NASTY = '<script>alert("&")</script> & 50 % of {x}_$1#~^\\ ok'
SECTIONS = "scores ends parts lengths length-ratio directions speed changes recipe".split()


def both(l2r: str, r2l: str) -> dict[str, Side]:
    """What two directions found."""
    return {"l2r": Side(l2r, -0.5, False), "r2l": Side(r2l, -1.25, True)}


def systems(*texts: list[str], **more: Any) -> list[System]:
    """Systems a, b, ... with an output for the set `news`."""
    return [System(name, {"news": Decoded(lines)}, **more) for name, lines in zip("abcdefgh", texts, strict=False)]


def news(sources: list[str] | None = SOURCE, *references: list[str]) -> list[NamedSet]:
    return [NamedSet("news", references or (REFERENCE,), sources)]


@pytest.fixture(scope="module")
def bidirectional() -> Report:
    """A base from a file, and a run of both directions whose names and texts are out to break the page."""
    best = [both(text, NASTY) for text in REFERENCE]
    output = Decoded([*REFERENCE[:3], NASTY], ["l2r", "l2r", "l2r", "r2l"], best)
    run = System("<b>new</b>", {"news": output}, 1_234_567, 10.0, 2.5, {"machine": "cpu", "weights": "http://x.y"})
    return make([System("base", {"news": Decoded(WORSE)}), run], news(), metrics=("bleu", "chrf", "ter"))


# Numbers


def test_json_says_what_scores_say() -> None:
    told = to_json(make(systems(WORSE, REFERENCE), news(), metrics=("exact_match", "bleu")))
    told = json.loads(json.dumps(told))
    # With four lines, two of the sixteen ways to swap them give the whole difference: p is about 0.125.
    assert told["headline"] == "No clear winner: b is 100.00 exact match from a"
    assert told["tests"][0]["p_randomization"] == pytest.approx(0.125, abs=0.04) and told["tests"][0]["mark"] == ""
    assert [row["scores"]["news"] for row in told["scores"]["exact_match"]] == [0.0, 100.0]
    assert told["scores"]["bleu"][1]["mean"] == pytest.approx(100)
    assert told["sets"] == [{"name": "news", "sentences": 4, "references": 1}]
    assert [metric["name"] for metric in told["metrics"]] == ["exact_match", "bleu", "first4", "last4", "length_ratio"]
    assert told["metrics"][1]["signatures"]["news"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    # first four: the cat _ on, _ dog barks at, birds sing in the, rain falls on _: 13 of 16
    assert told["scores"]["first4"][0]["mean"] == pytest.approx(100 * 13 / 16)
    assert told["scores"]["length_ratio"][0]["mean"] == pytest.approx(20 / 21)
    assert {(row["on"], row["system"]) for row in told["tests"]} == {("news", "b"), ("mean", "b")}
    assert sum(part["words"] for part in told["parts"]["b"]) == 21
    assert all(part["accuracy"] == 100 for part in told["parts"]["b"] if part["words"])
    # sources of 3, 4, 8 and 2 words; buckets of two words up to the longest but a twentieth
    assert [(bucket["label"], bucket["segments"]) for bucket in told["lengths"]] == [
        ("0-2", 1), ("3-4", 2), ("5-6", 0), ("7-8", 1), ("over 8", 0)
    ]  # fmt: skip
    assert told["changes"]["system"] == "b" and all(line["gain"] > 0 for line in told["changes"]["lines"])


def test_only_a_difference_beyond_chance_is_marked() -> None:
    many = REFERENCE * 10
    told = make(systems(WORSE * 10, many, WORSE * 10), news(SOURCE * 10, many))
    on_mean = [tested for tested in told.tests if (tested.metric, tested.on) == ("bleu", "mean")]
    assert {tested.system: tested.mark for tested in on_mean} == {"b": "**", "c": ""}
    assert reports.finding(told).headline.startswith("b leads a by ")
    same = make(systems(many, many), news(SOURCE * 10, many))
    assert reports.finding(same).headline == "No clear winner: a is 0.00 BLEU from b"
    assert "p = 1.000" in reports.finding(same).detail


def test_base_that_leads_is_said_to_lead() -> None:
    many = REFERENCE * 10
    told = make(systems(WORSE * 10, many), news(SOURCE * 10, many), base="b")
    assert reports.finding(told).headline.startswith("b leads a by ")
    assert told.row("bleu", "a").difference < 0 and told.test("bleu", "b") is None
    lower_is_better = make(systems(WORSE * 10, many), news(SOURCE * 10, many), metrics=["ter"])
    assert reports.finding(lower_is_better).headline.startswith("b leads a by ")


def test_mean_of_several_sets_has_a_test_of_its_own() -> None:
    sets = [NamedSet(name, [REFERENCE * 5], SOURCE * 5) for name in ("one", "two")]
    good, bad = ({name: Decoded(lines * 5) for name in ("one", "two")} for lines in (REFERENCE, WORSE))
    told = make([System("base", bad), System("new", good)], sets, metrics=["bleu"])
    row, mean, single = told.row("bleu", "new"), told.test("bleu", "new"), told.test("bleu", "new", "two")
    assert row.mean == pytest.approx(100) and mean is not None and single is not None
    assert mean.difference == pytest.approx(row.difference)
    # Two sets move less than one: the mean's interval is the narrower one.
    assert mean.interval[1] - mean.interval[0] < single.interval[1] - single.interval[0]
    assert mean.p_randomization <= 0.01
    assert sum(part.words for part in told.parts["new"]) == 2 * 5 * 21
    assert sum(bucket.segments for bucket in told.lengths) == 40


def test_directions_are_counted_and_shown(bidirectional: Report) -> None:
    found = bidirectional.directions["<b>new</b>"]
    assert (found.winners.l2r, found.winners.r2l, found.differing) == (3, 1, 4)
    assert {example.winner for example in found.examples} == {"l2r", "r2l"}
    assert "base" not in bidirectional.directions


def test_without_sources_there_are_no_lengths() -> None:
    told = make(systems(WORSE, REFERENCE), news(None))
    assert told.lengths == []
    assert "sources were not given" in page(told)


@pytest.mark.parametrize(
    "given, base, message",
    [
        (lambda: (systems(WORSE, REFERENCE[:3]), news()), None, "b has 3 lines but reference 1 has 4"),
        (lambda: (systems(WORSE), news(SOURCE[:3])), None, "the source of news has 3 lines but reference 1 has 4"),
        (lambda: (systems(WORSE), []), None, "a report needs test sets, and there are none"),
        (lambda: ([], news()), None, "a report needs systems, and there are none"),
        (lambda: (systems(WORSE) * 2, news()), None, "two systems are called 'a'"),
        (lambda: (systems(WORSE), news()), "c", "--base: must be one of a, got 'c'"),
        (lambda: (systems(WORSE), [NamedSet("other", [REFERENCE])]), None, "a has no output for the test set other"),
        (lambda: (systems(WORSE), [NamedSet("mean", [REFERENCE])]), None, "cannot be called 'mean'"),
        (lambda: (systems([]), news(None, [])), None, "a is empty: there is nothing to score"),
    ],
)
def test_what_cannot_be_reported_is_said(given: Callable[[], Any], base: str | None, message: str) -> None:
    with pytest.raises(BothwaysError, match=re.escape(message)):
        make(*given(), base=base)


def test_empty_reference_is_scored_and_noted() -> None:
    told = make(systems(WORSE), news(SOURCE, [*REFERENCE[:3], ""]))
    assert told.notes == ["news: reference 1: line 4 is empty; no word of a hypothesis matches there"]
    assert told.notes[0] in page(told)


# The page


class Reader(HTMLParser):
    """What a browser would fetch or run, and whether every tag is closed."""

    VOID = ("meta", "br", "hr", "link", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.styles = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} runs something: {name}={value}"
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href", "background"):
                self.addresses.append(value or "")
            if name == "style":
                self.styles += value or ""
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.styles += data


def test_page_fetches_nothing_and_is_whole(bidirectional: Report) -> None:
    text = page(bidirectional)
    read = Reader(text)
    assert read.open == [] and read.addresses == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    assert not re.search(r"url\(|@import|://", read.styles)
    # The one address on it is a weight's name that a person made up; it is text, which nobody fetches.
    assert re.findall(r"\w+://[^\s<\"]*", text) == ["http://x.y"]
    assert read.ids == SECTIONS
    assert read.tags.count("h1") == 1 and text.startswith("<!DOCTYPE html>\n<html lang=")
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in read.styles


def test_page_shows_text_as_text(bidirectional: Report) -> None:
    text = page(bidirectional)
    assert "<script" not in text and "<b>new" not in text
    assert "&lt;script&gt;" in text and "&lt;b&gt;new&lt;/b&gt;" in text


def test_page_shows_both_directions_and_the_winner(bidirectional: Report) -> None:
    text = page(bidirectional)
    shown = text[text.index('id="directions"') :]
    assert shown.index("l2r") < shown.index("r2l")
    assert '<dt class="won">▸ l2r<span class="faint"> wins</span></dt>' in shown
    assert '<dt class="won">▸ r2l<span class="faint"> wins</span></dt>' in shown
    assert "−1.250, unfinished when the search ended" in shown


def test_page_has_every_section_whatever_there_is() -> None:
    for texts, sources in (([WORSE], None), ([WORSE] * 8, SOURCE), ([[""] * 4], SOURCE)):
        report = make(systems(*texts), news(sources))
        read = Reader(page(report))
        assert read.open == []
        assert [name for name in SECTIONS if name not in ("changes", *read.ids)] == []


def test_figures_hold_every_value_inside() -> None:
    series = [plots.Line("a", 0, [1.0, None, 3.0]), plots.Line("b", 1, [2.0, 2.0, 2.0])]
    for size in (plots.WIDE, plots.NARROW):
        drawn = plots.lines(series, ["x", "y", "z"], [], "title", "words", size)
        xs = [float(x) for x in re.findall(r'c?x="(-?[\d.]+)"', drawn)]
        assert all(0 <= x <= size.width for x in xs) and drawn.count("<title>") == 5


@pytest.mark.parametrize("values", [(0.9989, 1.0003), (98.2, 99.9), (-2.0, 0.5)])
def test_labels_of_ticks_lie_inside(values: tuple[float, float]) -> None:
    rows = [plots.Spot(f"system {i}", i, value, f"{value:.3f}") for i, value in enumerate(values)]
    for size in (plots.WIDE, plots.NARROW):
        drawn = plots.spots(rows, "title", "words", size)
        labels = re.findall(r'class="tick mid" x="([\d.]+)" y="[\d.]+">([^<]+)<', drawn)
        assert len(labels) >= 2
        for x, label in labels:
            half = len(label) * plots.LETTER / 2
            assert float(x) - half >= -0.1 and float(x) + half <= size.width + 0.1


@pytest.mark.parametrize(
    "low, high, count, expected",
    [
        (0, 5, 5, [0, 1, 2, 3, 4, 5]),
        (91.9, 99.6, 5, [90, 92, 94, 96, 98, 100]),
        (-0.4, 0.4, 4, [-0.4, -0.2, 0, 0.2, 0.4]),
        (7, 7, 4, [6.9, 6.95, 7.0, 7.05, 7.1]),
    ],
)
def test_ticks_are_round_and_reach_both_ends(low: float, high: float, count: int, expected: list[float]) -> None:
    found = plots.ticks(low, high, count)
    assert found[0] <= low and found[-1] >= high
    if low != high:
        assert found == pytest.approx(expected)


def test_ticks_of_one_value_are_apart() -> None:
    for value in (0.0, 7.0, 1e6, -3.0, 1e-7):
        found = plots.ticks(value, value, 5)
        assert found[0] <= value <= found[-1] and len(found) >= 2


# LaTeX and the terminal


def test_latex_escapes_and_aligns(bidirectional: Report) -> None:
    told = tables.latex(bidirectional)
    rows = [line for line in told.splitlines() if line.endswith(r"\\")]
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", told)
    assert columns and all(len(re.split(r"(?<!\\)&", row)) == len(columns[1]) for row in rows)
    assert r"\textless{}b\textgreater{}new" in told and r"\toprule" in told and "% BLEU nrefs:1" in told
    assert tables.latex_text(r"50 % & {x}_$1#~^\ ok") == (
        r"50 \% \& \{x\}\_\$1\#\textasciitilde{}\textasciicircum{}\textbackslash{} ok"
    )
    assert tables.latex_text("two\nlines") == "two lines"


@pytest.mark.parametrize("count, shown", [(207_800_000, "207.8M"), (52_100, "52.1K"), (999, "999"), (None, "–")])
def test_magnitude(count: int | None, shown: str) -> None:
    assert tables.magnitude(count) == shown


@pytest.mark.parametrize("value, shown", [(1.234, "+1.23"), (-0.5, "−0.50"), (0.001, "0.00"), (-0.001, "0.00")])
def test_signed(value: float, shown: str) -> None:
    assert tables.signed(value, 2) == shown


# The command line, on files

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """The command line in this process: status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["bothways", "report", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, lines in {"ref": REFERENCE, "src": SOURCE, "a": WORSE, "b": REFERENCE, "short": REFERENCE[:3]}.items():
        write_lines(tmp_path / name, lines)
    (tmp_path / "none").write_text("")
    return tmp_path


def test_command_writes_every_form(files: Path, say: Say) -> None:
    forms = ("--output", "out/page.html", "--json", "r.json", "--latex", "r.tex")
    given = ("--hypotheses", "old=a", "b", "--reference", "ref", "--source", "src")
    code, out, err = say(*given, *forms, "--metric", "bleu", "--metric", "ter", "--examples", 2)
    assert code == 0, err
    assert "old" in out and "BLEU" in out and "TER" in out and "difference" in out
    assert "wrote out/page.html" in err
    told = json.loads((files / "r.json").read_text(encoding="utf-8"))
    assert told["base"] == "old" and [system["name"] for system in told["systems"]] == ["old", "b"]
    assert told["systems"][0]["recipe"]["sha256"] == [reporting.digest(WORSE)]
    assert told["settings"]["versions"]["sacrebleu"] and len(told["changes"]["lines"]) <= 2
    assert Reader((files / "out/page.html").read_text(encoding="utf-8")).ids == SECTIONS
    assert "tabular" in (files / "r.tex").read_text(encoding="utf-8")


def test_files_of_several_sets_go_in_their_order(files: Path, say: Say) -> None:
    sets = ("--test", "one", "src", "ref", "--test", "two", "src", "a")
    code, _, err = say("--hypotheses", "x=b", "x=a", "y=b", "y=b", *sets, "--json", "r.json", "--quiet")
    assert code == 0 and err == ""
    rows = json.loads((files / "r.json").read_text(encoding="utf-8"))["scores"]["bleu"]
    assert rows[0]["scores"] == pytest.approx({"one": 100, "two": 100})
    assert rows[1]["scores"]["two"] < 100


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--hypotheses short --reference ref", "short has 3 lines but ref has 4; line i of one must be scored against"),
        ("--hypotheses a --reference none", "a has 4 lines but none has 0;"),
        ("--hypotheses none --reference none", "none is empty: there is nothing to score"),
        ("--hypotheses a --reference ref --source short", "short has 3 lines but ref has 4;"),
        ("--hypotheses a=gone --reference ref", "gone: no such file"),
        ("--hypotheses a", "--hypotheses needs a test set: --reference FILE"),
        ("--hypotheses a --source src", "--source belongs to --reference FILE"),
        ("--hypotheses a --reference ref --test x src ref", "--test and --reference both name test sets"),
        ("--hypotheses a --test news", "--test must be NAME SRC REF [REF...] without runs, got 'news'"),
        ("--hypotheses x=a x=b --reference ref", "--hypotheses: x has 2 files (a, b) for 1 test sets (ref)"),
        ("--hypotheses a b --reference ref --base c", "--base: must be one of a, b, got 'c'"),
        ("--hypotheses a --reference ref --metric bleurt", "unknown metric 'bleurt'; accepted: bleu, chrf"),
        ("--reference ref", "report needs a run, or files: --hypotheses NAME=FILE --reference FILE"),
        ("gone/ --reference ref --source src", "gone: is not a run (it has no config.yaml)"),
        ("gone/ --reference ref", "--source: runs decode it, but it is not given for ref"),
        ("gone/ --train.updates=2", "--train.updates=2: decoding takes --search.option=value only"),
    ],
)
def test_command_says_what_is_wrong(files: Path, say: Say, arguments: str, message: str) -> None:
    code, out, err = say(*arguments.split())
    assert code == 2 and out == "" and err.startswith(f"bothways: {message}"), err


# Runs


@pytest.fixture(scope="module")
def runs(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same data, one of them of both directions, and one on data of its own."""
    folder = tmp_path_factory.mktemp("report")
    short = {"updates": 2, "save_every": 1}
    train(tiny(prepared.folder, "transformer-l2r", train=short), folder / "l2r", device="cpu", quiet=True)
    train(tiny(prepared.folder, "no-interaction", train=short), folder / "both", device="cpu", quiet=True)
    rows = pairs(100, seed=9)
    sides, dev = write_pairs(folder, "train", rows[6:]), write_pairs(folder, "dev", rows[:6])
    prepare(*sides, [("dev", dev[0], [dev[1]])], [("test", dev[0], [dev[1]])], folder / "data", vocab=40, kind="words")
    train(tiny(folder / "data", "no-interaction", train=short), folder / "other", device="cpu", quiet=True)
    return folder


def cached(run: Path) -> list[Path]:
    return sorted((run / "decoded-sets").glob("*.jsonl"))


def test_runs_are_decoded_once(
    runs: Path, prepared: Prepared, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("l2r", "both"):
        shutil.copytree(runs / name, tmp_path / name)
    call = (tmp_path / "l2r", f"two ways={tmp_path / 'both'}", "--test", "dev", "--device", "cpu")
    code, first, err = say(*call, "--json", tmp_path / "r.json", "--output", tmp_path / "r.html")
    assert code == 0 and "two ways: decoding dev (6 sentences)" in err, err
    told = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    ours = told["systems"][1]
    texts = [r.text for r in Translator.open(tmp_path / "both").translate(prepared.valid["dev"].source_lines())]
    rows = [json.loads(line) for line in cached(tmp_path / "both")[0].read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows[1:]] == texts
    assert ours["parameters"] == Translator.open(tmp_path / "both").model.parameter_count()
    assert ours["sentences_per_second"] > 0 and ours["updates_per_second"] > 0
    assert ours["recipe"]["data"] == prepared.fingerprint and ours["recipe"]["search"]["beam"] == 2
    assert told["directions"]["two ways"]["winners"].keys() == {"l2r", "r2l"}
    assert Reader((tmp_path / "r.html").read_text(encoding="utf-8")).ids[:8] == SECTIONS[:8]
    # Nothing is decoded again, unless something else would come out, or it is asked for.
    monkeypatch.setattr(Translator, "open", lambda *_, **__: pytest.fail("decodes again"))
    code, second, err = say(*call)
    assert (code, second) == (0, first)
    monkeypatch.undo()
    assert "decoding" in say(*call, "--search.length_penalty=0")[2]
    assert "decoding" in say(*call, "--checkpoint", "1")[2]
    assert "decoding" in say(*call, "--fresh")[2]
    assert len(cached(tmp_path / "l2r")) == 3
    # A damaged file is decoded anew.
    for path in cached(tmp_path / "l2r"):
        path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    assert "l2r: decoding dev" in say(*call)[2]


def test_two_passes_are_reported_side_by_side(runs: Path, prepared: Prepared, tmp_path: Path, say: Say) -> None:
    """Size and speed of both passes, and what each of them said."""
    strategy = {"name": "asynchronous", "updates": 2}
    config = tiny(prepared.folder, "abd-transformer", train={"updates": 2}, strategy=strategy)
    run = train(config, tmp_path / "abd", device="cpu", quiet=True)
    code, out, err = say(runs / "l2r", run.folder, "--test", "dev", "--device", "cpu", "--json", tmp_path / "r.json")
    assert code == 0 and "abd" in out, err
    single, ours = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["systems"]
    assert ours["parameters"] == run.model().parameter_count() > 1.4 * single["parameters"]
    assert ours["sentences_per_second"] > 0 and ours["updates_per_second"] > 0
    rows = [json.loads(line) for line in cached(run.folder)[0].read_text(encoding="utf-8").splitlines()[1:]]
    found = Translator.open(run.folder).translate(prepared.valid["dev"].source_lines())
    assert {row["direction"] for row in rows} == {"l2r"}
    for pass_ in ("l2r", "r2l"):
        assert [row["best"][pass_]["text"] for row in rows] == [one.best[pass_].text for one in found]


def test_runs_on_other_data_decode_the_same_text(runs: Path, prepared: Prepared, say: Say) -> None:
    both_runs = (runs / "both", runs / "other", "--device", "cpu")
    code, _, err = say(*both_runs, "--test", "dev")
    assert code == 2
    assert err.splitlines()[-1].startswith("bothways: the test set 'dev' is not the same text in ")
    assert f"({runs / 'both'})" in err and f"({runs / 'other'})" in err
    dev = prepared.folder / "valid" / "dev"
    code, out, err = say(*both_runs, "--test", "dev", dev / "source.txt", dev / "reference.0.txt")
    assert code == 0 and "both" in out and "other" in out, err
    code, _, err = say(runs / "both", runs / "other", "--device", "cpu")
    assert code == 2 and "has no test set; name a validation set (dev) or files" in err


def test_set_that_only_one_has_is_decoded_by_both(runs: Path, say: Say) -> None:
    code, out, err = say(runs / "other", runs / "both", "--test", "test", "--device", "cpu")
    assert code == 0 and "both" in out, err
    assert f"{runs / 'both'}: was trained on other prepared data than {runs / 'other'}" in err


def test_unknown_sets_and_checkpoints_are_named(runs: Path, say: Say) -> None:
    assert "--test: must be one of dev (" in say(runs / "both", "--test", "gone", "--device", "cpu")[2]
    assert (
        "no such checkpoint; there are: 000001, 000002"
        in say(runs / "both", "--test", "dev", "--checkpoint", "7", "--device", "cpu")[2]
    )


def test_damaged_checkpoint_is_not_reported_as_another(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "l2r", tmp_path / "l2r", ignore=shutil.ignore_patterns("decoded-sets"))
    for path in (tmp_path / "l2r/checkpoints").glob("000002/model.safetensors"):
        path.write_bytes(b"broken")
    chosen = reporting.choose([str(tmp_path / "l2r")], checkpoint="last", device="cpu")
    with pytest.raises(CheckpointError, match=r"is damaged \(its checksum differs\)"):
        reporting.gather(chosen, tests=[["dev"]])


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    assert [one.name for one in reporting.choose(["a/run", "b/run", "c/bift/", "x=d/run"])] == [
        "a/run",
        "b/run",
        "bift",
        "x",
    ]
    chosen = reporting.choose([str(tmp_path), f"x={tmp_path / 'y'}"])
    assert reporting.base_among(["x"], chosen, str(tmp_path / "y")) == "x"
    assert reporting.base_among(["x"], chosen, "nobody") == "nobody"


def test_folder_that_cannot_be_written_costs_time_only(
    runs: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "l2r", tmp_path / "l2r", ignore=shutil.ignore_patterns("decoded-sets"))
    (tmp_path / "l2r/decoded-sets").write_text("a file where a folder should be")
    code, out, err = say(tmp_path / "l2r", "--test", "dev", "--device", "cpu")
    assert code == 0 and out and "the next report will decode again" in err
