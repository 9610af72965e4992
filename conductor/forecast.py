"""How many requests each decode instance will hold in the near future.

Every booked request adds the chance that it is being decoded to each future bin: it joins when its prefill
is expected to end, and stays with the probability that a decode lasts that long. That probability is
learned from finished requests (`DurationSurvival`), or is a step at a uniform time, as the paper assumes
(arXiv 2407.00079, section 7.4). What is known now corrects the sum: the difference between the true and the
expected batch fades with the mean duration. Requests that have not come yet are expected at the rate of the
last ones.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from moonpool.errors import UsageError

F64 = NDArray[np.float64]
_FINISHES_PER_REFRESH: Final = 32
_FORGETTING: Final = 0.995
_PRIOR_WEIGHT: Final = 10.0
#: The rate of bookings fades by e in this time.
_INFLOW_MEMORY_S: Final = 30.0
BINS_MAX: Final = 65_536


@final
class DurationSurvival:
    """The chance that a decode lasts longer than k bins, from those that finished; the latest count most.

    Starts as an exponential law of mean `prior_s`. With `uniform`, it is a step at `prior_s` and never
    learns.
    """

    def __init__(self, bins: int, bin_s: float, prior_s: float, *, uniform: bool = False) -> None:
        self._bin_s: Final = bin_s
        self._uniform: Final = uniform
        edges = np.arange(bins + 1) * bin_s
        alive = (edges < prior_s).astype(np.float64) if uniform else np.exp(-edges / prior_s)
        self._ended: F64 = (alive[:-1] - alive[1:]) * _PRIOR_WEIGHT
        self._later = float(alive[-1]) * _PRIOR_WEIGHT
        self._sum_s = prior_s * _PRIOR_WEIGHT
        self._weight = _PRIOR_WEIGHT
        self._fresh = 0
        self.curve: F64 = alive[:-1].copy()
        #: Seconds that a decode is expected to last within its first k bins.
        self.expected_s: F64 = np.cumsum(self.curve) * bin_s
        self.mean_s = prior_s

    def observe(self, seconds: float) -> None:
        """Learns that a decode took that long."""
        if self._uniform:
            return
        self._ended *= _FORGETTING
        self._later *= _FORGETTING
        at = int(seconds / self._bin_s)
        if at < len(self._ended):
            self._ended[at] += 1.0
        else:
            self._later += 1.0
        self._sum_s = self._sum_s * _FORGETTING + seconds
        self._weight = self._weight * _FORGETTING + 1.0
        self._fresh += 1
        if self._fresh >= _FINISHES_PER_REFRESH:
            self._fresh = 0
            total = float(self._ended.sum()) + self._later
            # Bookings keep a reference to the curve they used, so a new one is made.
            self.curve = 1.0 - np.concatenate(([0.0], np.cumsum(self._ended)[:-1])) / total
            self.expected_s = np.cumsum(self.curve) * self._bin_s
            self.mean_s = self._sum_s / self._weight


class Booking(NamedTuple):
    """A request's expected presence: chances `curve` from the bin `start` on (bins count from time 0)."""

    at: int
    start: int
    curve: F64
    tokens: float


