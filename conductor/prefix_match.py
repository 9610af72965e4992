"""The answer to "who has the start of this prompt?"."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple, final

from moonpool.errors import UsageError
from moonpool.events import Holder, Tier
from moonpool.native.table.matching import Match

#: What a block is worth in G1, G2 and G3, as Mooncake's guide for routers starts with.
TIER_WEIGHTS: Final = (1.0, 0.75, 0.25)


class Depths(NamedTuple):
    """Leading blocks: on the device; with those behind them in host memory; with those behind on disk."""

    device: int
    host: int
    disk: int


class ZeroReason(StrEnum):
    """Why nobody matches."""

    UNKNOWN_CONTEXT = "unknown_context"
    """No holder is registered for this tenant, model, LoRA, salt and block size."""
    SHORT_PROMPT = "short_prompt"
    """The prompt has no whole block."""
    FIRST_BLOCK_UNKNOWN = "first_block_unknown"
    """No holder has the first block."""


@final
class PrefixMatch:
    """How far each holder matches a chain. Holders that have not the first block are left out.

    Depths count blocks and are cumulative: 0 <= device <= host <= disk. A match keeps what its query saw:
    later changes of the index do not change it.
    """

    __slots__ = ("_match", "_names", "members")

    def __init__(self, match: Match, names: tuple[Holder | None, ...], members: int) -> None:
        self._match = match
        self._names = names
        #: Holders of the context, those without a match included.
        self.members = members

    def __len__(self) -> int:
        return len(self._match)

    @property
    def blocks(self) -> int:
        """Blocks that were asked for."""
        return self._match.blocks

    @property
    def depth(self) -> int:
        """Leading blocks that the best holder has."""
        return self._match.depth_of_rank(1)

    @property
    def holders(self) -> list[Holder]:
        """The holders that match at all."""
        return [self._name(number) for number in self._match.holders]

    def depths(self) -> dict[Holder, int]:
        """Leading blocks of every holder that matches, in whatever tier. The quickest form by name."""
        return self._match.depths_by_name(self._names)

    def by_holder(self) -> dict[Holder, Depths]:
        """Depths of every holder that matches."""
        rows = self._match.rows_by_holder()
        return {self._name(number): Depths(*row) for number, row in rows.items()}

    def by_instance(self) -> dict[str, Depths]:
        """Depths of each instance's best rank, tier by tier."""
        best: dict[str, Depths] = {}
        for holder, depths in self.by_holder().items():
            known = best.get(holder.instance, depths)
            best[holder.instance] = Depths(*map(max, known, depths))
        return best

    def universal(self, share: float = 1.0) -> int:
        """Leading blocks that at least this share of the members have: they say nothing about where to go."""
        if not 0.0 < share <= 1.0:
            raise UsageError("a share is above 0 and at most 1", field="share", value=str(share))
        # Less a little, so that a share like 0.7 of 10 members is 7 of them and not 8.
        return self._match.depth_of_rank(max(1, math.ceil(share * self.members - 1e-9)))

    def marginal(self, share: float = 1.0) -> dict[Holder, Depths]:
        """Depths beyond the universal blocks."""
        shared = self.universal(share)
        return {
            holder: Depths(*(max(0, depth - shared) for depth in depths))
            for holder, depths in self.by_holder().items()
        }

    def worth(
        self, weights: tuple[float, float, float] = TIER_WEIGHTS, share: float | None = 1.0
    ) -> dict[Holder, float]:
        """Weighted blocks of each holder, each in its fastest tier; `share` None: universal ones too."""
        rows = self.by_holder() if share is None else self.marginal(share)
        return {
            holder: weights[Tier.DEVICE] * row.device
            + weights[Tier.HOST] * (row.host - row.device)
            + weights[Tier.DISK] * (row.disk - row.host)
            for holder, row in rows.items()
        }

    def planes(self) -> memoryview:
        """`uint32[4, holders]`: numbers of the holders, device, host, disk; a read-only view for arrays."""
        return self._match.planes()

    def why_nothing(self) -> ZeroReason | None:
        """Why nobody matches; None when somebody does."""
        if len(self._match):
            return None
        if not self.members:
            return ZeroReason.UNKNOWN_CONTEXT
        return ZeroReason.FIRST_BLOCK_UNKNOWN if self.blocks else ZeroReason.SHORT_PROMPT

    def _name(self, number: int) -> Holder:
        holder = self._names[number]
        assert holder is not None, "a block was held by a number without a name"
        return holder
