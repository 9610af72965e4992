"""The binding of libibverbs over the fake one: devices, queue pairs, and every way a request ends."""

from __future__ import annotations

import errno
import gc
import os
import select
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.fake_verbs.connections import WAIT_S, Connection, fresh_fabric
from tests.native.fake_verbs.fabric import (
    LOST,
    WC_FATAL,
    WC_FLUSH,
    WC_REMOTE_ACCESS,
    WC_RETRY,
    WC_RNR,
    FakeFabric,
)

from moonpool.errors import LimitExceeded, OutOfMemory, ResourceError, TransportUnavailable, UsageError
from moonpool.native.verbs import devices
from moonpool.native.verbs.attributes import EventKind, GidKind, LinkLayer
from moonpool.native.verbs.devices import Device, VerbsLibrary, live_objects
from moonpool.native.verbs.queue_pairs import CompletionQueue, QueuePair

WC_LOCAL_PROTECTION = 4
NONE_LIVE = dict.fromkeys(devices.KINDS, 0)


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with fresh_fabric(2) as made:
        yield made


@pytest.fixture
def library(fabric: FakeFabric) -> VerbsLibrary:
    return VerbsLibrary(fabric.path)


@pytest.fixture
def linked(library: VerbsLibrary) -> Iterator[Connection]:
    connection = Connection(library)
    yield connection
    connection.close()


def statuses(connection: Connection, n: int) -> list[tuple[int, int]]:
    return [(each.id, each.status) for each in connection.reap(n)]


def events_of(device: Device, n: int = 1) -> list[EventKind]:
    """The next n events, waited for on the descriptor."""
    found: list[EventKind] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < n:
        assert time.monotonic() < deadline, f"{len(found)} of {n} events came"
        select.select([device.async_fd], [], [], 1.0)
        found += [event.kind for event in device.take_events()]
    return found


# The library and its devices


def test_a_library_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(TransportUnavailable, match=r"no_such_library.*apt-get install libibverbs1"):
        VerbsLibrary("no_such_library.so.1")


def test_a_library_of_something_else_is_refused() -> None:
    with pytest.raises(TransportUnavailable, match=r"libm\.so\.6 lacks ibv_get_device_list"):
        VerbsLibrary("libm.so.6")


def test_the_default_library_can_be_changed_and_changed_back(fabric: FakeFabric) -> None:
    devices.use_library(fabric.path)
    try:
        assert devices.default_library().path == fabric.path
        assert devices.default_library() is devices.default_library()
    finally:
        devices.use_library("")


def test_devices_are_listed(fabric: FakeFabric, library: VerbsLibrary) -> None:
    assert library.device_names() == ["fake0", "fake1"]
    fabric.devices(4)
    assert library.device_names() == ["fake0", "fake1", "fake2", "fake3"]
    fabric.remove(2)
    assert library.device_names() == ["fake0", "fake1", "fake3"]
    fabric.devices(0)
    assert library.device_names() == []


def test_a_kernel_without_rdma_has_no_devices(fabric: FakeFabric, library: VerbsLibrary) -> None:
    fabric.fail("get_device_list", errno.ENOSYS, times=2)
    assert library.device_names() == []
    with pytest.raises(UsageError, match="no RDMA device 'fake0'; there are: none"):
        Device(library, "fake0")
    fabric.fail("get_device_list", errno.EACCES)
    with pytest.raises(ResourceError, match="listing the RDMA devices"):
        library.device_names()


def test_attributes_port_and_gids(fabric: FakeFabric, library: VerbsLibrary) -> None:
    fabric.limits(max_mr_bytes=1 << 30, max_wr=512, max_cqe=1000)
    device = Device(library, "fake1")
    attributes = device.attributes()
    assert (attributes.name, attributes.firmware, attributes.ports) == ("fake1", "fake", 1)
    assert (attributes.max_mr_bytes, attributes.max_qp_wr, attributes.max_cqe) == (1 << 30, 512, 1000)
    assert attributes.guid == 0x0200000000000002
    port = device.port(1)
    assert (port.active, port.state_name, port.link_layer) == (True, "ACTIVE", LinkLayer.ETHERNET)
    assert (port.active_mtu, port.lid) == (5, 0)
    kinds = [(entry.index, entry.kind) for entry in device.gids(1)]
    assert kinds == [(0, GidKind.ROCE_1), (1, GidKind.ROCE_2), (2, GidKind.ROCE_1), (3, GidKind.ROCE_2)]
    assert device.gids(1)[3].gid[-6:] == b"\xff\xff\x0a\x62\x00\x02"
    assert device.gids(2) == []
    with pytest.raises(ResourceError, match="port 2 on fake1"):
        device.port(2)
    with pytest.raises(UsageError, match="numbered from 1"):
        device.port(0)
    device.close()
    with pytest.raises(ResourceError, match="is closed"):
        device.attributes()


