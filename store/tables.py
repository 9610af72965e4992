"""What the master's core asks of its tables: plain values in, plain values out, no clock and no I/O.

The native tables (`moonpool.native.table`) and their Python twins both satisfy these protocols, so the core,
its tests and the simulator run on either. An *index* names a live object inside one table and is reused after
`drop`. Segments are named by their segment id. All sizes and offsets are bytes, all times cluster ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.native.table.stored import OpenPut, Place, PutEntry, StoredObject

__all__ = [
    "Extents",
    "ObjectTable",
    "OpenPut",
    "OpenPuts",
    "Place",
    "PutEntry",
    "Slots",
    "StoredObject",
]


class ObjectTable(Protocol):
    """Objects by (tenant, key), with one recency queue for each segment."""

    def __len__(self) -> int: ...
    def add_segment(self, segment: int, capacity_bytes: int) -> None:
        """Makes room for a segment's queue; `capacity_bytes` sizes the policy's queues."""

    def drop_segment(self, segment: int) -> None:
        """Forgets a segment without places; InternalError when it still has some."""

    def find(self, tenant: int, key: bytes) -> int:
        """The index of the object, or -1."""

    def add(self, stored: StoredObject) -> int:
        """Adds an object as the most recent of its segments; InternalError when its key is taken.

        LimitExceeded when the table is full.
        """

    def at(self, index: int) -> StoredObject:
        """The object at a live index; InternalError for any other."""

    def object_id(self, index: int) -> int:
        """Its id, as `at(index).object_id` and cheaper."""

    def drop(self, index: int) -> StoredObject:
        """Takes the object and all of its places out."""

    def add_place(self, index: int, place: Place) -> None:
        """One more complete copy; InternalError when the segment has one of it."""

    def drop_place(self, index: int, segment: int) -> Place:
        """Takes one place out; the object stays, with no place if that was its last."""

    def set_pin(self, index: int, pin: int, soft_pin_end_ms: int) -> None:
        """Changes how it may be evicted."""

    def lease_until(self, index: int) -> int:
        """When its last lease ends; 0 when it never had one."""

    def extend_lease(self, index: int, until_ms: int) -> None:
        """Never shortens."""

    def touch(self, index: int) -> None:
        """A use, as the policy counts it, in every segment that has a place."""

    def victims(
        self, segment: int, wanted_bytes: int, now_ms: int, *, count_max: int, soft: bool
    ) -> list[int]:
        """Objects to evict from a segment, least valuable first, until their extents cover `wanted_bytes`.

        Skips leased and hard-pinned ones, and soft-pinned ones unless `soft` (then these come last). Looks at
        most at 4 * count_max + 64 entries; what it may not evict goes to the recent end of its queue, so that
        the next call goes on behind it. They stay in the table: the caller drops what it evicts.

        All members of a group or none: where a member would lose its last place, all members come, also those
        with no place on this segment, and all of them end; else those with a place here come, and lose it.
        A group comes whole even where `count_max` is smaller.
        """

    def places_on(self, segment: int, after_index: int, count_max: int) -> list[int]:
        """Indices above `after_index` of objects with a place on the segment, ascending."""

    def bytes_on(self, segment: int) -> int:
        """Bytes of all extents of complete places on the segment, rounded as extents are."""

    def bytes_of(self, tenant: int) -> int:
        """Bytes of all extents of complete places of the tenant's objects, rounded; 0 for a stranger."""

    def packed_places(self, segment: int) -> bytes:
        """Every place on the segment as u64 little-endian triples (offset, extent bytes, slot), by offset.

        What `Extents.take_all` and `Slots.take_all` rebuild free space from, at native speed.
        """

    def drop_places(self, segment: int) -> int:
        """Takes out all places on the segment, and the objects that had no other; how many objects ended."""

    def find_prefix(
        self, tenant: int, prefix: bytes, after_index: int, count_max: int, looks_max: int
    ) -> tuple[list[int], int]:
        """Indices above `after_index` of the tenant's objects whose keys start with `prefix`, ascending.

        Stops at `count_max` found or `looks_max` looked at. Second: the index to go on after, -1 at the end.
        """

    def scan(self, after_index: int, count_max: int) -> list[int]:
        """Live indices above `after_index`, ascending. Start with -1."""

    def dump(self) -> bytes:
        """All objects and the order of their queues, without leases. Versioned, checked.

        The same bytes from the native table and from its twin.
        """

    def load(self, data: bytes) -> None:
        """Into an empty table with its segments added; UsageError, and an empty table, for what is no dump.

        Objects keep their order by index; indices start again at 0 without gaps.
        """

    def memory_bytes(self) -> int:
        """Bytes of memory that the table takes."""

    def check(self) -> None:
        """Asserts all invariants; InternalError names the first that fails."""


class Extents(Protocol):
    """Free space of one segment, by offset. Sizes are rounded: to 4,096 from 4,096 bytes up, else to 64."""

    capacity_bytes: int

    def add_range(self, offset: int, length: int) -> None:
        """Space that may be given from now on (an opened window); merges with free neighbours."""

    def allocate(self, size: int) -> int:
        """The offset of a new extent, or -1. O(1)."""

    def free(self, offset: int, size: int) -> None:
        """Gives back an extent as allocated; InternalError when it is not one."""

    def take(self, offset: int, size: int) -> None:
        """Carves a given extent out of free space (rebuilding); InternalError when it is not all free."""

    def take_all(self, packed: bytes) -> None:
        """`take` for each triple of `ObjectTable.packed_places`, which are ascending."""

    def free_bytes(self) -> int:
        """Bytes that may be given now, in whatever pieces."""

    def largest_free(self) -> int:
        """Bytes of the largest free piece."""

    def extents(self) -> int:
        """How many extents are given."""

    def check(self) -> None: ...


class Slots(Protocol):
    """Free directory slots of one segment: lowest first is not promised. None is free at first."""

    def add_range(self, first: int, count: int) -> None:
        """Slots that may be given from now on; they open in proportion with the segment's windows."""

    def allocate(self) -> int:
        """A slot, or -1 when all that were added are taken."""

    def free(self, slot: int) -> None: ...
    def take(self, slot: int) -> None:
        """Marks a free slot as given (rebuilding); InternalError when it is not free."""

    def take_all(self, packed: bytes) -> None:
        """`take` for the slot of each triple of `ObjectTable.packed_places`."""

    def used(self) -> int:
        """How many slots are given."""

    def free_count(self) -> int:
        """How many slots may be given now."""


class OpenPuts(Protocol):
    """Puts that were started and have not ended, by put id, in order of their deadlines; bounded."""

    def __len__(self) -> int: ...
    def add(self, put: OpenPut) -> None:
        """LimitExceeded when the table is full; InternalError when the id is taken."""

    def get(self, put_id: int) -> OpenPut | None:
        """The put of that id; None when it is not open."""

    def end_entry(self, put_id: int, index: int, state: int) -> PutEntry:
        """Marks one entry; the put goes when none is open. Returns the entry as it was."""

    def expired(self, now_ms: int, count_max: int) -> list[int]:
        """Put ids whose deadline has passed, earliest first."""

    def of_client(self, client: int) -> Sequence[int]:
        """Ids of the open puts of a client."""

    def writing_bytes(self, segment: int) -> int:
        """Bytes of extents of open entries on a segment."""

    def writing_bytes_of(self, tenant: int) -> int:
        """Bytes of extents of the tenant's open entries, on all segments."""

    def check(self) -> None: ...
