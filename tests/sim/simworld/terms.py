"""Following the journal: groups applied in order to a state, strictly."""

from __future__ import annotations

import msgpack

from moonpool.store.facts import fact_of
from moonpool.store.state import State
from simworld.redis_model import Group


class Follower:
    """A state, and how far in which run of Redis it has come."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.applied = 0
        self.now_ms = 0
        self.epoch = 0
        self._run_id: int | None = None

    def belongs(self, run_id: int) -> bool:
        """Whether this is the run that was followed so far; the first one counts."""
        if self._run_id is None:
            self._run_id = run_id
        return self._run_id == run_id

    def apply(self, groups: tuple[Group, ...]) -> bool:
        """Applies groups that follow; False when they do not."""
        for group in groups:
            version, epoch, first, now_ms, facts = msgpack.unpackb(group.payload, use_list=False, raw=False)
            if version != 1 or first != self.applied + 1 or first != group.first:
                return False
            for fact in facts:
                self.state.apply(fact_of(fact))
            self.applied += len(facts)
            self.now_ms = max(self.now_ms, now_ms)
            self.epoch = max(self.epoch, epoch)
        return True
