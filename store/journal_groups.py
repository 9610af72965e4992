"""Facts on their way into the journal: cut into groups, sent, confirmed in order. Pure.

A group is one append. It is cut when somebody waits for a fact, when the oldest fact has lingered long
enough, or when it is large enough; what one decision said stays in one group, so a crash never keeps half.
Groups are sent without waiting for answers, up to a bound, and are kept until they are confirmed: after a
reconnect all of them are sent again, which Redis takes as repeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from moonpool.errors import InternalError
from moonpool.store.facts import encode_group
from moonpool.units import NS_PER_US

#: Facts that somebody waits for leave at once while fewer groups than this are under way; then they share.
URGENT_GROUPS_MAX: Final = 4


class Group(NamedTuple):
    """One append: facts `first` to `last` as bytes of a group (docs/store/architecture.md, "Facts")."""

    epoch: int
    first: int
    last: int
    data: bytes


@final
class GroupQueue:
    """Facts of one term that are not durable yet, in order. `sequence` is the last one that is."""

    def __init__(
        self, epoch: int, sequence: int, group_bytes: int, linger_us: int, in_flight_max: int
    ) -> None:
        self.epoch = epoch
        #: The last sequence that the journal confirmed.
        self.durable = sequence
        #: The last sequence taken in.
        self.taken = sequence
        #: Bytes of facts and groups that are not confirmed.
        self.bytes = 0
        self._group_bytes = group_bytes
        self._linger_ns = linger_us * NS_PER_US
        self._in_flight_max = in_flight_max
        self._facts: list[bytes] = []
        self._facts_bytes = 0
        self._now_ms = 0
        self._oldest_ns = 0
        self._urgent = False
        self._held = False
        self._cut: deque[Group] = deque()
        self._sent: deque[Group] = deque()

    def add(self, first: int, facts: Sequence[bytes], now_ms: int, *, urgent: bool, now_ns: int) -> None:
        """Takes facts in; `urgent` when a reply waits for them."""
        if first != self.taken + 1:
            raise InternalError(f"facts from {first} do not follow {self.taken}; please report this")
        if not self._facts:
            self._oldest_ns = now_ns
        self._facts += facts
        size = sum(map(len, facts))
        self._facts_bytes += size
        self.bytes += size
        self.taken += len(facts)
        self._now_ms = max(self._now_ms, now_ms)
        self._urgent |= urgent
        if self._facts_bytes >= self._group_bytes and not self._held:
            self._close_group()

    def hurry(self) -> None:
        """Somebody waits for what was taken in so far."""
        self._urgent = bool(self._facts)

    def next_group(self, now_ns: int) -> Group | None:
        """The group to send now, which then counts as sent; None when none is due."""
        if len(self._sent) >= self._in_flight_max:
            return None
        if not self._cut:
            if not self._facts or self._held:
                return None
            urgent = self._urgent and len(self._sent) < URGENT_GROUPS_MAX
            if not urgent and now_ns - self._oldest_ns < self._linger_ns:
                return None
            self._close_group()
        group = self._cut.popleft()
        self._sent.append(group)
        return group

    def due_in_ns(self, now_ns: int) -> int | None:
        """How long until `next_group` may give one without anything else happening; None: not by itself."""
        if not self._facts or self._held or len(self._sent) >= self._in_flight_max:
            return None
        return max(0, self._oldest_ns + self._linger_ns - now_ns)

    def confirm(self, last: int) -> Group | None:
        """The journal holds everything up to `last`; returns the group that this confirmed."""
        if not self._sent or self._sent[0].last != last:
            return None
        group = self._sent.popleft()
        self.durable = group.last
        self.bytes -= len(group.data)
        return group

    def send_again(self) -> None:
        """All that was sent and not confirmed is to be sent again, in order."""
        self._cut.extendleft(reversed(self._sent))
        self._sent.clear()

    def hold(self) -> bool:
        """No group is cut until `raise_epoch`; True once none is under way either."""
        self._held = True
        return not (self._cut or self._sent)

    def raise_epoch(self, epoch: int) -> None:
        """Groups cut from now on carry a new epoch; none may be under way."""
        self._held = False
        if self._cut or self._sent:
            raise InternalError("an epoch was raised with groups under way; please report this")
        self.epoch = epoch

    @property
    def lingers(self) -> bool:
        """Facts are here that are in no group yet."""
        return bool(self._facts)

    @property
    def idle(self) -> bool:
        """Nothing waits for an answer or to be sent."""
        return not (self._facts or self._cut or self._sent)

    @property
    def in_flight(self) -> int:
        """Groups sent and not confirmed."""
        return len(self._sent)

    def flush(self) -> None:
        """Cuts what is there, so that it leaves with the next calls."""
        if self._facts and not self._held:
            self._close_group()

    def _close_group(self) -> None:
        first = self.taken - len(self._facts) + 1
        data = encode_group(self.epoch, first, self._now_ms, self._facts)
        self._cut.append(Group(self.epoch, first, self.taken, data))
        self.bytes += len(data) - self._facts_bytes
        self._facts = []
        self._facts_bytes = 0
        self._urgent = False
