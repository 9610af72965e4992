"""The bytes of the data lane, version 1: pinned in data_lane_v1.txt, one `name = hexadecimal bytes` a line.

A line that changes breaks every peer that runs an older Moonpool: a new wire version needs a new file.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from moonpool.errors import Status
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
    ENTRY_BYTES,
    HEADER_BYTES,
    Entry,
    GroupHeader,
    LaneOp,
    encode_group,
    encode_reply,
    reply_to,
)

FILE = Path(__file__).with_name("data_lane_v1.txt")
PINNED = {
    name: bytes.fromhex(raw) for name, raw in (line.split(" = ") for line in FILE.read_text().splitlines())
}

KEY = bytes(range(16))
ENTRIES = (
    Entry(region=1 << 32 | 7, offset=4096, length=8, key=KEY),
    Entry(region=(1 << 64) - 1, offset=(1 << 64) - 1, length=0, key=bytes(16)),
    Entry(region=2 << 32, offset=0, length=5, key=KEY[::-1]),
)
READ = GroupHeader(LaneOp.READ, 3, 0x0102_0304_0506_0708, 13)
WRITE = GroupHeader(LaneOp.WRITE, 3, 2, 13)
LARGEST = GroupHeader(LaneOp.READ, 1, (1 << 64) - 1, 1 << 40)
FLUSH = GroupHeader(LaneOp.FLUSH, 0, 3, 0)
NOTIFY = GroupHeader(LaneOp.NOTIFY, 0, 4, 5)
PING = GroupHeader(LaneOp.PING, 0, 5, 0)
GOOD = (Status.COMPLETE,) * 3
FAILED = (Status.COMPLETE, Status.STALE_HANDLE, Status.OUT_OF_RANGE)
PAYLOAD = b"payloadbytes!"

FRAMES = {
    "read": encode_group(READ, ENTRIES),
    "write": encode_group(WRITE, ENTRIES) + PAYLOAD,
    "read_largest": encode_group(LARGEST, [Entry(3 << 32, 0, 1 << 40, KEY)]),
    "flush": encode_group(FLUSH),
    "notify": encode_group(NOTIFY) + b"hello",
    "ping": encode_group(PING),
    "read_reply": encode_reply(reply_to(READ, GOOD)) + PAYLOAD,
    "read_reply_failed": encode_reply(reply_to(READ, FAILED), FAILED),
    "write_reply": encode_reply(reply_to(WRITE, GOOD)),
    "write_reply_failed": encode_reply(reply_to(WRITE, FAILED), FAILED),
    "flush_reply": encode_reply(reply_to(FLUSH, [Status.COMPLETE])),
    "notify_reply_full": encode_reply(reply_to(NOTIFY, [Status.QUEUE_FULL])),
    "ping_reply": encode_reply(reply_to(PING, [Status.COMPLETE])),
}


def test_the_file_pins_every_kind_of_frame() -> None:
    assert PINNED.keys() == FRAMES.keys()


@pytest.mark.parametrize("name", FRAMES)
def test_encoding_gives_the_pinned_bytes(name: str) -> None:
    assert FRAMES[name].hex() == PINNED[name].hex()


def test_a_group_laid_out_by_hand() -> None:
    raw = PINNED["write"]
    assert raw[:2] == b"\x4d\x50"
    assert raw[2:4] == bytes([LaneOp.WRITE, 0])
    assert struct.unpack("<IQQQ", raw[4:HEADER_BYTES]) == (3, 2, 13, 0)
    first = raw[HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES]
    assert struct.unpack("<QQQ", first[:24]) == (1 << 32 | 7, 4096, 8)
    assert first[24:40] == KEY
    assert first[40:] == bytes(24)
    assert raw[HEADER_BYTES + 3 * ENTRY_BYTES :] == PAYLOAD


def test_a_failed_reply_laid_out_by_hand() -> None:
    raw = PINNED["read_reply_failed"]
    assert raw[:4] == b"\x4d\x50" + bytes([LaneOp.READ | 0x80, Status.OUT_OF_RANGE])
    assert struct.unpack("<IQQQ", raw[4:HEADER_BYTES]) == (3, READ.group_id, 0, 0)
    assert raw[HEADER_BYTES:] == bytes([0, 6, 7])


def test_the_target_understands_the_pinned_groups() -> None:
    parser = TargetParser()
    events = []
    for name in ("read", "write", "flush", "notify", "ping"):
        events += parser.feed(PINNED[name])
    parser.end()
    assert events == [
        GroupOpened(READ, ENTRIES),
        GroupEnded(READ),
        GroupOpened(WRITE, ENTRIES),
        PayloadPiece(2, 0, 0, memoryview(PAYLOAD[:8])),
        PayloadPiece(2, 2, 0, memoryview(PAYLOAD[8:])),
        GroupEnded(WRITE),
        GroupOpened(FLUSH, ()),
        GroupEnded(FLUSH),
        Notification(NOTIFY, b"hello"),
        GroupOpened(PING, ()),
        GroupEnded(PING),
    ]


@pytest.mark.parametrize(
    ("name", "header", "statuses", "pieces"),
    [
        ("read_reply", READ, GOOD, [PAYLOAD[:8], PAYLOAD[8:]]),
        ("read_reply_failed", READ, FAILED, []),
        ("write_reply", WRITE, GOOD, []),
        ("write_reply_failed", WRITE, FAILED, []),
        ("flush_reply", FLUSH, (), []),
        ("notify_reply_full", NOTIFY, (), []),
        ("ping_reply", PING, (), []),
    ],
)
def test_the_initiator_understands_the_pinned_replies(
    name: str, header: GroupHeader, statuses: tuple[Status, ...], pieces: list[bytes]
) -> None:
    parser = ReplyParser()
    parser.expect(header, ENTRIES if header.count else ())
    *data, ended = parser.feed(PINNED[name])
    parser.end()
    assert [bytes(piece.data) for piece in data if isinstance(piece, PayloadPiece)] == pieces
    assert isinstance(ended, ReplyEnded)
    assert ended.statuses == statuses
    assert ended.header.op is header.op
