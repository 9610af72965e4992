"""Who may write where.

Each extent that a leader gave out is a claim, and the newest claim on a byte holds it.

A write that lands in bytes whose newest claim is another put's has destroyed somebody's data, whatever any
process believes at that moment. That includes writers that stalled in mid-write and woke up later.
"""

from __future__ import annotations

from dataclasses import dataclass


class ExtentStolen(AssertionError):
    """A write landed in an extent that belongs to another put."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One extent, and the open put that may fill it."""

    start: int
    stop: int
    put_id: int


class Claims:
    """The claims on one segment's memory (one generation of it), oldest first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._claims: list[Claim] = []

    def add(self, offset: int, length: int, put_id: int) -> None:
        """The leader gave an extent out; claims that lie wholly inside it are over."""
        new = Claim(offset, offset + length, put_id)
        self._claims = [one for one in self._claims if not (new.start <= one.start and one.stop <= new.stop)]
        self._claims.append(new)

    def check_write(self, offset: int, length: int, put_id: int) -> None:
        """A write of that attempt lands now."""
        stop = offset + length
        for claim in reversed(self._claims):
            if claim.start < stop and offset < claim.stop:
                if claim.put_id != put_id:
                    raise ExtentStolen(
                        f"{self._name}: put {put_id:x} wrote [{offset}, {stop}), which was given to"
                        f" put {claim.put_id:x} as [{claim.start}, {claim.stop})"
                    )
                if claim.start <= offset and stop <= claim.stop:
                    return
        raise ExtentStolen(f"{self._name}: put {put_id:x} wrote [{offset}, {stop}), which nobody gave it")
