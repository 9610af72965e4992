"""Notifications over lanes: order, the bound of the queue, repeats, and those that batches send."""

from __future__ import annotations

import functools
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.errors import PeerGone, QueueFull, Status, TransferTimeout, UsageError
from moonpool.native.io.batch import Batch
from moonpool.native.io.lanes import announce_by_lane
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.shm import add_mapped_path
from moonpool.wire.transfer import GroupHeader, LaneOp, decode_reply_header, encode_group

READ, WRITE, NOTIFY = 1, 2, 4
LIMIT = 65536


def messages(target: Any) -> list[bytes]:
    return [message for _sender, _number, message in target.server.take_notices(1000, 0.0)]


def test_messages_arrive_in_order_with_growing_numbers(target: Any, rig: Any, tools: Any) -> None:
    sent = [b"%d" % index for index in range(50)]
    for message in sent:
        rig.pool.call(NOTIFY, message, 10.0)
    taken = target.server.take_notices(1000, 0.0)
    assert [message for _, _, message in taken] == sent
    numbers = [number for _, number, _ in taken]
    assert numbers == sorted(set(numbers))
    assert {sender for sender, _, _ in taken} == {tools.INSTANCE}


@pytest.mark.parametrize("size", [0, 1, 32, 8192, 8193, 20_000, LIMIT - 1, LIMIT])
def test_messages_of_every_size(target: Any, rig: Any, tools: Any, size: int) -> None:
    message = tools.pattern(size, size).tobytes()
    rig.pool.call(NOTIFY, message, 10.0)
    rig.pool.call(NOTIFY, message[::-1], 10.0)
    assert messages(target) == [message, message[::-1]]


def test_a_message_over_the_limit_is_refused_here(rig: Any) -> None:
    with pytest.raises(UsageError, match="at most 65536 bytes") as caught:
        rig.pool.call(NOTIFY, bytes(LIMIT + 1), 10.0)
    assert caught.value.limit == LIMIT
    assert rig.pool.counters()["connects"] == 0


def test_several_threads_of_one_sender_keep_one_order(target: Any, rig: Any) -> None:
    def send(name: bytes) -> None:
        for index in range(20):
            rig.pool.call(NOTIFY, b"%s %d" % (name, index), 20.0)

    threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    taken = target.server.take_notices(1000, 0.0)
    assert len(taken) == 60
    numbers = [number for _, number, _ in taken]
    assert numbers == sorted(set(numbers))
    for name in (b"a", b"b", b"c"):
        mine = [message for _, _, message in taken if message.startswith(name)]
        assert mine == [b"%s %d" % (name, index) for index in range(20)]


def test_a_full_queue_says_so_and_takes_more_once_emptied(io: int, make_target: Any, make_rig: Any) -> None:
    target = make_target(io, notices_max=3)
    rig = make_rig(target.connect, io)
    for index in range(3):
        rig.pool.call(NOTIFY, b"%d" % index, 10.0)
    for _ in range(2):
        with pytest.raises(QueueFull) as caught:
            rig.pool.call(NOTIFY, b"too many", 10.0)
        assert caught.value.retryable
    counted = target.server.counters()
    assert (counted["notices_waiting"], counted["notices_refused"]) == (3, 2)
    assert rig.pool.counters()["lost"] == 0
    assert [message for _, _, message in target.server.take_notices(2, 0.0)] == [b"0", b"1"]
    rig.pool.call(NOTIFY, b"later", 10.0)
    assert messages(target) == [b"2", b"later"]


def test_taking_is_bounded_by_count_and_time(target: Any, rig: Any) -> None:
    assert target.server.take_notices(10, 0.0) == []
    assert target.server.take_notices(10, 0.01) == []
    assert target.server.take_notices(10, -1.0) == []
    for index in range(3):
        rig.pool.call(NOTIFY, b"%d" % index, 10.0)
    assert target.server.take_notices(0, 5.0) == []
    assert len(target.server.take_notices(1, 5.0)) == 1
    assert len(target.server.take_notices(10, None)) == 2


def test_a_taker_is_woken(target: Any, rig: Any, tools: Any) -> None:
    taken: list[Any] = []
    with tools.background(lambda: taken.extend(target.server.take_notices(10, tools.WAIT_S))):
        rig.pool.call(NOTIFY, b"wake up", 10.0)
    assert [message for _, _, message in taken] == [b"wake up"]


