"""The order of one event stream: what to apply now, what to wait for, what is lost. Pure, no clock.

Theory of operation. Messages are numbered from 0 by their publisher; subscribers that are slow lose some
without being told. States and what moves between them:

| state | message `expected` | later message | earlier message |
|---|---|---|---|
| in order | apply | hold it; ask for a replay -> waiting | newer stamp: restart; else drop |
| waiting | apply, then what is held behind it; none held any more -> in order | hold it | as above |

A replay that ends before the gap is closed, or more held messages than `held_max`, makes the gap a loss: the
stream goes on behind it, and the owner is told, so that what it believed of the publisher can be forgotten.
Removals may be among what was lost, and a block believed for ever is worse than one forgotten.

A publisher that restarts counts from 0 again with newer stamps. A late or doubled message has an old stamp.
A publisher may also restart and come past `expected` before anything of it is heard: so a replay is asked
from the last message that was applied, and one with another stamp in its place is of another run. Only a
restart whose first message heard is just the expected one cannot be told from the stream going on.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Generic, TypeAlias, TypeVar, final

from moonpool.errors import UsageError
from moonpool.units import U64_MAX

_Message = TypeVar("_Message")


@final
@dataclass(frozen=True, slots=True)
class Apply(Generic[_Message]):
    """Take this message in now."""

    message: _Message


@final
@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for everything from this number on; call `replay_ended` when no more comes."""

    start: int


@final
@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher began anew: nothing that it said before is true any more."""


@final
@dataclass(frozen=True, slots=True)
class Lost:
    """Messages from `first` to before `end` will not come."""

    first: int
    end: int


Step: TypeAlias = "Apply[_Message] | AskReplay | Restarted | Lost"


@final
class StreamOrder(Generic[_Message]):
    """Puts one stream's messages in order. Each call returns the steps to take, in order.

    `can_replay` False: a gap is a loss at once. At most `held_max` messages wait behind a gap.
    """

    def __init__(self, *, can_replay: bool, held_max: int = 4_096) -> None:
        if not 1 <= held_max <= 1 << 20:
            raise UsageError("held_max is from 1 to 2**20", field="held_max", value=str(held_max))
        self._can_replay: Final = can_replay
        self._held_max: Final = held_max
        self._expected = 0
        self._last_stamp_s = float("-inf")
        #: Of the message before the expected one.
        self._applied_stamp_s = float("-inf")
        self._held: dict[int, tuple[float, _Message]] = {}
        self._order: list[int] = []
        self._is_waiting = False
        self.duplicates = 0

    @property
    def expected(self) -> int:
        """The number of the next message to apply."""
        return self._expected

    @property
    def is_waiting(self) -> bool:
        """True while a replay is to close a gap: what the publisher said last is not known yet."""
        return self._is_waiting

    def live(self, number: int, stamp_s: float, message: _Message) -> list[Step[_Message]]:
        """A message of the stream itself."""
        self._check(number)
        if number < self._expected:
            if stamp_s > self._last_stamp_s:
                return self._restart(number, stamp_s, message)
            self.duplicates += 1
            return []
        return self._take(number, stamp_s, message)

    def replayed(self, number: int, stamp_s: float, message: _Message) -> list[Step[_Message]]:
        """A message of a replay; what was applied already is passed over."""
        self._check(number)
        if number == self._expected - 1 and stamp_s != self._applied_stamp_s:
            return self._restart(number, stamp_s, message)
        if number < self._expected:
            self.duplicates += 1
            return []
        return self._take(number, stamp_s, message)

    def replay_ended(self) -> list[Step[_Message]]:
        """No more of the replay comes; a gap that is still open is lost."""
        if not self._is_waiting:
            return []
        return self._give_up()

    def check(self) -> None:
        """Asserts the invariants."""
        assert self._is_waiting == bool(self._held), (self._is_waiting, len(self._held))
        assert sorted(self._order) == sorted(self._held)
        assert all(number > self._expected for number in self._held), self._expected
        assert len(self._held) <= self._held_max

    @staticmethod
    def _check(number: int) -> None:
        if not 0 <= number <= U64_MAX:
            raise UsageError("a message's number has 64 bits", field="number", value=str(number))

    def _take(self, number: int, stamp_s: float, message: _Message) -> list[Step[_Message]]:
        if number == self._expected:
            steps: list[Step[_Message]] = []
            self._apply(stamp_s, message, steps)
            self._release(steps)
            return steps
        if number in self._held:
            self.duplicates += 1
            return []
        self._held[number] = (stamp_s, message)
        heappush(self._order, number)
        if not self._can_replay or len(self._held) >= self._held_max:
            return self._give_up()
        if self._is_waiting:
            return []
        self._is_waiting = True
        return [AskReplay(max(0, self._expected - 1))]

    def _restart(self, number: int, stamp_s: float, message: _Message) -> list[Step[_Message]]:
        self._held.clear()
        self._order.clear()
        self._is_waiting = False
        self._expected = 0
        return [Restarted(), *self._take(number, stamp_s, message)]

    def _give_up(self) -> list[Step[_Message]]:
        steps: list[Step[_Message]] = []
        # Behind a second gap nothing is known either, and the replay has ended: that is given up as well.
        while self._order:
            first = self._order[0]
            steps.append(Lost(self._expected, first))
            self._expected = first
            self._release(steps)
        return steps

    def _release(self, steps: list[Step[_Message]]) -> None:
        while self._order and self._order[0] == self._expected:
            stamp_s, message = self._held.pop(heappop(self._order))
            self._apply(stamp_s, message, steps)
        self._is_waiting = bool(self._held)

    def _apply(self, stamp_s: float, message: _Message, steps: list[Step[_Message]]) -> None:
        self._expected += 1
        self._applied_stamp_s = stamp_s
        self._last_stamp_s = max(self._last_stamp_s, stamp_s)
        steps.append(Apply(message))
