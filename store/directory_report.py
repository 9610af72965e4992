"""What a node tells of a segment's directory when it joins: records in pages, packed and read. Pure.

The format is in docs/store/architecture.md ("Effects"). The node packs, the master reads; what it reads is
untrusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from moonpool.errors import ProtocolError
from moonpool.store.directory import DEAD, KEY_BYTES_MAX, SIZE_MAX, SLOTS_MAX

_RECORD: Final = struct.Struct("<IBBHIIQQQ16s")
RECORD_BYTES: Final = _RECORD.size


class RecordState(IntEnum):
    """What stands in a slot."""

    #: An object, whole and true.
    COMPLETE = 1
    #: An object that is gone; nobody uses its extent.
    DEAD = 2
    #: No complete object, but somebody reads or may still write the extent.
    HELD = 3


class ReportRecord(NamedTuple):
    """One slot. A fenced extent has id 0 and no key; an object whose key found no room has an empty one."""

    slot: int
    state: RecordState
    object_type: int
    tenant: int
    offset: int
    size: int
    object_id: int
    digest: bytes
    key: bytes
    #: Why a dead object was retired; 0 when that is not known.
    reason: int = 0


def pack_records(records: Iterable[ReportRecord]) -> bytes:
    """The `entries` of one `node_report`."""
    out = bytearray()
    for one in records:
        out += _RECORD.pack(
            one.slot,
            one.state,
            one.object_type,
            len(one.key),
            one.tenant,
            one.reason,
            one.offset,
            one.size,
            one.object_id,
            one.digest,
        )
        out += one.key
    return bytes(out)


def read_records(data: bytes, slots: int, capacity: int) -> list[ReportRecord]:
    """The records of a page from a segment of so many slots and bytes; ProtocolError for anything else."""
    records: list[ReportRecord] = []
    place = 0
    while place < len(data):
        if len(data) - place < RECORD_BYTES:
            raise ProtocolError("a report ends inside a record")
        slot, state, kind, key_bytes, tenant, reason, offset, size, object_id, digest = _RECORD.unpack_from(
            data, place
        )
        place += RECORD_BYTES
        key = data[place : place + key_bytes]
        place += key_bytes
        fits = (
            slot < min(slots, SLOTS_MAX) and offset <= capacity and size <= min(capacity - offset, SIZE_MAX)
        )
        known = 1 <= state <= 3 and object_id < DEAD and (object_id > 0 or state == RecordState.HELD)
        if len(key) != key_bytes or key_bytes > KEY_BYTES_MAX or not fits or not known:
            raise ProtocolError(f"record {len(records)} of a report has impossible numbers")
        records.append(
            ReportRecord(slot, RecordState(state), kind, tenant, offset, size, object_id, digest, key, reason)
        )
    return records
