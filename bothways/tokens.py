"""The terms every part shares: the two directions and the five tokens that each vocabulary begins with."""

from collections.abc import Sequence
from enum import IntEnum

PAD = 0  # fills a batch; never a key, never predicted
TAG_L2R = 1  # first input of an l2r stream; never predicted
TAG_R2L = 2  # first input of an r2l stream; never predicted
END = 3  # ends a source and a target
UNKNOWN = 4  # a word outside a word vocabulary; subword vocabularies fall back to bytes and never use it
SPECIAL_TOKENS = ("<pad>", "<l2r>", "<r2l>", "</s>", "<unk>")
FIRST_PREDICTED = END  # tags and padding come before it, and are masked before every softmax


class Direction(IntEnum):
    """Index on the axis D. It is the order of generation, and says nothing about the script's reading direction."""

    L2R = 0
    R2L = 1

    @property
    def tag(self) -> int:
        """The first input token of a stream of this direction."""
        return TAG_L2R if self is Direction.L2R else TAG_R2L

    @property
    def label(self) -> str:
        """The name used in configurations, files and prose."""
        return self.name.lower()


L2R, R2L = Direction.L2R, Direction.R2L
DIRECTIONS = {"l2r": (L2R,), "r2l": (R2L,), "both": (L2R, R2L)}


def turn(tokens: Sequence[int], direction: Direction) -> list[int]:
    """Reading order to generation order and back (it is its own inverse); the end mark is not part of `tokens`."""
    return list(tokens) if direction is L2R else list(tokens)[::-1]
