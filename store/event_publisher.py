"""Tells the world what the store holds: a ZMQ stream of events with numbers, and a socket that says them
again.

The caller's `publish` never waits: it numbers a batch, puts it into a bounded queue and wakes a thread that
owns both sockets. A batch that finds the queue full is dropped and counted, but keeps its number, so readers
see a gap and know that they missed something. The thread remembers the last batches for readers that ask for
a gap on the replay socket. Formats: docs/events.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from moonpool.config_ranges import check_ranges
from moonpool.errors import NameInUse, ProtocolError, UsageError
from moonpool.events import ObjectEvent
from moonpool.units import MIB
from moonpool.wire.object_events import (
    END_OF_REPLAY,
    KEYS_MAX,
    decode_sequence,
    encode_events,
    encode_sequence,
)

#: Longest message that a reader may send to the replay socket.
_REQUEST_BYTES_MAX: Final = 256
_JOIN_S: Final = 5.0


_RANGES: Final = {
    "queue_batches_max": (1, 1 << 20),
    "replay_batches_max": (1, 1 << 20),
    "replay_bytes_max": (1, 1 << 34),
    "answer_batches_max": (1, 1 << 20),
    "reader_messages_max": (1, 1 << 20),
    "close_ms": (1, 60_000),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EventPublisherConfig:
    """Where events are published and what may be kept. Raises `UsageError` that names the wrong field."""

    #: ZMQ endpoint that readers subscribe to, such as "tcp://127.0.0.1:5557"; port "*" lets the system
    #: choose.
    endpoint: str = "tcp://127.0.0.1:*"
    #: ZMQ endpoint that answers requests for missed batches; "" offers none.
    replay_endpoint: str = ""
    #: First frame of each message, by which readers filter.
    topic: str = ""
    #: Most batches that wait for the sending thread; beyond it batches are dropped and counted.
    queue_batches_max: int = 4_096
    #: Most batches kept for replays.
    replay_batches_max: int = 10_000
    #: Most bytes of batches kept for replays.
    replay_bytes_max: int = 64 * MIB
    #: Most batches in one answer of the replay socket; a reader asks again from where it ended.
    answer_batches_max: int = 1_000
    #: Most messages that ZMQ holds for one slow reader before it drops them.
    reader_messages_max: int = 10_000
    #: How long close() lets queued messages go out, in milliseconds.
    close_ms: int = 500

    def __post_init__(self) -> None:
        if not self.endpoint:
            raise UsageError("events need an endpoint such as tcp://127.0.0.1:5557", field="endpoint")
        check_ranges(self, _RANGES)


def load_zmq() -> Any:
    """The module zmq; raises `UsageError` that says how to get it where it is missing."""
    try:
        return importlib.import_module("zmq")
    except ImportError as exc:
        raise UsageError(
            "publishing events needs pyzmq; install it with: pip install 'moonpool[events]'", field="events"
        ) from exc


def cut(events: Sequence[ObjectEvent]) -> Iterator[list[ObjectEvent]]:
    """The events in batches of at most `KEYS_MAX` keys; an event with more keys is said in parts."""
    batch: list[ObjectEvent] = []
    room = KEYS_MAX
    for event in events:
        keys = event.keys
        while keys:
            part, keys = keys[:room], keys[room:]
            batch.append(event if part is event.keys else replace(event, keys=part))
            room -= len(part)
            if not room:
                yield batch
                batch, room = [], KEYS_MAX
    if batch:
        yield batch


@final
class EventPublisher:
    """Publishes the events of one stream. Owns a thread and two sockets until `close`.

    `stream` names who counts: a new leader is a new stream, which tells readers to ask for a listing.
    `publish` may be called from one thread; `counters` from any.
    """

    def __init__(self, config: EventPublisherConfig, stream: str) -> None:
        self.config: Final = config
        self.stream = stream
        self._zmq = load_zmq()
        self._topic = config.topic.encode()
        self._next = 1
        # Of each batch: its stream, number, time and events; number 0 begins a stream.
        self._queue: deque[tuple[str, int, float, list[ObjectEvent]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._published = self._dropped = self._replayed = self._refused = 0
        self._closing = False
        self._context = self._zmq.Context()
        try:
            self._sender = self._bound(self._zmq.PUB, config.endpoint)
            self._answers: Any = None
            if config.replay_endpoint:
                self._answers = self._bound(self._zmq.ROUTER, config.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        #: What to subscribe to, with the port that the system chose.
        self.endpoint: Final[str] = self._address(self._sender)
        #: Where to ask for a replay; "" without one.
        self.replay_endpoint: Final[str] = self._address(self._answers) if self._answers else ""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="moonpool-events", daemon=True)
        self._thread.start()

    def begin(self, stream: str) -> None:
        """Begins a stream: its numbers start at 1, and batches of the one before cannot be replayed any
        more.
        """
        self.stream = stream
        self._next = 1
        self._queue.append((stream, 0, 0.0, []))

    def publish(self, events: Sequence[ObjectEvent]) -> bool:
        """Queues one batch; never waits. False when it was dropped, which readers see as a gap."""
        whole = True
        for batch in cut(events):
            sequence, self._next = self._next, self._next + 1
            if self._closing or len(self._queue) >= self.config.queue_batches_max:
                self._dropped += 1
                whole = False
            else:
                self._queue.append((self.stream, sequence, time.time(), batch))
        if not self._closing:
            os.eventfd_write(self._wake, 1)
        return whole

    def counters(self) -> dict[str, int]:
        """Batches published, dropped and said again, requests refused; all since the start."""
        return {
            "event_batches_published": self._published,
            "event_batches_dropped": self._dropped,
            "event_batches_replayed": self._replayed,
            "event_replays_refused": self._refused,
        }

    def close(self) -> None:
        """Sends what is queued, within `close_ms`, and ends. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_S + self.config.close_ms / 1e3)
        os.close(self._wake)

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, self.config.reader_messages_max)
        socket.setsockopt(self._zmq.RCVHWM, 64)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
        socket.setsockopt(self._zmq.LINGER, self.config.close_ms)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as exc:
            raise NameInUse(f"cannot publish events at {endpoint}: {exc}", name=endpoint) from exc
        return socket

    def _address(self, socket: Any) -> str:
        return str(socket.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        if self._answers is not None:
            poller.register(self._answers, self._zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._send_queued()
            if self._answers in ready:
                self._answer()
        self._send_queued()
        # Blocks until the messages are out or the linger of the sockets is over.
        self._context.destroy(linger=self.config.close_ms)

    def _send_queued(self) -> None:
        while self._queue:
            stream, sequence, stamp_s, events = self._queue.popleft()
            if not sequence:
                self._kept.clear()
                self._kept_bytes = 0
                continue
            payload = encode_events(stream, stamp_s, events)
            self._sender.send_multipart((self._topic, encode_sequence(sequence), payload))
            self._published += 1
            self._kept.append((sequence, payload))
            self._kept_bytes += len(payload)
            while (
                len(self._kept) > self.config.replay_batches_max
                or self._kept_bytes > self.config.replay_bytes_max
            ):
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        # [who asks, empty, first wanted number]; anything else is counted and not answered.
        frames = self._answers.recv_multipart()
        try:
            if len(frames) != 3 or frames[1]:
                raise ProtocolError("a request for a replay has an empty frame and a number")
            first = decode_sequence(frames[2])
        except ProtocolError:
            self._refused += 1
            return
        sent = 0
        for sequence, payload in self._kept:
            if sequence < first:
                continue
            if sent == self.config.answer_batches_max:
                break
            self._say_again(frames[0], sequence, payload)
            sent += 1
        self._replayed += sent
        self._say_again(frames[0], END_OF_REPLAY, b"")

    def _say_again(self, reader: bytes, sequence: int, payload: bytes) -> None:
        # A reader that does not take its answer loses the rest of it: it will see that the end is missing.
        with contextlib.suppress(self._zmq.Again):
            self._answers.send_multipart(
                (reader, b"", self._topic, encode_sequence(sequence), payload), self._zmq.NOBLOCK
            )
