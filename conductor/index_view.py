"""A prefix index as a scheduler asks it: one context, a fixed list of instances, arrays in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.index import PrefixIndex
from moonpool.errors import UsageError
from moonpool.events import CacheContext, Hashes, Holder


@final
class IndexView:
    """Answers `overlap` for the holders given, in their order; each is registered with the context.

    A block counts for a tier when it is in that tier or a faster one. One thread at a time.
    """

    def __init__(self, index: PrefixIndex, context: CacheContext, holders: Sequence[Holder]) -> None:
        if not holders or len(set(holders)) != len(holders):
            raise UsageError("a view needs one holder or more, each once", field="holders")
        for holder in holders:
            index.register(context, holder)
        self.index: Final = index
        self.context: Final = context
        self.holders: Final = tuple(holders)
        self._version = -1
        self._columns: NDArray[np.intp] = np.zeros(0, np.intp)

    def overlap(self, hashes: Hashes) -> NDArray[np.int32]:
        """int32[3, n]: leading blocks of each holder in G1; in G1 or G2; in G1, G2 or G3. Yours to keep."""
        if self.index.version != self._version:
            self._look_up_columns()
        depths = self.index.query_depths(self.context, hashes, mixed=True)
        return depths[:, self._columns].astype(np.int32)

    def _look_up_columns(self) -> None:
        # Numbers may have changed: one of ours may have left and come back.
        for holder in self.holders:
            self.index.register(self.context, holder)
        numbers = [self.index.number(holder) for holder in self.holders]
        self._columns = np.array(numbers, np.intp)
        self._version = self.index.version
