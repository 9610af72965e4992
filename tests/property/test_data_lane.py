"""The data lane's codec: round trips however the bytes are cut, every broken rule, and hostile bytes."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import ProtocolError, QueueFull, Status, UsageError
from moonpool.wire.lane_parser import (
    GroupEnded,
    GroupOpened,
    Notification,
    PayloadPiece,
    ReplyEnded,
    ReplyParser,
    TargetParser,
)
from moonpool.wire.transfer import (
    ENTRIES_MAX,
    HEADER_BYTES,
    LENGTH_MAX,
    NOTIFICATION_BYTES_MAX,
    OPS_WITH_ENTRIES,
    Entry,
    GroupHeader,
    LaneOp,
    encode_group,
    encode_reply,
    reply_to,
)

U64 = st.integers(0, (1 << 64) - 1)
FINAL = st.sampled_from([status for status in Status if status is not Status.PENDING])
KEY = bytes(range(16))
# Hostile bytes are cheap to try: never fewer than this, more where the profile says so.
FUZZ = settings(max_examples=max(300, settings.default.max_examples if settings.default else 0))


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupHeader, tuple[Entry, ...], bytes]:
    """A legal group with a small payload: (header, entries, payload that follows)."""
    op = draw(st.sampled_from(LaneOp))
    group_id = draw(U64)
    if op in OPS_WITH_ENTRIES:
        lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=6))
        entries = tuple(
            Entry(draw(U64), draw(U64), length, draw(st.binary(min_size=16, max_size=16)))
            for length in lengths
        )
        payload = draw(st.binary(min_size=sum(lengths), max_size=sum(lengths)))
        header = GroupHeader(op, len(entries), group_id, len(payload))
        return header, entries, payload if op is LaneOp.WRITE else b""
    payload = draw(st.binary(max_size=200)) if op is LaneOp.NOTIFY else b""
    return GroupHeader(op, 0, group_id, len(payload)), (), payload


def cut(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The bytes in pieces that end where `cuts` says (modulo the length)."""
    bounds = sorted({0, len(data), *(one % (len(data) + 1) for one in cuts)})
    for start, end in pairwise(bounds):
        yield data[start:end]


@given(st.lists(groups(), min_size=1, max_size=4), st.lists(st.integers(0, 5_000), max_size=12))
def test_groups_survive_any_cutting(
    sent: list[tuple[GroupHeader, tuple[Entry, ...], bytes]], cuts: list[int]
) -> None:
    stream = b"".join(encode_group(header, entries) + payload for header, entries, payload in sent)
    parser = TargetParser()
    received: list[tuple[GroupHeader, tuple[Entry, ...], bytes]] = []
    opened: GroupOpened | None = None
    buffers: list[bytearray] = []
    for piece in cut(stream, cuts):
        for event in parser.feed(piece):
            if isinstance(event, GroupOpened):
                opened = event
                buffers = [bytearray() for _ in event.entries]
            elif isinstance(event, PayloadPiece):
                assert opened is not None
                assert event.group_id == opened.header.group_id
                assert event.offset == len(buffers[event.entry])
                assert len(event.data) > 0
                buffers[event.entry] += event.data
            elif isinstance(event, GroupEnded):
                assert opened is not None
                assert event.header == opened.header
                received.append((opened.header, opened.entries, b"".join(buffers)))
                opened = None
            else:
                received.append((event.header, (), event.message))
    parser.end()
    assert received == sent


@given(
    st.lists(st.tuples(groups(), st.lists(FINAL, min_size=6, max_size=6), st.booleans()), max_size=4),
    st.data(),
)
def test_replies_survive_any_cutting(
    asked: list[tuple[tuple[GroupHeader, tuple[Entry, ...], bytes], list[Status], bool]], data: st.DataObject
) -> None:
    parser = ReplyParser()
    stream, expected = b"", []
    reads = 0
    for (header, entries, _), drawn, good in asked:
        reads += header.op is LaneOp.READ
        if reads > 2 and header.op is LaneOp.READ:
            continue
        parser.expect(header, entries)
        count = header.count or 1
        statuses = [Status.COMPLETE] * count if good else drawn[:count]
        reply = reply_to(header, statuses)
        payload = data.draw(st.binary(min_size=reply.payload_bytes, max_size=reply.payload_bytes))
        stream += encode_reply(reply, statuses) + payload
        expected.append((reply, tuple(statuses) if header.count else (), payload))
    received, payload_seen = [], bytearray()
    for piece in cut(stream, data.draw(st.lists(st.integers(0, 5_000), max_size=12))):
        for event in parser.feed(piece):
            if isinstance(event, ReplyEnded):
                received.append((event.header, event.statuses, bytes(payload_seen)))
                payload_seen.clear()
            else:
                payload_seen += event.data
    parser.end()
    assert parser.unanswered == 0
    assert received == expected


def header_bytes(**changes: int) -> bytes:
    """A READ header of one entry of 8 bytes, with some numbers changed."""
    numbers = {"magic": 0x504D, "op": 1, "flags": 0, "count": 1, "group_id": 1, "payload": 8, "reserved": 0}
    return struct.pack("<HBBIQQQ", *(numbers | changes).values())


