"""Replies that wait: for facts to be durable, for nodes to acknowledge effects, or for a time.

`Needs` say what must have come; several replies may share one. A key whose object is just ending keeps its
needs (`ending`), so that who removes it again hears no sooner than who removed it first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from moonpool.store.outputs import Reply


@final
@dataclass(slots=True)
class Needs:
    """`acks`: for each join (by its number), the effect it must acknowledge, unless `until_ms` has come."""

    sequence: int = 0
    acks: dict[int, int] = field(default_factory=dict)
    #: From here on the acknowledgements do not matter; 0 when there are none to wait for.
    until_ms: int = 0
    #: A time before which nothing may be said, whatever came.
    not_before_ms: int = 0

    def join(self, other: Needs) -> None:
        """These needs and those of another together."""
        self.sequence = max(self.sequence, other.sequence)
        self.until_ms = max(self.until_ms, other.until_ms)
        self.not_before_ms = max(self.not_before_ms, other.not_before_ms)
        for join, number in other.acks.items():
            self.acks[join] = max(number, self.acks.get(join, 0))


@final
@dataclass(slots=True, eq=False)
class _Held:
    number: int
    #: None: there is nobody to answer (any more), the needs are kept for the keys.
    reply: Reply | None
    needs: Needs
    give_up_ms: int
    keys: tuple[tuple[int, bytes], ...]


@final
class Holds:
    """Held replies; each call costs O(replies that change)."""

    __slots__ = ("_alive", "_by_fact", "_by_join", "_by_time", "_number", "_unanswered", "ending")

    def __init__(self) -> None:
        #: Not durable yet, in the order of their sequences, which only grow.
        self._by_fact: deque[_Held] = deque()
        #: Of those, the ones whose time to give up is still to come, in its order.
        self._unanswered: deque[_Held] = deque()
        #: Durable, waiting for acknowledgements or a time.
        self._alive: dict[int, _Held] = {}
        #: Of each join: (effect number, number in `_alive`).
        self._by_join: dict[int, list[tuple[int, int]]] = {}
        #: (time, number in `_alive`).
        self._by_time: list[tuple[int, int]] = []
        self._number = 0
        #: Needs of the last removal of a key that has not been answered yet.
        self.ending: dict[tuple[int, bytes], Needs] = {}

    def __len__(self) -> int:
        return len(self._by_fact) + len(self._alive)

    def add(
        self,
        reply: Reply | None,
        needs: Needs,
        give_up_ms: int,
        keys: tuple[tuple[int, bytes], ...] = (),
    ) -> None:
        """Keeps a reply (None: only the keys) until its needs have come; `keys` are `ending` until then.

        Neither `needs.sequence` nor `give_up_ms` may be lower than in the call before.
        """
        self._number += 1
        held = _Held(self._number, reply, needs, give_up_ms, keys)
        self._by_fact.append(held)
        if reply is not None:
            self._unanswered.append(held)
        for key in keys:
            self.ending[key] = needs

    def due(self, durable: int, acked: Mapping[int, int], now_ms: int) -> list[Reply]:
        """Takes out the replies whose needs have come. `acked`: the highest number of each live join."""
        ready: list[Reply] = []
        while self._by_fact and self._by_fact[0].needs.sequence <= durable:
            held = self._by_fact.popleft()
            self._alive[held.number] = held
            self._look(held, acked, now_ms, ready)
        for join in list(self._by_join):
            heap, number = self._by_join[join], acked.get(join, 0)
            while heap and heap[0][0] <= number:
                self._look(self._alive.get(heapq.heappop(heap)[1]), acked, now_ms, ready)
            if not heap:
                del self._by_join[join]
        while self._by_time and self._by_time[0][0] <= now_ms:
            self._look(self._alive.get(heapq.heappop(self._by_time)[1]), acked, now_ms, ready)
        return ready

    def given_up(self, now_ms: int) -> list[Reply]:
        """Takes out the replies that waited for the journal too long; their keys' needs stay."""
        late: list[Reply] = []
        queue = self._unanswered
        while queue and (queue[0].reply is None or queue[0].number in self._alive):
            queue.popleft()
        while queue and queue[0].give_up_ms <= now_ms:
            held = queue.popleft()
            if held.reply is not None and held.number not in self._alive:
                late.append(held.reply)
                held.reply = None
        return late

    def drop_join(self, join: int) -> None:
        """A join is over: what waits for it now waits for its time."""
        self._by_join.pop(join, None)

    def take_all(self) -> list[Reply]:
        """Takes out everything, oldest first."""
        held = [*self._alive.values(), *self._by_fact]
        self._by_fact.clear()
        self._unanswered.clear()
        self._alive.clear()
        self._by_join.clear()
        self._by_time.clear()
        self.ending.clear()
        ordered = sorted(held, key=lambda each: each.number)
        return [each.reply for each in ordered if each.reply is not None]

    def _look(self, held: _Held | None, acked: Mapping[int, int], now_ms: int, ready: list[Reply]) -> None:
        if held is None:
            return
        needs = held.needs
        wait_ms = needs.not_before_ms
        if now_ms < needs.until_ms:
            missing = {join: n for join, n in needs.acks.items() if acked.get(join, 0) < n}
            if missing:
                wait_ms = max(wait_ms, needs.until_ms)
            for join, number in missing.items():
                heapq.heappush(self._by_join.setdefault(join, []), (number, held.number))
        if now_ms < wait_ms:
            heapq.heappush(self._by_time, (wait_ms, held.number))
            return
        del self._alive[held.number]
        if held.reply is not None:
            ready.append(held.reply)
            held.reply = None
        for key in held.keys:
            if self.ending.get(key) is held.needs:
                del self.ending[key]
