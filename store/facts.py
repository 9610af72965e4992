"""Facts: all that a journal holds, as values and as bytes.

A fact is a MessagePack array `[type, version, fields...]` in the shortest form of each item: equal facts are
equal bytes, here and in the native core. Reading is strict: a type or version that is not in the table, a
wrong number of fields, a wrong kind of value or bytes left over raise `UnknownFact`, and nothing is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]

from moonpool.store.errors import UnknownFact
from moonpool.store.records import Place

#: Longest fact in bytes; objects that go together are cut into several facts below it.
FACT_BYTES_MAX: Final = 4 << 20


class Leader(NamedTuple):
    """A new leader took over: its epoch, name and the endpoints of its rpc port. Unsettles the state.

    `run` names the run of the server that keeps the journal. Where it is another than the last leader's, the
    journal may have lost its end: no place is seen until its node has reported.
    """

    epoch: int
    name: str
    endpoints: tuple[str, ...]
    run: str


class Node(NamedTuple):
    """A node joined for the first time, or again as a new process."""

    node_id: int
    name: str
    host: str
    instance: bytes
    engine_endpoint: str
    view_endpoint: str
    state: int


class Segment(NamedTuple):
    """A segment joined; no window is open yet."""

    segment_id: int
    node_id: int
    name: str
    generation: int
    capacity: int
    slots: int
    tier: int
    kind: int
    location: str
    data_handle: int
    directory_handle: int
    state: int


class SegmentState(NamedTuple):
    """A segment's state changed; GONE drops all places on it."""

    segment_id: int
    state: int
    generation: int


class Window(NamedTuple):
    """From now on extents may be given from these bytes, which follow the segment's last window."""

    segment_id: int
    offset: int
    length: int


class Object(NamedTuple):
    """An object is complete; it replaces the object `replaced` of its key, or none when that is 0."""

    object_id: int
    tenant: int
    key: bytes
    size: int
    digest: bytes
    object_type: int
    pin: int
    soft_pin_end_ms: int
    group: int
    places: tuple[Place, ...]
    replaced: int


class ObjectsGone(NamedTuple):
    """Objects ended; one whose key is not there only leaves a grave, in an unsettled state.

    There an empty key stands for all keys of the tenant.
    """

    reason: int
    tenant: int
    objects: tuple[tuple[int, bytes], ...]


class PlaceGone(NamedTuple):
    """An object lost one of several places."""

    object_id: int
    tenant: int
    key: bytes
    segment_id: int
    reason: int


class PlaceAdded(NamedTuple):
    """An object has one more place."""

    object_id: int
    tenant: int
    key: bytes
    place: Place


class PinSet(NamedTuple):
    """An object's pin changed."""

    object_id: int
    tenant: int
    key: bytes
    pin: int
    soft_pin_end_ms: int


class Tenant(NamedTuple):
    """A tenant was made or changed. `token_digest` is SHA-256 of its token, or empty."""

    tenant_id: int
    name: str
    quota_bytes: int
    token_digest: bytes


class NodeStateSet(NamedTuple):
    """A node's state changed."""

    node_id: int
    state: int


class Settled(NamedTuple):
    """Every segment has reported to this leader: graves are forgotten."""


class Group(NamedTuple):
    """Facts that went into the journal together; the first has the number `first_sequence`."""

    epoch: int
    first_sequence: int
    now_ms: int
    facts: tuple[Fact, ...]


Fact: TypeAlias = (
    Leader
    | Node
    | Segment
    | SegmentState
    | Window
    | Object
    | ObjectsGone
    | PlaceGone
    | PlaceAdded
    | PinSet
    | Tenant
    | NodeStateSet
    | Settled
)

VERSION: Final = 1
GROUP_VERSION: Final = 1
#: Type number of each fact (all at version 1), and what each of its fields is: i a number from 0 to 2^64 - 1,
#: s text, b bytes, S texts, P a place, Q places, O pairs of object id and key.
TYPES: Final[Mapping[type[Any], tuple[int, str]]] = MappingProxyType(
    {
        Leader: (1, "isSs"),
        Node: (2, "issbssi"),
        Segment: (3, "iisiiiiisiii"),
        SegmentState: (4, "iii"),
        Window: (5, "iii"),
        Object: (6, "iibibiiiiQi"),
        ObjectsGone: (7, "iiO"),
        PlaceGone: (8, "iibii"),
        PlaceAdded: (9, "iibP"),
        PinSet: (10, "iibii"),
        Tenant: (11, "isib"),
        NodeStateSet: (12, "ii"),
        Settled: (13, ""),
    }
)
_NUMBERS: Final[Mapping[type[Any], int]] = MappingProxyType({kind: row[0] for kind, row in TYPES.items()})
# Kept, since making one costs as much as packing a fact; `pack` holds the GIL from start to end.
_pack: Final = msgpack.Packer(use_bin_type=True).pack
_ROWS: Final[Mapping[int, tuple[type[Any], str]]] = MappingProxyType(
    {number: (kind, letters) for kind, (number, letters) in TYPES.items()}
)


