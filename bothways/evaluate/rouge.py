"""A hypothesis and its references -> the ROUGE of this segment, from 0 to 1, by the package rouge-score.

    f1            the best reference counts: the one that gives the highest F1
    recall        the best reference counts: the one that gives the highest recall
    pooled_recall recall within the first 75 bytes, over all references together: DUC's protocol,
                  `ROUGE-1.5.5.pl -a -m -b 75 -f A` (docs/scores.md lists what is different)

Words are runs of a-z and 0-9 after lower-casing; everything else, letters of other scripts included, separates them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from bothways.errors import DataError

DUC_BYTES = 75  # what DUC 2003 and 2004 allowed a very short summary


@dataclass(frozen=True)
class Rouge:
    """One kind of ROUGE."""

    unit: str
    """rouge1 (words), rouge2 (pairs of words), rougeL (longest common subsequence), as rouge-score names them."""
    stem: bool = False
    """Whether Porter's stemmer takes the endings off words of more than three letters."""

    def f1(self, hypothesis: str, references: Sequence[str]) -> float:
        """F1 with the best reference."""
        return max(float(self._compare(hypothesis, reference).fmeasure) for reference in references)

    def recall(self, hypothesis: str, references: Sequence[str]) -> float:
        """Recall with the best reference."""
        return max(float(self._compare(hypothesis, reference).recall) for reference in references)

    def pooled_recall(self, hypothesis: str, references: Sequence[str], size: int = DUC_BYTES) -> float:
        """Matches with all references over the units of all references; both sides cut to their first bytes."""
        hypothesis = cut(hypothesis, size)
        matches = units = 0
        for reference in (cut(text, size) for text in references):
            count = self._count(reference)
            matches += round(self._compare(hypothesis, reference).recall * count)
            units += count
        return matches / units if units else 0.0

    def require_words(self, references: Sequence[Sequence[str]]) -> None:
        """Raise where every score would be 0 because of the script the text is written in."""
        lines = [line for reference in references for line in reference if line.strip()]
        if lines and not any(self._words.tokenize(line) for line in lines):
            raise DataError(
                f"{self.unit} knows only words of a-z and 0-9, and no reference has one (the first: {lines[0]!r}); "
                f"another metric must score this text"
            )

    def _compare(self, hypothesis: str, reference: str) -> Any:
        return self._scorer.score(reference, hypothesis)[self.unit]

    def _count(self, reference: str) -> int:
        words = len(self._words.tokenize(reference))
        return max(words - 1, 0) if self.unit == "rouge2" else words

    @cached_property
    def _words(self) -> "_Words":
        return _Words(self.stem)

    @cached_property
    def _scorer(self) -> Any:
        from rouge_score.rouge_scorer import RougeScorer  # it loads nltk, which nobody else needs

        return RougeScorer([self.unit], tokenizer=self._words)


class _Words:
    """rouge-score's own words. They are remembered: every reference asks for the hypothesis again."""

    def __init__(self, stem: bool) -> None:
        from nltk.stem.porter import PorterStemmer
        from rouge_score.tokenize import tokenize

        stemmer = PorterStemmer() if stem else None
        if stemmer is not None:
            stemmer.stem = lru_cache(maxsize=100_000)(stemmer.stem)
        self.tokenize = lru_cache(maxsize=1_000)(lambda text: tokenize(text, stemmer))


def cut(text: str, size: int) -> str:
    """The first bytes of a text in UTF-8; a character that does not fit wholly is left out."""
    return text.encode("utf-8")[:size].decode("utf-8", errors="ignore")
