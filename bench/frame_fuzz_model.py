"""What a fuzzed target must answer: a model of its regions beside the reference codec of the data lane.

The fuzzers know everything a worst case would know, handles and keys included, so nothing is guarded by luck.
Every byte that a legal WRITE carries is given by the region and the offset it goes to: whatever the order in
which connections write, a region may only ever hold bytes of its first or of its written pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, final

import numpy as np
import numpy.typing as npt

from moonpool.errors import ProtocolError, Status
from moonpool.operations import Access
from moonpool.wire.lane_parser import GroupEnded, GroupOpened, Notification, TargetEvent, TargetParser
from moonpool.wire.transfer import (
    HEADER_BYTES,
    OPS_WITH_ENTRIES,
    Entry,
    GroupHeader,
    LaneOp,
    decode_group_header,
    encode_reply,
    reply_to,
)

#: What refused WRITEs carry; no pattern holds it, so a single accepted byte of it shows.
GARBAGE: Final = 0xEE


class Violation(Exception):
    """The target did something that it must not do; the text says what, and how to do it again."""


@cache
def pattern(seed: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Pseudo-random bytes without `GARBAGE`, read-only, the same in every process."""
    made = np.random.default_rng(seed).integers(0, GARBAGE, size_bytes, dtype=np.uint8)
    made.flags.writeable = False
    return made


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFacts:
    """A region of the target. Without keys (`b""`) nobody but its own initiator knows them."""

    name: str
    handle: int
    size_bytes: int
    access: Access
    read_key: bytes = b""
    write_key: bytes = b""
    first_seed: int = 0
    written_seed: int = 0

    def key_for(self, op: LaneOp) -> bytes:
        """The key that allows an operation."""
        return self.read_key if op is LaneOp.READ else self.write_key


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Where the target is, and all of its regions; `stale_handle` is of a revoked one."""

    pid: int
    port: int
    unix_name: str
    instance: bytes
    regions_max: int
    regions: tuple[RegionFacts, ...]
    stale_handle: int
    healthy: str = field(default="healthy")


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What the reference makes of bytes at the start of a lane."""

    #: The connection must be closed by the target.
    breaks: bool
    #: A good group header came, which the target counts.
    has_header: bool
    #: Something came that is answered.
    is_answered: bool
    #: The last group whose entries came.
    opened: GroupOpened | None = None


def judge(data: bytes) -> Verdict:
    """Feeds the reference parser with one frame, whole, cut or broken."""
    parser = TargetParser()
    events: list[TargetEvent] = []
    breaks = False
    try:
        # In steps that no part of a frame is smaller than: a break drops the events of its own step only.
        for at in range(0, len(data), HEADER_BYTES):
            events += parser.feed(data[at : at + HEADER_BYTES])
    except ProtocolError:
        breaks = True
    try:
        decode_group_header(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        has_header = len(data) >= HEADER_BYTES
    except ProtocolError:
        has_header = False
    opened = [event for event in events if isinstance(event, GroupOpened)]
    is_answered = any(isinstance(event, GroupEnded | Notification) for event in events)
    return Verdict(breaks, has_header, is_answered, opened[-1] if opened else None)


@final
class Oracle:
    """Predicts statuses, answers and payloads, one group at a time."""

    def __init__(self, facts: TargetFacts) -> None:
        self.facts = facts
        self._by_handle = {region.handle: region for region in facts.regions}

    def status_of(self, op: LaneOp, entry: Entry) -> Status:
        """The status of one entry, by the order of checks that docs/wire/data-lane.md gives."""
        region = self._by_handle.get(entry.region)
        if region is None:
            return Status.STALE_HANDLE
        key = region.key_for(op)
        if not key or entry.key != key:
            return Status.ACCESS_DENIED
        if not region.access & (Access.READ if op is LaneOp.READ else Access.WRITE):
            return Status.ACCESS_DENIED
        if entry.offset + entry.length > region.size_bytes:
            return Status.OUT_OF_RANGE
        return Status.COMPLETE

    def statuses(self, header: GroupHeader, entries: Sequence[Entry]) -> list[Status]:
        """One status per entry, or COMPLETE for a group without entries."""
        if header.op not in OPS_WITH_ENTRIES:
            return [Status.COMPLETE]
        return [self.status_of(header.op, entry) for entry in entries]

    def answer(self, header: GroupHeader, entries: Sequence[Entry]) -> bytes:
        """All bytes of the reply; READs are predicted from the written pattern."""
        statuses = self.statuses(header, entries)
        reply = reply_to(header, statuses)
        out = encode_reply(reply, statuses)
        if header.op is LaneOp.READ and reply.status is Status.COMPLETE:
            out += b"".join(self._held(entry) for entry in entries)
        return out

    def payload(self, header: GroupHeader, entries: Sequence[Entry]) -> bytes:
        """What a WRITE sends after its entries: the written pattern where it is accepted, else garbage."""
        return b"".join(
            self._held(entry)
            if self.status_of(header.op, entry) is Status.COMPLETE
            else bytes([GARBAGE]) * entry.length
            for entry in entries
        )

    def _held(self, entry: Entry) -> bytes:
        region = self._by_handle[entry.region]
        held = pattern(region.written_seed, region.size_bytes)
        return held[entry.offset : entry.offset + entry.length].tobytes()
