"""Reads the two streams of a data lane: groups at the target, replies at the initiator; with no I/O.

Theory of operation. A parser is fed pieces of any size and returns events. Each state waits for one part:

    TargetParser   HEADER -> ENTRIES -> (WRITE: PAYLOAD) -> HEADER       READ, WRITE
                   HEADER -> MESSAGE -> HEADER                            NOTIFY
                   HEADER -> HEADER                                       FLUSH, PING
    ReplyParser    HEADER -> STATUSES | PAYLOAD | nothing -> HEADER

A part is kept until it is whole (at most 16,384 bytes of entries, or a message of 65,536); payload passes
through as views of what was fed, so memory stays flat whatever the peer sends. A broken rule raises
`ProtocolError`, and the parser stays broken: the connection must be closed.

Source: docs/architecture.md, "Wire, version 1", and docs/wire/data-lane.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias, final

from moonpool.errors import ProtocolError, QueueFull, Status
from moonpool.wire.transfer import (
    ENTRY_BYTES,
    HEADER_BYTES,
    OPS_WITH_ENTRIES,
    UNANSWERED_OTHERS_MAX,
    UNANSWERED_READS_MAX,
    UNANSWERED_WRITES_MAX,
    Entry,
    GroupHeader,
    LaneOp,
    ReplyHeader,
    decode_entries,
    decode_group_header,
    decode_reply_header,
    decode_statuses,
)


@final
@dataclass(frozen=True, slots=True)
class GroupOpened:
    """A group's header and entries are in; its payload (WRITE) follows."""

    header: GroupHeader
    entries: tuple[Entry, ...]


@final
@dataclass(frozen=True, slots=True)
class PayloadPiece:
    """Bytes of one entry, from `offset` within it. `data` is borrowed from the bytes that were fed."""

    group_id: int
    entry: int
    offset: int
    data: memoryview


@final
@dataclass(frozen=True, slots=True)
class GroupEnded:
    """All of a group is in: it can be answered."""

    header: GroupHeader


@final
@dataclass(frozen=True, slots=True)
class Notification:
    """A message; the header's group id is its sequence number."""

    header: GroupHeader
    message: bytes


@final
@dataclass(frozen=True, slots=True)
class ReplyEnded:
    """The whole reply is in. `statuses` has one status per entry of the group, in order."""

    header: ReplyHeader
    statuses: tuple[Status, ...]


TargetEvent: TypeAlias = GroupOpened | PayloadPiece | GroupEnded | Notification
ReplyEvent: TypeAlias = PayloadPiece | ReplyEnded

Bytes: TypeAlias = bytes | bytearray | memoryview


class _State(Enum):
    HEADER = auto()
    ENTRIES = auto()
    MESSAGE = auto()
    STATUSES = auto()
    PAYLOAD = auto()


class _Stream:
    """Cuts fed bytes into parts of a wanted size, keeping at most one unfinished part."""

    __slots__ = ("_kept", "_view")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._view = memoryview(b"")

    def feed(self, data: Bytes) -> None:
        self._view = memoryview(data).cast("B")

    def take(self, size_bytes: int) -> bytes | None:
        """Exactly `size_bytes`, or None after keeping all that is there."""
        missing = size_bytes - len(self._kept)
        self._kept += self._view[:missing]
        self._view = self._view[missing:]
        if len(self._kept) < size_bytes:
            return None
        part = bytes(self._kept)
        self._kept.clear()
        return part

    def borrow(self, size_bytes: int) -> memoryview:
        """Up to `size_bytes` of what was fed, without a copy."""
        piece = self._view[:size_bytes]
        self._view = self._view[len(piece) :]
        return piece

    @property
    def between_parts(self) -> bool:
        return not self._kept


