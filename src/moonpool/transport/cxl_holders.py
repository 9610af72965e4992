"""Which engines of other hosts map our far memory by devices of their own. Pure: readings of a clock come in.

Nobody on this host can end what another host's CPU does to shared memory. One that lets go says so; one whose
session ended without a word stops by itself as soon as it notices, and gets `quarantine_s` for that: until
then its ranges stay locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final


class Closable(Protocol):
    """What is kept: the backing of a region."""

    def close(self) -> None:
        """Unlocks the range."""
        ...


@final
@dataclass(frozen=True, slots=True)
class _Holder:
    instance: bytes
    writes: bool


@final
class HolderBook:
    """Not thread-safe: its owner locks. Times are seconds of one monotonic clock."""

    def __init__(self, quarantine_s: float) -> None:
        self.quarantine_s = quarantine_s
        self._holders: dict[int, dict[int, _Holder]] = {}
        self._lost: dict[int, float] = {}
        self._kept: list[tuple[float, Closable]] = []

    def attached(self, handle: int, session_id: int, instance: bytes, *, writes: bool) -> None:
        """A session's peer maps the region."""
        self._holders.setdefault(handle, {})[session_id] = _Holder(instance, writes)

    def detached(self, handle: int, session_id: int) -> None:
        """It has let go."""
        self._holders.get(handle, {}).pop(session_id, None)

    def session_ended(self, session_id: int, now: float) -> None:
        """The session is closed; what its peer had not let go of is in quarantine."""
        for handle, holders in self._holders.items():
            if holders.pop(session_id, None) is not None:
                self._lost[handle] = now + self.quarantine_s

    def holders(self, handle: int) -> set[int]:
        """Sessions whose peers map the region."""
        return set(self._holders.get(handle, ()))

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Sessions, of one instance or of any, that may write it."""
        return {
            session
            for session, holder in self._holders.get(handle, {}).items()
            if holder.writes and instance in (None, holder.instance)
        }

    def of_session(self, session_id: int) -> bool:
        """True while the session's peer maps something."""
        return any(session_id in holders for holders in self._holders.values())

    def forget(self, handle: int, kept: Closable | None, now: float) -> bool:
        """The region is revoked and its living holders were asked; False when one is in quarantine.

        Then `kept` is kept until the quarantine is over, and closed by the `sweep` after it.
        """
        self._holders.pop(handle, None)
        until = self._lost.pop(handle, now)
        if until <= now or kept is None:
            return True
        self._kept.append((until, kept))
        return False

    def sweep(self, now: float) -> int:
        """Lets go of what is out of quarantine; returns how many regions stay kept."""
        self._lost = {handle: until for handle, until in self._lost.items() if until > now}
        over = [kept for until, kept in self._kept if until <= now]
        self._kept = [(until, kept) for until, kept in self._kept if until > now]
        for kept in over:
            kept.close()
        return len(self._kept)

    @property
    def attached_count(self) -> int:
        """Mappings that engines of other hosts have."""
        return sum(map(len, self._holders.values()))