def test_gids_one_by_one_equal_the_table(library: VerbsLibrary) -> None:
    device = Device(library, "fake0")
    table = [(entry.index, entry.gid) for entry in device.gids(1)]
    assert [(entry.index, entry.gid) for entry in device.gids_one_by_one(1)] == table
    device.close()


def test_an_infiniband_port_has_a_lid(fabric: FakeFabric, library: VerbsLibrary) -> None:
    fabric.link_layer(1, True)
    device = Device(library, "fake1")
    assert (device.port(1).link_layer, device.port(1).lid) == (LinkLayer.INFINIBAND, 2)
    assert [entry.kind for entry in device.gids(1)] == [GidKind.INFINIBAND]
    device.close()


@pytest.mark.parametrize("call", ["open_device", "alloc_pd"])
def test_a_device_that_cannot_be_opened_leaves_nothing(
    fabric: FakeFabric, library: VerbsLibrary, call: str
) -> None:
    fabric.fail(call, errno.ENOMEM)
    with pytest.raises(OutOfMemory, match="on fake0"):
        Device(library, "fake0")
    gc.collect()
    assert live_objects() == NONE_LIVE
    Device(library, "fake0").close()


def test_a_device_of_another_user_says_which_file(fabric: FakeFabric, library: VerbsLibrary) -> None:
    fabric.fail("open_device", errno.EACCES)
    with pytest.raises(ResourceError, match="/dev/infiniband/uverbs"):
        Device(library, "fake0")


def test_a_device_closes_what_was_made_on_it(library: VerbsLibrary) -> None:
    connection = Connection(library)
    assert live_objects() == {"devices": 2, "completion_queues": 2, "queue_pairs": 2, "regions": 2}
    connection.close()
    assert live_objects() == NONE_LIVE
    connection.close()
    for closed in (connection.near.pair.to_error, connection.near.queue.poll, connection.near.queue.arm):
        with pytest.raises(ResourceError, match="closed"):
            closed()


def test_dropped_objects_free_themselves_children_first(library: VerbsLibrary) -> None:
    connection = Connection(library)
    ring = [connection]
    ring.append(ring)  # type: ignore[arg-type]
    del connection, ring
    gc.collect()
    assert live_objects() == NONE_LIVE


@pytest.mark.parametrize("call", ["create_comp_channel", "create_cq", "create_qp"])
def test_what_cannot_be_made_leaves_nothing(fabric: FakeFabric, library: VerbsLibrary, call: str) -> None:
    device = Device(library, "fake0")
    fabric.fail(call, errno.ENOMEM)
    with pytest.raises(OutOfMemory, match="fake0"):
        QueuePair(CompletionQueue(device, 8), 8)
    gc.collect()
    assert live_objects() == {**NONE_LIVE, "devices": 1}
    device.close()


def test_a_queue_in_use_is_not_closed(linked: Connection) -> None:
    with pytest.raises(UsageError, match="1 queue pairs still use"):
        linked.near.queue.close()
    linked.near.pair.close()
    linked.near.queue.close()
    linked.near.queue.close()


@pytest.mark.parametrize("call", ["destroy_qp", "dereg_mr"])
def test_what_cannot_be_freed_stays_and_is_freed_by_the_next_close(
    fabric: FakeFabric, library: VerbsLibrary, call: str
) -> None:
    connection = Connection(library)
    fabric.fail(call, errno.EBUSY)
    with pytest.raises(ResourceError, match="busy"):
        connection.near.device.close()
    assert not connection.near.device.closed
    left = "queue_pairs" if call == "destroy_qp" else "regions"
    assert live_objects()[left] == 2
    connection.close()
    assert live_objects() == NONE_LIVE


