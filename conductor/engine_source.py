"""From an engine's records to events of the index: whose they are, what they mean, in whose hashes.

Theory of operation. A source is one stream: one instance, or one data-parallel rank of it. Its registration
says model, tenant, block size and how the engine hashes; its records say blocks.

- *Groups.* Models with several kinds of attention publish a group for each. Only groups of full attention are
  a prefix that another request can use; a sliding window's blocks are passed over and counted. A removal does
  not say its kind, so the kind of each group is remembered.
- *Hashes.* An engine whose recipe is known is believed as it is: a query hashes its prompt the same way.
  Where it is not known (a random seed), `rehash` names a recipe of ours: hashes are computed from the
  records' tokens behind the parent's, and a table remembers ours for each of the engine's, as long as it has
  the block. A block whose tokens or parent nobody said cannot be named; it is counted and left out.
- *Contexts.* A record's LoRA and block size count where it names them; the rest is the registration's. What
  the engine mixes into its hashes, as vLLM does with a salt, need not keep contexts apart as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, final

from moonpool.conductor.blocks import BlockHasher
from moonpool.conductor.engine_payload import PREFIX_KINDS, RawBatch, RawCleared, RawEvent, RawHash, RawStored
from moonpool.conductor.recipes import HashRecipe
from moonpool.errors import UsageError
from moonpool.events import (
    BlockEvent,
    BlockHash,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheContext,
    Holder,
    Tier,
    block_hash,
    check_context,
    check_holder,
    tier_of_medium,
)

GROUPS_MAX: Final = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """What a registration says of a stream. `rehash`: name blocks by this recipe instead of the engine's."""

    instance: str
    context: CacheContext
    rank: int = 0
    rehash: HashRecipe | None = None
    #: Most blocks whose names are remembered for `rehash`; beyond it new ones are left out.
    names_max: int = 1 << 22

    def __post_init__(self) -> None:
        check_context(self.context)
        check_holder(Holder(self.instance, self.rank))
        if not 1 <= self.names_max <= 1 << 30:
            raise UsageError("names_max is from 1 to 2**30", field="names_max", value=str(self.names_max))


@final
@dataclass(slots=True)
class SourceCounters:
    """What a source's records came to; all only grow."""

    blocks_stored: int = 0
    blocks_removed: int = 0
    clears: int = 0
    #: Blocks of groups that are no prefix.
    groups_passed_over: int = 0
    #: Blocks that `rehash` could not name.
    unnamed: int = 0
    #: Events whose medium nobody knows.
    media_unknown: int = 0
    kinds_unknown: int = 0


