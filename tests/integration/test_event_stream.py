"""The event stream over real sockets: order, gaps, replays, and that nothing on its ports harms it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from moonpool.errors import NameInUse
from moonpool.events import ObjectsRemoved, ObjectsStored, Tier
from moonpool.store.event_publisher import EventPublisher, EventPublisherConfig
from moonpool.wire.object_events import END_OF_REPLAY, decode_events, decode_sequence, encode_sequence

WAIT_MS = 10_000
STORED = ObjectsStored("default", (b"a", b"b"), "node-1", Tier.HOST)
REMOVED = ObjectsRemoved("default", (b"a",), "node-1", Tier.DISK)
Connect = Callable[[int, str], "zmq.Socket[bytes]"]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens a socket of a kind to an endpoint; all are closed at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def make(kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        opened.append(socket)
        socket.connect(endpoint)
        return socket

    yield make
    for socket in opened:
        socket.close(linger=0)
    context.term()


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    config = EventPublisherConfig(
        replay_endpoint="tcp://127.0.0.1:*", topic="pool", replay_batches_max=8, answer_batches_max=5
    )
    made = EventPublisher(config, "leader-1")
    yield made
    made.close()


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came in time"
    return socket.recv_multipart()


def subscribed(connect: Connect, publisher: EventPublisher) -> zmq.Socket[bytes]:
    """A reader whose subscription the publisher has seen: it has got a first batch."""
    reader = connect(zmq.SUB, publisher.endpoint)
    reader.subscribe(b"pool")
    deadline = time.monotonic() + WAIT_MS / 1e3
    while time.monotonic() < deadline:
        publisher.publish([REMOVED])
        if reader.poll(20):
            while reader.poll(50):
                reader.recv_multipart()
            return reader
    pytest.fail("the subscription did not reach the publisher")


def replay(dealer: zmq.Socket[bytes], first: int) -> list[int]:
    """Sequence numbers of an answer, without the mark of its end."""
    dealer.send_multipart([b"", encode_sequence(first)])
    found: list[int] = []
    while True:
        empty, topic, number, payload = receive(dealer)
        assert (empty, topic) == (b"", b"pool")
        if decode_sequence(number) == END_OF_REPLAY:
            assert payload == b""
            return found
        assert decode_events(decode_sequence(number), payload).stream == "leader-1"
        found.append(decode_sequence(number))


def test_readers_get_events_in_order(connect: Connect, publisher: EventPublisher) -> None:
    reader = subscribed(connect, publisher)
    assert publisher.publish([STORED, REMOVED])
    assert publisher.publish([STORED])
    assert publisher.publish([])
    batches = []
    for _ in range(2):
        topic, number, payload = receive(reader)
        assert topic == b"pool"
        batches.append(decode_events(decode_sequence(number), payload))
    assert [batch.events for batch in batches] == [(STORED, REMOVED), (STORED,)]
    assert batches[1].sequence == batches[0].sequence + 1
    assert batches[0].stream == "leader-1"
    assert not reader.poll(20), "an empty batch is not sent"


def test_a_replay_is_bounded_and_ends_with_a_mark(connect: Connect, publisher: EventPublisher) -> None:
    reader = subscribed(connect, publisher)
    for _ in range(20):
        publisher.publish([STORED])
    last = [decode_sequence(receive(reader)[1]) for _ in range(20)][-1]
    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    # Of all the last 8 are kept, and an answer has at most 5 of them.
    assert replay(dealer, 1) == list(range(last - 7, last - 2))
    assert replay(dealer, last - 2) == [last - 2, last - 1, last]
    assert replay(dealer, last + 1) == []
    assert publisher.counters()["event_batches_replayed"] == 8


def test_a_new_stream_counts_from_1_and_forgets_the_one_before(
    connect: Connect, publisher: EventPublisher
) -> None:
    reader = subscribed(connect, publisher)
    publisher.begin("leader-2")
    publisher.publish([STORED])
    _, number, payload = receive(reader)
    assert decode_events(decode_sequence(number), payload).stream == "leader-2"
    assert decode_sequence(number) == 1
    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    dealer.send_multipart([b"", encode_sequence(1)])
    assert [decode_sequence(receive(dealer)[2]) for _ in range(2)] == [1, END_OF_REPLAY]


def test_garbage_on_the_replay_socket_is_counted_and_hurts_nobody(
    connect: Connect, publisher: EventPublisher
) -> None:
    reader = subscribed(connect, publisher)
    publisher.publish([STORED])
    last = decode_sequence(receive(reader)[1])
    dealer = connect(zmq.DEALER, publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"no", encode_sequence(1)], [b"", encode_sequence(1), b"more"]):
        dealer.send_multipart(frames)
    assert replay(dealer, last) == [last]
    assert publisher.counters()["event_replays_refused"] == 4
    # Longer than any request: ZMQ itself ends that reader's connection.
    loud = connect(zmq.DEALER, publisher.replay_endpoint)
    loud.send_multipart([b"", b"x" * 100_000])
    assert replay(dealer, last) == [last]


def test_a_taken_port_is_a_typed_error_and_leaves_nothing_open(publisher: EventPublisher) -> None:
    with pytest.raises(NameInUse, match="cannot publish events"):
        EventPublisher(EventPublisherConfig(endpoint=publisher.endpoint), "leader-2")
    with pytest.raises(NameInUse):
        EventPublisher(EventPublisherConfig(replay_endpoint=publisher.endpoint), "leader-2")


def test_a_master_publishes_what_happens_to_objects(connect: Connect) -> None:
    from moonpool.store.client import connect as connect_pool
    from moonpool.store.journal_config import JournalConfig
    from moonpool.store.master import Master
    from moonpool.store.master_config import MasterConfig
    from moonpool.store.master_service_config import MasterServiceConfig
    from moonpool.store.node import Node
    from moonpool.store.node_config import NodeConfig

    config = MasterServiceConfig(
        journal=JournalConfig(address="memory://"),
        name="m",
        endpoints=("127.0.0.1:0",),
        rules=MasterConfig(events=True),
        events=EventPublisherConfig(),
    )
    with (
        Master(config) as master,
        Node(NodeConfig(addresses=(master.address,), name="n", segment_bytes=1 << 20)) as node,
        connect_pool(master.address) as pool,
    ):
        assert node.wait_active(30)
        reader = connect(zmq.SUB, master.events_endpoint)
        reader.subscribe(b"")
        seen: list[tuple[str, tuple[bytes, ...]]] = []
        number = 0
        deadline = time.monotonic() + WAIT_MS / 1e3
        # What happened before the subscription reached the master is not seen: objects until one is.
        while not any(kind == "ObjectsRemoved" for kind, _ in seen) and time.monotonic() < deadline:
            number += 1
            assert pool.put(f"key-{number}", b"x").stored
            pool.remove(f"key-{number}")
            while reader.poll(20):
                _, sequence, payload = reader.recv_multipart()
                batch = decode_events(decode_sequence(sequence), payload)
                assert batch.stream == "m/1"
                for event in batch.events:
                    assert isinstance(event, ObjectsStored | ObjectsRemoved)
                    assert (event.tenant, event.node, event.tier) == ("default", "n", Tier.HOST)
                    seen.append((type(event).__name__, event.keys))
    removed = [keys for kind, keys in seen if kind == "ObjectsRemoved"]
    stored = [keys for kind, keys in seen if kind == "ObjectsStored"]
    assert removed, seen
    assert set(stored) & set(removed), "an object came and went"
