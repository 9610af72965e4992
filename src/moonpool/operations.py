"""What can be done to a region, and what a region allows."""

from __future__ import annotations

from enum import IntEnum, IntFlag


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
