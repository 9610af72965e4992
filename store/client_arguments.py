"""What callers give, checked before anything is sent: each mistake is a `UsageError` that names the field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from moonpool.errors import UsageError
from moonpool.store.keys import as_key
from moonpool.store.records import Pin

if TYPE_CHECKING:
    from moonpool.store.client_results import PutPolicy

#: The longest time that fits everywhere.
MS_MAX: Final = 1 << 62


def whole(value: Any, field: str, most: int = MS_MAX) -> int:
    """A whole number from 0 to `most`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) <= most:
        raise UsageError(f"{field}={value!r}: give a whole number from 0 to {most}", field=field)
    return int(value)


def flag(value: Any, field: str) -> bool:
    """True or False and nothing else."""
    if not isinstance(value, bool):
        raise UsageError(f"{field}={value!r}: give True or False", field=field)
    return value


def wait_of(wait_ms: int | None, otherwise: int) -> int:
    """How long a put waits for space: what the call says, else what the settings say."""
    return otherwise if wait_ms is None else whole(wait_ms, "wait_ms")


def items(values: Any, field: str) -> Sequence[Any]:
    """Many keys, values or buffers: a list or tuple as it is, another iterable as a list."""
    if isinstance(values, list | tuple):
        return values
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray | memoryview):
        try:
            return list(values)
        except TypeError:  # an array without dimensions says that it can be iterated
            pass
    raise UsageError(f"{field} takes a list; got {type(values).__name__}", field=field)


def prefix_of(prefix: Any) -> bytes:
    """What keys begin with; it may be empty, where a key may not."""
    if isinstance(prefix, str | bytes | bytearray | memoryview) and not len(prefix):
        return b""
    return as_key(prefix)


def pin_of(pin: Any, soft_pin_ms: Any) -> tuple[Pin, int]:
    """A pin and how long it lasts, which only a soft one takes, and must."""
    try:
        kind = Pin(pin)
    except ValueError:
        raise UsageError(
            f"pin={pin!r}: choose one of {', '.join(map(str, map(repr, Pin)))}", field="pin"
        ) from None
    lasts = whole(soft_pin_ms, "soft_pin_ms")
    if (kind is Pin.SOFT) != (lasts > 0):
        raise UsageError("soft_pin_ms goes with pin=Pin.SOFT, and only with it", field="soft_pin_ms")
    return kind, lasts


def policy_of(policy: PutPolicy | None, changes: dict[str, Any], **fixed: Any) -> PutPolicy | None:
    """A policy from the keywords of a call, and those that the call itself sets."""
    from moonpool.store.client_results import PutPolicy

    known = sorted(PutPolicy.__dataclass_fields__.keys() - fixed.keys())
    wrong = sorted(changes.keys() - set(known))
    if wrong:
        raise UsageError(
            f"this call has no setting {wrong[0]!r}; there are {', '.join(known)}", field=wrong[0]
        )
    if policy is not None and not isinstance(policy, PutPolicy):
        raise UsageError(f"policy takes a PutPolicy; got {type(policy).__name__}", field="policy")
    if not changes and not fixed:
        return policy
    if policy is not None:
        raise UsageError("give a policy, or its fields as keywords, not both", field="policy")
    return PutPolicy(**changes, **fixed)
