"""What the master tells a node to do, read from MessagePack values and checked. Pure.

The effects are described in docs/store/architecture.md ("RPC", "Effects"). A value that is none of them is a
`ProtocolError`: the node then joins anew instead of guessing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from moonpool.errors import ProtocolError
from moonpool.store.directory import CHUNK_BYTES, NewObject
from moonpool.units import U32_MAX, U64_MAX

ADD: Final = 1
RETIRE: Final = 2
FENCE: Final = 3
REHASH: Final = 4
RESET: Final = 5
#: In place of a slot: the whole segment.
ANY_SLOT: Final = 0xFFFFFFFF
INSTANCE_BYTES: Final = 16
TAG_MASK: Final = 0xFFFF


class Add(NamedTuple):
    """An object is complete. `tag`: of the put whose grants its extent had; 0 for none in this join."""

    segment: int
    slot: int
    new: NewObject
    tag: int


class Retire(NamedTuple):
    """An object is gone: its word is stamped dead."""

    segment: int
    slot: int
    object_id: int
    reason: int


class Fence(NamedTuple):
    """Nobody may write the extent any more for this put (0: for any put before this join)."""

    segment: int
    slot: int
    offset: int
    length: int
    instance: bytes
    put_id: int
    until_ms: int


class Rehash(NamedTuple):
    """Are the bytes of this object what its digest says?"""

    task: int
    segment: int
    slot: int
    object_id: int


class Reset(NamedTuple):
    """Forget everything about a segment and offer it anew."""

    segment: int


Effect: TypeAlias = Add | Retire | Fence | Rehash | Reset


def read_effect(raw: object) -> Effect:
    """One effect; ProtocolError for a value that is none."""
    if not isinstance(raw, list | tuple) or not raw:
        raise ProtocolError("an effect is an array that begins with its number")
    kind = raw[0]
    reader = _READERS.get(kind) if type(kind) is int else None
    if reader is None:
        raise ProtocolError(f"the master sent an effect of the unknown type {kind!r}: update this node")
    try:
        effect: Effect = reader(*raw[1:])
        return effect
    except (TypeError, ValueError) as problem:
        raise ProtocolError(f"the master sent a wrong effect of type {kind}: {problem}") from problem


def _number(value: Any, most: int = U64_MAX) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no number from 0 to {most}")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes are needed, not {type(value).__name__}")
    return value


def _read_add(
    segment: Any, slot: Any, offset: Any, size: Any, tenant: Any, object_id: Any, key: Any, *rest: Any
) -> Add:
    digest, kind, chunks, tag = rest
    if _number(size) <= CHUNK_BYTES:
        chunks = b""  # a single chunk needs no list
    new = NewObject(
        offset=_number(offset),
        size=_number(size),
        tenant=_number(tenant, U32_MAX),
        object_id=_number(object_id),
        key=_bytes(key),
        digest=_bytes(digest),
        object_type=_number(kind, 255),
        chunks=_bytes(chunks),
    )
    return Add(_number(segment, U32_MAX), _number(slot, U32_MAX), new, _number(tag, TAG_MASK))


def _read_retire(segment: Any, slot: Any, object_id: Any, reason: Any) -> Retire:
    return Retire(_number(segment, U32_MAX), _number(slot, U32_MAX), _number(object_id), _number(reason, 15))


def _read_fence(segment: Any, slot: Any, offset: Any, length: Any, instance: Any, *rest: Any) -> Fence:
    put_id, until = rest
    if len(_bytes(instance)) != INSTANCE_BYTES:
        raise ValueError(f"an instance has {INSTANCE_BYTES} bytes")
    numbers = _number(offset), _number(length)
    where = _number(segment, U32_MAX), _number(slot, U32_MAX)
    return Fence(*where, *numbers, instance, _number(put_id), _number(until, U32_MAX))


def _read_rehash(task: Any, segment: Any, slot: Any, object_id: Any) -> Rehash:
    return Rehash(_number(task), _number(segment, U32_MAX), _number(slot, U32_MAX), _number(object_id))


def _read_reset(segment: Any) -> Reset:
    return Reset(_number(segment, U32_MAX))


_READERS: Final[dict[int, Any]] = {
    ADD: _read_add,
    RETIRE: _read_retire,
    FENCE: _read_fence,
    REHASH: _read_rehash,
    RESET: _read_reset,
}
