"""Several models as one: searched with together, or each on its own and judged by all.

Their vocabularies are the same; their families, sizes and training need not be.
"""

from collections.abc import Sequence

from torch import nn

from bothways.models.interface import Seq2Seq
from bothways.tokens import Direction


class Panel(nn.Module):
    """Models that search each on its own and rescore what all of them found: one model with itself, or several."""

    members: Sequence[Seq2Seq]

    def __init__(self, members: Sequence[Seq2Seq], directions: Sequence[tuple[Direction, ...]]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)  # type: ignore[assignment]
        self.directions = directions

    def parameter_count(self) -> int:
        """Trained numbers of all members; a member that stands twice counts once."""
        return sum(p.numel() for p in self.parameters())
