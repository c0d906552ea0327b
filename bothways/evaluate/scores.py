"""Hypotheses and references, as lines of text -> scores, each with its signature and a score for every segment.

Statistics per segment come first, the score from their sum: resampling or a bucket only adds up other rows.

    metric            best   statistics of a segment
    bleu              100    sacreBLEU's: lengths, matched and all n-grams
    chrf              100    sacreBLEU's: n-grams of both sides, matched ones
    ter               0      sacreBLEU's: edits, mean reference length
    rouge1, 2, L      100    F1 of the segment; 1, so that the corpus score is the mean
      ...-recall      100    recall of the segment; 1
      ...-duc         100    recall of the segment within 75 bytes; 1
    exact_match       100    whether a reference equals the hypothesis; 1
    length_ratio      1      words of the hypothesis; words of the reference closest in length
    first4, last4     100    matching positions among the first (last) four; reference words there
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from bothways.errors import DataError
from bothways.evaluate.positions import End, closest_length, matches_at
from bothways.evaluate.rouge import DUC_BYTES, Rouge

Statistics = NDArray[np.float64]


class Metric(Protocol):
    """N segments -> statistics [N, F] -> a score from the sum of any of their rows."""

    def segments(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
        """[N, F]: a row for each segment; references[r][i] is the r-th reference of hypotheses[i]."""
        ...

    def score(self, total: Statistics) -> float:
        """The corpus score; `total` [F] is the sum of the rows."""
        ...

    def segment_score(self, row: Statistics) -> float:
        """The score of one segment from its row [F]."""
        ...

    def signature(self, references: int) -> str:
        """What is needed to compute the score again; `references` is how many each segment has."""
        ...


@dataclass(frozen=True)
class Reading:
    """How lines are read before they are compared."""

    lowercase: bool = False
    tokenize: str = "13a"
    stem: bool | None = None
    """For ROUGE; None leaves it to the metric: the protocol of DUC stems, the others do not."""

    def text(self, line: str) -> str:
        """The line without white space around it."""
        return line.strip().lower() if self.lowercase else line.strip()

    def words(self, line: str) -> list[str]:
        """The scorer's words of a line."""
        return _tokenizer(self.tokenize)(self.text(line)).split()


AS_IT_STANDS = Reading()