class _PayloadWalk:
    """Hands out a group's payload entry by entry."""

    __slots__ = ("_entry", "_group_id", "_lengths", "_offset")

    def __init__(self, group_id: int, lengths: Sequence[int]) -> None:
        self._group_id = group_id
        self._lengths = lengths
        self._entry = 0
        self._offset = 0

    def pieces(self, stream: _Stream) -> Iterator[PayloadPiece]:
        """Pieces for as long as bytes last; empty entries have none."""
        while not self.ended:
            data = stream.borrow(self._lengths[self._entry] - self._offset)
            if not data:
                return
            yield PayloadPiece(self._group_id, self._entry, self._offset, data)
            self._offset += len(data)

    @property
    def ended(self) -> bool:
        """True when all is handed out; steps over finished entries."""
        while self._entry < len(self._lengths) and self._offset == self._lengths[self._entry]:
            self._entry += 1
            self._offset = 0
        return self._entry == len(self._lengths)


@final
class TargetParser:
    """Reads what an initiator sends.

    For each group: `GroupOpened`, its `PayloadPiece`s and `GroupEnded`; for a message: `Notification`.
    """

    __slots__ = ("_broken", "_header", "_state", "_stream", "_walk")

    def __init__(self) -> None:
        self._stream = _Stream()
        self._state = _State.HEADER
        self._header = GroupHeader(LaneOp.PING, 0, 0, 0)
        self._walk = _PayloadWalk(0, ())
        self._broken: ProtocolError | None = None

    def feed(self, data: Bytes) -> list[TargetEvent]:
        """Takes contiguous bytes and returns what they complete; pieces borrow `data`.

        Raises `ProtocolError` for a broken rule, at this and every later call; what the same call had
        completed before is dropped with the connection.
        """
        if self._broken is not None:
            raise self._broken
        self._stream.feed(data)
        try:
            return list(self._events())
        except ProtocolError as exc:
            self._broken = exc
            raise
        finally:
            self._stream.feed(b"")

    def end(self) -> None:
        """Tells the parser that the stream ended; raises `ProtocolError` in the middle of a group."""
        if self._state is not _State.HEADER or not self._stream.between_parts:
            raise ProtocolError("the stream ended in the middle of a group")

    def _events(self) -> Iterator[TargetEvent]:
        while True:
            if self._state is _State.HEADER:
                raw = self._stream.take(HEADER_BYTES)
                if raw is None:
                    return
                self._header = decode_group_header(raw)
                yield from self._after_header()
            elif self._state is _State.ENTRIES:
                raw = self._stream.take(ENTRY_BYTES * self._header.count)
                if raw is None:
                    return
                yield from self._after_entries(decode_entries(self._header, raw))
            elif self._state is _State.MESSAGE:
                raw = self._stream.take(self._header.payload_bytes)
                if raw is None:
                    return
                self._state = _State.HEADER
                yield Notification(self._header, raw)
            else:
                yield from self._walk.pieces(self._stream)
                if not self._walk.ended:
                    return
                self._state = _State.HEADER
                yield GroupEnded(self._header)

    def _after_header(self) -> Iterator[TargetEvent]:
        if self._header.op in OPS_WITH_ENTRIES:
            self._state = _State.ENTRIES
        elif self._header.op is LaneOp.NOTIFY:
            self._state = _State.MESSAGE
        else:
            yield GroupOpened(self._header, ())
            yield GroupEnded(self._header)

    def _after_entries(self, entries: tuple[Entry, ...]) -> Iterator[TargetEvent]:
        yield GroupOpened(self._header, entries)
        lengths = [entry.length for entry in entries] if self._header.op is LaneOp.WRITE else []
        self._walk = _PayloadWalk(self._header.group_id, lengths)
        self._state = _State.PAYLOAD


_UNANSWERED_MAX: Final = {LaneOp.WRITE: UNANSWERED_WRITES_MAX, LaneOp.READ: UNANSWERED_READS_MAX}


