"""What `put` and `get` say: outcomes are results, failures are errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, final

from moonpool.errors import MoonpoolError, UsageError
from moonpool.store.client_arguments import flag, items, pin_of, whole
from moonpool.store.keys import is_name
from moonpool.store.records import Pin
from moonpool.wire.rpc import pack_value


class PutStatus(IntEnum):
    """How one key of a put ended. FAILED occurs only in the many-forms: elsewhere its error is raised."""

    STORED = 0
    EXISTS = 1
    NO_SPACE = 2
    FAILED = 3


class GetStatus(IntEnum):
    """How one key of a `get_into` ended. FAILED occurs only in the many-forms: elsewhere it is raised."""

    MISS = 0
    HIT = 1
    FAILED = 2


class PutResult(NamedTuple):
    """`object_id` and `replicas` (complete copies) are 0 unless STORED; `error` is set when FAILED."""

    status: PutStatus
    object_id: int = 0
    replicas: int = 0
    error: MoonpoolError | None = None

    @property
    def stored(self) -> bool:
        """True when this call made the object."""
        return self.status is PutStatus.STORED


class GetResult(NamedTuple):
    """`length` bytes were written into the destination when HIT; `error` is set when FAILED."""

    status: GetStatus
    length: int = 0
    object_id: int = 0
    error: MoonpoolError | None = None

    @property
    def hit(self) -> bool:
        """True when the destination holds the object's bytes."""
        return self.status is GetStatus.HIT


class Listed(NamedTuple):
    """One object as `list` tells it; `places` is how many complete copies there are."""

    key: bytes
    size: int
    object_type: int
    pin: Pin
    places: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PutPolicy:
    """How objects are placed and kept; see the guide for each. Raises UsageError for what cannot be."""

    replicas: int = 1
    replace: bool = False
    pin: Pin = Pin.NONE
    soft_pin_ms: int = 0
    group: str = ""
    object_type: int = 0
    tier: int | None = None
    kind: int | None = None
    preferred: Sequence[str] = ()
    need_all: bool = False

    def __post_init__(self) -> None:
        if whole(self.replicas, "replicas", 255) < 1:
            raise UsageError(f"replicas={self.replicas}: from 1 to 255 copies", field="replicas")
        pin_of(self.pin, self.soft_pin_ms)
        whole(self.object_type, "object_type", 255)
        for name in ("tier", "kind"):
            if getattr(self, name) is not None:
                whole(getattr(self, name), name, 255)
        for name in ("replace", "need_all"):
            flag(getattr(self, name), name)
        if self.group and not is_name(self.group):
            raise UsageError("group is printable text of 1 to 255 bytes", field="group")
        if not all(map(is_name, items(self.preferred, "preferred"))):
            raise UsageError("preferred takes a list of segment names", field="preferred")

    def packed(self) -> bytes | None:
        """The MessagePack of the policy map of `put_start`: what is not the default; None when all is."""
        fields: dict[str, Any] = {
            "replicas": int(self.replicas) if self.replicas != 1 else None,
            "replace": self.replace or None,
            "pin": int(self.pin) or None,
            "soft_pin_ms": int(self.soft_pin_ms) or None,
            "group": self.group or None,
            "type": int(self.object_type) or None,
            "tier": None if self.tier is None else int(self.tier),
            "kind": None if self.kind is None else int(self.kind),
            "preferred": list(self.preferred) or None,
            "need_all": self.need_all or None,
        }
        told = {name: value for name, value in fields.items() if value is not None}
        return pack_value(told) if told else None
