"""The native target against an initiator written in Python on the reference codec, byte for byte.

Every answer is compared with the bytes that the reference would send. Then requests that break a rule: the
lane ends, is counted, and everybody else is served on.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moonpool.errors import Status
from moonpool.wire.lane_parser import PayloadPiece, ReplyEnded, ReplyParser
from moonpool.wire.transfer import (
    ENTRIES_MAX,
    LENGTH_MAX,
    NOTIFICATION_BYTES_MAX,
    Entry,
    GroupHeader,
    LaneOp,
    encode_group,
    encode_reply,
    reply_to,
)

READ_KEY, WRITE_KEY = b"the read key 16b", b"the write key 16"
SIZE = 1 << 16
U64_MAX = (1 << 64) - 1
GOOD, STALE, RANGE, DENIED = Status.COMPLETE, Status.STALE_HANDLE, Status.OUT_OF_RANGE, Status.ACCESS_DENIED


class PythonInitiator:
    """A lane to a native target. `exchange` compares each answer with the reference's."""

    def __init__(self, lane: socket.socket) -> None:
        self.lane = lane
        self.lane.settimeout(20.0)
        self.parser = ReplyParser()
        self.next_id = 1

    def receive(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            piece = self.lane.recv(size - len(raw))
            assert piece, f"the lane ended after {len(raw)} of {size} bytes"
            raw += piece
        return raw

    def request(
        self, op: LaneOp, entries: Sequence[Entry] = (), payload: bytes = b""
    ) -> tuple[GroupHeader, bytes]:
        total = sum(entry.length for entry in entries) if entries else len(payload)
        header = GroupHeader(op, len(entries), self.next_id, total)
        self.next_id += 1
        return header, encode_group(header, entries) + payload

    def exchange(
        self,
        op: LaneOp,
        entries: Sequence[Entry] = (),
        payload: bytes = b"",
        *,
        statuses: Sequence[Status] = (GOOD,),
        expected: bytes = b"",
    ) -> None:
        header, raw = self.request(op, entries, payload)
        self.parser.expect(header, entries)
        self.lane.sendall(raw)
        self.check_answer(header, statuses, expected)

    def check_answer(self, header: GroupHeader, statuses: Sequence[Status], expected: bytes) -> None:
        wanted = encode_reply(reply_to(header, list(statuses)), list(statuses)) + expected
        raw = self.receive(len(wanted))
        assert raw == wanted
        events = self.parser.feed(raw)
        assert b"".join(bytes(event.data) for event in events if isinstance(event, PayloadPiece)) == expected
        (ended,) = [event for event in events if isinstance(event, ReplyEnded)]
        if header.count:
            assert list(ended.statuses) == list(statuses)

    def end(self) -> None:
        """The target has nothing more to say."""
        self.lane.shutdown(socket.SHUT_WR)
        assert self.lane.recv(1) == b""
        self.parser.end()


@pytest.fixture
def initiator(target: Any) -> Any:
    made = PythonInitiator(target.connect())
    yield made
    made.end()


def test_every_operation_byte_for_byte(target: Any, initiator: PythonInitiator) -> None:
    remote = target.offer(SIZE)
    whole = remote.array.tobytes()
    reads = [
        Entry(remote.handle, at, length, READ_KEY) for at, length in ((0, 100), (7, 0), (5000, 3), (SIZE, 0))
    ]
    initiator.exchange(LaneOp.READ, reads, statuses=[GOOD] * 4, expected=whole[:100] + whole[5000:5003])
    writes = [Entry(remote.handle, 10, 4, WRITE_KEY), Entry(remote.handle, SIZE - 2, 2, WRITE_KEY)]
    initiator.exchange(LaneOp.WRITE, writes, b"fourXY", statuses=[GOOD] * 2)
    assert remote.array.tobytes() == whole[:10] + b"four" + whole[14:-2] + b"XY"
    initiator.exchange(LaneOp.FLUSH)
    initiator.exchange(LaneOp.PING)
    initiator.exchange(LaneOp.NOTIFY, payload=b"hello")
    assert target.server.take_notices(9, 0.0)[0][1:] == (5, b"hello")


@pytest.mark.parametrize("op", [LaneOp.READ, LaneOp.WRITE])
def test_every_refusal_byte_for_byte(target: Any, initiator: PythonInitiator, op: LaneOp) -> None:
    remote, gone = target.offer(SIZE), target.offer(SIZE)
    locked = target.offer(SIZE, access=2 if op is LaneOp.READ else 1)
    assert target.regions.remove(gone.handle, 5.0)
    key = READ_KEY if op is LaneOp.READ else WRITE_KEY
    other = WRITE_KEY if op is LaneOp.READ else READ_KEY
    before = remote.array.copy()
    cases = [
        (Entry(remote.handle, 0, 10, key), GOOD),
        (Entry(gone.handle, 0, 10, key), STALE),
        (Entry(0, 0, 10, key), STALE),
        (Entry(remote.handle + 1, 0, 10, key), STALE),
        (Entry(remote.handle + (1 << 32), 0, 10, key), STALE),
        (Entry(U64_MAX, 0, 10, key), STALE),
        (Entry(remote.handle, SIZE - 9, 10, key), RANGE),
        (Entry(remote.handle, U64_MAX, 10, key), RANGE),
        (
            Entry(remote.handle, 0, LENGTH_MAX, key)
            if op is LaneOp.READ
            else Entry(remote.handle, SIZE, 1, key),
            RANGE,
        ),
        (Entry(remote.handle, 0, 10, other), DENIED),
        (Entry(remote.handle, 0, 10, bytes(16)), DENIED),
        (Entry(locked.handle, 0, 10, key), DENIED),
        (Entry(remote.handle, SIZE + 1, 0, key), RANGE),
        (Entry(gone.handle, 0, 0, key), STALE),
        (Entry(remote.handle, 100, 10, key), GOOD),
    ]
    entries, statuses = [entry for entry, _ in cases], [status for _, status in cases]
    payload = b""
    if op is LaneOp.WRITE:
        payload = b"".join(bytes([65 + at]) * entry.length for at, entry in enumerate(entries))
    initiator.exchange(op, entries, payload, statuses=statuses)
    if op is LaneOp.WRITE:
        before[0:10], before[100:110] = 65, 65 + 14
    assert (remote.array == before).all()
    for entry, status in cases:
        if op is LaneOp.READ or entry.length > SIZE:
            continue
        initiator.exchange(op, [entry], bytes(entry.length), statuses=[status])
    initiator.exchange(LaneOp.PING)
    remote.check_guards()


@pytest.mark.parametrize("seed", range(4))
def test_random_groups_byte_for_byte(target: Any, initiator: PythonInitiator, seed: int) -> None:
    chance = random.Random(seed)
    remote = target.offer(SIZE, seed=seed)
    model = bytearray(remote.array.tobytes())
    for _ in range(60):
        op = chance.choice([LaneOp.READ, LaneOp.WRITE])
        entries, statuses, payload, expected = [], [], bytearray(), bytearray()
        for _ in range(chance.choice([1, 2, 5, ENTRIES_MAX])):
            length = chance.choice([0, 1, 50, chance.randrange(3000)])
            offset = chance.randrange(SIZE + 500)
            key = chance.choice([READ_KEY, WRITE_KEY, READ_KEY if op is LaneOp.READ else WRITE_KEY])
            entries.append(Entry(remote.handle, offset, length, key))
            if key != (READ_KEY if op is LaneOp.READ else WRITE_KEY):
                statuses.append(DENIED)
            else:
                statuses.append(GOOD if offset + length <= SIZE else RANGE)
            data = chance.randbytes(length)
            if op is LaneOp.WRITE:
                payload += data
                if statuses[-1] is GOOD:
                    model[offset : offset + length] = data
            else:
                expected += model[offset : offset + length]
        if set(statuses) != {GOOD} or op is LaneOp.WRITE:
            expected.clear()
        initiator.exchange(op, entries, bytes(payload), statuses=statuses, expected=bytes(expected))
        assert remote.array.tobytes() == bytes(model)
    remote.check_guards()


def test_pipelined_groups_are_answered_in_order(target: Any, initiator: PythonInitiator) -> None:
    remote = target.offer(SIZE)
    raw, waiting = bytearray(), []
    for index in range(60):
        entry = Entry(remote.handle, index * 8, 8, WRITE_KEY)
        header, request = initiator.request(LaneOp.WRITE, [entry], struct.pack("<Q", index))
        initiator.parser.expect(header, [entry])
        raw += request
        waiting.append(header)
    initiator.lane.sendall(raw)
    for header in waiting:
        initiator.check_answer(header, [GOOD], b"")
    assert remote.array[:480].tobytes() == struct.pack("<60Q", *range(60))


@pytest.mark.parametrize("step", [1, 7, 31, 33, 95, 97])
def test_requests_in_pieces(target: Any, initiator: PythonInitiator, step: int) -> None:
    remote = target.offer(4096)
    whole = remote.array.tobytes()
    requests = [
        (LaneOp.READ, [Entry(remote.handle, 0, 64, READ_KEY)], b"", whole[:64]),
        (LaneOp.WRITE, [Entry(remote.handle, 64, 100, WRITE_KEY)], b"w" * 100, b""),
        (LaneOp.NOTIFY, [], b"m" * 50, b""),
        (LaneOp.PING, [], b"", b""),
    ]
    for op, entries, payload, expected in requests:
        header, raw = initiator.request(op, entries, payload)
        initiator.parser.expect(header, entries)
        for at in range(0, len(raw), step):
            initiator.lane.sendall(raw[at : at + step])
        initiator.check_answer(header, [GOOD], expected)
    assert remote.array[64:164].tobytes() == b"w" * 100


def test_the_largest_message(target: Any, initiator: PythonInitiator) -> None:
    message = bytes(range(256)) * 256
    assert len(message) == NOTIFICATION_BYTES_MAX
    initiator.exchange(LaneOp.NOTIFY, payload=message)
    assert target.server.take_notices(1, 0.0)[0][2] == message


# ---- requests that break a rule --------------------------------------------------------------------------


def group(op: int, *entries: bytes, **changes: int) -> bytes:
    about = {
        "magic": 0x504D,
        "flags": 0,
        "count": len(entries),
        "group_id": 9,
        "payload": 0,
        "reserved": 0,
        **changes,
    }
    return struct.pack(
        "<HBBIQQQ",
        about["magic"],
        op,
        about["flags"],
        about["count"],
        about["group_id"],
        about["payload"],
        about["reserved"],
    ) + b"".join(entries)


def entry(length: int = 16, *, handle: int = 1 << 32, offset: int = 0, grant: bytes = bytes(24)) -> bytes:
    return struct.pack("<QQQ16s24s", handle, offset, length, READ_KEY, grant)


BROKEN: dict[str, bytes] = {
    "magic": group(1, entry(), magic=0x4D50, payload=16),
    "operation 0": group(0),
    "operation 6": group(6),
    "a reply": group(0x81, entry(), payload=16),
    "flags": group(1, entry(), flags=1, payload=16),
    "reserved": group(1, entry(), reserved=1 << 63, payload=16),
    "read of nothing": group(1),
    "write of nothing": group(2),
    "257 entries": group(1, *[entry()] * 257, payload=257 * 16),
    "4 billion entries": group(2, count=0xFFFFFFFF),
    "payload below the entries": group(1, entry(), payload=15),
    "payload above the entries": group(2, entry(), payload=17),
    "payload that overflows": group(1, entry(LENGTH_MAX), entry(LENGTH_MAX), payload=U64_MAX),
    "length over the limit": group(1, entry(LENGTH_MAX + 1), payload=LENGTH_MAX + 1),
    "lengths that wrap": group(1, entry(U64_MAX), entry(17), payload=16),
    "a grant": group(1, entry(grant=bytes(23) + b"\x01"), payload=16),
    "a grant's first byte": group(1, entry(grant=b"\x01" + bytes(23)), payload=16),
    "flush with entries": group(3, entry()),
    "flush with payload": group(3, payload=1),
    "notify with entries": group(4, entry()),
    "notify over the limit": group(4, payload=NOTIFICATION_BYTES_MAX + 1),
    "ping with payload": group(5, payload=1),
    "ping with entries": group(5, entry(), count=1),
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_ends_its_lane_alone(target: Any, tools: Any, name: str) -> None:
    remote = target.offer(SIZE)
    assert remote.handle == 1 << 32
    before = remote.array.copy()
    lane, other = PythonInitiator(target.connect()), PythonInitiator(target.connect())
    lane.exchange(LaneOp.PING)
    lane.lane.sendall(BROKEN[name])
    assert ended_without_answer(lane.lane)
    tools.wait_until(lambda: target.server.lanes == 1, "the lane's thread ends")
    assert target.server.counters()["lanes_broken"] == 1
    assert target.regions.users == 0
    other.exchange(LaneOp.READ, [Entry(remote.handle, 0, 8, READ_KEY)], expected=before[:8].tobytes())
    assert (remote.array == before).all()
    other.end()


def ended_without_answer(lane: socket.socket) -> bool:
    try:
        return lane.recv(1) == b""
    except ConnectionResetError:  # bytes of ours were still unread when the target closed
        return True


@pytest.mark.parametrize("seed", range(3))
def test_noise_ends_lanes_and_nothing_else(target: Any, tools: Any, seed: int) -> None:
    chance = random.Random(seed)
    remote = target.offer(SIZE)
    before = remote.array.copy()
    good = group(1, entry(), payload=16)
    for _ in range(40):
        raw = bytearray(good if chance.random() < 0.5 else chance.randbytes(chance.randrange(1, 400)))
        for _ in range(chance.randrange(4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        lane = target.connect()
        lane.sendall(raw)
        lane.shutdown(socket.SHUT_WR)
        drain(lane)
        lane.close()
    tools.wait_until(lambda: target.server.lanes == 0, "every lane ends")
    assert (remote.array == before).all()
    remote.check_guards()
    last = PythonInitiator(target.connect())
    last.exchange(LaneOp.PING)
    last.end()


def drain(lane: socket.socket) -> None:
    lane.settimeout(20.0)
    try:
        while lane.recv(65536):
            pass
    except ConnectionResetError:
        pass


CUTS: list[Callable[[bytes], bytes]] = [
    lambda raw, at=at: raw[:at] for at in (0, 1, 31, 32, 33, 95, 96, 97, 111)
]


@pytest.mark.parametrize("cut", CUTS)
def test_an_initiator_that_leaves_in_a_group(target: Any, tools: Any, cut: Callable[[bytes], bytes]) -> None:
    remote = target.offer(SIZE)
    lane = target.connect()
    raw = encode_group(GroupHeader(LaneOp.WRITE, 1, 1, 16), [Entry(remote.handle, 0, 16, WRITE_KEY)]) + bytes(
        16
    )
    lane.sendall(cut(raw))
    lane.close()
    tools.wait_until(lambda: target.server.lanes == 0, "the lane's thread ends")
    assert target.regions.users == 0
    assert target.server.counters()["lanes_broken"] == 0, "leaving is no broken rule"
