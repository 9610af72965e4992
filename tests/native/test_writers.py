"""Which lanes carry a WRITE into a range at this moment: none is missed, and each is seen to end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.errors import StaleHandle, UsageError
from moonpool.native.io.grants import make_grant
from moonpool.native.io.writers import deny_grants, grant_counters, set_grant_key, writes_into
from moonpool.wire.transfer import Entry, GroupHeader, LaneOp, encode_group

WAIT_S = 20.0
GRANTED_WRITE = 2 | 8
KEY = b"the grant key 16"


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.001)


def group(op: LaneOp, *entries: Entry) -> bytes:
    """The frame of a group without its payload."""
    return encode_group(GroupHeader(op, len(entries), 1, sum(entry.length for entry in entries)), entries)


def entry(memory: Any, offset: int, length: int, grant: bytes = bytes(24), key: bytes = b"") -> Entry:
    return Entry(memory.handle, offset, length, key or memory.write_key, grant)


@pytest.fixture
def offered(target: Any, tools: Any) -> Any:
    """A region with a name for its key."""
    memory = target.offer(1 << 16)
    memory.write_key = tools.WRITE_KEY
    memory.read_key = tools.READ_KEY
    return memory


def test_a_write_is_seen_while_it_lasts(target: Any, offered: Any) -> None:
    def seen(offset: int, length: int) -> set[tuple[int, int]]:
        return writes_into(target.server, target.regions, offered.handle, offset, length)

    lane: socket.socket = target.connect()
    assert seen(0, 1 << 16) == set()
    lane.sendall(group(LaneOp.WRITE, entry(offered, 4096, 100), entry(offered, 8192, 4096)) + bytes(150))
    until(lambda: seen(4096, 1) != set(), "the WRITE is not seen")
    ((serial, number),) = seen(0, 1 << 16)
    for offset, length, found in (
        (4095, 1, False),
        (4195, 1, True),
        (4196, 1, False),
        (0, 4097, True),
        (8191, 1, False),
        (12287, 4096, True),
        (12288, 4096, False),
    ):
        until(lambda o=offset, n=length, f=found: bool(seen(o, n)) is f, f"{offset}+{length}")
    other: socket.socket = target.connect()
    other.sendall(group(LaneOp.WRITE, entry(offered, 8192, 64)))
    until(lambda: len(seen(8192, 64)) == 2, "the second WRITE is not seen")
    lane.sendall(bytes(4046))
    assert len(lane.recv(32, socket.MSG_WAITALL)) == 32
    until(lambda: (serial, number) not in seen(0, 1 << 16), "an answered WRITE is still seen")
    lane.sendall(group(LaneOp.WRITE, entry(offered, 4096, 100)))
    until(lambda: (serial, number + 1) in seen(4096, 1), "the lane's next WRITE has another number")
    for one in (lane, other):
        one.close()
    until(lambda: seen(0, 1 << 16) == set(), "a WRITE whose lane is gone is still seen")


def test_refused_entries_and_reads_write_nothing(target: Any, offered: Any) -> None:
    lane: socket.socket = target.connect()
    wrong = entry(offered, 0, 4096, key=bytes(16))
    lane.sendall(group(LaneOp.WRITE, wrong, entry(offered, 8192, 64)) + bytes(10))
    seen = lambda offset: writes_into(target.server, target.regions, offered.handle, offset, 64)  # noqa: E731
    until(lambda: bool(seen(8192)), "the good entry is not seen")
    until(lambda: not seen(0), "the refused entry counts")
    reader: socket.socket = target.connect()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reads = group(LaneOp.READ, *[entry(offered, 16384, 32768, key=offered.read_key)] * 256)
    reader.sendall(reads)  # 8 MiB that nobody takes: the lane stays in the group
    until(lambda: target.server.counters()["groups"] == 2, "the READ has not begun")
    assert not seen(16384)


def test_a_grant_lets_a_lane_in(target: Any, offered: Any) -> None:
    memory = target.offer(1 << 16, GRANTED_WRITE)
    set_grant_key(target.regions, KEY, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    good = make_grant(KEY, memory.handle, 4096, 4096, 600_000, 5)
    lane: socket.socket = target.connect()

    def write(grant: bytes, offset: int = 4096, length: int = 64) -> int:
        lane.sendall(group(LaneOp.WRITE, Entry(memory.handle, offset, length, offered.write_key, grant)))
        lane.sendall(b"x" * length)
        reply = lane.recv(32, socket.MSG_WAITALL)
        status = reply[3]
        if status:
            assert lane.recv(1) == bytes([status])
        return status

    assert write(good) == 0
    assert [write(bytes(24)), write(good, 4032, 128), write(good, 8128, 128), write(good, 1 << 15)] == [
        8,
        8,
        8,
        8,
    ]
    for bit in range(0, 192, 7):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        assert write(bytes(changed)) == 8, bit
    other = make_grant(KEY, offered.handle, 4096, 4096, 600_000, 5)
    assert write(other) == 8
    counters = grant_counters(target.regions)
    assert counters["grants_accepted"] == 1
    assert counters["grants_absent"] == 1
    assert counters["grants_outside"] == 3
    assert counters["grants_wrong"] == len(range(0, 192, 7)) + 1
    assert bytes(memory.array[4096:4160]) == b"x" * 64
    memory.check_guards()


def test_what_was_let_in_before_a_denial_is_seen_after_it(target: Any, offered: Any) -> None:
    memory = target.offer(1 << 16, GRANTED_WRITE)
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    set_grant_key(target.regions, KEY, now)
    grant = make_grant(KEY, memory.handle, 0, 4096, 600_000, 5)
    frame = group(LaneOp.WRITE, Entry(memory.handle, 0, 4096, offered.write_key, grant))
    early: socket.socket = target.connect()
    early.sendall(frame + bytes(1))
    until(lambda: grant_counters(target.regions)["grants_accepted"] == 1, "not let in")
    assert deny_grants(target.regions, memory.handle, 0, 5, now + 10**12)
    assert len(writes_into(target.server, target.regions, memory.handle, 0, 4096)) == 1
    late: socket.socket = target.connect()
    late.sendall(frame + bytes(4096))
    assert late.recv(32, socket.MSG_WAITALL)[3] == 8
    assert grant_counters(target.regions)["grants_denied"] == 1
    early.sendall(bytes(4095))
    assert early.recv(32, socket.MSG_WAITALL)[3] == 0
    until(lambda: not writes_into(target.server, target.regions, memory.handle, 0, 4096), "it has ended")


def test_wrong_arguments(target: Any, offered: Any) -> None:
    for handle in (0, offered.handle + (1 << 32), 1 << 40, 63):
        with pytest.raises(StaleHandle):
            writes_into(target.server, target.regions, handle, 0, 1)
    with pytest.raises(UsageError):
        set_grant_key(target.regions, b"short", 0)
    with pytest.raises(UsageError):
        deny_grants(target.regions, 1, 0, 1 << 16, 0)