def entry_bytes(region: int, length: int, grant: bytes = bytes(24)) -> bytes:
    """An entry as it lies on the wire, offset 0."""
    return struct.pack("<QQQ16s24s", region, 0, length, KEY, grant)


ENTRY = entry_bytes(1 << 32, 8)

BROKEN_GROUPS = {
    "magic": header_bytes(magic=0x4D50),
    "operation 0": header_bytes(op=0),
    "operation 6": header_bytes(op=6),
    "a reply": header_bytes(op=0x81),
    "flags": header_bytes(flags=1),
    "reserved": header_bytes(reserved=1),
    "no entries": header_bytes(count=0, payload=0),
    "too many entries": header_bytes(count=ENTRIES_MAX + 1),
    "four billion entries": header_bytes(count=(1 << 32) - 1),
    "payload beyond all lengths": header_bytes(payload=LENGTH_MAX + 1),
    "payload of 2^64 - 1": header_bytes(payload=(1 << 64) - 1),
    "payload below the sum": header_bytes(payload=7) + ENTRY,
    "payload above the sum": header_bytes(payload=9) + ENTRY,
    "length": header_bytes(payload=LENGTH_MAX) + entry_bytes(1, LENGTH_MAX + 1),
    "sum beyond u64": header_bytes(count=2, payload=0) + entry_bytes(1, 1 << 63) + entry_bytes(1, 1 << 63),
    "a grant": header_bytes() + entry_bytes(1 << 32, 8, bytes(23) + b"\1"),
    "flush with entries": header_bytes(op=3, payload=0),
    "flush with payload": header_bytes(op=3, count=0),
    "ping with payload": header_bytes(op=5, count=0),
    "notification with entries": header_bytes(op=4),
    "notification too long": header_bytes(op=4, count=0, payload=NOTIFICATION_BYTES_MAX + 1),
}


@pytest.mark.parametrize("name", BROKEN_GROUPS)
def test_a_broken_rule_ends_the_lane(name: str) -> None:
    parser = TargetParser()
    with pytest.raises(ProtocolError) as first:
        parser.feed(BROKEN_GROUPS[name])
    with pytest.raises(ProtocolError) as again:
        parser.feed(encode_group(GroupHeader(LaneOp.PING, 0, 1, 0)))
    assert again.value is first.value


def test_good_groups_before_a_broken_one_are_not_lost_when_fed_apart() -> None:
    parser = TargetParser()
    ping = GroupHeader(LaneOp.PING, 0, 1, 0)
    assert parser.feed(encode_group(ping)) == [GroupOpened(ping, ()), GroupEnded(ping)]
    with pytest.raises(ProtocolError, match="magic"):
        parser.feed(bytes(HEADER_BYTES))


READ = GroupHeader(LaneOp.READ, 2, 9, 12)
WRITE = GroupHeader(LaneOp.WRITE, 2, 9, 12)
PAIR = (Entry(1 << 32, 0, 8, KEY), Entry(1 << 32, 8, 4, KEY))


def reply_bytes(**changes: int) -> bytes:
    """A good reply to READ (without its payload), with some numbers changed."""
    return header_bytes(**({"op": 0x81, "count": 2, "group_id": 9, "payload": 12} | changes))


BROKEN_REPLIES = {
    "magic": reply_bytes(magic=1),
    "reserved": reply_bytes(reserved=1),
    "not a reply": reply_bytes(op=1),
    "unknown operation": reply_bytes(op=0x86),
    "other operation": reply_bytes(op=0x82),
    "other group": reply_bytes(group_id=8),
    "other count": reply_bytes(count=3),
    "status of a running transfer": reply_bytes(flags=1, payload=0),
    "unknown status": reply_bytes(flags=16, payload=0),
    "short payload": reply_bytes(payload=11),
    "payload with a failure": reply_bytes(flags=6),
    "unknown entry status": reply_bytes(flags=6, payload=0) + bytes([6, 16]),
    "running entry": reply_bytes(flags=6, payload=0) + bytes([6, 1]),
    "no entry has the status": reply_bytes(flags=6, payload=0) + bytes([7, 0]),
}


@pytest.mark.parametrize("name", BROKEN_REPLIES)
def test_a_wrong_reply_ends_the_lane(name: str) -> None:
    parser = ReplyParser()
    parser.expect(READ, PAIR)
    with pytest.raises(ProtocolError) as first:
        parser.feed(BROKEN_REPLIES[name])
    with pytest.raises(ProtocolError) as again:
        parser.feed(b"")
    assert again.value is first.value


def test_a_reply_to_nothing_ends_the_lane() -> None:
    with pytest.raises(ProtocolError, match="no group"):
        ReplyParser().feed(reply_bytes())


def test_replies_must_keep_the_order_of_groups() -> None:
    parser = ReplyParser()
    second = GroupHeader(LaneOp.PING, 0, 10, 0)
    parser.expect(READ, PAIR)
    parser.expect(second)
    with pytest.raises(ProtocolError, match="does not answer"):
        parser.feed(encode_reply(reply_to(second, [Status.COMPLETE])))