@pytest.mark.parametrize("way", ["abandon", "close", "drop"])
def test_a_forked_child_frees_nothing_of_its_parents(
    fabric: FakeFabric, linked: Connection, way: str
) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: forking with threads
        child = os.fork()
    if child == 0:
        try:
            if way == "abandon":
                for end in (linked.near, linked.far):
                    end.device.abandon_after_fork()
                left = len(os.listdir("/proc/self/fd"))
                os._exit(0 if live_objects() == NONE_LIVE and left == fds - 4 else 1)
            if way == "close":
                linked.close()
            for end in (linked.near, linked.far):
                del end.pair, end.registration, end.queue, end.device
            gc.collect()
            os._exit(0 if live_objects() == NONE_LIVE else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sent = linked.near.memory.pattern(21)
    linked.post(1)
    assert statuses(linked, 1) == [(1, 0)]
    assert linked.far.memory.read() == sent
    assert fabric.live("pairs") == 2
    linked.near.device.abandon_after_fork()  # in the process that opened it: nothing
    assert not linked.near.device.closed


# Requests


def test_write_and_read_move_the_bytes(linked: Connection) -> None:
    sent = linked.near.memory.pattern(1)
    linked.post(11)
    assert statuses(linked, 1) == [(11, 0)]
    assert linked.far.memory.read() == sent
    there = linked.far.memory.pattern(2)
    linked.post(12, write=False)
    done = linked.reap(1)[0]
    assert (done.id, done.status, done.text, done.qp_number) == (12, 0, "success", linked.near.pair.number)
    assert linked.near.memory.read() == there


def test_large_requests_move_in_pieces(library: VerbsLibrary) -> None:
    connection = Connection(library, size=(1 << 20) + 123)
    sent = connection.near.memory.pattern(3)
    connection.post(1)
    assert statuses(connection, 1) == [(1, 0)]
    assert connection.far.memory.read() == sent
    connection.close()


def test_several_pieces_go_to_one_place(linked: Connection) -> None:
    near, far = linked.near, linked.far
    content = near.memory.pattern(4)
    parts = [(100, 7), (0, 0), (900, 33), (50, 1)]
    near.pair.post(
        5,
        True,
        [(near.memory.address + at, n, near.lkey) for at, n in parts],
        far.memory.address + 10,
        far.rkey,
    )
    assert statuses(linked, 1) == [(5, 0)]
    expected = b"".join(content[at : at + n] for at, n in parts)
    assert far.memory.read()[10 : 10 + len(expected)] == expected
    assert not any(far.memory.read()[10 + len(expected) :])


def test_only_requests_that_ask_complete(linked: Connection) -> None:
    for i in range(5):
        linked.post(i, length=64, offset=64 * i, signalled=i == 4)
    assert statuses(linked, 1) == [(4, 0)]
    assert linked.near.queue.poll() == []


def test_a_full_queue_refuses_and_frees_places_by_polling(linked: Connection) -> None:
    depth = linked.near.pair.send_depth
    for i in range(depth):
        linked.post(i, length=1, signalled=i == depth - 1)
    with pytest.raises(OutOfMemory, match="posting a request"):
        linked.post(99, length=1)
    assert statuses(linked, 1) == [(depth - 1, 0)]
    linked.post(99, length=1)
    assert statuses(linked, 1) == [(99, 0)]


def test_too_many_pieces_are_refused(linked: Connection) -> None:
    with pytest.raises(LimitExceeded, match="at most 32 pieces"):
        linked.near.pair.post(1, True, [(0, 0, 0)] * 33, 0, 0)
    with pytest.raises(ResourceError, match="Invalid argument"):
        linked.near.pair.post(1, True, [(linked.near.memory.address, 1, linked.near.lkey)] * 5, 0, 0)


def test_posting_may_fail(fabric: FakeFabric, linked: Connection) -> None:
    fabric.fail("post_send", errno.ENOMEM)
    with pytest.raises(OutOfMemory, match="posting a request"):
        linked.post(1)
    linked.post(2)
    assert statuses(linked, 1) == [(2, 0)]


@pytest.mark.parametrize("status", [WC_RNR, WC_RETRY, WC_FATAL])
def test_a_failed_request_ends_the_pair_and_flushes_the_rest(
    fabric: FakeFabric, linked: Connection, status: int
) -> None:
    fabric.complete(0, status, after=1)
    fabric.hold(0, True)
    linked.near.memory.pattern(5)
    for i in range(4):
        linked.post(i, length=16, offset=16 * i, signalled=False)
    fabric.hold(0, False)
    assert statuses(linked, 3) == [(1, status), (2, WC_FLUSH), (3, WC_FLUSH)]
    assert linked.near.pair.state == "ERR"
    assert linked.far.memory.read()[:16] == linked.near.memory.read()[:16]
    assert not any(linked.far.memory.read()[16:])


def test_a_lost_completion_did_its_work(fabric: FakeFabric, linked: Connection) -> None:
    fabric.complete(0, LOST)
    sent = linked.near.memory.pattern(6)
    linked.post(1, length=100)
    linked.post(2, length=1)
    assert statuses(linked, 1) == [(2, 0)]
    assert linked.far.memory.read()[:100] == sent[:100]
    assert fabric.count(0, "lost") >= 1


def test_a_wrong_key_is_a_remote_access_error_on_both_ends(linked: Connection) -> None:
    linked.near.memory.pattern(7)
    linked.post(1, rkey=linked.far.rkey + 1)
    assert statuses(linked, 1) == [(1, WC_REMOTE_ACCESS)]
    assert events_of(linked.far.device) == [EventKind.QP_ACCESS]
    assert (linked.near.pair.state, linked.far.pair.state) == ("ERR", "ERR")
    assert not any(linked.far.memory.read())


@pytest.mark.parametrize("write", [True, False])
def test_bytes_past_the_end_are_a_remote_access_error(linked: Connection, write: bool) -> None:
    near, far = linked.near, linked.far
    near.pair.post(
        1, write, [(near.memory.address, 2, near.lkey)], far.memory.address + far.size - 1, far.rkey
    )
    assert statuses(linked, 1) == [(1, WC_REMOTE_ACCESS)]


def test_an_unregistered_region_is_out_of_reach(linked: Connection) -> None:
    key = linked.far.rkey
    linked.far.registration.close()
    linked.near.memory.pattern(8)
    linked.post(1, rkey=key)
    assert statuses(linked, 1) == [(1, WC_REMOTE_ACCESS)]
    assert not any(linked.far.memory.read())


def test_a_wrong_local_key_is_a_protection_error(linked: Connection) -> None:
    near, far = linked.near, linked.far
    near.pair.post(1, True, [(near.memory.address, 8, near.lkey + 1)], far.memory.address, far.rkey)
    assert statuses(linked, 1) == [(1, WC_LOCAL_PROTECTION)]


def test_a_pair_taken_to_error_flushes_what_is_in_flight(fabric: FakeFabric, linked: Connection) -> None:
    fabric.hold(0, True)
    linked.near.memory.pattern(9)
    for i in range(3):
        linked.post(i, signalled=False)
    linked.near.pair.to_error()
    assert statuses(linked, 3) == [(0, WC_FLUSH), (1, WC_FLUSH), (2, WC_FLUSH)]
    fabric.hold(0, False)
    linked.post(3)  # a pair in ERR takes requests, and flushes them
    assert statuses(linked, 1) == [(3, WC_FLUSH)]
    assert not any(linked.far.memory.read())


def test_a_pair_can_be_reset_and_connected_again(fabric: FakeFabric, linked: Connection) -> None:
    fabric.complete(0, WC_RETRY)
    linked.post(1)
    assert statuses(linked, 1) == [(1, WC_RETRY)]
    for end in (linked.near, linked.far):
        end.pair.to_reset()
        end.pair.to_init(1, 6)
    linked.connect()
    sent = linked.near.memory.pattern(10)
    linked.post(2)
    assert statuses(linked, 1) == [(2, 0)]
    assert linked.far.memory.read() == sent


def test_an_overrun_ends_the_queue(fabric: FakeFabric, library: VerbsLibrary) -> None:
    connection = Connection(library, queue_depth=4)
    before = fabric.count(0, "overruns")
    for i in range(6):
        connection.post(i, length=1)
    assert events_of(connection.near.device) == [EventKind.CQ_ERROR]
    assert fabric.count(0, "overruns") == before + 1
    with pytest.raises(ResourceError, match="polling a completion queue"):
        connection.near.queue.poll()
    connection.close()


# Links and devices


def test_a_silent_cut_ends_requests_after_the_retries(fabric: FakeFabric, linked: Connection) -> None:
    fabric.cut(1, True)
    linked.post(1)
    assert statuses(linked, 1) == [(1, WC_RETRY)]
    assert linked.near.device.take_events() == []


def test_a_short_cut_is_bridged_by_the_retries(fabric: FakeFabric, linked: Connection) -> None:
    fabric.retry(2_000)
    fabric.cut(1, True)
    sent = linked.near.memory.pattern(11)
    linked.post(1)
    fabric.cut(1, False)
    fabric.retry(30)
    linked.near.queue.wait(0)
    assert statuses(linked, 1) == [(1, 0)]
    assert linked.far.memory.read() == sent


def test_a_port_that_goes_down_and_up_tells_its_device(fabric: FakeFabric, linked: Connection) -> None:
    fabric.port(0, False)
    assert events_of(linked.near.device) == [EventKind.PORT_ERROR]
    assert linked.near.device.port(1).state_name == "DOWN"
    linked.post(1)
    assert statuses(linked, 1) == [(1, WC_RETRY)]
    fabric.port(0, True)
    assert events_of(linked.near.device) == [EventKind.PORT_ACTIVE]
    assert linked.near.device.port(1).active
    assert linked.far.device.take_events() == []


def test_a_removed_device_flushes_and_gives_eio(fabric: FakeFabric, linked: Connection) -> None:
    fabric.hold(0, True)
    linked.post(1)
    fabric.remove(0)
    assert events_of(linked.near.device) == [EventKind.DEVICE_FATAL]
    assert statuses(linked, 1) == [(1, WC_FLUSH)]
    with pytest.raises(ResourceError, match="gone or being reset"):
        linked.post(2)
    with pytest.raises(ResourceError, match="gone or being reset"):
        CompletionQueue(linked.near.device, 8)
    linked.near.device.close()
    fabric.restore(0)
    Device(linked.near.device.library, "fake0").close()


def test_a_pair_that_the_device_ends_tells_its_number(fabric: FakeFabric, linked: Connection) -> None:
    fabric.kill_pair(linked.near.pair.number)
    select.select([linked.near.device.async_fd], [], [], WAIT_S)
    event = linked.near.device.take_events()[0]
    assert (event.kind, event.qp_number) == (EventKind.QP_FATAL, linked.near.pair.number)


def test_an_event_about_a_destroyed_pair_is_passed_over(fabric: FakeFabric, linked: Connection) -> None:
    fabric.kill_pair(linked.near.pair.number)
    linked.near.pair.close()
    fabric.port(0, False)
    assert events_of(linked.near.device) == [EventKind.PORT_ERROR]


def test_a_slow_rail_takes_its_time(fabric: FakeFabric, library: VerbsLibrary) -> None:
    connection = Connection(library, size=1 << 20)
    fabric.rate(0, 20 << 20)
    started = time.monotonic()
    connection.post(1)
    assert statuses(connection, 1) == [(1, 0)]
    assert time.monotonic() - started >= 0.05
    connection.close()


# Leaks


def test_a_thousand_connections_leak_nothing(fabric: FakeFabric, library: VerbsLibrary) -> None:
    Connection(library).close()
    fds = len(os.listdir("/proc/self/fd"))
    pages = resident_pages()
    for cycle in range(1000):
        connection = Connection(library, size=256, depth=4, queue_depth=8)
        connection.post(cycle, length=64)
        if cycle % 3 == 0:
            assert statuses(connection, 1) == [(cycle, 0)]
        elif cycle % 3 == 1:
            connection.near.pair.to_error()
        connection.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert live_objects() == NONE_LIVE
    assert resident_pages() - pages < 4096, "16 MiB more than before"


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
