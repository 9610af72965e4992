"""Fuzzed frames of the data lane, each with the answer that the reference predicts for it.

They are made one by one with the reference codec: of any shape, mutated, cut or broken. The volume comes from
`moonpool.bench.frame_fuzz_bulk`.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from moonpool.bench.frame_fuzz_model import Oracle, Verdict, judge
from moonpool.errors import ProtocolError, Status
from moonpool.operations import Op
from moonpool.units import KIB, U32_MAX, U64_MAX
from moonpool.wire.transfer import (
    ENTRIES_MAX,
    ENTRY_BYTES,
    HEADER_BYTES,
    KEY_BYTES,
    LENGTH_MAX,
    MAGIC,
    NOTIFICATION_BYTES_MAX,
    OPS_WITH_ENTRIES,
    Entry,
    GroupHeader,
    LaneOp,
    decode_entries,
    decode_group_header,
    encode_group,
)

#: Longest payload or answer of one frame that a fuzzer sends or asks for.
PAYLOAD_BYTES_MAX: Final = 256 * KIB
#: Of the groups made one by one: those with as many entries as a group can have, which cost most to make.
LARGEST_SHARE: Final = 0.02
_COUNTS: Final = (1,) * 12 + (2, 2, 3, 16)
LENGTH_EDGES: Final = (0, 1, 2, 63, 64, 4_095, 4_096, 65_535, 1 << 32, LENGTH_MAX - 1, LENGTH_MAX)
OFFSET_EDGES: Final = (0, 1, 4_096, U32_MAX, 1 << 32, LENGTH_MAX, (1 << 63) - 1, 1 << 63, U64_MAX)
_HEADER_FIELDS: Final = ((0, "<H"), (2, "<B"), (3, "<B"), (4, "<I"), (8, "<Q"), (16, "<Q"), (24, "<Q"))
_ENTRY_FIELDS: Final = ((0, "<Q"), (8, "<Q"), (16, "<Q"), (24, "<Q"), (32, "<Q"), (40, "<Q"), (56, "<Q"))
_FIELD_EDGES: Final = (0, 1, 2, 5, 6, 255, 256, 257, 65_536, 65_537, LENGTH_MAX, LENGTH_MAX + 1, U64_MAX)


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Whole frames, and all bytes that must come back for them."""

    data: bytes
    answer: bytes
    frames: int = 1
    refused: int = 0
    #: The status may also be QUEUE_FULL: it is a notification.
    is_notice: bool = False


@final
@dataclass(frozen=True, slots=True)
class Ender:
    """The last bytes of a connection: after them nothing may come back but its end."""

    data: bytes
    verdict: Verdict
    refused: int