def encode_fact(fact: Fact) -> bytes:
    """The bytes of a fact."""
    packed: bytes = _pack((_NUMBERS[type(fact)], VERSION, *fact))
    return packed


def decode_fact(data: bytes) -> Fact:
    """The fact in these bytes, and nothing else in them; raises `UnknownFact`."""
    if len(data) > FACT_BYTES_MAX:
        raise UnknownFact(f"a fact has at most {FACT_BYTES_MAX} bytes; this one has {len(data)}")
    try:
        row = msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=True, max_array_len=1 << 20)
    except (ValueError, UnicodeDecodeError, RecursionError) as exc:
        raise UnknownFact(f"these bytes are no fact: {type(exc).__name__}") from exc
    return fact_of(row)


def encode_group(epoch: int, first_sequence: int, now_ms: int, facts: Sequence[bytes]) -> bytes:
    """The bytes of a group of encoded facts."""
    head = bytearray(b"\x95")
    for number in (GROUP_VERSION, epoch, first_sequence, now_ms):
        head += msgpack.packb(number)
    head += msgpack.Packer().pack_array_header(len(facts))
    return b"".join((head, *facts))


def decode_group(data: bytes) -> Group:
    """The group in these bytes, and nothing else in them; raises `UnknownFact`."""
    try:
        row = msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=True)
    except (ValueError, UnicodeDecodeError, RecursionError) as exc:
        raise UnknownFact(f"these bytes are no group of facts: {type(exc).__name__}") from exc
    if not isinstance(row, tuple) or len(row) != 5 or row[0] != GROUP_VERSION or type(row[0]) is not int:
        raise UnknownFact("the journal holds a group of facts of another version")
    facts = tuple(fact_of(each) for each in _array(row[4]))
    return Group(_number(row[1]), _number(row[2]), _number(row[3]), facts)


def fact_of(row: object) -> Fact:
    """The fact in an unpacked array (of a group, for example); raises `UnknownFact`."""
    if not isinstance(row, tuple | list) or len(row) < 2:
        raise UnknownFact("a fact is an array of a type, a version and fields")
    number, version = row[0], row[1]
    known = _ROWS.get(number) if type(number) is int else None
    if known is None or version != VERSION or type(version) is not int:
        raise UnknownFact(f"the journal holds a fact of type {number!r}, version {version!r}")
    kind, letters = known
    if len(row) != 2 + len(letters):
        raise UnknownFact(f"a {kind.__name__} has {len(letters)} fields; this one has {len(row) - 2}")
    fields = [_READERS[letter](value) for letter, value in zip(letters, row[2:], strict=True)]
    fact: Fact = kind(*fields)
    return fact


def _number(value: object) -> int:
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    raise UnknownFact(f"a fact has {type(value).__name__} where a number belongs")


def _text(value: object) -> str:
    if type(value) is str:
        return value
    raise UnknownFact(f"a fact has {type(value).__name__} where text belongs")


def _bytes(value: object) -> bytes:
    if type(value) is bytes:
        return value
    raise UnknownFact(f"a fact has {type(value).__name__} where bytes belong")


def _array(value: object) -> tuple[object, ...]:
    if isinstance(value, tuple | list):
        return tuple(value)
    raise UnknownFact(f"a fact has {type(value).__name__} where an array belongs")


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(each) for each in _array(value))


def _place(value: object) -> Place:
    items = _array(value)
    if len(items) != 3:
        raise UnknownFact("a place is a segment, an offset and a slot")
    return Place(*(_number(item) for item in items))


def _places(value: object) -> tuple[Place, ...]:
    return tuple(_place(each) for each in _array(value))


def _objects(value: object) -> tuple[tuple[int, bytes], ...]:
    pairs = []
    for each in _array(value):
        pair = _array(each)
        if len(pair) != 2:
            raise UnknownFact("an object that is gone is an object id and a key")
        pairs.append((_number(pair[0]), _bytes(pair[1])))
    return tuple(pairs)


_READERS: Final[Mapping[str, Callable[[object], Any]]] = MappingProxyType(
    {"i": _number, "s": _text, "b": _bytes, "S": _texts, "P": _place, "Q": _places, "O": _objects}
)