def test_closing_wakes_a_taker(make_target: Any, tools: Any) -> None:
    target = make_target()
    taken: list[Any] = []
    with tools.background(lambda: taken.append(target.server.take_notices(10, None))):
        assert target.server.close(tools.WAIT_S)
    assert taken == [[]]


def test_the_descriptor_is_readable_while_messages_wait(target: Any, rig: Any) -> None:
    fd = target.server.notice_fd

    def readable() -> bool:
        return bool(select.select([fd], [], [], 0)[0])

    assert not readable()
    for _ in range(2):
        rig.pool.call(NOTIFY, b"one", 10.0)
    assert readable()
    target.server.take_notices(1, 0.0)
    assert readable()
    target.server.take_notices(1, 0.0)
    assert not readable()


# ---- repeats ---------------------------------------------------------------------------------------------


def notify(lane: Any, number: int, message: bytes = b"message") -> Status:
    lane.sendall(encode_group(GroupHeader(LaneOp.NOTIFY, 0, number, len(message))) + message)
    raw = b""
    while len(raw) < 32:
        raw += lane.recv(32 - len(raw))
    reply = decode_reply_header(raw)
    assert (reply.op, reply.group_id, reply.count, reply.payload_bytes) == (LaneOp.NOTIFY, number, 0, 0)
    return reply.status


def test_a_repeat_is_acknowledged_and_dropped(target: Any) -> None:
    lane = target.connect()
    assert [notify(lane, number, b"%d" % number) for number in (5, 5, 6, 5, 6, 7)] == [Status.COMPLETE] * 6
    assert messages(target) == [b"5", b"6", b"7"]


def test_a_repeat_on_another_lane_of_the_sender_is_dropped_too(target: Any) -> None:
    first, second = target.connect(), target.connect()
    notify(first, 1)
    notify(second, 1)
    notify(second, 2)
    assert len(messages(target)) == 2


def test_senders_are_told_apart(target: Any) -> None:
    senders = [bytes([index]) * 16 for index in range(1, 20)]
    for sender in senders:
        lane = target.connect(sender)
        notify(lane, 1)
        notify(lane, 1)
    assert [sender for sender, _, _ in target.server.take_notices(1000, 0.0)] == senders


def test_a_message_that_found_no_room_can_be_sent_again(io: int, make_target: Any) -> None:
    target = make_target(io, notices_max=1)
    lane = target.connect()
    assert notify(lane, 1) is Status.COMPLETE
    assert notify(lane, 2) is Status.QUEUE_FULL
    assert len(messages(target)) == 1
    assert notify(lane, 2) is Status.COMPLETE
    assert [number for _, number, _ in target.server.take_notices(10, 0.0)] == [2]


def test_a_lost_lane_is_replaced_and_nothing_arrives_twice(target: Any, rig: Any) -> None:
    for index in range(5):
        rig.pool.call(NOTIFY, b"%d" % index, 10.0)
        assert messages(target) == [b"%d" % index]
        target.restart()
    assert rig.pool.counters()["connects"] == 5


# ---- a silent owner --------------------------------------------------------------------------------------


def test_a_silent_owner_ends_a_call_in_time(io: int, make_stalled: Any) -> None:
    stalled = make_stalled(io)
    with pytest.raises(TransferTimeout):
        stalled.rig.pool.call(NOTIFY, b"anyone?", 0.05)
    assert stalled.rig.pool.counters() == {"connects": 1, "lost": 1, "open": 0}


def test_a_call_that_waits_for_its_turn_ends_in_time(io: int, make_stalled: Any, tools: Any) -> None:
    stalled = make_stalled(io)

    def first() -> None:
        with pytest.raises(PeerGone):
            stalled.rig.pool.call(NOTIFY, b"first", tools.WAIT_S)

    with tools.background(first):
        stalled.request()
        with pytest.raises(TransferTimeout):
            stalled.rig.pool.call(NOTIFY, b"second", 0.05)
        assert len(stalled.peers) == 1, "the second never got a lane"
        stalled.peers[0].close()


# ---- batches that announce their end ---------------------------------------------------------------------


def announced(rig: Any, op: int, mine: Any, remote: Any, offsets: list[int], message: bytes) -> Any:
    batch = rig.make(op, mine.address, remote.handle, offsets, 16)
    batch.attach_notice(message)
    announce_by_lane(batch)
    batch.drive_here()
    return batch