@final
class DecodeForecast:
    """Expected requests and tokens of n decode instances in bins of `bin_s` up to `horizon_s` ahead."""

    def __init__(self, instances: int, *, horizon_s: float, bin_s: float, survival: DurationSurvival) -> None:
        bins = math.ceil(horizon_s / bin_s)
        if not 2 <= bins <= BINS_MAX:
            raise UsageError(f"a forecast has 2 to {BINS_MAX} bins, not {bins}; change bin or horizon")
        self._bins: Final = bins
        self._bin_s: Final = bin_s
        self.survival: Final = survival
        # Twice the horizon: the window slides along, and the arrays are shifted once per horizon.
        self._requests: Final[F64] = np.zeros((instances, 2 * bins))
        self._context: Final[F64] = np.zeros((instances, 2 * bins))
        self._first_bin = 0
        self._spread: Final = np.zeros(instances)
        self._bookings = self._delay_s = self._tokens = 0.0
        self._began: float | None = None
        self._last = 0.0

    def book(self, at: int, join: float, tokens: float, now: float) -> Booking:
        """Adds a request of `tokens` that joins instance `at` at the time `join`; what `release` needs."""
        self._slide(now)
        curve = self.survival.curve
        start = int(join / self._bin_s)
        # A booking may reach past the window's end; it is cut there.
        length = min(len(curve), max(0, self._first_bin + 2 * self._bins - start))
        booking = Booking(at, start, curve[:length], tokens)
        self._add(booking, start, 1.0)
        self._note_inflow(at, join - now, tokens, now)
        return booking

    def release(self, booking: Booking, now: float) -> None:
        """Takes what is left of a booking out of the future."""
        self._slide(now)
        self._add(booking, int(now / self._bin_s) + 1, -1.0)

    def expected(self, when: float, now: float, batch: F64, context: F64) -> tuple[F64, F64]:
        """float64[n] twice: requests and context tokens at `when`, given the present ones."""
        self._slide(now)
        here = int(now / self._bin_s) - self._first_bin
        there = min(int(when / self._bin_s) - self._first_bin, here + self._bins - 1)
        fade = math.exp((now - when) / self.survival.mean_s)
        requests = self._requests[:, there] + (batch - self._requests[:, here]) * fade
        tokens = self._context[:, there] + (context - self._context[:, here]) * fade
        more, mean_tokens = self._inflow(when - now, now)
        requests, tokens = requests + more, tokens + more * mean_tokens
        return np.maximum(requests, 0.0), np.maximum(tokens, 0.0)

    def expected_at(
        self, at: int, when: float, now: float, present: tuple[float, float]
    ) -> tuple[float, float]:
        """As `expected`, for one instance; `present` is its batch and context."""
        self._slide(now)
        here = int(now / self._bin_s) - self._first_bin
        there = min(int(when / self._bin_s) - self._first_bin, here + self._bins - 1)
        fade = math.exp((now - when) / self.survival.mean_s)
        booked, context = self._requests[at], self._context[at]
        requests = booked.item(there) + (present[0] - booked.item(here)) * fade
        tokens = context.item(there) + (present[1] - context.item(here)) * fade
        share, mean_tokens = self._inflow_share(when - now, now)
        more = self._spread.item(at) * share
        return max(requests + more, 0.0), max(tokens + more * mean_tokens, 0.0)

    def _note_inflow(self, at: int, delay_s: float, tokens: float, now: float) -> None:
        if self._began is None:
            self._began = self._last = now
        fade = math.exp((self._last - now) / _INFLOW_MEMORY_S)
        self._last = now
        self._bookings = self._bookings * fade + 1.0
        self._delay_s = self._delay_s * fade + delay_s
        self._tokens = self._tokens * fade + tokens
        self._spread[:] *= fade
        self._spread[at] += 1.0

    def _inflow(self, ahead_s: float, now: float) -> tuple[F64, float]:
        """Requests on each instance `ahead_s` from now that have not come yet, and their mean context."""
        share, mean_tokens = self._inflow_share(ahead_s, now)
        return self._spread * share, mean_tokens

    def _inflow_share(self, ahead_s: float, now: float) -> tuple[float, float]:
        """By what the recent bookings of an instance are multiplied to give those to come; mean context.

        A request whose own prefill is long meets those that come after it and overtake it.
        """
        if self._began is None:
            return 0.0, 0.0
        window_s = _INFLOW_MEMORY_S * max(1.0 - math.exp((self._began - now) / _INFLOW_MEMORY_S), 0.05)
        fade = math.exp((self._last - now) / _INFLOW_MEMORY_S)
        bins = int((ahead_s - self._delay_s / self._bookings) / self._bin_s)
        if bins <= 0:
            return 0.0, 0.0
        present_s = self.survival.expected_s.item(min(bins, self._bins) - 1)
        return fade * present_s / window_s, self._tokens / self._bookings

    def _add(self, booking: Booking, since: int, sign: float) -> None:
        skip = max(0, since - booking.start, self._first_bin - booking.start)
        if skip >= len(booking.curve):
            return
        low = booking.start + skip - self._first_bin
        part = sign * booking.curve[skip:]
        self._requests[booking.at, low : low + len(part)] += part
        self._context[booking.at, low : low + len(part)] += part * booking.tokens

    def _slide(self, now: float) -> None:
        passed = int(now / self._bin_s) - self._first_bin
        if passed < self._bins:
            return
        for array in (self._requests, self._context):
            kept = max(0, 2 * self._bins - passed)
            array[:, :kept] = array[:, passed : passed + kept].copy()
            array[:, kept:] = 0.0
        self._first_bin += passed
