"""Which instances have which blocks: the prefix index.

Theory of operation. A block is known by its chain hash within a context (tenant, model, LoRA, salt, block
size). For each block the index keeps the set of holders (ranks of instances) and the tiers they have it in.
It believes events: stored, removed, cleared. A query walks a prompt's chain once, for all holders together.
Names become numbers here (`membership`), everything per block is in `moonpool.native.table.block_table`.

Nothing ages out by itself: an index mirrors caches, and their events say what left. What it may hold is
bounded by its config: beyond that a store raises `LimitExceeded`, having kept the start of the chain.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from moonpool.conductor.index_config import IndexConfig
from moonpool.conductor.membership import Membership
from moonpool.conductor.prefix_match import PrefixMatch
from moonpool.errors import InternalError, UsageError
from moonpool.events import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheContext,
    Hashes,
    Holder,
    Tier,
)
from moonpool.native.table.block_table import EVERY_CONTEXT, EVERY_TIER, BlockTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: A context number that is never given out: nothing is stored there.
_NOWHERE: Final = EVERY_CONTEXT - 1


class IndexStatistics(NamedTuple):
    """What an index holds now; `forgotten` counts blocks dropped for want of room since it was made."""

    blocks: int
    contexts: int
    holders: int
    holder_sets: int
    memory_bytes: int
    forgotten: int


@final
class PrefixIndex:
    """Who has the start of a prompt.

    Pure: no clock, thread or socket. Changes come from one thread at a time; queries may come from others at
    the same time (the GIL is released in large calls). `hashes` are 64-bit integers in chain order: a list,
    an `array('Q')` as `BlockHasher` gives, or any buffer of 64-bit integers.
    """

    def __init__(self, config: IndexConfig | None = None) -> None:
        self.config: Final = config or IndexConfig()
        seed = self.config.table_seed
        self._membership: Final = Membership(self.config.contexts_max, self.config.holders_max)
        self._table: Final = BlockTable(
            blocks_max=self.config.blocks_max,
            holders_max=self.config.holders_max,
            set_bytes_max=self.config.set_bytes_max,
            seed=secrets.randbits(64) if seed is None else seed,
        )
        # Looked up on every call.
        self._places: Final = self._membership.places
        self._contexts: Final = self._membership.contexts
        self._call_blocks_max: Final = self.config.call_blocks_max

    def __len__(self) -> int:
        return len(self._table)

    def register(self, context: CacheContext, holder: Holder) -> None:
        """Makes a holder a member of a context before it has blocks there, so that matches count it.

        Registering again changes nothing. Raises `LimitExceeded` beyond `contexts_max` or `holders_max`.
        """
        self._membership.enter(context, holder)

    def unregister(self, holder: Holder, context: CacheContext | None = None) -> int:
        """Forgets a holder, in one context or everywhere. Returns how many blocks it had. O(blocks)."""
        homes = self._membership.homes(holder)
        leaving = homes if context is None else homes & {context}
        removed = self.clear(holder, None if leaving == homes else context) if leaving else 0
        for each in leaving:
            self._membership.leave(each, holder)
        return removed

    def store(self, context: CacheContext, holder: Holder, hashes: Hashes, tier: Tier = Tier.DEVICE) -> int:
        """The holder has these blocks in this tier; it becomes a member. Returns how many are new there.

        O(1) a block. Raises `LimitExceeded` at a bound: blocks before the error's `index` are stored.
        """
        place = self._places.get((context, holder)) or self._membership.enter(context, holder)
        self._check_length(hashes)
        return self._table.store(place[0], place[1], tier, hashes)

    def remove(
        self, context: CacheContext, holder: Holder, hashes: Hashes, tier: Tier | None = Tier.DEVICE
    ) -> int:
        """The holder no longer has these blocks in this tier (None: in any). Returns how many it had.

        O(1) a block.
        """
        place = self._places.get((context, holder))
        if place is None:
            return 0
        self._check_length(hashes)
        return self._table.remove(place[0], place[1], EVERY_TIER if tier is None else tier, hashes)

    def clear(self, holder: Holder, context: CacheContext | None = None, tier: Tier | None = None) -> int:
        """The holder has nothing in this tier (None: in any) of this context (None: of any) any more.

        It stays a member. Returns how many blocks it had there. O(blocks of the index), some ns each.
        """
        number = self._membership.number(holder)
        if number is None or (context is not None and context not in self._contexts):
            return 0
        where = EVERY_CONTEXT if context is None else self._contexts[context]
        return self._table.clear(number, EVERY_TIER if tier is None else tier, where)

    def apply(self, event: BlockEvent) -> int:
        """Takes in one event; returns how many blocks it changed."""
        if isinstance(event, BlocksStored):
            return self.store(event.context, event.holder, event.hashes, event.tier)
        if isinstance(event, BlocksRemoved):
            return self.remove(event.context, event.holder, event.hashes, event.tier)
        if isinstance(event, BlocksCleared):
            return self.clear(event.holder, event.context, event.tier)
        raise UsageError(f"an index takes no {type(event).__name__}", field="event")

    def query(self, context: CacheContext, hashes: Hashes, mixed: bool = False) -> PrefixMatch:
        """How far each holder of the context has this chain. O(blocks matched + holders of the first block).

        A holder matches tier by tier, fastest first, and never goes back up, which is what an engine with an
        offloading connector can use. `mixed`: a block counts for a tier when it is there or in a faster one.
        """
        self._check_length(hashes)
        match = self._table.query(self._contexts.get(context, _NOWHERE), hashes, mixed)
        return PrefixMatch(match, self._membership.names, self._membership.member_count(context))

    def query_depths(self, context: CacheContext, hashes: Hashes, mixed: bool = False) -> NDArray[np.uint32]:
        """The same as an array by holder number: uint32[3, width], device, host, disk; 0 for no match."""
        import numpy as np

        self._check_length(hashes)
        out = np.empty((3, self.width), np.uint32)
        self._table.query_into(self._contexts.get(context, _NOWHERE), hashes, out, mixed)
        return out

    def query_many(
        self, context: CacheContext, hashes: Hashes, offsets: Sequence[int], mixed: bool = False
    ) -> NDArray[np.uint32]:
        """Many chains in one call: chain i is `hashes[offsets[i]:offsets[i + 1]]`. uint32[n, 3, width].

        `BlockHasher.hashes_of_prompts` gives both arguments. The GIL is released.
        """
        import numpy as np

        self._check_length(hashes)
        out = np.empty((max(0, len(offsets) - 1), 3, self.width), np.uint32)
        self._table.query_many(self._contexts.get(context, _NOWHERE), hashes, offsets, out, mixed)
        return out

    @property
    def width(self) -> int:
        """Columns of the arrays by holder: one more than the highest number in use, and at least one."""
        return max(1, len(self._membership.names))

    @property
    def version(self) -> int:
        """Grows whenever a holder or context comes or goes; numbers are valid for one version."""
        return self._membership.version

    def number(self, holder: Holder) -> int | None:
        """The holder's column in the arrays; None when it is not registered."""
        return self._membership.number(holder)

    def members(self, context: CacheContext) -> frozenset[Holder]:
        """The holders of a context, those without blocks included."""
        return self._membership.members(context)

    def contexts(self) -> tuple[CacheContext, ...]:
        """The contexts that have members."""
        return tuple(self._contexts)

    def blocks_held(self, holder: Holder) -> dict[Tier, int]:
        """How many blocks a holder has in each tier, over all contexts. O(1)."""
        number = self._membership.number(holder)
        held = (0, 0, 0) if number is None else self._table.blocks_held(number)
        return dict(zip(Tier, held, strict=True))

    def holds(self, context: CacheContext, holder: Holder, block: int) -> frozenset[Tier]:
        """The tiers in which a holder has one block."""
        place = self._places.get((context, holder))
        bits = self._table.tiers_of(place.context, block, place.holder) if place else 0
        return frozenset(tier for tier in Tier if bits >> tier & 1)

    def statistics(self) -> IndexStatistics:
        """Sizes, for gauges. O(1)."""
        return IndexStatistics(
            blocks=len(self._table),
            contexts=len(self._contexts),
            holders=sum(holder is not None for holder in self._membership.names),
            holder_sets=self._table.holder_sets,
            memory_bytes=self._table.memory_bytes,
            forgotten=self._table.forgotten,
        )

    def check(self) -> None:
        """Asserts every invariant; raises `InternalError` that names the broken one. O(blocks x holders)."""
        self._membership.check()
        self._table.check()
        numbers = set(self._contexts.values())
        if not self._table.contexts_in_use() <= numbers:
            raise InternalError("blocks are kept for a context that has no member")
        for number in range(self.config.holders_max):
            named = number < len(self._membership.names) and self._membership.names[number] is not None
            if not named and any(self._table.blocks_held(number)):
                raise InternalError("blocks are kept for a holder that is not registered", index=number)

    def _check_length(self, hashes: Hashes) -> None:
        if len(hashes) > self._call_blocks_max:
            raise UsageError(
                f"one call takes at most {self._call_blocks_max} blocks; split it or raise call_blocks_max",
                field="call_blocks_max",
                limit=self._call_blocks_max,
            )
