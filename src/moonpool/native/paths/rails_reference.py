"""The plain twin of moonpool.native.paths.rails: the same decisions, for tests to compare with.

Theory of operation: see rails.pyx. Here numbers cannot overflow, and nothing saves time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

RAIL_WAIT: Final = -1
RAIL_NONE: Final = -2
UP, PAUSED, PROBING, DEMOTED = range(4)

_CUT: Final = 4096
_LEAST_SLICE: Final = 16384
_MEMORY_SLICES: Final = 32
_SLOW_SHARE: Final = 16
_PARTS: Final = 6
_LATENCY_SHARE: Final = 8
_ONE: Final = 256
_PENALTY_MAX: Final = 4096
_STALL_FACTOR: Final = 4
_RATE_MIN: Final = 32
_RATE_MAX: Final = 1 << 26
_BYTES_MAX: Final = 1 << 44
_LATENCY_MAX: Final = 1_000_000_000
_QUANTUM: Final = 2000
_QUANTUM_RAIL: Final = 500
_FORGET: Final = 1_000_000_000
_LATE_MAX: Final = 1 << 34


def _took(n_bytes: int, rate: int) -> int:
    return (min(n_bytes, _BYTES_MAX) << 16) // rate


@dataclass(slots=True)
class PlainRail:
    """One rail, by the names of `mp_rail`."""

    link_rate: int
    rate: int
    latency_ns: int
    penalty: int
    slots: int
    queued_bytes: int = 0
    mark_ns: int = 0
    until_ns: int = 0
    pause_ns: int = 0
    healthy_ns: int = 0
    seen_bytes: int = 0
    seen_ns: int = 0
    batch_bytes: int = 0
    batch_ns: int = 0
    inflight: int = 0
    state: int = UP
    fresh: int = 0
    unlearned: int = 0
    cut_off: int = 0
    slices: int = 0
    bytes: int = 0
    failures: int = 0
    pauses: int = 0
    probes: int = 0
    demotions: int = 0

    def forgiven(self, now: int) -> int:
        """The believed rate, without the penalty."""
        if self.inflight or now <= self.mark_ns or self.rate >= self.link_rate or self.mark_ns == 0:
            return self.rate
        idle = min(now - self.mark_ns, _FORGET * 64) >> 10
        return self.rate + (self.link_rate - self.rate) * idle // (idle + (_FORGET >> 10))

    def rate_now(self, now: int) -> int:
        """The believed rate with the penalty."""
        return max(self.forgiven(now) * _ONE // self.penalty, 1)

    def waiting(self, now: int) -> int:
        """How long what is queued still takes."""
        if self.inflight == 0:
            return 0
        whole = _took(self.queued_bytes, self.rate_now(now))
        served = max(now - self.mark_ns, 0) + (0 if self.fresh else self.latency_ns)
        if self.inflight > 1:
            served = min(served, whole // self.inflight * 3 // 2)
        return max(whole - served, 0)

    def offset(self, now: int, depth: int) -> int:
        """What a slice takes besides service and waiting."""
        latency = self.latency_ns * self.penalty // _ONE
        if self.inflight and now > self.mark_ns:
            expected = _took(self.queued_bytes // self.inflight, self.rate) + self.latency_ns + depth
            late = now - self.mark_ns - expected * _STALL_FACTOR
            latency += min(max(late, 0), _LATE_MAX)
        return latency


class PlainRails:
    """As `moonpool.native.paths.rails.Rails`."""

    def __init__(self, *, data_probes: bool = False, slice_min_bytes: int = _LEAST_SLICE) -> None:
        self.rails: list[PlainRail] = []
        self.data_probes = data_probes
        self.slice_min = slice_min_bytes
        self.slice_max = 1 << 20
        self.overhead = 4096
        self.depth = 10_000
        self.pause_min = 10_000_000
        self.pause_max = 30_000_000_000

    def add(self, bytes_per_s: int, latency_ns: int, *, penalty: float = 1.0, slots: int = 64) -> int:
        """A rail more."""
        rate = min(bytes_per_s, 1 << 46) * 1024 // 1_000_000 * 64 // 1000
        rate = min(max(rate, _RATE_MIN), _RATE_MAX)
        cost = min(max(int(penalty * _ONE), _ONE), _PENALTY_MAX)
        self.rails.append(PlainRail(rate, rate, min(latency_ns, _LATENCY_MAX), cost, slots or 1))
        return len(self.rails) - 1

    def state(self, rail: int) -> dict[str, Any]:
        """All that is known of a rail."""
        return asdict(self.rails[rail])

    # -- choosing --

    def _candidates(self, now: int, allowed: int) -> list[int]:
        among = [i for i in range(len(self.rails)) if allowed >> i & 1]
        found = [i for i in among if self._may_carry(self.rails[i], now)]
        if any(self.rails[i].state == UP for i in found):
            return found
        return sorted({*found, *(i for i in among if self.rails[i].state == DEMOTED)})

    def _may_carry(self, rail: PlainRail, now: int) -> bool:
        if rail.state == UP:
            return True
        due = rail.inflight == 0 and not rail.cut_off and now >= rail.until_ns
        return self.data_probes and rail.state != PROBING and due

    def _has_room(self, rail: PlainRail, n_bytes: int) -> bool:
        if rail.inflight == 0:
            return True
        if rail.inflight >= rail.slots or rail.state != UP:
            return False
        window = (rail.latency_ns + self.depth) * rail.rate >> 16
        return rail.inflight == 1 or rail.queued_bytes <= window + n_bytes + self.overhead

    def _expected(self, rail: PlainRail, n_bytes: int, now: int) -> int:
        service = _took(n_bytes + self.overhead, rail.rate_now(now))
        return service + rail.waiting(now) + rail.offset(now, self.depth)

    def _late(self, rail: PlainRail, now: int) -> int:
        return rail.offset(now, self.depth) + rail.waiting(now)

    def _level(self, mask: Iterable[int], n_bytes: int, now: int) -> int:
        full = list(mask)
        while True:
            filled = min(n_bytes, _BYTES_MAX)
            for i in full:
                rate = self.rails[i].rate_now(now)
                filled += min(self._late(self.rails[i], now), _took(_BYTES_MAX, rate)) * rate >> 16
            speed = sum(self.rails[i].rate_now(now) for i in full)
            level = (min(filled, _BYTES_MAX) << 16) // speed
            used = [i for i in full if self._late(self.rails[i], now) < level]
            if used in (full, []):
                return level
            full = used

    def _share(self, rail: PlainRail, level: int, now: int) -> int:
        span = level - self._late(rail, now)
        rate = rail.rate_now(now)
        return min(span, _took(_BYTES_MAX, rate)) * rate >> 16 if span > 0 else 0

    def _least(self, rail: PlainRail, now: int) -> int:
        quantum = max(_QUANTUM, _QUANTUM_RAIL * len(self.rails))
        size = max(min(quantum * rail.rate_now(now) >> 16, self.slice_max // 2), self.slice_min)
        return max(size // _CUT * _CUT, _CUT)

    def _fit(self, left: int, size: int, least: int) -> int:
        size = min(max(size // _CUT * _CUT, least), self.slice_max)
        if left <= size:
            return left
        if left - size >= least:
            return size
        return left if left <= self.slice_max else left // 2 // _CUT * _CUT

    def _quickest(self, among: list[int], n_bytes: int, now: int) -> tuple[int, int]:
        return min((self._expected(self.rails[i], n_bytes, now), i) for i in among)

    def choose(self, n_bytes: int, backlog: int, now_ns: int, allowed: int = 0xFFFFFFFF) -> int:
        """See `rails_choose`."""
        mask = self._candidates(now_ns, allowed)
        if not mask:
            return RAIL_NONE
        _end, best = self._quickest(mask, n_bytes, now_ns)
        if not self._has_room(self.rails[best], n_bytes):
            ready = [i for i in mask if self._has_room(self.rails[i], n_bytes)]
            if not ready:
                return RAIL_WAIT
            end, best = self._quickest(ready, n_bytes, now_ns)
            if end > self._level(mask, n_bytes + backlog, now_ns):
                return RAIL_WAIT
        self._book(self.rails[best], n_bytes, now_ns)
        return best

    def next(self, left: int, backlog: int, now_ns: int, allowed: int = 0xFFFFFFFF) -> tuple[int, int]:
        """See `rails_next`."""
        mask = self._candidates(now_ns, allowed) if left else []
        if not mask:
            return RAIL_NONE, 0
        level = self._level(mask, left + backlog, now_ns)
        full, offers = False, []
        for i in mask:
            rail = self.rails[i]
            least, share = self._least(rail, now_ns), self._share(rail, level, now_ns)
            if share < min(least, left) // 2:
                continue
            size = self._fit(left, self._part(rail, share, least), least)
            if self._has_room(rail, size):
                offers.append((self._expected(rail, least, now_ns), i, size))
            else:
                full = True
        if offers:
            _end, best, size = min(offers)
            if self._expected(self.rails[best], size, now_ns) > level:
                ready = [i for i in mask if self._has_room(self.rails[i], size)]
                _end, best = self._quickest(ready, size, now_ns)
            self._book(self.rails[best], size, now_ns)
            return best, size
        if full:
            return RAIL_WAIT, 0
        size = min(left, self.slice_max)
        best = self.choose(size, backlog, now_ns, allowed)
        return best, size if best >= 0 else 0

    def _part(self, rail: PlainRail, share: int, least: int) -> int:
        if rail.state != UP:
            return least
        return share // _PARTS if share >= 2 * least else share

    def _book(self, rail: PlainRail, n_bytes: int, now: int) -> None:
        if rail.inflight == 0:
            rail.rate = rail.forgiven(now)
            rail.seen_bytes = rail.seen_bytes + rail.batch_bytes if rail.state == UP else 0
            rail.seen_ns = _took(rail.seen_bytes, rail.rate)
            rail.batch_bytes = rail.batch_ns = rail.unlearned = 0
            rail.mark_ns, rail.fresh = now, 1
        if rail.state != UP and now >= rail.until_ns:
            rail.probes += 1
            if rail.state == PAUSED:
                rail.state = PROBING
            else:
                self._hold_off(rail, DEMOTED, now)
        rail.inflight += 1
        rail.queued_bytes += n_bytes + self.overhead

    def slice_bytes(self, n_bytes: int) -> int:
        """See `rails_slice_bytes`."""
        least = [self._least(rail, rail.mark_ns) for rail in self.rails if rail.state == UP]
        return self._fit(n_bytes, n_bytes // (4 * len(least)), max(least)) if least else n_bytes

    # -- learning --

    def done(self, rail: int, n_bytes: int, now_ns: int) -> None:
        """See `rails_done`."""
        this = self.rails[rail]
        self._learn(this, n_bytes + self.overhead, now_ns)
        self._drop(this, n_bytes)
        this.slices += 1
        this.bytes += n_bytes
        if this.state == PROBING:
            this.state, this.healthy_ns = UP, now_ns
        if this.state == UP and this.pause_ns and now_ns - this.healthy_ns >= this.pause_ns:
            this.pause_ns = this.pause_ns // 2 if this.pause_ns > self.pause_min else 0
            this.healthy_ns = now_ns
        best = max((each.rate for each in self.rails if each.state == UP), default=0)
        if this.state == UP and this.rate < best // _SLOW_SHARE:
            self._hold_off(this, DEMOTED, now_ns)
            this.demotions += 1
        elif this.state == DEMOTED and this.rate >= best // (_SLOW_SHARE // 2):
            this.state, this.healthy_ns = UP, now_ns

    def _learn(self, rail: PlainRail, weight: int, now: int) -> None:
        elapsed = max(now - rail.mark_ns, 0)
        if elapsed or rail.fresh:
            rail.seen_bytes += rail.batch_bytes
            rail.seen_ns += rail.batch_ns
            rail.batch_bytes = rail.batch_ns = rail.unlearned = 0
            memory = _MEMORY_SLICES * max(self.slice_min, _LEAST_SLICE)
            memory = max(memory, rail.rate * _QUANTUM * _MEMORY_SLICES >> 16)
            while rail.seen_bytes > memory:
                rail.seen_bytes //= 2
                rail.seen_ns //= 2
        if rail.fresh:
            served = _took(weight, rail.rate)
            if served < 2 * rail.latency_ns and elapsed < _STALL_FACTOR * (served + rail.latency_ns):
                rail.unlearned = 1
                seen = min(max(elapsed - served, 0), _LATENCY_MAX)
                rail.latency_ns -= rail.latency_ns // _LATENCY_SHARE
                rail.latency_ns += -(-seen // _LATENCY_SHARE)
            elapsed = max(elapsed - rail.latency_ns, elapsed // 2)
            rail.fresh = 0
        rail.mark_ns = max(now, rail.mark_ns)
        if rail.unlearned:
            return
        rail.batch_bytes += weight
        rail.batch_ns += elapsed
        if rail.seen_ns + rail.batch_ns:
            rail.rate = (rail.seen_bytes + rail.batch_bytes << 16) // (rail.seen_ns + rail.batch_ns)
        rail.rate = min(max(rail.rate, _RATE_MIN), _RATE_MAX, 2 * rail.link_rate)

    def _drop(self, rail: PlainRail, n_bytes: int) -> None:
        rail.queued_bytes = max(rail.queued_bytes - n_bytes - self.overhead, 0)
        rail.inflight = max(rail.inflight - 1, 0)
        if rail.inflight == 0:
            rail.queued_bytes = 0

    # -- healing --

    def _hold_off(self, rail: PlainRail, state: int, now: int) -> None:
        rail.pause_ns = min(max(rail.pause_ns * 2, self.pause_min), self.pause_max)
        rail.until_ns = now + rail.pause_ns
        rail.state = state

    def _pause(self, rail: PlainRail, now: int) -> None:
        if rail.state != PAUSED:
            self._hold_off(rail, PAUSED, now)
            rail.pauses += 1

    def failed(self, rail: int, n_bytes: int, now_ns: int) -> None:
        """See `rails_failed`."""
        self._drop(self.rails[rail], n_bytes)
        self.rails[rail].failures += 1
        self._pause(self.rails[rail], now_ns)

    def unbook(self, rail: int, n_bytes: int) -> None:
        """See `rails_unbook`."""
        this = self.rails[rail]
        self._drop(this, n_bytes)
        if this.state == PROBING and this.inflight == 0:
            this.state = PAUSED

    def idle_probe(self, now_ns: int) -> int:
        """See `rails_idle_probe`."""
        for i, rail in enumerate(self.rails):
            if rail.state == UP or now_ns < rail.until_ns or rail.cut_off or rail.inflight:
                continue
            if rail.state == PAUSED:
                rail.state = PROBING
            rail.until_ns = now_ns + self.pause_max
            rail.probes += 1
            return i
        return -1

    def probed(self, rail: int, ok: bool, now_ns: int) -> None:
        """See `rails_probed`."""
        this = self.rails[rail]
        if not ok:
            this.failures += 1
            self._pause(this, now_ns)
        elif this.state in (PROBING, DEMOTED):
            if this.state == DEMOTED:
                this.rate = max(this.rate, this.link_rate // (_SLOW_SHARE // 2))
                this.seen_bytes = this.seen_ns = this.batch_bytes = this.batch_ns = 0
            this.state, this.healthy_ns = UP, now_ns

    def link(self, rail: int, up: bool, now_ns: int) -> None:
        """See `rails_link`."""
        this = self.rails[rail]
        if up and this.cut_off:
            this.cut_off, this.until_ns = 0, now_ns
        elif not up and not this.cut_off:
            self._pause(this, now_ns)
            this.cut_off = 1

    @property
    def usable(self) -> int:
        """See `rails_usable`."""
        return sum(1 << i for i in self._candidates(0, 0xFFFFFFFF))
