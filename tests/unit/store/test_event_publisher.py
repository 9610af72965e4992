"""The event stream: its bytes, how batches are cut, numbers of dropped ones, settings."""

from __future__ import annotations

import importlib
import random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from moonpool.errors import ProtocolError, UsageError
from moonpool.events import EventBatch, ObjectEvent, ObjectsRemoved, ObjectsStored, Tier
from moonpool.store.event_publisher import EventPublisher, EventPublisherConfig, cut
from moonpool.wire.object_events import (
    KEYS_MAX,
    decode_events,
    decode_sequence,
    encode_events,
    encode_sequence,
)

STORED = ObjectsStored("default", (b"a", b"b"), "node-1", Tier.HOST)
REMOVED = ObjectsRemoved("default", (b"a",), "node-1", Tier.DISK)


def test_batches_travel() -> None:
    payload = encode_events("leader-7", 12.5, [STORED, REMOVED])
    assert decode_events(9, payload) == EventBatch("leader-7", 9, (STORED, REMOVED), 12.5)
    assert decode_sequence(encode_sequence(2**63)) == 2**63


def test_the_bytes_are_fixed() -> None:
    assert encode_events("s", 1.0, [REMOVED]).hex() == (
        "9401a173cb3ff0000000000000919502a764656661756c74a66e6f64652d310291c40161"
    )


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        [1, "s", 0.0],
        [2, "s", 0.0, []],
        [True, "s", 0.0, []],
        [1, "", 0.0, []],
        [1, "s", "now", []],
        [1, "s", 0.0, {}],
        [1, "s", 0.0, [[1, "t", "n", 1]]],
        [1, "s", 0.0, [[3, "t", "n", 1, [b"k"]]]],
        [1, "s", 0.0, [[1, "t", "n", 7, [b"k"]]]],
        [1, "s", 0.0, [[1, "t", "n", 1, ["text"]]]],
        [1, "s", 0.0, [[1, "t", "n", 1, [b""]]]],
        [1, "s", 0.0, [[1, "t", "n", 1, []]]],
        [1, "s", 0.0, [[1, "t", "n", 1, [b"k" * 1025]]]],
        [1, "s", 0.0, [[1, "t", "n", 1, [b"k"] * (KEYS_MAX + 1)]]],
    ],
)
def test_what_is_no_batch_is_refused(plain: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_events(1, msgpack.packb(plain))


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_give_a_batch_or_a_typed_error(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode_events("s", 1.0, [STORED, REMOVED] * 5))
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        batch = decode_events(1, bytes(data[: rng.randint(0, len(data))]))
    except ProtocolError:
        return
    assert isinstance(batch, EventBatch), f"seed {seed}"


def test_long_batches_are_cut_and_lose_no_key() -> None:
    keys = tuple(b"%d" % number for number in range(2 * KEYS_MAX + 5))
    events: list[ObjectEvent] = [STORED, ObjectsStored("t", keys, "n", Tier.HOST), REMOVED]
    parts = list(cut(events))
    assert [sum(len(event.keys) for event in part) for part in parts] == [KEYS_MAX, KEYS_MAX, 8]
    assert parts[0][0] is STORED
    assert parts[-1][-1] is REMOVED
    middle = [event for part in parts for event in part if event.tenant == "t"]
    assert tuple(key for event in middle for key in event.keys) == keys
    assert list(cut([])) == []


def test_a_full_queue_drops_counts_and_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = EventPublisher._send_queued
    monkeypatch.setattr(EventPublisher, "_send_queued", lambda self: None)
    publisher = EventPublisher(EventPublisherConfig(queue_batches_max=2), "leader-1")
    try:
        assert [publisher.publish([STORED]) for _ in range(4)] == [True, True, False, False]
        assert publisher.counters()["event_batches_dropped"] == 2
        assert [sequence for _, sequence, _, _ in publisher._queue] == [1, 2]
        publisher._queue.clear()
        publisher.publish([STORED])
        assert [sequence for _, sequence, _, _ in publisher._queue] == [5], "the lost ones keep their numbers"
    finally:
        monkeypatch.setattr(EventPublisher, "_send_queued", sending)
        publisher.close()
    assert publisher.counters()["event_batches_published"] == 1, "close sends what is queued"
    assert publisher.publish([STORED]) is False
    publisher.close()


def test_without_zmq_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("no zmq")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match=r"moonpool\[events\]"):
        EventPublisher(EventPublisherConfig(), "leader-1")


@pytest.mark.parametrize(
    "fields", [{"endpoint": ""}, {"queue_batches_max": 0}, {"close_ms": 10**9}, {"replay_batches_max": True}]
)
def test_wrong_settings_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        EventPublisherConfig(**fields)
    assert caught.value.field in fields
