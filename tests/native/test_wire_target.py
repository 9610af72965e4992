"""The native initiator against a target written in Python on the reference codec, byte for byte.

What arrives is encoded again by the reference and must be the very bytes; what the reference answers is taken
apart by the native side. Then answers that break a rule, each of which must end the lane and nothing else.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from moonpool.errors import (
    AccessDenied,
    InternalError,
    MoonpoolError,
    PeerGone,
    ProtocolError,
    QueueFull,
    StaleHandle,
    Status,
)
from moonpool.wire.lane_parser import GroupEnded, GroupOpened, Notification, PayloadPiece, TargetParser
from moonpool.wire.transfer import (
    Entry,
    GroupHeader,
    LaneOp,
    encode_group,
    encode_reply,
    reply_to,
)

READ, WRITE = 1, 2
SIZE = 1 << 16
READ_KEY, WRITE_KEY = b"the read key 16b", b"the write key 16"


class PythonTarget:
    """Regions and one lane, in plain Python. `raw` is all that came; `groups` what the parser made of it."""

    def __init__(self, lane: socket.socket, regions: dict[int, bytearray]) -> None:
        self.lane = lane
        self.regions = regions
        self.raw = bytearray()
        self.again = bytearray()
        self.groups: list[GroupHeader] = []
        self.messages: list[bytes] = []
        self._entries: tuple[Entry, ...] = ()
        self._statuses: list[Status] = []

    def serve(self) -> None:
        """Answer everything until the initiator ends the lane."""
        parser = TargetParser()
        while data := self.lane.recv(100_000):
            self.raw += data
            for event in parser.feed(data):
                self.take(event)
        parser.end()

    def take(self, event: Any) -> None:
        if isinstance(event, GroupOpened):
            self.again += encode_group(event.header, event.entries)
            self._entries = event.entries
            self._statuses = [self.check(event.header.op, entry) for entry in event.entries]
        elif isinstance(event, PayloadPiece):
            self.again += event.data
            entry = self._entries[event.entry]
            if self._statuses[event.entry] is Status.COMPLETE:
                start = entry.offset + event.offset
                self.regions[entry.region][start : start + len(event.data)] = event.data
        elif isinstance(event, Notification):
            self.again += encode_group(event.header) + event.message
            self.messages.append(event.message)
            self.groups.append(event.header)
            self.lane.sendall(encode_reply(reply_to(event.header, [Status.COMPLETE])))
        elif isinstance(event, GroupEnded):
            self.groups.append(event.header)
            self.answer(event.header)

    def check(self, op: LaneOp, entry: Entry) -> Status:
        memory = self.regions.get(entry.region)
        if memory is None:
            return Status.STALE_HANDLE
        if entry.key != (READ_KEY if op is LaneOp.READ else WRITE_KEY):
            return Status.ACCESS_DENIED
        return Status.COMPLETE if entry.offset + entry.length <= len(memory) else Status.OUT_OF_RANGE

    def answer(self, header: GroupHeader) -> None:
        statuses = self._statuses if header.count else [Status.COMPLETE]
        reply = reply_to(header, statuses)
        self.lane.sendall(encode_reply(reply, statuses))
        if reply.payload_bytes:
            for entry in self._entries:
                self.lane.sendall(self.regions[entry.region][entry.offset : entry.offset + entry.length])


@pytest.fixture
def python_target(io: int, make_stalled: Any, tools: Any) -> Any:
    """`run(calls)` makes calls against a served Python target with one lane; returns the target."""
    stalled = make_stalled(io, lanes_max=1)

    class Made:
        rig = stalled.rig
        handle = 7 << 32 | 3
        memory = bytearray(tools.pattern(SIZE, 9).tobytes())
        regions: ClassVar[dict[int, bytearray]] = {}

        def run(self, calls: Callable[[], None]) -> PythonTarget:
            self.rig.segment.put_region(self.handle, 4096, SIZE, 3, READ_KEY, WRITE_KEY)
            self.regions[self.handle] = self.memory
            targets: list[PythonTarget] = []

            def serve() -> None:
                tools.wait_until(lambda: bool(stalled.peers), "the lane is opened")
                stalled.peers[0].settimeout(tools.WAIT_S)
                targets.append(PythonTarget(stalled.peers[0], self.regions))
                targets[0].serve()

            with tools.background(serve):
                try:
                    calls()
                finally:
                    self.rig.close()
            (target,) = targets
            assert bytes(target.again) == bytes(target.raw), "the reference would have sent other bytes"
            assert self.rig.pool.counters()["connects"] == 1
            return target

    return Made()


@pytest.mark.parametrize("count", [1, 3, 256, 257, 700])
@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize("digest", [False, True])
def test_batches_byte_for_byte(python_target: Any, tools: Any, op: int, count: int, digest: bool) -> None:
    mine = python_target.rig.buffer(SIZE)
    mine.array[:] = tools.pattern(SIZE, 4)
    places = np.arange(count, dtype=np.uint64) * np.uint64(64)
    lengths = np.arange(count, dtype=np.uint64) % np.uint64(64) + np.uint64(1)
    before_here, before_there = mine.array.copy(), bytes(python_target.memory)

    def calls() -> None:
        local = places + np.uint64(mine.address)
        batch = python_target.rig.run(op, local, python_target.handle, places, lengths, digest=digest)
        assert batch.statuses() == bytes(count)

    target = python_target.run(calls)
    assert [header.op for header in target.groups] == [LaneOp(op)] * -(-count // 256)
    assert [header.group_id for header in target.groups] == list(
        range(target.groups[0].group_id, target.groups[0].group_id + len(target.groups))
    )
    source, here, there = (
        before_there if op == READ else before_here,
        before_here.copy(),
        bytearray(before_there),
    )
    for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
        if op == READ:
            here[place : place + length] = np.frombuffer(source, dtype=np.uint8)[place : place + length]
        else:
            there[place : place + length] = source[place : place + length].tobytes()
    assert np.array_equal(mine.array, here)
    assert python_target.memory == there
    mine.check_guards()


@pytest.mark.parametrize("op", [READ, WRITE])
def test_refusals_of_the_reference_are_understood(python_target: Any, op: int) -> None:
    rig = python_target.rig
    mine = rig.buffer(SIZE, fill=1)
    good, stale, locked, short = python_target.handle, 1 << 32 | 1, 1 << 32 | 2, 1 << 32 | 4

    def calls() -> None:
        rig.segment.put_region(stale, 4096, SIZE, 3, READ_KEY, WRITE_KEY)
        rig.segment.put_region(locked, 4096, SIZE, 3, bytes(16), bytes(16))
        rig.segment.put_region(short, 4096, 2 * SIZE, 3, READ_KEY, WRITE_KEY)
        python_target.regions[locked] = python_target.regions[short] = bytearray(SIZE)
        batch = rig.run(
            op,
            [mine.address + 100 * at for at in range(6)],
            [good, stale, good, locked, short, good],
            [0, 0, 100, 0, SIZE + 1, 200],
            100,
        )
        expected = [Status.COMPLETE, Status.STALE_HANDLE, Status.COMPLETE]
        expected += [Status.ACCESS_DENIED, Status.OUT_OF_RANGE, Status.COMPLETE]
        assert list(batch.statuses()) == expected

    target = python_target.run(calls)
    # A READ asks again for the good ones alone; a WRITE's are done.
    assert [header.count for header in target.groups] == ([6, 3] if op == READ else [6])


def test_calls_byte_for_byte(python_target: Any) -> None:
    sent = [b"", b"one", bytes(range(256)) * 256]

    def calls() -> None:
        for message in sent:
            python_target.rig.pool.call(LaneOp.NOTIFY, message, 10.0)
        python_target.rig.pool.call(LaneOp.FLUSH, b"", 10.0)
        python_target.rig.pool.call(LaneOp.PING, b"", 10.0)

    target = python_target.run(calls)
    assert target.messages == sent
    assert [header.op.name for header in target.groups] == ["NOTIFY"] * 3 + ["FLUSH", "PING"]
    numbers = [header.group_id for header in target.groups[:3]]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_large_transfers_byte_for_byte(python_target: Any) -> None:
    mine = python_target.rig.buffer(SIZE)
    python_target.memory[:] = bytes(SIZE - 1) + b"\x01"

    def calls() -> None:
        for op in (READ, WRITE):
            assert python_target.rig.run(op, mine.address, python_target.handle, 0, SIZE).worst == 0

    python_target.run(calls)
    assert mine.array.tobytes() == bytes(python_target.memory)


# ---- answers that break a rule ---------------------------------------------------------------------------


def header(group_id: int, *, magic: int = 0x504D, op: int = 0x81, status: int = 0, **rest: int) -> bytes:
    numbers = (rest.get("count", 1), group_id, rest.get("payload", 0), rest.get("reserved", 0))
    return struct.pack("<HBBIQQQ", magic, op, status, *numbers)


#: What a broken target answers to a READ of 100 bytes in group `g`.
BROKEN_READS: dict[str, Callable[[int], bytes]] = {
    "wrong magic": lambda g: header(g, magic=0x504E, payload=100) + bytes(100),
    "answer to another operation": lambda g: header(g, op=0x82, payload=100) + bytes(100),
    "a request": lambda g: header(g, op=0x01, payload=100) + bytes(100),
    "another group": lambda g: header(g + 1, payload=100) + bytes(100),
    "wrong count": lambda g: header(g, count=2, payload=100) + bytes(100),
    "too little payload": lambda g: header(g, payload=99) + bytes(99),
    "too much payload": lambda g: header(g, payload=101) + bytes(101),
    "reserved bits": lambda g: header(g, payload=100, reserved=1) + bytes(100),
    "pending": lambda g: header(g, status=1) + b"\x01",
    "unknown status": lambda g: header(g, status=16) + b"\x10",
    "unknown status of an entry": lambda g: header(g, status=6) + b"\xff",
    "pending entry": lambda g: header(g, status=6) + b"\x01",
    "failure without a failed entry": lambda g: header(g, status=6) + b"\x00",
    "failure that no entry has": lambda g: header(g, status=6) + b"\x07",
    "failure with payload": lambda g: header(g, status=6, payload=1) + b"\x06" + b"x",
}
BROKEN_WRITES: dict[str, Callable[[int], bytes]] = {
    "payload": lambda g: header(g, op=0x82, payload=100),
    "pending entry": lambda g: header(g, op=0x82, status=8) + b"\x01",
    "failure without a failed entry": lambda g: header(g, op=0x82, status=8) + b"\x00",
    "answer to another operation": lambda g: header(g, op=0x81),
    "wrong count": lambda g: header(g, op=0x82, count=0),
}


def answer_once(stalled: Any, make: Callable[[int], bytes]) -> None:
    """Answer the first group on the first lane."""
    request = stalled.request()
    (group_id,) = struct.unpack_from("<Q", request, 8)
    stalled.peers[0].sendall(make(group_id))


@pytest.mark.parametrize(
    ("op", "make"),
    [pytest.param(READ, make, id=f"read-{name}") for name, make in BROKEN_READS.items()]
    + [pytest.param(WRITE, make, id=f"write-{name}") for name, make in BROKEN_WRITES.items()],
)
def test_a_broken_answer_ends_the_lane(make_stalled: Any, io: int, tools: Any, op: int, make: Any) -> None:
    stalled = make_stalled(io)
    mine, remote = stalled.rig.buffer(100, fill=3), stalled.memory()
    batch = stalled.rig.make(op, mine.address, remote.handle, 0, 100)
    with tools.background(batch.drive_here):
        answer_once(stalled, make)
        assert batch.wait(tools.WAIT_S)
    assert batch.worst == Status.PROTOCOL
    assert stalled.rig.pool.counters() == {"connects": 1, "lost": 1, "open": 0}
    assert (mine.array == 3).all()
    mine.check_guards()


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, 131])
def test_an_answer_that_is_cut_is_a_peer_gone(make_stalled: Any, io: int, tools: Any, cut: int) -> None:
    stalled = make_stalled(io)
    mine, remote = stalled.rig.buffer(100), stalled.memory()
    batch = stalled.rig.make(READ, mine.address, remote.handle, 0, 100)
    with tools.background(batch.drive_here):
        answer_once(stalled, lambda g: (header(g, payload=100) + bytes(100))[:cut])
        stalled.peers[0].shutdown(socket.SHUT_WR)
        assert batch.wait(tools.WAIT_S)
    assert batch.worst == Status.PEER_GONE
    mine.check_guards()


CALLS: dict[str, tuple[Callable[[int], bytes], type[MoonpoolError]]] = {
    "complete": (lambda g: header(g, op=0x85, count=0), MoonpoolError),
    "queue full": (lambda g: header(g, op=0x85, count=0, status=13), QueueFull),
    "denied": (lambda g: header(g, op=0x85, count=0, status=8), AccessDenied),
    "stale": (lambda g: header(g, op=0x85, count=0, status=6), StaleHandle),
    "internal": (lambda g: header(g, op=0x85, count=0, status=14), InternalError),
    "pending": (lambda g: header(g, op=0x85, count=0, status=1), ProtocolError),
    "unknown": (lambda g: header(g, op=0x85, count=0, status=200), ProtocolError),
    "count": (lambda g: header(g, op=0x85, count=1), ProtocolError),
    "payload": (lambda g: header(g, op=0x85, count=0, payload=1), ProtocolError),
    "reserved": (lambda g: header(g, op=0x85, count=0, reserved=1), ProtocolError),
    "another op": (lambda g: header(g, op=0x84, count=0), ProtocolError),
    "another group": (lambda g: header(g + 1, op=0x85, count=0), ProtocolError),
    "magic": (lambda g: header(g, op=0x85, count=0, magic=0), ProtocolError),
    "cut": (lambda g: header(g, op=0x85, count=0)[:16], PeerGone),
}


@pytest.mark.parametrize("name", CALLS)
def test_answers_to_a_call(make_stalled: Any, io: int, tools: Any, name: str) -> None:
    stalled = make_stalled(io)
    make, expected = CALLS[name]

    def answer() -> None:
        answer_once(stalled, make)
        stalled.peers[0].shutdown(socket.SHUT_WR)

    with tools.background(answer):
        if name == "complete":
            stalled.rig.pool.call(LaneOp.PING, b"", tools.WAIT_S)
        else:
            with pytest.raises(expected):
                stalled.rig.pool.call(LaneOp.PING, b"", tools.WAIT_S)
    kept = expected not in (ProtocolError, PeerGone)
    assert stalled.rig.pool.counters()["lost"] == (0 if kept else 1)