@final
class EngineSource:
    """Turns one stream's batches into events. Pure; one thread at a time."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec: Final = spec
        self.counters: Final = SourceCounters()
        self._is_prefix: dict[int | None, bool] = {}
        self._contexts: dict[tuple[str, int], CacheContext] = {}
        self._names: Final = BlockNames(spec.names_max) if spec.rehash else None
        self._hashers: dict[CacheContext, BlockHasher] = {}

    @property
    def names_kept(self) -> int:
        """How many of the engine's hashes are remembered for `rehash`."""
        return len(self._names) if self._names is not None else 0

    def events(self, batch: RawBatch) -> list[BlockEvent]:
        """The events of a batch, in its order."""
        self.counters.kinds_unknown += batch.unknown
        rank = self.spec.rank if batch.rank is None else batch.rank
        holder = Holder(self.spec.instance, rank)
        found: list[BlockEvent] = []
        for record in batch.events:
            found.extend(self._event(record, holder))
        return found

    def forget(self) -> None:
        """The stream starts again from nothing (the engine restarted): remembered names and groups go."""
        if self._names is not None:
            self._names.clear()
        self._is_prefix.clear()

    def _event(self, record: RawEvent, holder: Holder) -> Iterable[BlockEvent]:
        if isinstance(record, RawCleared):
            self.counters.clears += 1
            if self._names is not None:
                self._names.drop_rank(holder.rank)
            return (BlocksCleared(holder),)
        try:
            tier = tier_of_medium(record.medium)
        except UsageError:
            self.counters.media_unknown += 1
            return ()
        if not self._takes(record):
            self.counters.groups_passed_over += len(record.hashes)
            return ()
        if isinstance(record, RawStored):
            return self._stored(record, holder, tier)
        self.counters.blocks_removed += len(record.hashes)
        hashes = self._removed_names(record.hashes, holder, tier)
        return [BlocksRemoved(context, holder, hashes, tier) for context in self._known_contexts()]

    def _takes(self, record: Any) -> bool:
        """Whether the record's group is a prefix; what a removal's group was is known from its stores."""
        if isinstance(record, RawStored) and record.kind is not None:
            takes = record.kind in PREFIX_KINDS
            if record.group in self._is_prefix or len(self._is_prefix) < GROUPS_MAX:
                self._is_prefix[record.group] = takes
            return takes
        return self._is_prefix.get(record.group, True)

    def _stored(self, record: RawStored, holder: Holder, tier: Tier) -> Iterable[BlockEvent]:
        context = self._context(record)
        if self._names is None:
            hashes = [block_hash(raw) for raw in record.hashes]
            parent = None if record.parent is None else block_hash(record.parent)
        else:
            named, parent = self._name(record, context, holder, tier)
            self.counters.unnamed += len(record.hashes) - len(named)
            if not named:
                return ()
            hashes = named
        self.counters.blocks_stored += len(hashes)
        return (BlocksStored(context, holder, hashes, tier, parent, record.tokens),)

    def _context(self, record: RawStored) -> CacheContext:
        spec = self.spec.context
        key = (spec.lora if record.lora is None else record.lora, record.block_tokens or spec.block_tokens)
        context = self._contexts.get(key)
        if context is None:
            context = spec._replace(lora=key[0], block_tokens=key[1])
            if len(self._contexts) < GROUPS_MAX:
                self._contexts[key] = context
        return context

    def _known_contexts(self) -> Iterable[CacheContext]:
        """A removal does not say its LoRA or block size: hashes are unique, so it is told to each context."""
        return tuple(self._contexts.values()) or (self.spec.context,)

    def _removed_names(self, raw: tuple[RawHash, ...], holder: Holder, tier: Tier) -> list[BlockHash]:
        if self._names is None:
            return [block_hash(each) for each in raw]
        return [name for each in raw if (name := self._names.drop(each, holder.rank, tier)) is not None]

    def _name(
        self, record: RawStored, context: CacheContext, holder: Holder, tier: Tier
    ) -> tuple[list[BlockHash], BlockHash | None]:
        names = self._names
        assert names is not None
        place = (holder.rank, tier)
        known = [names.find(raw) for raw in record.hashes]
        parent = None if record.parent is None else names.find(record.parent)
        if None in known and (record.parent is None or parent is not None):
            known = self._compute(record, context, parent)
        found: list[BlockHash] = []
        for raw, name in zip(record.hashes, known, strict=True):
            if name is None or not names.keep(raw, name, *place):
                break  # what follows has a parent without a name
            found.append(name)
        return found, parent

    def _compute(
        self, record: RawStored, context: CacheContext, parent: BlockHash | None
    ) -> list[BlockHash | None]:
        count = len(record.hashes)
        if len(record.tokens) < count * context.block_tokens:
            return [None] * count
        hasher = self._hashers.get(context)
        if hasher is None:
            assert self.spec.rehash is not None
            hasher = self._hashers[context] = BlockHasher(self.spec.rehash, context)
        tokens = record.tokens[: count * context.block_tokens]
        first = 0 if parent is None else 1
        chain = hasher.chain(tokens, parent=parent, first_block=first)
        return [BlockHash(each) for each in chain.hashes]


@dataclass(slots=True)
class _Named:
    name: BlockHash
    places: set[tuple[int, Tier]] = field(default_factory=set)


@final
class BlockNames:
    """Our hash of each block that an engine has, by the engine's own; bounded."""

    def __init__(self, names_max: int) -> None:
        self._names_max: Final = names_max
        self._named: dict[RawHash, _Named] = {}

    def __len__(self) -> int:
        return len(self._named)

    def find(self, raw: RawHash) -> BlockHash | None:
        """Our name; None when the block is not known."""
        found = self._named.get(raw)
        return None if found is None else found.name

    def keep(self, raw: RawHash, name: BlockHash, rank: int, tier: Tier) -> bool:
        """The block is in this place too; False when there is no room to remember it."""
        found = self._named.get(raw)
        if found is None:
            if len(self._named) >= self._names_max:
                return False
            found = self._named[raw] = _Named(name)
        found.places.add((rank, tier))
        return True

    def drop(self, raw: RawHash, rank: int, tier: Tier) -> BlockHash | None:
        """The block has left this place; forgotten with its last one. None when it was not known."""
        found = self._named.get(raw)
        if found is None:
            return None
        found.places.discard((rank, tier))
        if not found.places:
            del self._named[raw]
        return found.name

    def drop_rank(self, rank: int) -> None:
        """A rank has nothing any more. O(names)."""
        for raw, found in list(self._named.items()):
            found.places = {place for place in found.places if place[0] != rank}
            if not found.places:
                del self._named[raw]

    def clear(self) -> None:
        """Forgets all."""
        self._named.clear()
