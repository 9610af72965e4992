"""Reference codec of the data lane, wire version 1: frames to bytes and back, with no I/O.

After the hello a lane carries *groups* from the initiator, each answered in order.

    group  = header (32)  entries (count x 64)  payload (WRITE: the bytes; NOTIFY: the message)
    reply  = header (32)  then one of: nothing | statuses (count x 1) | payload (READ that went well)

Encoding a frame that breaks a rule is the caller's mistake (`UsageError`); decoding one is the peer's
(`ProtocolError`). `moonpool.wire.lane_parser` reads whole streams; the native lanes are tested against both.

Source: docs/architecture.md, "Wire, version 1", and docs/wire/data-lane.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final, final

from moonpool.errors import ProtocolError, Status, UsageError
from moonpool.units import U64_MAX

MAGIC: Final = 0x504D
REPLY_BIT: Final = 0x80
HEADER_BYTES: Final = 32
ENTRY_BYTES: Final = 64
KEY_BYTES: Final = 16
ENTRIES_MAX: Final = 256
LENGTH_MAX: Final = 1 << 40
NOTIFICATION_BYTES_MAX: Final = 65_536
#: How many groups of a kind an initiator may leave unanswered on one lane.
UNANSWERED_WRITES_MAX: Final = 64
UNANSWERED_READS_MAX: Final = 2
UNANSWERED_OTHERS_MAX: Final = 64

_HEADER: Final = Struct("<HBBIQQQ")
GRANT_BYTES: Final = 24
#: What a READ, and a WRITE that shows no grant, have in the last bytes of their entries.
_NO_GRANT: Final = bytes(GRANT_BYTES)
_ENTRY: Final = Struct("<QQQ16s24s")


class LaneOp(IntEnum):
    """What a group asks for."""

    READ = 1
    WRITE = 2
    FLUSH = 3
    NOTIFY = 4
    PING = 5


#: Operations whose groups carry entries; the others have none.
OPS_WITH_ENTRIES: Final = frozenset({LaneOp.READ, LaneOp.WRITE})
_OP_NUMBERS: Final = frozenset(int(op) for op in LaneOp)
_FINAL_STATUSES: Final = frozenset(int(status) for status in Status) - {Status.PENDING}


@final
@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What an initiator asks: `payload_bytes` follow the entries (READ: are asked for)."""

    op: LaneOp
    count: int
    group_id: int
    payload_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One transfer of a group: bytes [offset, offset + length) of a region, and the key that allows it.

    `grant` is what a pool WRITE shows (docs/store/architecture.md); READs show none.
    """

    region: int
    offset: int
    length: int
    key: bytes
    grant: bytes = _NO_GRANT


@final
@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """How a group ended: `status` is COMPLETE when all of it did, else one of the entries' statuses."""

    op: LaneOp
    status: Status
    count: int
    group_id: int
    payload_bytes: int


def group_fault(header: GroupHeader) -> str | None:
    """The rule a group header breaks, or None."""
    if header.op in OPS_WITH_ENTRIES:
        if not 1 <= header.count <= ENTRIES_MAX:
            return f"a {header.op.name} group has 1 to {ENTRIES_MAX} entries, not {header.count}"
        if header.payload_bytes > header.count * LENGTH_MAX:
            return f"{header.count} entries cannot have {header.payload_bytes} bytes"
        return None
    if header.count != 0:
        return f"a {header.op.name} group has no entries, not {header.count}"
    limit = NOTIFICATION_BYTES_MAX if header.op is LaneOp.NOTIFY else 0
    if header.payload_bytes > limit:
        return f"a {header.op.name} group has at most {limit} bytes, not {header.payload_bytes}"
    return None


def entries_fault(header: GroupHeader, entries: Sequence[Entry]) -> str | None:
    """The rule that entries break together with their header, or None."""
    if len(entries) != header.count:
        return f"the header counts {header.count} entries and {len(entries)} are there"
    if any(entry.length > LENGTH_MAX for entry in entries):
        return f"an entry is longer than {LENGTH_MAX} bytes"
    if header.op is not LaneOp.WRITE and any(entry.grant != _NO_GRANT for entry in entries):
        return f"an entry of a {header.op.name} group shows a grant; only WRITEs do"
    total = sum(entry.length for entry in entries)
    if header.op in OPS_WITH_ENTRIES and total != header.payload_bytes:
        return f"the header says {header.payload_bytes} bytes and the entries {total}"
    return None