@final
class FrameMaker:
    """Makes frames one by one; the same seed gives the same frames."""

    def __init__(self, oracle: Oracle, rng: random.Random) -> None:
        self._oracle = oracle
        self._rng = rng
        self._regions = oracle.facts.regions
        self._open_regions = {
            op: [one for one in self._regions if one.access.allows(Op(op)) and one.key_for(op)]
            for op in OPS_WITH_ENTRIES
        }
        live = [region.handle for region in self._regions]
        aged = [handle + (1 << 32) for handle in live] + [handle & U32_MAX for handle in live]
        beyond = [1 << 32 | oracle.facts.regions_max, 1 << 32 | U32_MAX, U64_MAX, 0]
        self.handles = [*live, *live, oracle.facts.stale_handle, *aged, *beyond]
        self.keys = [key for region in self._regions for key in (region.read_key, region.write_key) if key]
        self.keys += [bytes(KEY_BYTES), b"\xff" * KEY_BYTES]

    def legal(self) -> Piece:
        """A frame that must be answered: well-formed, or mutated and still within the rules."""
        for _ in range(8):
            piece = self._mutated_legal() if self._rng.random() < 0.4 else self._group()
            if piece is not None:
                return piece
        return self._call(LaneOp.PING)

    def ender(self) -> Ender:
        """How to end a connection: broken, cut, random bytes, or at the border of two frames."""
        choice = self._rng.random()
        if choice < 0.1:
            return self._judged(b"")
        if choice < 0.25:
            return self._judged(self._rng.randbytes(self._rng.choice((1, 31, 32, 33, 300, 4_000))))
        if choice < 0.45:
            whole = self.legal().data
            return self._judged(whole[: self._rng.randrange(len(whole))])
        for _ in range(16):
            made = self._judged(self._mutated(self._frame_head()))
            if made.verdict.breaks and not made.verdict.is_answered:
                return made
        return self._judged(struct.pack("<HBBIQQQ", MAGIC, 6, 0, 0, 0, 0, 0))

    def _judged(self, data: bytes) -> Ender:
        verdict = judge(data)
        opened = verdict.opened
        refused = opened is not None and any(self._oracle.statuses(opened.header, opened.entries))
        return Ender(data, verdict, int(refused))

    # Well-formed frames

    def _group(self) -> Piece | None:
        op = self._rng.choice((LaneOp.READ, LaneOp.READ, LaneOp.WRITE, LaneOp.WRITE, *LaneOp))
        if op not in OPS_WITH_ENTRIES:
            return self._call(op)
        entries = self._entries(op)
        header = GroupHeader(op, len(entries), self._rng.getrandbits(64), sum(e.length for e in entries))
        return self._piece(header, entries, encode_group(header, entries))

    def _call(self, op: LaneOp) -> Piece:
        message = b""
        number = self._rng.getrandbits(64)
        if op is LaneOp.NOTIFY:
            size = self._rng.choice((0, 1, 100, 4_000, NOTIFICATION_BYTES_MAX))
            message = self._rng.randbytes(size)
            # Mostly small, since the target takes only numbers above the last one.
            number = self._rng.choice((0, self._rng.getrandbits(8), self._rng.getrandbits(32)))
        header = GroupHeader(op, 0, number, len(message))
        return Piece(
            encode_group(header) + message, self._oracle.answer(header, ()), is_notice=op is LaneOp.NOTIFY
        )

    def _piece(self, header: GroupHeader, entries: Sequence[Entry], head: bytes) -> Piece | None:
        """The whole frame, or None when its payload or answer would be too large to be worth it."""
        if header.op is LaneOp.WRITE and header.payload_bytes > PAYLOAD_BYTES_MAX:
            return None
        statuses = self._oracle.statuses(header, entries)
        refused = max(statuses) is not Status.COMPLETE
        if header.op is LaneOp.READ and header.payload_bytes > PAYLOAD_BYTES_MAX and not refused:
            return None
        payload = self._oracle.payload(header, entries) if header.op is LaneOp.WRITE else b""
        return Piece(head + payload, self._oracle.answer(header, entries), refused=int(refused))

    def _entries(self, op: LaneOp) -> list[Entry]:
        count = ENTRIES_MAX if self._rng.random() < LARGEST_SHARE else self._rng.choice(_COUNTS)
        good = self._rng.random() < 0.5
        return [self._good_entry(op) if good else self._any_entry(op, count) for _ in range(count)]

    def _good_entry(self, op: LaneOp) -> Entry:
        region = self._rng.choice(self._open_regions[op])
        length = min(self._rng.choice((0, 1, 7, 64, 1_000, 9_000)), region.size_bytes)
        last = region.size_bytes - length
        offset = self._rng.choice((0, last, self._rng.randint(0, last)))
        return Entry(region.handle, offset, length, region.key_for(op))

    def _any_entry(self, op: LaneOp, count: int) -> Entry:
        region = self._rng.choice(self._regions)
        handle = self._rng.choice((region.handle, region.handle, self._rng.choice(self.handles)))
        key = self._rng.choice(
            (region.key_for(op), self._rng.choice(self.keys), self._rng.randbytes(KEY_BYTES))
        )
        size = region.size_bytes
        offset = self._rng.choice((0, size - 1, size, size + 1, self._rng.choice(OFFSET_EDGES)))
        # A READ's length costs nothing when it is refused; a WRITE must send what it announces.
        lengths = LENGTH_EDGES if op is LaneOp.READ and count <= 16 else LENGTH_EDGES[:5]
        return Entry(handle, offset, self._rng.choice(lengths), key or bytes(KEY_BYTES))

    # Mutated frames

    def _frame_head(self) -> bytes:
        """Header and entries of a well-formed group."""
        op = self._rng.choice((LaneOp.READ, LaneOp.WRITE, LaneOp.WRITE, *LaneOp))
        entries = self._entries(op) if op in OPS_WITH_ENTRIES else []
        total = sum(entry.length for entry in entries)
        return encode_group(GroupHeader(op, len(entries), self._rng.getrandbits(64), total), entries)

    def _mutated(self, head: bytes) -> bytes:
        """A head after one to three flipped bits or fields set to an edge."""
        out = bytearray(head)
        for _ in range(self._rng.randint(1, 3)):
            if self._rng.random() < 0.5:
                out[self._rng.randrange(len(out))] ^= 1 << self._rng.randrange(8)
                continue
            at, form = self._rng.choice(_HEADER_FIELDS)
            n_entries = (len(out) - HEADER_BYTES) // ENTRY_BYTES
            if n_entries and self._rng.random() < 0.6:
                at, form = self._rng.choice(_ENTRY_FIELDS)
                at += HEADER_BYTES + ENTRY_BYTES * self._rng.randrange(n_entries)
            limit = (1 << 8 * struct.calcsize(form)) - 1
            struct.pack_into(form, out, at, self._rng.choice(_FIELD_EDGES) & limit)
        return bytes(out)

    def _mutated_legal(self) -> Piece | None:
        head = self._mutated(self._frame_head())
        try:
            header = decode_group_header(head[:HEADER_BYTES])
            if len(head) != HEADER_BYTES + ENTRY_BYTES * header.count:
                return None
            entries = decode_entries(header, head[HEADER_BYTES:])
        except (ProtocolError, struct.error):
            return None
        if header.op is LaneOp.NOTIFY:
            message = self._rng.randbytes(header.payload_bytes)
            return Piece(head + message, self._oracle.answer(header, ()), is_notice=True)
        return self._piece(header, entries, head)
