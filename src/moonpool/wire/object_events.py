"""Batches of the store's events as bytes, for the ZMQ stream of docs/events.md: a sans-I/O codec.

A message has three frames: the topic, the sequence number (u64, big endian) and a MessagePack array::

    [1, stream, stamp_s, [[kind, tenant, node, tier, [key, ...]], ...]]     kind: 1 stored, 2 removed

The frames around it are those of the streams of serving engines, so one reader can take them all. Payloads
are untrusted input: size, depth and counts are bounded, and anything else is a `ProtocolError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from moonpool.errors import ProtocolError
from moonpool.events import EventBatch, ObjectEvent, ObjectsRemoved, ObjectsStored, Tier

VERSION: Final = 1
PAYLOAD_BYTES_MAX: Final = 16 << 20
#: Most keys of all events of one batch: at most half of the longest payload.
KEYS_MAX: Final = 8_192
KEY_BYTES_MAX: Final = 1_024
NAME_BYTES_MAX: Final = 1_024
#: Sequence number of the message that ends an answer of the replay socket; its payload is empty.
END_OF_REPLAY: Final = (1 << 64) - 1

_SEQUENCE: Final = struct.Struct(">Q")
_STORED: Final = 1
_REMOVED: Final = 2
_KINDS: Final[dict[int, type[ObjectEvent]]] = {_STORED: ObjectsStored, _REMOVED: ObjectsRemoved}


def encode_sequence(sequence: int) -> bytes:
    """The second frame."""
    return _SEQUENCE.pack(sequence)


def decode_sequence(frame: bytes) -> int:
    """The number in a second frame, or in a request for a replay."""
    if len(frame) != _SEQUENCE.size:
        raise ProtocolError(f"a sequence number has {_SEQUENCE.size} bytes, not {len(frame)}")
    return int(_SEQUENCE.unpack(frame)[0])


def encode_events(stream: str, stamp_s: float, events: Sequence[ObjectEvent]) -> bytes:
    """The third frame."""
    plain = [
        [
            _STORED if isinstance(event, ObjectsStored) else _REMOVED,
            event.tenant,
            event.node,
            int(event.tier),
            list(event.keys),
        ]
        for event in events
    ]
    packed: bytes = msgpack.packb([VERSION, stream, stamp_s, plain])
    return packed


def decode_events(sequence: int, payload: bytes) -> EventBatch:
    """A batch from its second and third frame; raises `ProtocolError` for what is none."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a batch of events has at most {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}")
    try:
        batch: Any = msgpack.unpackb(payload, max_ext_len=0, max_map_len=0, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as exc:
        raise ProtocolError(f"a batch of events is not MessagePack: {exc}") from exc
    if not isinstance(batch, list) or len(batch) < 4 or type(batch[0]) is not int:
        raise ProtocolError("a batch of events is an array of four: version, stream, time, events")
    version, stream, stamp_s, events = batch[:4]
    if version != VERSION:
        raise ProtocolError(f"a batch of events has version {version}; this reader knows {VERSION}")
    if not _is_name(stream) or type(stamp_s) not in (int, float) or not isinstance(events, list):
        raise ProtocolError("a batch of events has a field of a wrong type")
    decoded = tuple(_event(each) for each in events)
    if sum(len(event.keys) for event in decoded) > KEYS_MAX:
        raise ProtocolError(f"a batch has at most {KEYS_MAX} keys")
    return EventBatch(stream, sequence, decoded, float(stamp_s))


def _event(plain: Any) -> ObjectEvent:
    if not isinstance(plain, list) or len(plain) < 5:
        raise ProtocolError("an event is an array of five: kind, tenant, node, tier, keys")
    kind, tenant, node, tier, keys = plain[:5]
    if type(kind) is not int or kind not in _KINDS or not _is_name(tenant) or not _is_name(node):
        raise ProtocolError("an event's kind, tenant or node is wrong")
    if type(tier) is not int or tier not in tuple(Tier):
        raise ProtocolError("an event's tier is none that is known")
    if (
        not isinstance(keys, list)
        or not keys
        or not all(isinstance(key, bytes) and 1 <= len(key) <= KEY_BYTES_MAX for key in keys)
    ):
        raise ProtocolError(f"an event's keys are binary, 1 to {KEY_BYTES_MAX} bytes each")
    return _KINDS[kind](tenant, tuple(keys), node, Tier(tier))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= NAME_BYTES_MAX