def encode_group(header: GroupHeader, entries: Sequence[Entry] = ()) -> bytes:
    """Header and entries of a group; the caller sends the payload after it. `UsageError` if a rule breaks."""
    for index, entry in enumerate(entries):
        numbers = (entry.region, entry.offset, entry.length)
        if len(entry.grant) != GRANT_BYTES:
            raise UsageError(f"a grant has {GRANT_BYTES} bytes", index=index)
        if len(entry.key) != KEY_BYTES or min(numbers) < 0 or max(numbers) > U64_MAX:
            raise UsageError(f"an entry has a key of {KEY_BYTES} bytes and u64 numbers", index=index)
    fault = group_fault(header) or entries_fault(header, entries)
    if fault or not 0 <= header.group_id <= U64_MAX or header.payload_bytes < 0:
        raise UsageError(f"cannot encode the group: {fault or 'its numbers are not u64'}")
    out = bytearray(HEADER_BYTES + ENTRY_BYTES * len(entries))
    _HEADER.pack_into(out, 0, MAGIC, header.op, 0, header.count, header.group_id, header.payload_bytes, 0)
    for index, entry in enumerate(entries):
        at = HEADER_BYTES + index * ENTRY_BYTES
        _ENTRY.pack_into(out, at, entry.region, entry.offset, entry.length, entry.key, entry.grant)
    return bytes(out)


def decode_group_header(raw: bytes | memoryview) -> GroupHeader:
    """The 32 bytes that open a group; raises `ProtocolError` for a broken rule."""
    magic, op, flags, count, group_id, payload_bytes, reserved = _HEADER.unpack(raw)
    if magic != MAGIC or flags != 0 or reserved != 0:
        raise ProtocolError(f"not a group header (magic {magic:#06x}, flags {flags}, reserved {reserved})")
    if op not in _OP_NUMBERS:
        raise ProtocolError(f"the group asks for the unknown operation {op}")
    header = GroupHeader(LaneOp(op), count, group_id, payload_bytes)
    fault = group_fault(header)
    if fault:
        raise ProtocolError(fault, operation=header.op.name)
    return header


def decode_entries(header: GroupHeader, raw: bytes | memoryview) -> tuple[Entry, ...]:
    """The entries of a group; raises `ProtocolError` for a broken rule."""
    entries = []
    for region, offset, length, key, grant in _ENTRY.iter_unpack(raw):
        entries.append(Entry(region, offset, length, key, grant))
    fault = entries_fault(header, entries)
    if fault:
        raise ProtocolError(fault, operation=header.op.name)
    return tuple(entries)


def worst_status(statuses: Sequence[Status]) -> Status:
    """What a reply's header says for these entries: COMPLETE if all are, else the highest number."""
    return max(statuses, default=Status.COMPLETE)


def reply_to(header: GroupHeader, statuses: Sequence[Status]) -> ReplyHeader:
    """The reply header for a group, given one status per entry (READ, WRITE) or exactly one (others)."""
    expected = header.count if header.op in OPS_WITH_ENTRIES else 1
    if len(statuses) != expected or Status.PENDING in statuses:
        raise UsageError(f"a {header.op.name} group needs {expected} final statuses, not {len(statuses)}")
    status = worst_status(statuses)
    carries = header.op is LaneOp.READ and status is Status.COMPLETE
    return ReplyHeader(
        header.op, status, header.count, header.group_id, header.payload_bytes if carries else 0
    )


def encode_reply(header: ReplyHeader, statuses: Sequence[Status] = ()) -> bytes:
    """Header of a reply and, when entries failed, their statuses; a good READ's payload is sent after it."""
    out = _HEADER.pack(
        MAGIC, header.op | REPLY_BIT, header.status, header.count, header.group_id, header.payload_bytes, 0
    )
    if header.status is Status.COMPLETE or header.op not in OPS_WITH_ENTRIES:
        return out
    if len(statuses) != header.count:
        raise UsageError(f"a failed group of {header.count} entries needs as many statuses")
    return out + bytes(statuses)


def decode_reply_header(raw: bytes | memoryview) -> ReplyHeader:
    """The 32 bytes that open a reply; raises `ProtocolError` for a broken rule."""
    magic, op, status, count, group_id, payload_bytes, reserved = _HEADER.unpack(raw)
    if magic != MAGIC or reserved != 0:
        raise ProtocolError(f"not a reply header (magic {magic:#06x}, reserved {reserved})")
    if not op & REPLY_BIT or op & ~REPLY_BIT not in _OP_NUMBERS:
        raise ProtocolError(f"the reply has the unknown operation {op:#x}")
    return ReplyHeader(LaneOp(op & ~REPLY_BIT), _final_status(status), count, group_id, payload_bytes)


def decode_statuses(raw: bytes | memoryview) -> tuple[Status, ...]:
    """The statuses of a failed group's entries; raises `ProtocolError` for a number that cannot be one."""
    return tuple(_final_status(number) for number in raw)


def _final_status(number: int) -> Status:
    if number not in _FINAL_STATUSES:
        raise ProtocolError(f"a reply cannot have the status {number}")
    return Status(number)
