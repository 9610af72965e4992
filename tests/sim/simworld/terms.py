"""Following the journal: groups applied in order to a state, strictly."""

from __future__ import annotations

from moonpool.store.facts import decode_group
from moonpool.store.state import State
from moonpool.store.table_factory import Tables
from simworld.redis_model import Group


class Follower:
    """A state, and how far in which run of Redis it has come."""

    def __init__(self, made: tuple[State, Tables]) -> None:
        self.state, self.tables = made
        self.applied = 0
        self.epoch = 0
        self.run_id: int | None = None

    def belongs(self, run_id: int) -> bool:
        """Whether this is the run that was followed so far; the first one counts."""
        if self.run_id is None:
            self.run_id = run_id
        return self.run_id == run_id

    def apply(self, groups: tuple[Group, ...]) -> bool:
        """Applies groups that follow; False when they do not."""
        for group in groups:
            decoded = decode_group(group.payload)
            if group.first != self.applied + 1:
                return False
            self.state.apply_group(decoded)
            self.applied += len(decoded.facts)
            self.epoch = max(self.epoch, decoded.epoch)
        return True
