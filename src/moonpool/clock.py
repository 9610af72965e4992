"""Time as a value: the seam between cores that are told the time and shells that read it.

Readings are nanoseconds of a monotonic clock of this host, good only for differences inside one boot;
readings of two processes are never compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol, final

from moonpool.errors import UsageError
from moonpool.units import NS_PER_MS, NS_PER_S


class Clock(Protocol):
    """What gives the time."""

    def now_ns(self) -> int:
        """The current reading; never goes back."""
        ...


@final
class SystemClock:
    """CLOCK_MONOTONIC: stands still while the machine sleeps, as socket timeouts do."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Reads the clock (about 40 ns)."""
        return time.monotonic_ns()


@final
class BootClock:
    """CLOCK_BOOTTIME: goes on while the machine sleeps, so leases run out on time."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Reads the clock."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@final
class ManualClock:
    """A clock that moves when told, for simulation and tests."""

    __slots__ = ("_now_ns",)

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """The reading last set."""
        return self._now_ns

    def advance(self, delta_ns: int) -> int:
        """Moves the clock on and returns the new reading; raises `UsageError` for a step back."""
        if delta_ns < 0:
            raise UsageError(f"a clock cannot go back by {-delta_ns} ns", value=str(delta_ns))
        self._now_ns += delta_ns
        return self._now_ns


@final
@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute reading after which a wait ends; None means never."""

    end_ns: int | None

    @classmethod
    def after_s(cls, now_ns: int, timeout_s: float | None) -> Deadline:
        """The deadline `timeout_s` seconds after a reading; None gives one that never comes."""
        if timeout_s is None:
            return cls(None)
        if not timeout_s >= 0:  # also refuses NaN
            raise UsageError(f"a timeout cannot be {timeout_s}; use None for no limit", field="timeout_s")
        if timeout_s == float("inf"):
            return cls(None)
        return cls(now_ns + int(timeout_s * NS_PER_S))

    @classmethod
    def after_ms(cls, now_ns: int, timeout_ms: int) -> Deadline:
        """The deadline `timeout_ms` milliseconds after a reading."""
        return cls(now_ns + timeout_ms * NS_PER_MS)

    def remaining_ns(self, now_ns: int) -> int | None:
        """Nanoseconds left, 0 when passed, None when it never comes."""
        return None if self.end_ns is None else max(0, self.end_ns - now_ns)

    def remaining_s(self, now_ns: int) -> float | None:
        """Seconds left, in the shape that socket and lock waits take."""
        left = self.remaining_ns(now_ns)
        return None if left is None else left / NS_PER_S

    def expired(self, now_ns: int) -> bool:
        """True at and after the deadline."""
        return self.end_ns is not None and now_ns >= self.end_ns

    def earlier(self, other: Deadline) -> Deadline:
        """Whichever of two deadlines comes first."""
        if self.end_ns is None:
            return other
        if other.end_ns is None:
            return self
        return self if self.end_ns <= other.end_ns else other