@pytest.mark.parametrize(("op", "limit"), [(LaneOp.WRITE, 64), (LaneOp.READ, 2), (LaneOp.PING, 64)])
def test_unanswered_groups_are_bounded(op: LaneOp, limit: int) -> None:
    parser = ReplyParser()
    entries = PAIR if op in OPS_WITH_ENTRIES else ()
    header = GroupHeader(op, len(entries), 9, sum(entry.length for entry in entries))
    for _ in range(limit):
        parser.expect(header, entries)
    with pytest.raises(QueueFull) as caught:
        parser.expect(header, entries)
    assert caught.value.limit == limit
    assert parser.unanswered == limit


@pytest.mark.parametrize("fed", [encode_group(READ, PAIR)[:-1], b"\x4d", encode_group(WRITE, PAIR) + b"x"])
def test_a_stream_cut_in_a_group_is_an_error(fed: bytes) -> None:
    parser = TargetParser()
    parser.feed(fed)
    with pytest.raises(ProtocolError, match="middle"):
        parser.end()


def test_a_stream_cut_before_an_answer_is_an_error() -> None:
    parser = ReplyParser()
    parser.expect(WRITE, PAIR)
    with pytest.raises(ProtocolError, match="unanswered"):
        parser.end()


@pytest.mark.parametrize(
    ("header", "entries"),
    [
        (GroupHeader(LaneOp.READ, 1, 1, 8), ()),
        (GroupHeader(LaneOp.READ, 0, 1, 0), ()),
        (GroupHeader(LaneOp.READ, 2, 1, 11), PAIR),
        (GroupHeader(LaneOp.PING, 0, 1, 1), ()),
        (GroupHeader(LaneOp.PING, 0, -1, 0), ()),
        (GroupHeader(LaneOp.PING, 0, 1 << 64, 0), ()),
        (GroupHeader(LaneOp.NOTIFY, 0, 1, -1), ()),
        (GroupHeader(LaneOp.READ, 1, 1, 8), (Entry(1, 0, 8, b"short"),)),
        (GroupHeader(LaneOp.READ, 1, 1, 8), (Entry(-1, 0, 8, KEY),)),
        (GroupHeader(LaneOp.READ, 1, 1, 8), (Entry(1, 1 << 64, 8, KEY),)),
        (GroupHeader(LaneOp.READ, 1, 1, LENGTH_MAX + 1), (Entry(1, 0, LENGTH_MAX + 1, KEY),)),
    ],
)
def test_frames_that_break_a_rule_are_not_encoded(header: GroupHeader, entries: tuple[Entry, ...]) -> None:
    with pytest.raises(UsageError):
        encode_group(header, entries)


def test_replies_that_break_a_rule_are_not_encoded() -> None:
    for statuses in ([Status.COMPLETE], [Status.PENDING, Status.COMPLETE]):
        with pytest.raises(UsageError):
            reply_to(READ, statuses)
    failed = reply_to(READ, [Status.COMPLETE, Status.STALE_HANDLE])
    assert failed.payload_bytes == 0
    with pytest.raises(UsageError):
        encode_reply(failed, [Status.STALE_HANDLE])


def feed_all(parser: TargetParser | ReplyParser, pieces: list[bytes]) -> bool:
    """Feeds until the end or a typed error; any other exception fails the test. True when all was legal."""
    for piece in pieces:
        try:
            for event in parser.feed(piece):
                assert isinstance(event, GroupOpened | GroupEnded | PayloadPiece | Notification | ReplyEnded)
        except ProtocolError:
            return False
    return True


@FUZZ
@given(st.lists(st.binary(max_size=120), max_size=8))
def test_noise_gives_a_typed_error_or_nothing(pieces: list[bytes]) -> None:
    feed_all(TargetParser(), pieces)
    replies = ReplyParser()
    replies.expect(READ, PAIR)
    feed_all(replies, pieces)


@FUZZ
@given(
    st.lists(groups(), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=4),
)
def test_flipped_bits_give_a_typed_error_or_another_legal_stream(
    sent: list[tuple[GroupHeader, tuple[Entry, ...], bytes]], flips: list[tuple[int, int]]
) -> None:
    stream = bytearray(b"".join(encode_group(header, entries) + payload for header, entries, payload in sent))
    for position, bit in flips:
        stream[position % len(stream)] ^= 1 << bit
    feed_all(TargetParser(), [bytes(stream)])


def test_memory_stays_flat_while_a_large_write_passes() -> None:
    length = 64 << 20
    opening = encode_group(GroupHeader(LaneOp.WRITE, 1, 1, length), [Entry(1 << 32, 0, length, KEY)])
    piece = bytes(1 << 20)
    parser = TargetParser()
    tracemalloc.start()
    try:
        parser.feed(opening)
        seen = sum(
            len(event.data)
            for _ in range(64)
            for event in parser.feed(piece)
            if isinstance(event, PayloadPiece)
        )
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == length
    assert peak_bytes < 256 * 1024
