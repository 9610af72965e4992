"""The dump of an object table: one flat, versioned, checked byte string.

Little endian. Magic `MOONOBJ1`, version u32 = 1, policy u32, objects u64, queues u64, bytes of the object
part u64. Then the objects by index: object id u64, group u64, soft-pin end u64, size u64, digest 16, tenant
u32, key bytes u16, type u8, pin u8, places u8, the key, and for each place offset u64, segment u32, slot
u32. Then the queues: segment u32, queue u32, entries u64, and for each entry, least recent first, ordinal
u32 and uses u8. At the end the crc32 of all before, u32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from moonpool.errors import UsageError
from moonpool.native.table.stored import (
    KEY_BYTES_MAX,
    OBJECT_BYTES_MAX,
    PIN_HARD,
    PIN_NONE,
    PIN_SOFT,
    TIME_MAX,
    Place,
    StoredObject,
)

MAGIC: Final = b"MOONOBJ1"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIIQQQ")
OBJECT: Final = struct.Struct("<QQQQ16sIHBBB")
PLACE: Final = struct.Struct("<QII")
QUEUE: Final = struct.Struct("<IIQ")
ENTRY: Final = struct.Struct("<IB")
CRC: Final = struct.Struct("<I")


class QueueDump(NamedTuple):
    """One queue of one segment: (ordinal of the object, uses), least recent first."""

    segment: int
    queue: int
    entries: list[tuple[int, int]]


class Dump(NamedTuple):
    """All that a dump says."""

    policy: int
    objects: list[StoredObject]
    queues: list[QueueDump]


def encode_dump(dump: Dump) -> bytes:
    """The bytes of a dump."""
    parts = [b""]
    for stored in dump.objects:
        head = OBJECT.pack(
            stored.object_id,
            stored.group,
            stored.soft_pin_end_ms,
            stored.size,
            stored.digest,
            stored.tenant,
            len(stored.key),
            stored.object_type,
            stored.pin,
            len(stored.places),
        )
        parts += [head, stored.key]
        parts += [PLACE.pack(place.offset, place.segment, place.slot) for place in stored.places]
    object_bytes = sum(map(len, parts))
    for queue in dump.queues:
        parts.append(QUEUE.pack(queue.segment, queue.queue, len(queue.entries)))
        parts += [ENTRY.pack(*entry) for entry in queue.entries]
    parts[0] = HEADER.pack(MAGIC, VERSION, dump.policy, len(dump.objects), len(dump.queues), object_bytes)
    body = b"".join(parts)
    return body + CRC.pack(zlib.crc32(body))


def refuse(reason: str) -> UsageError:
    """What is wrong with a dump, as an error."""
    return UsageError(f"this is no dump of an object table: {reason}", field="data", reason=reason)


class _Reader:
    """Bytes read from the front; UsageError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def raw(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise refuse("it ends too early")
        self.at += count
        return self._data[self.at - count : self.at]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.raw(form.size))


def decode_dump(data: bytes, segments: frozenset[int]) -> Dump:
    """The dump of these bytes, whose places lie on the given segments; UsageError for anything else."""
    if len(data) < HEADER.size + CRC.size or data[: len(MAGIC)] != MAGIC:
        raise refuse("it does not begin as one")
    if CRC.unpack(data[-CRC.size :])[0] != zlib.crc32(memoryview(data)[: -CRC.size]):
        raise refuse("its checksum is wrong")
    reader = _Reader(data[: -CRC.size])
    _, version, policy, objects, queues, object_bytes = reader.unpack(HEADER)
    if version != VERSION:
        raise refuse(f"its version is {version}")
    stored = [_read_object(reader, segments) for _ in range(_bounded(objects, OBJECT.size, data))]
    if reader.at != HEADER.size + object_bytes:
        raise refuse("its objects have another size")
    if len({(one.tenant, one.key) for one in stored}) != len(stored):
        raise refuse("a key comes twice")
    read = [_read_queue(reader, data) for _ in range(_bounded(queues, QUEUE.size, data))]
    if reader.at != len(data) - CRC.size:
        raise refuse("it goes on behind its end")
    for problem in _queue_problems(stored, read):
        raise refuse(problem)
    return Dump(policy, stored, read)


def _bounded(count: int, each: int, data: bytes) -> int:
    if count > len(data) // each:
        raise refuse("it ends too early")
    return count


def _read_object(reader: _Reader, segments: frozenset[int]) -> StoredObject:
    form = OBJECT.unpack(reader.raw(OBJECT.size))
    object_id, group, soft_end, size, digest, tenant, key_bytes, object_type, pin, count = form
    if not 0 < object_id < 1 << 63 or not 1 <= key_bytes <= KEY_BYTES_MAX or size > OBJECT_BYTES_MAX:
        raise refuse("an object has a field out of range")
    if pin > PIN_HARD or soft_end > TIME_MAX:
        raise refuse("an object has a field out of range")
    key = reader.raw(key_bytes)
    rows = [reader.unpack(PLACE) for _ in range(count)]
    places = tuple(Place(segment, offset, slot) for offset, segment, slot in rows)
    names = {place.segment for place in places}
    if len(names) != count or not names <= segments or any(place.offset >= 1 << 63 for place in places):
        raise refuse("an object has a place that cannot be")
    return StoredObject(object_id, tenant, key, size, digest, object_type, pin, soft_end, group, places)


def _read_queue(reader: _Reader, data: bytes) -> QueueDump:
    segment, queue, count = reader.unpack(QUEUE)
    rows = [ENTRY.unpack(reader.raw(ENTRY.size)) for _ in range(_bounded(count, ENTRY.size, data))]
    return QueueDump(segment, queue, [(ordinal, uses) for ordinal, uses in rows])


def _queue_problems(objects: list[StoredObject], queues: list[QueueDump]) -> Iterator[str]:
    """Queues ascend by (segment, number); each place is in one of them, and there where the pin puts it."""
    numbers = [(queue.segment, queue.queue) for queue in queues]
    if sorted(set(numbers)) != numbers or any(number > 3 for _, number in numbers):
        yield "its queues are out of order"
    classes: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for queue in queues:
        kind = max(queue.queue, 1)  # SMALL and MAIN are one kind
        for ordinal, uses in queue.entries:
            if ordinal >= len(objects) or uses > 3 or (queue.segment, ordinal) in seen:
                yield "a queue has an entry that cannot be"
                return
            seen.add((queue.segment, ordinal))
            pin = objects[ordinal].pin
            allowed = {PIN_NONE: (1,), PIN_SOFT: (1, 2), PIN_HARD: (3,)}[pin]
            if kind not in allowed or classes.setdefault(ordinal, kind) != kind:
                yield "a queue has an entry that cannot be"
                return
    if seen != {(place.segment, i) for i, stored in enumerate(objects) for place in stored.places}:
        yield "its queues do not hold its places"