@dataclass(frozen=True)
class SacreBleu:
    """A metric of sacreBLEU, by its own extraction of statistics and its own formula, so the scores are its own."""

    corpus: BLEU | CHRF | TER
    sentence: BLEU | CHRF | TER

    def segments(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
        """See Metric."""
        return np.asarray(self.corpus._extract_corpus_statistics(hypotheses, references), dtype=np.float64)

    def score(self, total: Statistics) -> float:
        """See Metric."""
        return float(self.corpus._compute_score_from_stats(total.tolist()).score)

    def segment_score(self, row: Statistics) -> float:
        """See Metric."""
        return float(self.sentence._compute_score_from_stats(row.tolist()).score)

    def signature(self, references: int) -> str:
        """See Metric."""
        return str(self.corpus._SIGNATURE_TYPE({**vars(self.corpus), "num_refs": references}))


@dataclass(frozen=True)
class Quotient:
    """A metric of ours: one count over another; 0 where there is nothing to divide by."""

    counts: Callable[[str, Sequence[str]], tuple[float, int]]
    """A hypothesis and its references -> numerator and denominator."""
    scale: float
    settings: str
    """The signature without the number of references and the version."""

    def segments(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
        """See Metric."""
        rows = [self.counts(ours, theirs) for ours, *theirs in zip(hypotheses, *references, strict=True)]
        return np.asarray(rows, dtype=np.float64)

    def score(self, total: Statistics) -> float:
        """See Metric."""
        numerator, denominator = total.tolist()
        return self.scale * numerator / denominator if denominator else 0.0

    def segment_score(self, row: Statistics) -> float:
        """See Metric."""
        return self.score(row)

    def signature(self, references: int) -> str:
        """See Metric."""
        return f"nrefs:{references}|{self.settings}|version:bothways-{_version()}"


@dataclass(frozen=True)
class RougeMean(Quotient):
    """The mean of the segments' ROUGE."""

    rouge: Rouge

    def segments(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
        """See Metric."""
        self.rouge.require_words(references)
        return super().segments(hypotheses, references)


def bleu(reading: Reading) -> Metric:
    """BLEU; a segment's own score uses the effective order, since most segments have no matching 4-gram."""
    # force: sacreBLEU would print a warning when text looks tokenized; decoded word vocabularies rightly do.
    make = partial(BLEU, lowercase=reading.lowercase, tokenize=reading.tokenize, force=True)
    return SacreBleu(make(), make(effective_order=True))


def chrf(reading: Reading) -> Metric:
    """chrF2: characters, so the tokenizer plays no part."""
    metric = CHRF(lowercase=reading.lowercase)
    return SacreBleu(metric, metric)


def ter(reading: Reading) -> Metric:
    """TER with its own tokenizer. Case counts unless `lowercase` is set; sacreBLEU's command has it the other way."""
    metric = TER(case_sensitive=not reading.lowercase)
    return SacreBleu(metric, metric)


def rouge(unit: str, measure: str, reading: Reading) -> Metric:
    """ROUGE; it lower-cases and has words of its own, so case and tokenizer of the reading play no part."""
    stem = reading.stem if reading.stem is not None else measure == "duc"
    kind = Rouge(unit, stem)
    value, settings = {
        "f1": (kind.f1, "measure:f1|refs:best"),
        "recall": (kind.recall, "measure:recall|refs:best"),
        "duc": (kind.pooled_recall, f"measure:recall|refs:pooled|bytes:{DUC_BYTES}"),
    }[measure]
    package = f"rouge-score-{installed_version('rouge-score')}"
    settings = f"case:lc|tok:rouge|stem:{'porter' if stem else 'no'}|{settings}|by:{package}"

    def counts(hypothesis: str, references: Sequence[str]) -> tuple[float, int]:
        return value(hypothesis, references), 1

    return RougeMean(counts, 100, settings, kind)


def exact_match(reading: Reading) -> Metric:
    """Share of hypotheses that are one of their references, white space around them aside."""

    def counts(hypothesis: str, references: Sequence[str]) -> tuple[int, int]:
        return int(reading.text(hypothesis) in map(reading.text, references)), 1

    return Quotient(counts, 100, _case(reading))


def length_ratio(reading: Reading) -> Metric:
    """Words of the hypotheses over words of the references; of several references the closest in length."""

    def counts(hypothesis: str, references: Sequence[str]) -> tuple[int, int]:
        length = len(reading.words(hypothesis))
        return length, closest_length(length, [len(reading.words(reference)) for reference in references])

    return Quotient(counts, 1, f"{_case(reading)}|tok:{reading.tokenize}")


def matching_accuracy(end: End, reading: Reading) -> Metric:
    """Share of the reference's first (last) four words that the hypothesis has at the same position."""

    def counts(hypothesis: str, references: Sequence[str]) -> tuple[int, int]:
        return matches_at(end, reading.words(hypothesis), [reading.words(reference) for reference in references])

    return Quotient(counts, 100, f"{_case(reading)}|tok:{reading.tokenize}")


ROUGE = ("rouge1", "rouge2", "rougeL")
METRICS: Mapping[str, Callable[[Reading], Metric]] = {
    "bleu": bleu,
    "chrf": chrf,
    "ter": ter,
    **{unit: partial(rouge, unit, "f1") for unit in ROUGE},
    **{f"{unit}-recall": partial(rouge, unit, "recall") for unit in ROUGE},
    **{f"{unit}-duc": partial(rouge, unit, "duc") for unit in ROUGE},
    "exact_match": exact_match,
    "length_ratio": length_ratio,
    "first4": partial(matching_accuracy, "first"),
    "last4": partial(matching_accuracy, "last"),
}


def gain(name: str, score: float, base: float) -> float:
    """How much better a score is than another: above 0 if it is, whichever way the metric counts."""
    if name == "ter":
        return base - score
    if name == "length_ratio":
        return abs(base - 1) - abs(score - 1)
    return score - base


@dataclass(frozen=True)
class Result:
    """A score with what it was made of."""

    name: str
    """As in METRICS."""
    score: float
    signature: str
    segments: list[float]
    """The score of each segment alone; their mean is not the corpus score."""


def score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = ("bleu",),
    lowercase: bool = False,
    tokenize: str = "13a",
    names: Sequence[str] = (),
    stem: bool | None = None,
) -> list[Result]:
    """A result for each metric; references[r][i] is the r-th reference of hypotheses[i].

    `names` are those of the hypotheses' file and of each reference's, for messages. `stem` is ROUGE's (see Reading).
    """
    (ours, *theirs) = names or ("hypotheses",)
    measured = measure({ours: hypotheses}, references, metrics, Reading(lowercase, tokenize, stem), theirs)
    return [Result(m.name, m.score(ours), m.signature, m.segment_scores(ours)) for m in measured]


@dataclass(frozen=True)
class Measured:
    """Several systems' sentences under one metric: what every score, test and interval of lengths adds up."""

    name: str
    """As in METRICS."""
    metric: Metric
    signature: str
    rows: Mapping[str, Statistics]
    """Name of a system -> its statistics [N, F]; row i is segment i for all of them."""

    def score(self, system: str) -> float:
        """The corpus score of a system."""
        return self.metric.score(self.rows[system].sum(axis=0))

    def segment_scores(self, system: str) -> list[float]:
        """The score of each segment alone; their mean is not the corpus score."""
        return [self.metric.segment_score(row) for row in self.rows[system]]


def measure(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = ("bleu",),
    reading: Reading = AS_IT_STANDS,
    names: Sequence[str] = (),
) -> list[Measured]:
    """The statistics of each system under each metric; `names` are those of the references, for messages."""
    chosen = {name: make_metric(name, reading.lowercase, reading.tokenize, reading.stem) for name in metrics}
    names = names or [f"reference {r}" for r in range(1, len(references) + 1)]
    for system, hypotheses in systems.items():
        check_lines(hypotheses, references, (system, *names))
    return [
        Measured(
            name,
            metric,
            metric.signature(len(references)),
            {system: metric.segments(hypotheses, references) for system, hypotheses in systems.items()},
        )
        for name, metric in chosen.items()
    ]


def make_metric(name: str, lowercase: bool = False, tokenize: str = "13a", stem: bool | None = None) -> Metric:
    """The metric of this name, ready for any number of hypotheses."""
    if name not in METRICS:
        raise DataError(f"unknown metric {name!r}; accepted: {', '.join(METRICS)}")
    _tokenizer(tokenize)
    return METRICS[name](Reading(lowercase, tokenize, stem))


def check_lines(hypotheses: Sequence[str], references: Sequence[Sequence[str]], names: Sequence[str] = ()) -> None:
    """Raise unless there is something to score and line i of every text belongs to line i of the others."""
    if not references:
        raise DataError("no references: a score needs at least one reference text")
    if any(isinstance(reference, str) for reference in references):
        raise DataError("references must be a list of texts, each a list of lines; put a single text in a list")
    ours, *theirs = names or ("hypotheses", *(f"reference {r}" for r in range(1, len(references) + 1)))
    for name, reference in zip(theirs, references, strict=True):
        if len(reference) != len(hypotheses):
            raise DataError(
                f"{ours} has {len(hypotheses)} lines but {name} has {len(reference)}; "
                f"line i of one must be scored against line i of the other"
            )
    if not hypotheses:
        raise DataError(f"{ours} is empty: there is nothing to score")


def notes(references: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """What a person should know about references that can be scored against all the same."""
    said = []
    for name, lines in zip(names, references, strict=True):
        empty = [number for number, line in enumerate(lines, 1) if not line.strip()]
        if empty:
            where = f"line {empty[0]} is" if len(empty) == 1 else f"{len(empty)} lines are"
            first = "" if len(empty) == 1 else f" (the first: line {empty[0]})"
            said.append(f"{name}: {where} empty{first}; no word of a hypothesis matches there")
    return said


def to_json(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """What `score --json` prints: {"metrics": [{"name", "score", "signature", "segments"}]}."""
    return {"metrics": [dict(vars(result)) for result in results]}


def label(name: str) -> str:
    """How a table writes a metric's name."""
    return {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}.get(name, name)


def digits(name: str) -> int:
    """Digits after the point that a table shows of this metric."""
    return 3 if name == "length_ratio" else 2


def table(results: Sequence[Result]) -> str:
    """A line for each result: label, score, signature."""
    cells = [(label(r.name), f"{r.score:.{digits(r.name)}f}") for r in results]
    label_width = max((len(name) for name, _ in cells), default=0)
    score_width = max((len(value) for _, value in cells), default=0)
    return "\n".join(
        f"{name:{label_width}} {value:>{score_width}}  {result.signature}"
        for (name, value), result in zip(cells, results, strict=True)
    )


@cache
def _tokenizer(name: str) -> Callable[[str], str]:
    """sacreBLEU's tokenizer of this name; some need a package of their own."""
    if name not in BLEU.TOKENIZERS:
        raise DataError(f"unknown tokenizer {name!r}; accepted: {', '.join(BLEU.TOKENIZERS)}")
    try:
        tokenizer: Callable[[str], str] = BLEU(tokenize=name).tokenizer
    except (ImportError, RuntimeError) as error:
        raise DataError(f"tokenizer {name!r} cannot be used here: {' '.join(str(error).split())}") from None
    return tokenizer


def _case(reading: Reading) -> str:
    return f"case:{'lc' if reading.lowercase else 'mixed'}"


@cache
def _version() -> str:
    try:
        return installed_version("bothways")
    except PackageNotFoundError:
        return "source"
