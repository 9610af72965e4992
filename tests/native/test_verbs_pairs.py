"""Queue pairs and completion queues over the fake: steps of a connection, addresses, notifications."""

from __future__ import annotations

import errno
import select
from collections.abc import Iterator

import pytest
from tests.native.fake_verbs.connections import WAIT_S, Connection, fresh_fabric, reap, route_between
from tests.native.fake_verbs.fabric import WC_RETRY, FakeFabric, library_path

from moonpool.errors import OutOfMemory, ResourceError, UnsupportedOperation, UsageError
from moonpool.native.verbs.attributes import GidKind, RegistrationPlan, Route
from moonpool.native.verbs.devices import Device, VerbsLibrary, live_objects
from moonpool.native.verbs.memory import register, register_dmabuf
from moonpool.native.verbs.queue_pairs import CompletionQueue, QueuePair

RELAXED = RegistrationPlan(relaxed_ordering=True)


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


# Connecting


def test_packet_numbers_must_agree(library: VerbsLibrary) -> None:
    connection = Connection(library)
    near, far = connection.near.pair, connection.far.pair
    for pair in (near, far):
        pair.to_reset()
        pair.to_init(1, 6)
    near.to_ready(route_between(near, far, remote_psn=1))
    far.to_ready(route_between(far, near))
    connection.post(1)
    assert statuses(connection, 1) == [(1, WC_RETRY)]
    connection.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mtu", 6),
        ("timeout", 32),
        ("retry_count", 8),
        ("local_psn", 1 << 24),
        ("port", -1),
        ("service_level", 16),
    ],
)
def test_a_route_out_of_bounds_names_its_field(linked: Connection, field: str, value: int) -> None:
    pair = linked.near.pair
    with pytest.raises(UsageError, match=f"route's {field} is from 0 to"):
        pair.to_ready(route_between(pair, linked.far.pair, **{field: value}))


def test_a_gid_of_another_length_is_refused(linked: Connection) -> None:
    route = Route(remote_qp=1, remote_gid=b"short", local_psn=0, remote_psn=0)
    with pytest.raises(UsageError, match="a GID has 16 bytes"):
        linked.near.pair.to_ready(route)


def test_steps_in_the_wrong_order_are_refused(library: VerbsLibrary) -> None:
    device = Device(library, "fake0")
    pair = QueuePair(CompletionQueue(device, 8), 8)
    assert pair.state == "RESET"
    with pytest.raises(ResourceError, match=r"connecting \(RTR\)"):
        pair.to_ready(route_between(pair, pair))
    pair.to_init(1, 6)
    assert pair.state == "INIT"
    with pytest.raises(ResourceError, match=r"setting up \(INIT\)"):
        pair.to_init(1, 6)
    pair.to_ready(route_between(pair, pair))
    assert pair.state == "RTS"
    pair.to_error()
    assert pair.state == "ERR"
    device.close()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_that_fails_is_told_and_can_be_repeated(
    fabric: FakeFabric, library: VerbsLibrary, step: int
) -> None:
    device = Device(library, "fake0")
    pair = QueuePair(CompletionQueue(device, 8), 8)
    fabric.fail("modify_qp", errno.ENOMEM, after=step)

    def connect() -> None:
        pair.to_init(1, 6)
        pair.to_ready(route_between(pair, pair))

    with pytest.raises(OutOfMemory, match=f"queue pair {pair.number}"):
        connect()
    pair.to_reset()
    connect()
    assert pair.state == "RTS"
    device.close()


def test_an_address_of_nobody_times_out(library: VerbsLibrary) -> None:
    device = Device(library, "fake0")
    pair = QueuePair(CompletionQueue(device, 8), 8)
    pair.to_init(1, 6)
    with pytest.raises(ResourceError, match="timed out"):
        pair.to_ready(Route(remote_qp=1, remote_gid=b"\xfd" * 16, local_psn=0, remote_psn=0))
    device.close()


def test_lids_connect_on_infiniband(fabric: FakeFabric, library: VerbsLibrary) -> None:
    for number in (0, 1):
        fabric.link_layer(number, True)
    ends = [Device(library, name) for name in ("fake0", "fake1")]
    pairs = [QueuePair(CompletionQueue(device, 8), 8) for device in ends]
    for own, peer in ((0, 1), (1, 0)):
        pairs[own].to_init(1, 6)
        pairs[own].to_ready(
            Route(
                remote_qp=pairs[peer].number,
                remote_gid=bytes(16),
                remote_lid=ends[peer].port(1).lid,
                with_grh=False,
                local_psn=1,
                remote_psn=1,
            )
        )
    pairs[0].post(1, True, [], 0, 0)
    assert [each.status for each in reap(pairs[0].queue, 1)] == [0]
    for device in ends:
        device.close()


# Libraries of before rdma-core 28


def test_an_old_library_serves_what_it_can() -> None:
    library = VerbsLibrary(library_path(old=True))
    assert not library.has_dmabuf
    connection = Connection(library)
    device = connection.near.device
    attributes = device.attributes()
    assert (attributes.max_qp_rd_atom, attributes.on_demand_paging) == (16, False)
    assert (device.port(1).active, device.port(1).active_mtu) == (True, 5)
    # Kinds and interfaces come from sysfs, which knows nothing of the fake's devices.
    assert [entry.index for entry in device.gids(1)] == [0, 1, 2, 3]
    assert {entry.kind for entry in device.gids(1)} == {GidKind.ROCE_1}
    memory, sent = connection.far.memory, connection.near.memory.pattern(5)
    relaxed = register([connection.far.device], memory.address, memory.size, 7, RELAXED)
    connection.post(1, rkey=relaxed.rkeys(0)[0])
    assert statuses(connection, 1) == [(1, 0)]
    assert memory.read() == sent
    with pytest.raises(UnsupportedOperation, match="install rdma-core 34 or newer"):
        register_dmabuf([device], 0, 0, 4096, 7)
    connection.close()
    assert not any(live_objects().values())


# Completion queues


def test_a_notification_comes_once_for_each_arming(linked: Connection) -> None:
    queue = linked.near.queue
    assert not queue.wait(0.0)
    queue.arm()
    linked.post(1, length=1)
    assert queue.wait(WAIT_S)
    linked.post(2, length=1)
    assert statuses(linked, 2) == [(1, 0), (2, 0)]
    assert not queue.wait(0.01)


def test_a_queue_with_unread_notifications_closes(linked: Connection) -> None:
    linked.near.queue.arm()
    linked.post(1, length=1)
    assert select.select([linked.near.queue.fd], [], [], WAIT_S)[0]
    linked.near.pair.close()
    linked.near.queue.close()


def test_the_device_may_refuse_a_depth(fabric: FakeFabric, library: VerbsLibrary) -> None:
    fabric.limits(max_wr=8, max_cqe=16)
    device = Device(library, "fake0")
    with pytest.raises(ResourceError, match="completion queue of 17"):
        CompletionQueue(device, 17)
    with pytest.raises(UsageError, match="at least one entry"):
        CompletionQueue(device, 0)
    queue = CompletionQueue(device, 16)
    assert queue.depth == 16
    with pytest.raises(ResourceError, match="queue pair of 9 x 1"):
        QueuePair(queue, 9)
    device.close()
