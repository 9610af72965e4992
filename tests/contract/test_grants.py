"""Granted regions over every way: lanes must show grants, batches of all kinds carry them, writers settle."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from moonpool import AccessDenied, Op, Status, UsageError
from moonpool.native.io.grants import make_grant, make_grants

KEY = b"the grant key 16"
SIZE = 1 << 20
WAIT_S = 20.0
#: Long before the clock of the machine's start could pass for a deadline.
LATER_MS = 600_000


def offer_granted(pair: Any) -> Any:
    """A region of the target that asks for grants, whose clock begins now."""
    if pair.way.in_memory:
        region = pair.target.allocate(SIZE, granted=True)
        if not pair.way.to_itself:
            pair.initiator.refresh(pair.segment)
    else:
        region, _ = pair.offer(SIZE, granted=True)
    pair.target.gate.set_key(KEY, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    return region


def is_let_in(pair: Any, region: Any, start: int, tag: int, until_ms: int = LATER_MS) -> bool:
    """Whether a WRITE of one byte passes that shows a grant for the extent at `start`."""
    grant = make_grant(KEY, region.handle, start, 64, until_ms, tag)
    batch = pair.initiator.transfer(
        Op.WRITE, pair.segment, b"x", region.handle, start, grants=grant, check=False
    )
    return bool(batch.status[0] == Status.COMPLETE)


@pytest.mark.memory_only("grants are shown over lanes, which carry memory only")
def test_a_lane_must_show_a_grant(pair: Any, way: Any) -> None:
    region = offer_granted(pair)
    grant = make_grant(KEY, region.handle, 4096, 4096, LATER_MS, 7)
    pair.initiator.write(pair.segment, region.handle, 4096, b"granted", grants=grant)
    assert bytes(region.view[4096:4103]) == b"granted"
    wrong = make_grant(b"another key of16", region.handle, 0, 4096, LATER_MS, 7)
    for offset, grants in ((0, None), (0, wrong), (0, grant), (8186, grant)):
        if way.by_lane:
            with pytest.raises(AccessDenied):
                pair.initiator.write(pair.segment, region.handle, offset, b"refused", grants=grants)
            assert bytes(region.view[offset : offset + 7]) == bytes(7)
        else:
            # Who maps the memory, or owns it, asks nobody: see docs/security.md.
            pair.initiator.write(pair.segment, region.handle, offset, b"by hand", grants=grants)
    counters = pair.target.gate.counters()
    refused = [counters[f"grants_{why}"] for why in ("absent", "wrong", "outside")]
    assert refused == ([1, 1, 2] if way.by_lane else [0, 0, 0])
    into = bytearray(7)
    pair.initiator.read(pair.segment, region.handle, 4096, into)
    assert into == b"granted"


@pytest.mark.memory_only("grants are shown over lanes, which carry memory only")
def test_every_transfer_of_a_batch_shows_its_own(pair: Any, way: Any) -> None:
    region = offer_granted(pair)
    # Large enough to be cut where batches go over several lanes: the cuts carry their transfers' grants.
    count, length = 16, 64 << 10
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(length)
    source = pair.buffer(count * length)
    source.array[:] = np.arange(count * length) % 251
    grants = make_grants(KEY, region.handle, offsets, [length] * count, LATER_MS, 3)
    grants[5 * 24 + 16] ^= 1
    for method in (pair.initiator.transfer, pair.initiator.submit):
        region.view[:] = bytes(SIZE)
        more = {"check": False} if method == pair.initiator.transfer else {}
        local = source.address + offsets
        batch = method(Op.WRITE, pair.segment, local, region.handle, offsets, length, grants=grants, **more)
        batch.wait(WAIT_S)
        expected = [Status.COMPLETE] * count
        if way.by_lane:
            expected[5] = Status.ACCESS_DENIED
        assert list(batch.status) == expected
        arrived = np.frombuffer(region.view, dtype=np.uint8).reshape(count, length)
        wanted = source.array.reshape(count, length).copy()
        if way.by_lane:
            wanted[5] = 0
        assert np.array_equal(arrived, wanted)
        del arrived


@pytest.mark.memory_only("grants are shown over lanes, which carry memory only")
def test_a_key_that_changed_makes_all_grants_wrong(pair: Any, way: Any) -> None:
    region = offer_granted(pair)
    assert is_let_in(pair, region, 0, 7)
    pair.target.gate.set_key(os.urandom(16), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    assert is_let_in(pair, region, 0, 7) is not way.by_lane
    # A clock that began long ago, as far as this machine has run for long.
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    ago_ms = min(LATER_MS, now // 2_000_000)
    pair.target.gate.set_key(KEY, now - ago_ms * 1_000_000)
    assert is_let_in(pair, region, 0, 7, ago_ms) is not way.by_lane
    assert pair.target.gate.counters()["grants_over"] == way.by_lane


@pytest.mark.memory_only("grants are shown over lanes, which carry memory only")
def test_denied_is_what_was_named_and_nothing_else(pair: Any, way: Any) -> None:
    region = offer_granted(pair)
    gate, now = pair.target.gate, time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    kept_out = not way.by_lane  # what is found where it is refused
    assert gate.deny(region.handle, 4096, 7, now + 10**12)
    assert gate.deny(region.handle, 8192, 7, now - 1)
    assert gate.deny(region.handle + (1 << 32), 0, 7, now + 10**12)
    found = [is_let_in(pair, region, *one) for one in ((4096, 7), (4096, 8), (8192, 7), (0, 7))]
    assert found == [kept_out, True, True, True]
    for number in range(2_000):  # the table grows, and keeps what it has
        assert gate.deny(region.handle, 64 * number, 9, now + 10**12)
    found = [is_let_in(pair, region, 64 * n, 9) for n in (0, 1, 777, 1_999, 2_000)]
    assert found == [*[kept_out] * 4, True]
    assert is_let_in(pair, region, 4096, 7) is kept_out
    gate.set_key(KEY, now)
    assert is_let_in(pair, region, 4096, 7)


def test_a_batch_shows_as_many_grants_as_it_has_transfers(pair: Any) -> None:
    region, _ = pair.offer(4096)
    for op, grants in ((Op.WRITE, bytes(23)), (Op.WRITE, bytes(48)), (Op.READ, bytes(24)), (Op.WRITE, b"")):
        with pytest.raises((UsageError, ValueError)):
            pair.initiator.transfer(op, pair.segment, bytearray(8), region.handle, 0, grants=grants)
    pair.initiator.write(
        pair.segment, region.handle, 0, b"x", grants=bytes(24)
    )  # asked for by nobody: ignored


@pytest.mark.grants
def test_who_mapped_the_memory_counts_as_a_writer_until_it_closes(pair: Any, way: Any) -> None:
    region = offer_granted(pair)
    gate, instance = pair.target.gate, pair.initiator.instance
    writers = gate.writers(region.handle, instance)
    assert bool(writers) is not way.by_lane
    assert gate.writers(region.handle, None) >= writers
    assert gate.settle(region.handle, writers, WAIT_S) == writers
    pair.initiator.close_segment(pair.segment)
    left = gate.writers(region.handle, instance)
    assert left == ({0} if way.to_itself else set())


@pytest.mark.grants
def test_settling_waits_for_what_runs(pair: Any, way: Any) -> None:
    """A batch that runs when the question comes has ended when the answer comes."""
    region = offer_granted(pair)
    if way.by_lane:
        assert pair.target.gate.writers(region.handle, pair.initiator.instance) == set(), "lanes are watched"
        return
    source = pair.buffer(SIZE)
    stop = threading.Event()
    done = [0]

    def write_on() -> None:
        while not stop.is_set():
            pair.initiator.write(pair.segment, region.handle, 0, source.address, SIZE)
            done[0] += 1

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        for _ in range(20):
            writers = pair.target.gate.writers(region.handle, pair.initiator.instance)
            assert pair.target.gate.settle(region.handle, writers, WAIT_S) == writers
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert done[0] > 0
