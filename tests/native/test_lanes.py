"""Bytes over lanes without an engine: every way to wait, reads, writes, digests, failures inside a batch."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import xxhash

from moonpool.errors import EngineClosed, InternalError, LimitExceeded, PeerRefused, Status, UsageError
from moonpool.native.io.lanes import LANES_MAX, Dialing, LanePool
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.server import TargetServer
from moonpool.wire.transfer import Entry, GroupHeader, LaneOp, encode_group

READ, WRITE = 1, 2
FLUSH, PING = 3, 5
CHUNK = 65536
GROUP = 256
SIZES = [1, 31, 4096, 16351, 16352, 16384, 65535, 65536, 65537, 262144, (1 << 20) + 13, 9 << 20]


def oracle(data: Any) -> list[int]:
    raw = bytes(data)
    return [xxhash.xxh3_64_intdigest(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK)]


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_read_brings_every_byte(target: Any, rig: Any, size: int, digest: bool) -> None:
    remote, mine = target.offer(size + 100), rig.buffer(size, shift=size % 17)
    rig.know(remote)
    before = remote.array.copy()
    batch = rig.run(READ, mine.address, remote.handle, 57, size, digest=digest)
    assert batch.worst == Status.COMPLETE
    assert np.array_equal(mine.array, before[57 : 57 + size])
    assert np.array_equal(remote.array, before)
    assert batch.digests() == ([oracle(mine.array)] if digest else None)
    mine.check_guards()
    remote.check_guards()


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_write_lands_every_byte(target: Any, rig: Any, tools: Any, size: int, digest: bool) -> None:
    remote, mine = target.offer(size + 100), rig.buffer(size, shift=size % 17)
    rig.know(remote)
    mine.array[:] = tools.pattern(size, 2)
    expected = remote.array.copy()
    expected[57 : 57 + size] = mine.array
    batch = rig.run(WRITE, mine.address, remote.handle, 57, size, digest=digest)
    assert batch.worst == Status.COMPLETE
    assert np.array_equal(remote.array, expected)
    assert batch.digests() == ([oracle(mine.array)] if digest else None)
    mine.check_guards()
    remote.check_guards()
    rig.close()
    counted = target.server.counters()
    assert (counted["bytes_written"], counted["bytes_read"]) == (size, 0)


@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_transfers_of_any_length(
    target: Any, rig: Any, tools: Any, op: int, digest: bool, seed: int
) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 7, 100, 4096, chance.randrange(20_000)]) for _ in range(1000)]
    places = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.uint64)
    order = list(range(1000))
    chance.shuffle(order)
    far = np.empty(1000, dtype=np.uint64)  # each transfer's bytes lie elsewhere at the other end
    at = 0
    for index in order:
        far[index] = at
        at += lengths[index]
    total = sum(lengths)
    remote, mine = target.offer(total), rig.buffer(total)
    rig.know(remote)
    mine.array[:] = tools.pattern(total, 3)
    source, sink = (remote.array.copy(), mine.array) if op == READ else (mine.array.copy(), remote.array)
    local = places + np.uint64(mine.address)
    batch = rig.run(op, local, remote.handle, far, np.array(lengths, dtype=np.uint64), digest=digest)
    assert batch.statuses() == bytes(1000)
    assert batch.bytes_done == total
    digests = batch.digests() or [None] * 1000
    for index in range(1000):
        here, there, length = int(places[index]), int(far[index]), lengths[index]
        out_of, into = (there, here) if op == READ else (here, there)
        piece = source[out_of : out_of + length]
        assert np.array_equal(sink[into : into + length], piece), index
        assert digests[index] == (oracle(piece) if digest else None), index
    mine.check_guards()
    remote.check_guards()
    rig.close()
    groups = target.server.counters()["groups"]
    assert groups == -(-sum(length > 0 for length in lengths) // GROUP), "empty transfers are never sent"


@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 512, 1000])
def test_batches_go_in_groups_of_256(target: Any, rig: Any, op: int, count: int) -> None:
    remote, mine = target.offer(64 * count), rig.buffer(64 * count)
    rig.know(remote)
    places = np.arange(count, dtype=np.uint64) * np.uint64(64)
    assert rig.run(op, places + np.uint64(mine.address), remote.handle, places, 64).worst == Status.COMPLETE
    assert np.array_equal(mine.array, remote.array)
    rig.close()
    counted = target.server.counters()
    assert counted["groups"] == -(-count // GROUP)
    assert counted["groups_refused"] == 0
    stats = rig.segment.path_stats(rig.path)[("READ", "WRITE")[op == WRITE]]
    assert (stats["batches"], stats["transfers"], stats["bytes"]) == (1, count, 64 * count)


def test_empty_transfers_need_no_lane(target: Any, rig: Any) -> None:
    remote, mine = target.offer(100), rig.buffer(100, fill=5)
    rig.know(remote)
    for op in (READ, WRITE):
        batch = rig.run(op, mine.address, remote.handle, [0, 100], [0, 0], digest=True)
        assert batch.statuses() == bytes(2)
        assert batch.digests() == [[], []]
    assert rig.pool.counters() == {"connects": 0, "lost": 0, "open": 0}
    assert (mine.array == 5).all()


# ---- failures inside a batch -----------------------------------------------------------------------------


class Mixed:
    """Transfers of which each third is refused by the target, each in its own way."""

    def __init__(self, target: Any, rig: Any, count: int, size: int) -> None:
        self.good, self.mine = target.offer(count * size, seed=5), rig.buffer(count * size)
        self.stale, locked, self.small = target.offer(size), target.offer(size), target.offer(size)
        read_only = target.offer(size, access=1)
        write_only = target.offer(size, access=2)
        rig.know(self.good)
        self.ways = {
            READ: [
                (rig.know(self.stale), 0, Status.STALE_HANDLE),
                (rig.know(locked, read_key=bytes(16), write_key=bytes(16)), 0, Status.ACCESS_DENIED),
                (rig.know(self.small, length=2 * size), size, Status.OUT_OF_RANGE),
                (rig.know(write_only), 0, Status.ACCESS_DENIED),
            ]
        }
        self.ways[WRITE] = [*self.ways[READ][:3], (rig.know(read_only), 0, Status.ACCESS_DENIED)]
        assert target.regions.remove(self.stale.handle, 5.0)
        self.untouched = [self.stale, locked, self.small, read_only, write_only]
        self.before = [memory.array.copy() for memory in self.untouched]

    def arrays(self, op: int, count: int, size: int) -> tuple[Any, Any, Any, list[int]]:
        places = [self.mine.address + at * size for at in range(count)]
        regions, offsets = [self.good.handle] * count, [at * size for at in range(count)]
        expected = [int(Status.COMPLETE)] * count
        for at in range(1, count, 3):
            regions[at], offsets[at], expected[at] = self.ways[op][at // 3 % len(self.ways[op])]
        return places, regions, offsets, expected


@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize(("count", "size"), [(3, 64), (5, 100_000), (300, 64), (1000, 100)])
@pytest.mark.parametrize("digest", [False, True])
def test_refused_transfers_fail_alone(
    target: Any, rig: Any, tools: Any, op: int, count: int, size: int, digest: bool
) -> None:
    mixed = Mixed(target, rig, count, size)
    mixed.mine.array[:] = tools.pattern(count * size, 6)
    local_before, remote_before = mixed.mine.array.copy(), mixed.good.array.copy()
    places, regions, offsets, expected = mixed.arrays(op, count, size)
    batch = rig.run(op, places, regions, offsets, size, digest=digest)
    assert list(batch.statuses()) == expected
    assert batch.worst == expected[1]
    assert batch.first_failure() == 1
    for at, status in enumerate(expected):
        span = slice(at * size, (at + 1) * size)
        moved = (remote_before if op == READ else local_before)[span]
        if status == Status.COMPLETE:
            assert np.array_equal(mixed.mine.array[span], moved)
            assert np.array_equal(mixed.good.array[span], moved)
            if digest:
                assert (batch.digests() or [])[at] == oracle(moved)
        else:
            assert np.array_equal(mixed.good.array[span], remote_before[span]), (
                "a refused transfer left a trace"
            )
    for memory, before in zip(mixed.untouched, mixed.before, strict=True):
        assert np.array_equal(memory.array, before)
        memory.check_guards()
    failed = sum(status != Status.COMPLETE for status in expected)
    stats = rig.segment.path_stats(rig.path)[("READ", "WRITE")[op == WRITE]]
    assert sum(stats["errors"].values()) == failed
    assert stats["transfers"] == count - failed
    assert rig.pool.counters()["lost"] == 0, "a refusal is no reason to lose a lane"
    again = rig.run(op, mixed.mine.address, mixed.good.handle, 0, size)
    assert again.worst == Status.COMPLETE


@pytest.mark.parametrize("op", [READ, WRITE])
def test_a_batch_of_refusals_only(target: Any, rig: Any, op: int) -> None:
    remote, mine = target.offer(4096), rig.buffer(4096)
    rig.know(remote)
    assert target.regions.remove(remote.handle, 5.0)
    batch = rig.run(op, mine.address, remote.handle, [0] * 300, 16)
    assert batch.statuses() == bytes([Status.STALE_HANDLE] * 300)
    rig.close()
    assert target.server.counters()["groups_refused"] == 2


def test_each_direction_has_its_key(target: Any, rig: Any, tools: Any) -> None:
    remote, mine = target.offer(64), rig.buffer(64)
    rig.know(remote, read_key=tools.WRITE_KEY, write_key=tools.READ_KEY)
    for op in (READ, WRITE):
        assert rig.run(op, mine.address, remote.handle, 0, 64).worst == Status.ACCESS_DENIED


@pytest.mark.parametrize("bit", range(128))
def test_every_bit_of_a_key_counts(make_target: Any, make_rig: Any, tools: Any, bit: int) -> None:
    target = make_target()
    rig = make_rig(target.connect)
    remote, mine = target.offer(64), rig.buffer(64)
    wrong = (int.from_bytes(tools.READ_KEY, "little") ^ 1 << bit).to_bytes(16, "little")
    rig.know(remote, read_key=wrong)
    assert rig.run(READ, mine.address, remote.handle, 0, 64).worst == Status.ACCESS_DENIED
    assert not mine.array.any()


# ---- lanes -----------------------------------------------------------------------------------------------


def test_a_lane_is_used_again(target: Any, rig: Any) -> None:
    remote, mine = target.offer(64), rig.buffer(64)
    rig.know(remote)
    for _ in range(5):
        rig.run(READ, mine.address, remote.handle, 0, 64)
        rig.pool.call(PING, b"", 10.0)
    assert rig.pool.counters() == {"connects": 1, "lost": 0, "open": 1}
    assert rig.pool.open == target.server.lanes == 1


def test_an_idle_lane_that_the_peer_closed_is_replaced_unseen(target: Any, rig: Any) -> None:
    remote, mine = target.offer(300 * 64), rig.buffer(300 * 64)
    rig.know(remote)
    places = np.arange(300, dtype=np.uint64) * np.uint64(64)
    for op in (READ, WRITE):
        assert rig.run(op, mine.address, remote.handle, 0, 64).worst == Status.COMPLETE
        target.restart()
        batch = rig.run(op, places + np.uint64(mine.address), remote.handle, places, 64)
        assert batch.statuses() == bytes(300)
    target.restart()
    rig.pool.call(FLUSH, b"", 10.0)
    assert rig.pool.counters() == {"connects": 4, "lost": 3, "open": 1}


def test_threads_share_a_bounded_number_of_lanes(target: Any, make_rig: Any, io: int, tools: Any) -> None:
    rig = make_rig(target.connect, io, lanes_max=2)
    remote = target.offer(1 << 16)
    rig.know(remote)
    buffers = [rig.buffer(1 << 16) for _ in range(6)]
    statuses: set[int] = set()

    def work(mine: Any) -> None:
        for _ in range(30):
            statuses.add(rig.run(READ, mine.address, remote.handle, 0, 1 << 16).worst)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(tools.WAIT_S)
    assert statuses == {Status.COMPLETE}
    assert all(np.array_equal(mine.array, remote.array) for mine in buffers)
    counted = rig.pool.counters()
    assert 1 <= counted["connects"] <= 2
    assert counted["lost"] == 0


@pytest.mark.parametrize("lanes_max", [0, LANES_MAX + 1, 1000])
def test_a_peer_has_1_to_64_lanes(lanes_max: int) -> None:
    with pytest.raises(UsageError, match="1 to 64") as caught:
        LanePool(lambda *_: -1, lanes_max=lanes_max, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0)
    assert caught.value.field == "lanes_per_peer_max"


def test_a_dropped_pool_closes_its_lanes(make_target: Any, make_rig: Any, tools: Any) -> None:
    target = make_target()
    pool = LanePool(
        lambda *_: target.connect().detach(), lanes_max=1, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0
    )
    pool.call(PING, b"", 10.0)
    assert target.server.lanes == 1
    del pool
    tools.wait_until(lambda: target.server.lanes == 0, "the target sees the end")


def test_a_closed_pool_refuses(target: Any, rig: Any) -> None:
    remote, mine = target.offer(64), rig.buffer(64)
    rig.know(remote)
    rig.close()
    assert rig.run(READ, mine.address, remote.handle, 0, 64).worst == Status.PEER_GONE
    rig.pool.shut()
    assert rig.pool.counters()["open"] == 0


# ---- connecting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "status"),
    [(PeerRefused(), Status.REFUSED), (ValueError("bug"), Status.INTERNAL), (SystemExit(), Status.INTERNAL)],
)
def test_what_the_connector_raises_becomes_the_status(
    make_rig: Any, tools: Any, problem: BaseException, status: Status
) -> None:
    def refuse() -> socket.socket:
        raise problem

    rig = make_rig(refuse)
    mine = rig.buffer(64)
    rig.know(mine, handle=1 << 32)
    assert rig.run(READ, mine.address, 1 << 32, 0, 64).worst == status
    assert rig.pool.counters() == {"connects": 0, "lost": 0, "open": 0}


def test_an_interrupt_while_connecting_reaches_the_caller(make_rig: Any) -> None:
    def interrupted() -> socket.socket:
        raise KeyboardInterrupt

    rig = make_rig(interrupted)
    mine = rig.buffer(64)
    rig.know(mine, handle=1 << 32)
    batch = rig.make(READ, mine.address, 1 << 32, 0, 64)

    def drive_and_look() -> None:
        batch.drive_here()
        time.sleep(0)  # Python looks for signals between two of its own instructions

    with pytest.raises(KeyboardInterrupt):
        drive_and_look()
    assert batch.worst == Status.CANCELLED


@pytest.mark.parametrize("answer", [-1, None, "7"])
def test_a_connector_must_return_a_descriptor(answer: Any) -> None:
    pool = LanePool(lambda *_: answer, lanes_max=1, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0)
    with pytest.raises(InternalError):
        pool.call(PING, b"", 1.0)


def test_the_connector_is_told_how_long_it_has(make_rig: Any) -> None:
    told: list[float] = []

    def connector(timeout_s: float, _dialing: object) -> int:
        told.append(timeout_s)
        raise PeerRefused

    pool = LanePool(connector, lanes_max=1, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0)
    for timeout_s in (5.0, 1e300):
        with pytest.raises(PeerRefused):
            pool.call(PING, b"", timeout_s)
    assert 4.0 < told[0] <= 5.0
    assert 9e8 < told[1] <= 1e9


# ---- the end of patience ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [READ, WRITE])
def test_a_deadline_ends_a_batch_and_its_lane(make_stalled: Any, io: int, op: int) -> None:
    stalled = make_stalled(io)
    mine, remote = stalled.rig.buffer(4096, fill=1), stalled.memory()
    batch = stalled.rig.run(op, mine.address, remote.handle, 0, 4096, timeout_s=0.05)
    assert batch.worst == Status.TIMED_OUT
    assert batch.elapsed_ns >= 50_000_000
    assert stalled.rig.pool.counters() == {"connects": 1, "lost": 1, "open": 0}
    assert (mine.array == 1).all()


@pytest.mark.parametrize("op", [READ, WRITE])
def test_a_silent_peer_is_stalled(make_stalled: Any, io: int, op: int) -> None:
    stalled = make_stalled(io, stall_s=0.05)
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    batch = stalled.rig.run(op, mine.address, remote.handle, 0, 4096)
    assert batch.worst == Status.STALLED
    assert stalled.rig.pool.counters()["lost"] == 1


def test_a_peer_that_takes_nothing_is_stalled(make_stalled: Any, io: int) -> None:
    stalled = make_stalled(io, stall_s=0.1)
    size = 64 << 20  # more than any socket buffer
    mine, remote = stalled.rig.buffer(size), stalled.memory(size)
    assert stalled.rig.run(WRITE, mine.address, remote.handle, 0, size).worst == Status.STALLED


@pytest.mark.parametrize("op", [READ, WRITE])
def test_cancelling_tears_the_lane_down(make_stalled: Any, io: int, op: int, tools: Any) -> None:
    stalled = make_stalled(io)
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    batch = stalled.rig.make(op, mine.address, remote.handle, 0, 4096)
    with tools.background(batch.drive_here):
        stalled.request()
        batch.cancel()
        assert batch.wait(tools.WAIT_S)
    assert batch.worst == Status.CANCELLED
    assert stalled.rig.pool.counters() == {"connects": 1, "lost": 1, "open": 0}


def test_a_batch_that_waits_for_a_lane_can_be_cancelled_and_has_a_deadline(
    make_stalled: Any, io: int, tools: Any
) -> None:
    stalled = make_stalled(io, lanes_max=1)
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    first = stalled.rig.make(READ, mine.address, remote.handle, 0, 4096)
    second = stalled.rig.make(READ, mine.address, remote.handle, 0, 4096)
    with tools.background(first.drive_here):
        stalled.request()
        late = stalled.rig.run(READ, mine.address, remote.handle, 0, 4096, timeout_s=0.03)
        assert late.worst == Status.TIMED_OUT
        with tools.background(second.drive_here):
            tools.wait_until(lambda: stalled.rig.segment.users == 2, "the second is under way")
            second.cancel()
            assert second.wait(tools.WAIT_S)
        assert second.worst == Status.CANCELLED
        stalled.peers[0].close()
    assert first.worst == Status.PEER_GONE


def test_shutting_the_pool_ends_what_runs(make_stalled: Any, io: int, tools: Any) -> None:
    stalled = make_stalled(io)
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    batch = stalled.rig.make(READ, mine.address, remote.handle, 0, 4096)
    with tools.background(batch.drive_here):
        stalled.request()
        assert stalled.rig.pool.close(tools.WAIT_S)
    assert batch.worst == Status.PEER_GONE


def test_bytes_that_come_late_land_nowhere(make_stalled: Any, io: int) -> None:
    stalled = make_stalled(io)
    mine, remote = stalled.rig.buffer(1 << 16, fill=1), stalled.memory(1 << 16)
    batch = stalled.rig.run(READ, mine.address, remote.handle, 0, 1 << 16, timeout_s=0.03)
    assert batch.worst == Status.TIMED_OUT

    def send_on() -> None:
        for _ in range(1000):
            stalled.peers[0].sendall(bytes([2]) * (1 << 16))

    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        send_on()
    assert (mine.array == 1).all()


# ---- the target ------------------------------------------------------------------------------------------


def test_the_target_bounds_its_lanes(make_target: Any, io: int) -> None:
    target = make_target(io, lanes_max=2)
    kept = [target.connect() for _ in range(2)]
    with pytest.raises(LimitExceeded, match="connections_max"):
        target.connect()
    assert target.server.lanes == 2
    target.server.close(5.0)
    assert target.server.lanes == 0
    with pytest.raises(EngineClosed):
        target.connect()
    assert [lane.recv(1) for lane in kept] == [b"", b""]


@pytest.mark.parametrize("instance", [b"", bytes(15), bytes(17)])
def test_an_instance_id_has_16_bytes(make_target: Any, instance: bytes) -> None:
    with pytest.raises(UsageError, match="16 bytes"):
        make_target().connect(instance)


def test_an_initiator_that_stops_in_a_group_is_given_up(make_target: Any, io: int, tools: Any) -> None:
    target = make_target(io, stall_s=0.05)
    lane = target.connect()
    tools.wait_until(lambda: target.server.lanes == 1, "the lane is served")
    lane.sendall(b"\x4d\x50\x02")  # the start of a WRITE
    assert lane.recv(1) == b"", "closed without an answer"
    tools.wait_until(lambda: target.server.lanes == 0, "its thread ends")


def test_silence_between_groups_is_no_stall(make_target: Any, io: int, make_rig: Any) -> None:
    target = make_target(io, stall_s=0.02)
    rig = make_rig(target.connect, io)
    rig.pool.call(PING, b"", 10.0)
    time.sleep(0.1)  # several times the stall time: what is tested is that nothing happens
    rig.pool.call(PING, b"", 10.0)
    assert rig.pool.counters()["connects"] == 1


def test_a_revoke_can_kick_a_write_that_hangs(make_target: Any, io: int, tools: Any) -> None:
    target = make_target(io)
    remote = target.offer(4096)
    idle, busy = target.connect(), target.connect()
    entry = Entry(remote.handle, 0, 4096, tools.WRITE_KEY)
    busy.sendall(encode_group(GroupHeader(LaneOp.WRITE, 1, 1, 4096), [entry]) + bytes(100))
    tools.wait_until(lambda: target.regions.users == 1, "the write is inside")
    assert not target.regions.remove(remote.handle, 0.01)
    assert target.server.kick_busy() == 1
    assert target.regions.drain(tools.WAIT_S)
    assert busy.recv(1) == b""
    assert target.server.kick_busy() == 0
    tools.wait_until(lambda: target.server.lanes == 1, "only the idle lane stays")
    idle.sendall(encode_group(GroupHeader(LaneOp.PING, 0, 1, 0)))
    assert len(idle.recv(64)) == 32


def test_a_dropped_server_with_open_lanes_keeps_what_its_threads_use(make_target: Any, tools: Any) -> None:
    ours, theirs = socket.socketpair()
    server = TargetServer(
        LocalRegions(8), io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0, lanes_max=1, notices_max=1
    )
    server.add_lane(theirs.detach(), tools.INSTANCE)
    notices = server.notice_fd
    del server
    ours.sendall(encode_group(GroupHeader(LaneOp.PING, 0, 9, 0)))
    assert len(ours.recv(64)) == 32, "still served"
    ours.close()
    # The structure is given up on purpose, and with it this one descriptor.
    os.close(notices)


def test_a_connector_that_has_returned_watches_nothing(make_target: Any) -> None:
    target = make_target()
    kept: list[Any] = []

    def connector(_timeout_s: float, dialing: Any) -> int:
        ours = target.connect()
        dialing(ours.fileno())
        kept.append(dialing)
        return int(ours.detach())

    pool = LanePool(connector, lanes_max=1, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0)
    pool.call(PING, b"", 10.0)
    for dialing in (*kept, Dialing()):
        with pytest.raises(UsageError, match="not watched"):
            dialing(0)
    assert pool.close(10.0)