@pytest.mark.parametrize("op", [READ, WRITE])
def test_a_batch_announces_its_end(target: Any, rig: Any, op: int) -> None:
    remote, mine = target.offer(4096), rig.buffer(4096)
    rig.know(remote)
    assert announced(rig, op, mine, remote, [0, 100], b"done").worst == Status.COMPLETE
    assert announced(rig, op, mine, remote, [0], b"").worst == Status.COMPLETE
    assert messages(target) == [b"done", b""]


def test_a_written_byte_is_there_before_its_announcement(target: Any, rig: Any) -> None:
    remote, mine = target.offer(1 << 20), rig.buffer(1 << 20)
    rig.know(remote)
    for value in range(1, 11):
        mine.array[:] = value
        batch = rig.make(WRITE, mine.address, remote.handle, 0, 1 << 20)
        batch.attach_notice(b"%d" % value)
        announce_by_lane(batch)
        batch.drive_here()
        assert messages(target) == [b"%d" % value]
        assert (remote.array == value).all()


def test_a_failed_batch_announces_nothing(target: Any, rig: Any) -> None:
    remote, mine = target.offer(64), rig.buffer(4096)
    rig.know(remote)
    assert announced(rig, WRITE, mine, remote, [0, 64], b"never").worst == Status.OUT_OF_RANGE
    assert messages(target) == []


def test_an_announcement_that_finds_no_room_fails_the_batch(io: int, make_target: Any, make_rig: Any) -> None:
    target = make_target(io, notices_max=1)
    rig = make_rig(target.connect, io)
    remote, mine = target.offer(4096), rig.buffer(4096)
    rig.know(remote)
    assert announced(rig, WRITE, mine, remote, [0, 16], b"first").worst == Status.COMPLETE
    batch = announced(rig, WRITE, mine, remote, [0, 16], b"second")
    assert list(batch.statuses()) == [Status.COMPLETE, Status.QUEUE_FULL]
    assert messages(target) == [b"first"]


def test_without_lanes_an_announcement_fails_the_batch() -> None:
    own = LocalRegions(1)
    segment = NativeSegment(own, 1, 262144)
    add_mapped_path(segment)
    memory = np.zeros(64, dtype=np.uint8)
    own.add(memory.ctypes.data, 64, 7, bytes(16), bytes(16))
    segment.put_region(1 << 32, memory.ctypes.data, 64, 3, bytes(16), bytes(16))
    segment.set_mapping(1 << 32, memory.ctypes.data, True, memory)
    batch = Batch(WRITE, 1)
    batch.fill(memory.ctypes.data, 1 << 32, 0, 32, None, False)
    batch.attach_notice(b"to nobody")
    announce_by_lane(batch)
    segment.bind(batch)
    batch.drive_here()
    assert batch.worst == Status.PEER_GONE


# ---- interrupts ------------------------------------------------------------------------------------------


def wait_for_ever(wait: Callable[[], object]) -> None:
    while True:
        wait()


def interrupt_the_wait() -> None:
    """Interrupt the main thread once it is in `wait_for_ever`, which it leaves in no other way."""
    main = threading.main_thread().ident or 0
    while sys._current_frames()[main].f_code is not wait_for_ever.__code__:
        time.sleep(0.0005)
    signal.pthread_kill(main, signal.SIGINT)


def test_an_interrupt_ends_a_wait_without_a_bound(make_target: Any, tools: Any) -> None:
    server = make_target().server
    with tools.background(interrupt_the_wait), pytest.raises(KeyboardInterrupt):
        wait_for_ever(functools.partial(server.take_notices, 1, None))


def test_an_interrupt_ends_the_wait_for_a_batch_and_not_the_batch(make_stalled: Any, tools: Any) -> None:
    stalled = make_stalled()
    mine, remote = stalled.rig.buffer(64), stalled.memory()
    batch = stalled.rig.make(READ, mine.address, remote.handle, 0, 64)
    with tools.background(batch.drive_here):
        stalled.request()
        with tools.background(interrupt_the_wait), pytest.raises(KeyboardInterrupt):
            wait_for_ever(batch.wait)
        assert not batch.done
        batch.cancel()
        assert batch.wait(tools.WAIT_S)
