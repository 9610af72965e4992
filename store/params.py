"""Reading the parameters of requests: each raises `BadParams` with a sentence, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moonpool.errors import UsageError
from moonpool.events import Tier
from moonpool.native.table.chains import xxh3_64
from moonpool.store.errors import BadParams
from moonpool.store.keys import as_key, is_name
from moonpool.store.records import Kind, ObjectType, Pin

_TIME_MAX = 1 << 62
_POLICY_FIELDS = frozenset(
    {
        "replicas",
        "replace",
        "pin",
        "soft_pin_ms",
        "group",
        "type",
        "tier",
        "kind",
        "preferred",
        "need_all",
    }
)


class Policy(NamedTuple):
    """How the objects of one put are kept. `group` is the name's hash, 0 for none."""

    replicas: int = 1
    replace: bool = False
    pin: int = Pin.NONE
    soft_pin_ms: int = 0
    group: int = 0
    object_type: int = ObjectType.GENERAL
    tier: int | None = None
    kind: int | None = None
    preferred: tuple[str, ...] = ()
    need_all: bool = False


PLAIN_POLICY = Policy()


def number(value: Any, name: str, low: int = 0, high: int = _TIME_MAX) -> int:
    """A whole number in bounds."""
    if type(value) is not int or not low <= value <= high:
        raise BadParams(f"{name} must be a whole number from {low} to {high}", field=name)
    return value


def flag(value: Any, name: str) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise BadParams(f"{name} must be true or false", field=name)
    return value


def array(value: Any, name: str, items_max: int) -> Sequence[Any]:
    """An array of at most so many items."""
    if not isinstance(value, list | tuple):
        raise BadParams(f"{name} must be an array", field=name)
    if len(value) > items_max:
        raise BadParams(f"{name} has {len(value)} items, at most {items_max} go in one request", field=name)
    return value


def raw(value: Any, name: str, length: int | None = None) -> bytes:
    """Bytes, of one length when given."""
    if type(value) is not bytes or (length is not None and len(value) != length):
        of = "" if length is None else f" of length {length}"
        raise BadParams(f"{name} must be bytes{of}", field=name)
    return value


def name_text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    """A name: printable text of 1 to 255 bytes."""
    if value == "" and may_be_empty:
        return ""
    if not is_name(value):
        raise BadParams(f"{name} must be printable text of 1 to 255 bytes", field=name)
    text: str = value
    return text


def keys(value: Any, items_max: int) -> list[bytes]:
    """Keys of a request, as bytes."""
    given = array(value, "keys", items_max)
    try:
        return [key if type(key) is bytes and 0 < len(key) <= 1024 else as_key(key) for key in given]
    except UsageError as exc:
        raise BadParams(exc.message, field="keys") from exc


def prefix(value: Any) -> bytes:
    """The start of keys; empty means all."""
    if value in ("", b""):
        return b""
    try:
        return as_key(value)
    except UsageError as exc:
        raise BadParams(f"a prefix is empty or like a key: {exc.message}", field="prefix") from exc


def cursor(value: Any) -> int:
    """Where a listing goes on: -1 from the start."""
    return -1 if value is None else number(value, "cursor")


def lease(value: Any, lease_ms_max: int) -> int:
    """A lease in ms, cut to the longest there is."""
    return min(number(value, "lease_ms"), lease_ms_max)


def if_leased(value: Any) -> bool:
    """True to refuse leased objects, False to defer freeing them."""
    if value not in ("defer", "refuse"):
        raise BadParams("if_leased must be 'defer' or 'refuse'", field="if_leased")
    return bool(value == "refuse")


def group_hash(tenant: int, name: str) -> int:
    """The number of a group's name within its tenant; 0 for no name."""
    return xxh3_64(name.encode(), tenant) or 1 if name else 0


def policy(value: Any, tenant: int, replicas_max: int) -> Policy:
    """A policy map; nil is the plain one."""
    if value is None or value == {}:
        return PLAIN_POLICY
    if not isinstance(value, dict):
        raise BadParams("policy must be nil or a map", field="policy")
    unknown = [each for each in value if each not in _POLICY_FIELDS]
    if unknown:
        raise BadParams(f"policy has no field {unknown[0]!r}", field="policy")
    pin = number(value.get("pin", 0), "pin", 0, Pin.HARD)
    soft_pin_ms = number(value.get("soft_pin_ms", 0), "soft_pin_ms")
    if (pin == Pin.SOFT) != (soft_pin_ms > 0):
        raise BadParams("soft_pin_ms above 0 goes with pin 1, and only with it", field="soft_pin_ms")
    preferred = array(value.get("preferred", ()), "preferred", 64)
    tier, kind = value.get("tier"), value.get("kind")
    return Policy(
        replicas=number(value.get("replicas", 1), "replicas", 1, replicas_max),
        replace=flag(value.get("replace", False), "replace"),
        pin=pin,
        soft_pin_ms=soft_pin_ms,
        group=group_hash(tenant, name_text(value.get("group", ""), "group", may_be_empty=True)),
        object_type=number(value.get("type", 0), "type", 0, max(ObjectType)),
        tier=None if tier is None else number(tier, "tier", 0, max(Tier)),
        kind=None if kind is None else number(kind, "kind", 1, max(Kind)),
        preferred=tuple(name_text(each, "preferred") for each in preferred),
        need_all=flag(value.get("need_all", False), "need_all"),
    )