@final
class ReplyParser:
    """Reads what a target answers, for the groups announced with `expect`, in their order."""

    __slots__ = ("_broken", "_expected", "_reply", "_state", "_stream", "_unanswered", "_walk")

    def __init__(self) -> None:
        self._stream = _Stream()
        self._state = _State.HEADER
        self._reply = ReplyHeader(LaneOp.PING, Status.COMPLETE, 0, 0, 0)
        self._walk = _PayloadWalk(0, ())
        self._expected: deque[tuple[GroupHeader, tuple[int, ...]]] = deque()
        self._unanswered: Counter[LaneOp] = Counter()
        self._broken: ProtocolError | None = None

    def expect(self, header: GroupHeader, entries: Sequence[Entry] = ()) -> None:
        """Announces a group that is about to be sent; raises `QueueFull` when too many are unanswered."""
        limit = _UNANSWERED_MAX.get(header.op, UNANSWERED_OTHERS_MAX)
        if self._unanswered[header.op] >= limit:
            raise QueueFull(f"{limit} {header.op.name} groups are unanswered on this lane", limit=limit)
        self._unanswered[header.op] += 1
        self._expected.append((header, tuple(entry.length for entry in entries)))

    @property
    def unanswered(self) -> int:
        """How many announced groups have not been answered in full."""
        return self._unanswered.total()

    def feed(self, data: Bytes) -> list[ReplyEvent]:
        """Takes contiguous bytes and returns what they complete; pieces borrow `data`.

        Raises `ProtocolError` for a broken rule or an answer to no group, at this and every later call.
        """
        if self._broken is not None:
            raise self._broken
        self._stream.feed(data)
        try:
            return list(self._events())
        except ProtocolError as exc:
            self._broken = exc
            raise
        finally:
            self._stream.feed(b"")

    def end(self) -> None:
        """Tells the parser that the stream ended; raises `ProtocolError` while an answer is missing."""
        if self.unanswered:
            raise ProtocolError(f"the stream ended with {self.unanswered} groups unanswered")

    def _events(self) -> Iterator[ReplyEvent]:
        while True:
            if self._state is _State.HEADER:
                raw = self._stream.take(HEADER_BYTES)
                if raw is None:
                    return
                self._open(decode_reply_header(raw))
            elif self._state is _State.STATUSES:
                raw = self._stream.take(self._reply.count)
                if raw is None:
                    return
                statuses = decode_statuses(raw)
                if self._reply.status not in statuses:
                    raise ProtocolError(f"the reply says {self._reply.status.name} and no entry does")
                yield self._close(statuses)
            else:
                yield from self._walk.pieces(self._stream)
                if not self._walk.ended:
                    return
                yield self._close((self._reply.status,) * self._reply.count)

    def _open(self, reply: ReplyHeader) -> None:
        if not self._expected:
            raise ProtocolError("a reply came and no group is unanswered")
        group, lengths = self._expected[0]
        if (reply.op, reply.group_id, reply.count) != (group.op, group.group_id, group.count):
            raise ProtocolError(
                f"the reply {reply.op.name} {reply.group_id} of {reply.count} does not answer "
                f"the group {group.op.name} {group.group_id} of {group.count}"
            )
        good_read = reply.op is LaneOp.READ and reply.status is Status.COMPLETE
        if reply.payload_bytes != (group.payload_bytes if good_read else 0):
            raise ProtocolError(
                f"the reply cannot carry {reply.payload_bytes} bytes", operation=reply.op.name
            )
        self._reply = reply
        failed = reply.status is not Status.COMPLETE and reply.op in OPS_WITH_ENTRIES
        self._state = _State.STATUSES if failed else _State.PAYLOAD
        self._walk = _PayloadWalk(reply.group_id, lengths if good_read else ())

    def _close(self, statuses: tuple[Status, ...]) -> ReplyEnded:
        self._state = _State.HEADER
        self._expected.popleft()
        self._unanswered[self._reply.op] -= 1
        return ReplyEnded(self._reply, statuses)
