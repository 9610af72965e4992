"""The records of the store's tables as plain values: what goes in, and what comes out again.

Sizes and offsets are bytes, times are cluster ms. `moonpool.store.tables` has the tables' protocols.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from moonpool.errors import InternalError
from moonpool.units import U64_MAX

#: Extents of this size and more start on it and are multiples of it; smaller ones of 64.
PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 64
OBJECT_BYTES_MAX: Final = 1 << 40
KEY_BYTES_MAX: Final = 1024
#: Places of one object.
PLACES_MAX: Final = 255
DIGEST_BYTES: Final = 16
#: The largest id of a segment, tenant, client or slot, and the largest time.
ID_MAX: Final = 0xFFFFFFFF
TIME_MAX: Final = (1 << 63) - 1

#: `pin` of an object: free to go, evicted last, never evicted.
PIN_NONE: Final = 0
PIN_SOFT: Final = 1
PIN_HARD: Final = 2

#: `state` of an entry of an open put.
ENTRY_OPEN: Final = 0
ENTRY_ENDED: Final = 1
ENTRY_DROPPED: Final = 2


class Place(NamedTuple):
    """One complete copy: where its extent starts in a segment, and its slot in that segment's directory."""

    segment: int
    offset: int
    slot: int


class StoredObject(NamedTuple):
    """A complete object. `size` is of the payload; `digest` is the root (16 bytes)."""

    object_id: int
    tenant: int
    key: bytes
    size: int
    digest: bytes
    object_type: int
    pin: int
    soft_pin_end_ms: int
    group: int
    places: tuple[Place, ...]


class PutEntry(NamedTuple):
    """One key of an open put. `state`: 0 open, 1 ended, 2 aborted or expired."""

    key: bytes
    size: int
    places: tuple[Place, ...]
    state: int


class OpenPut(NamedTuple):
    """Extents given to a writer until its put ends, is aborted, or its deadline passes."""

    put_id: int
    client: int
    tenant: int
    deadline_ms: int
    object_type: int
    pin: int
    soft_pin_end_ms: int
    group: int
    replace: bool
    entries: tuple[PutEntry, ...]


def extent_bytes(size: int) -> int:
    """Bytes of a payload's extent: rounded to 4,096 from 4,096 up, else to 64; 64 for an empty one."""
    unit = PAGE_BYTES if size >= PAGE_BYTES else LINE_BYTES
    return max(-(-size // unit) * unit, LINE_BYTES)


def check_object(stored: StoredObject) -> None:
    """InternalError where a field is outside what a table can hold."""
    segments = [place.segment for place in stored.places]
    fits = (
        0 < stored.object_id < 1 << 63
        and 0 <= stored.tenant <= ID_MAX
        and 1 <= len(stored.key) <= KEY_BYTES_MAX
        and 0 <= stored.size <= OBJECT_BYTES_MAX
        and len(stored.digest) == DIGEST_BYTES
        and 0 <= stored.object_type <= 255
        and PIN_NONE <= stored.pin <= PIN_HARD
        and 0 <= stored.soft_pin_end_ms <= TIME_MAX
        and 0 <= stored.group <= U64_MAX
        and len(segments) <= PLACES_MAX
        and len(set(segments)) == len(segments)
    )
    if not fits:
        raise InternalError(f"object {stored.object_id} has a field that no table can hold")


def check_place(place: Place) -> None:
    """InternalError where a place is outside what a table can hold."""
    if not (0 <= place.segment <= ID_MAX and 0 <= place.slot <= ID_MAX and 0 <= place.offset < 1 << 63):
        raise InternalError(f"{place} is no place")


def check_put(put: OpenPut) -> None:
    """InternalError where a field is outside what the table can hold, or nothing of the put is open."""
    places = [place for entry in put.entries for place in entry.places]
    fits = (
        0 < put.put_id <= U64_MAX
        and 0 <= put.client <= ID_MAX
        and 0 <= put.tenant <= ID_MAX
        and 0 <= put.deadline_ms <= TIME_MAX
        and 0 <= put.object_type <= 255
        and 0 <= put.pin <= PIN_HARD
        and 0 <= put.soft_pin_end_ms <= TIME_MAX
        and 0 <= put.group <= U64_MAX
        and any(entry.state == ENTRY_OPEN for entry in put.entries)
        and all(ENTRY_OPEN <= entry.state <= ENTRY_DROPPED for entry in put.entries)
        and all(1 <= len(entry.key) <= KEY_BYTES_MAX for entry in put.entries)
        and all(
            0 <= entry.size <= (OBJECT_BYTES_MAX if entry.state == ENTRY_OPEN else U64_MAX)
            for entry in put.entries
        )
        and all(len(entry.places) <= PLACES_MAX for entry in put.entries)
        and all(0 <= place.segment <= ID_MAX and 0 <= place.slot <= ID_MAX for place in places)
        and all(0 <= place.offset < 1 << 63 for place in places)
    )
    if not fits:
        raise InternalError(f"put {put.put_id} has a field that no table can hold")
