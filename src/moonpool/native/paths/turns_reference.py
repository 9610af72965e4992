"""The plain twin of moonpool.native.paths.turns: the same order, for tests to compare with.

Theory of operation: see turns.pyx.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

LOW, NORMAL, HIGH, DIRECT = range(4)

_NS_PER_S: Final = 1_000_000_000
_NO_DEADLINE_NS: Final = 60_000_000_000


@dataclass(slots=True)
class _Turn:
    name: int
    of: int
    n_bytes: int
    since: int
    until: int
    group: int
    key: int
    held: bool = False


@dataclass(slots=True)
class _Class:
    rate: int = 0
    tokens: int = 0
    paid: int = 0
    turns: list[_Turn] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("submitted", "started", "started_bytes", "gone", "waited_ns", "waited_max_ns", "held", "late"), 0
        )
    )

    def fill(self, now: int) -> None:
        """Add what the rate brought."""
        bucket = self.rate // 10 + 1
        if not self.rate or now <= self.paid:
            return
        if not self.paid:
            self.paid, self.tokens = now, bucket
            return
        seconds = (now - self.paid) // _NS_PER_S
        self.tokens += seconds * self.rate
        self.paid += seconds * _NS_PER_S
        brought = (now - self.paid) // 1000 * self.rate // 1_000_000
        if brought:
            self.tokens += brought
            self.paid = now
        self.tokens = min(self.tokens, bucket)

    @property
    def open(self) -> bool:
        """True when one more may start."""
        return not self.rate or self.tokens > 0

    @property
    def opens(self) -> int:
        """When it will be open."""
        seconds, rest = divmod(1 - self.tokens, self.rate)
        return self.paid + seconds * _NS_PER_S + (rest + 1) * 1_000_000 // self.rate * 1000 + 2000


class PlainTurns:
    """As `moonpool.native.paths.turns.Turns`."""

    def __init__(
        self, head_start_ns: int, *, by_deadline: bool = False, caps: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.head_start = head_start_ns
        self.by_deadline = by_deadline
        self.classes = [_Class() for _ in range(4)]
        for of, rate in caps:
            self.classes[of].rate = rate

    def add(
        self, name: int, of: int, n_bytes: int, now_ns: int, *, until_ns: int = 0, group: int = 0
    ) -> None:
        """Queue a number of a class."""
        level = NORMAL if of == DIRECT else of
        due = (until_ns or now_ns + _NO_DEADLINE_NS) if self.by_deadline else now_ns
        key = due + (HIGH - level) * self.head_start
        one = self.classes[of]
        one.turns.append(_Turn(name, of, n_bytes, now_ns, until_ns, group, key))
        one.turns.sort(key=lambda turn: turn.key)  # stable: of equal keys the first to come stays first
        one.counts["submitted"] += 1

    def next(self, now_ns: int, blocked: int = 0) -> tuple[int | None, int]:
        """Whose turn it is, or None; and when to ask again, or 0."""
        found: list[_Turn] = []
        wakes: list[int] = []
        for one in self.classes:
            one.fill(now_ns)
            if one.turns and not one.open:
                wakes.append(one.opens)
            for turn in one.turns:
                if one.open or self._late(turn, now_ns):
                    if not blocked >> turn.group & 1:
                        found.append(turn)
                        break
                    continue
                one.counts["held"] += not turn.held
                turn.held = True
                if turn.until:
                    wakes.append(turn.until)
        if not found:
            return None, min(wakes, default=0)
        best = min(found, key=lambda turn: (turn.key, -turn.of))
        one = self.classes[best.of]
        one.turns.remove(best)
        if self._late(best, now_ns):
            one.counts["late"] += 1
        elif one.rate:
            one.tokens -= best.n_bytes
        waited = max(now_ns - best.since, 0)
        one.counts["started"] += 1
        one.counts["started_bytes"] += best.n_bytes
        one.counts["waited_ns"] += waited
        one.counts["waited_max_ns"] = max(one.counts["waited_max_ns"], waited)
        return best.name, 0

    @staticmethod
    def _late(turn: _Turn, now_ns: int) -> bool:
        return turn.until != 0 and now_ns >= turn.until

    def ready(self, now_ns: int, blocked: int = 0, most: int = 1024) -> int:
        """How many could have their turn now, each looked at alone; one where a cap holds all up."""
        for one in self.classes:
            one.fill(now_ns)
        free = [turn for one in self.classes for turn in one.turns[: None if one.open else 1]]
        return min(sum(not blocked >> turn.group & 1 for turn in free), most)

    def __len__(self) -> int:
        return sum(len(one.turns) for one in self.classes)

    def counts(self, of: int) -> dict[str, int]:
        """The counters of a class."""
        return self.classes[of].counts
