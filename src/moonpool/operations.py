"""What can be done to a region, and what a region allows."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, IntFlag

from moonpool.errors import UsageError
from moonpool.units import parse_size


class Op(IntEnum):
    """A one-sided operation, seen from the initiator; the numbers are those of the data lane."""

    #: Remote bytes into local memory.
    READ = 1
    #: Local bytes into remote memory.
    WRITE = 2


class Access(IntFlag):
    """What peers may do with a region."""

    NONE = 0
    READ = 1
    WRITE = 2
    READ_WRITE = 3

    def allows(self, op: Op) -> bool:
        """True when a region with this access takes the operation."""
        return bool(self & (Access.READ if op is Op.READ else Access.WRITE))


class Priority(IntEnum):
    """The class of a submitted batch: higher ones go first, and none waits for ever."""

    LOW = 0
    NORMAL = 1
    HIGH = 2

    @classmethod
    def of(cls, value: object) -> Priority:
        """From a member, its number, or its name in any case; UsageError for anything else."""
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, int) and not isinstance(value, bool) and value in cls.__members__.values():
            return cls(value)
        names = ", ".join(f"{one.name.lower()!r} ({one.value})" for one in cls)
        raise UsageError(f"a priority is one of {names}, not {value!r}", field="priority", value=repr(value))


def class_rates(texts: Iterable[str]) -> dict[Priority, int]:
    """Bytes a second by class from texts such as "low=200 MiB"; UsageError names the wrong one."""
    rates: dict[Priority, int] = {}
    for text in texts:
        name, equals, size = text.partition("=")
        priority = Priority.of(name.strip())
        rate = parse_size(size) if equals else 0
        if rate < 1 or priority in rates:
            raise UsageError(
                f"write a class and its bytes a second once, as low=200MiB, not {text!r}", value=text
            )
        rates[priority] = rate
    return rates
