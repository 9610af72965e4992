"""Words of the store as values: states, reasons, types, and what the master knows of nodes and segments.

All numbers here are in journals and on the wire: a change needs a new version number.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from moonpool.native.table.stored import (
    DIGEST_BYTES,
    KEY_BYTES_MAX,
    LINE_BYTES,
    OBJECT_BYTES_MAX,
    PAGE_BYTES,
    OpenPut,
    Place,
    PutEntry,
    StoredObject,
    extent_bytes,
)

__all__ = [
    "ANY_SLOT",
    "CHUNK_BYTES",
    "DEAD_BIT",
    "DEFAULT_TENANT_ID",
    "DIGEST_BYTES",
    "EPOCH_MAX",
    "EPOCH_TOLD_MAX",
    "KEY_BYTES_MAX",
    "LINE_BYTES",
    "OBJECT_BYTES_MAX",
    "PAGE_BYTES",
    "SEEN_STATES",
    "EntryCode",
    "Kind",
    "NodeRecord",
    "NodeState",
    "ObjectType",
    "OpenPut",
    "Pin",
    "Place",
    "PutEntry",
    "Reason",
    "RemoveCode",
    "SegmentRecord",
    "StoredObject",
    "TenantRecord",
    "chunk_count",
    "epoch_of",
    "extent_bytes",
    "object_id_of",
    "opened_slots",
]

DEFAULT_TENANT_ID: Final = 0
#: Of a state word: the object is dead.
DEAD_BIT: Final = 1 << 63
SEQUENCE_BITS: Final = 40
EPOCH_MAX: Final = (1 << 23) - 1
#: The highest epoch that a master goes above because a node says so: no node can use up those of a journal.
EPOCH_TOLD_MAX: Final = EPOCH_MAX >> 1
#: In a FENCE of a whole segment.
ANY_SLOT: Final = 0xFFFFFFFF
#: Payload that one chunk digest covers.
CHUNK_BYTES: Final = 65_536
#: What `native/table/extents` can count.
SEGMENT_BYTES_MAX: Final = 1 << 41
SLOTS_MAX: Final = 1 << 30


class NodeState(IntEnum):
    """Of a node, and of a segment."""

    JOINING = 1
    ACTIVE = 2
    SUSPECT = 3
    DEAD = 4
    LEAVING = 5
    GONE = 6


#: States in which readers are told of places on a segment.
SEEN_STATES: Final = frozenset({NodeState.ACTIVE, NodeState.SUSPECT, NodeState.LEAVING})


class Reason(IntEnum):
    """Why an object or a place went."""

    REMOVED = 1
    REPLACED = 2
    EVICTED = 3
    NODE_LOST = 4
    DAMAGED = 5
    MOVED = 6


class Kind(IntEnum):
    """What a segment is made of."""

    MEMORY = 1
    DISK = 2
    LOCAL_DISK = 3
    NVMEOF = 4


class ObjectType(IntEnum):
    """What an object holds, as its writer says."""

    GENERAL = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8


class Pin(IntEnum):
    """Free to go, evicted last (until an end), never evicted."""

    NONE = 0
    SOFT = 1
    HARD = 2


class EntryCode(IntEnum):
    """What became of one key of `put_start` or `put_end`."""

    OK = 0
    EXISTS = 1
    NO_SPACE = 2
    UNKNOWN_PUT = 3
    DEADLINE_PASSED = 4
    TOO_LARGE = 5
    REFUSED = 6


class RemoveCode(IntEnum):
    """What became of one key of `remove`."""

    REMOVED = 0
    ABSENT = 1
    LEASED = 2
    PINNED = 3


class NodeRecord(NamedTuple):
    """A node as the journal has it. `instance` is 16 bytes of one run of its process."""

    node_id: int
    name: str
    host: str
    instance: bytes
    engine_endpoint: str
    view_endpoint: str
    state: int


class SegmentRecord(NamedTuple):
    """A segment as the journal has it; `opened` is how many bytes its windows cover, from offset 0."""

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
    opened: int = 0


class TenantRecord(NamedTuple):
    """`quota_bytes` 0: none. `token_digest`: SHA-256 of the token a client must show, empty for none."""

    tenant_id: int
    name: str
    quota_bytes: int
    token_digest: bytes


def object_id_of(epoch: int, sequence: int) -> int:
    """The object id of a leader's epoch and its sequence, which starts at 1."""
    return epoch << SEQUENCE_BITS | sequence


def epoch_of(object_id: int) -> int:
    """The epoch that gave an object id."""
    return object_id >> SEQUENCE_BITS


def opened_slots(segment: SegmentRecord) -> int:
    """How many directory slots may be given, from 0: in proportion to the bytes that windows cover."""
    return segment.slots * segment.opened // segment.capacity


def chunk_count(size: int) -> int:
    """How many 64 KiB chunks a payload has; one for an empty one."""
    return max(1, -(-size // CHUNK_BYTES))
