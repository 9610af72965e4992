"""When bytes sent now between two instances will have arrived: a clock for each end of each link.

Both ends' NICs serve what was booked before, in order; so a busy sender delays its receivers, which is the
congestion that the papers name as the hard part and give no formula for.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.errors import UsageError
from moonpool.kernels.placement import LINK_ROWS, RATE, RECEIVER_FREE, SENDER_FREE

F64 = NDArray[np.float64]
_RATE_GAIN: Final = 0.2
_RATE_SPAN: Final = 100.0


@final
class LinkClocks:
    """Booked work of n NICs in both directions; rates in bytes a second, times in seconds."""

    def __init__(self, bytes_per_s: F64, latency_s: float) -> None:
        if (np.asarray(bytes_per_s) <= 0).any() or latency_s < 0:
            raise UsageError("links need a rate above 0 bytes a second and a latency of 0 s or more")
        self._nominal: Final[F64] = np.array(bytes_per_s, dtype=np.float64)
        #: float64[LINK_ROWS, n]: what the placement kernel reads; the arrays below are its rows.
        self.rows: Final[F64] = np.zeros((LINK_ROWS, len(self._nominal)))
        self.sender_free: Final[F64] = self.rows[SENDER_FREE]
        self.receiver_free: Final[F64] = self.rows[RECEIVER_FREE]
        self._rate: Final[F64] = self.rows[RATE]
        self._rate[:] = self._nominal
        self._slowest = float(self._rate.min())
        self.latency_s: Final = latency_s

    def arrival_seconds(self, source: int, targets: NDArray[np.intp], size_bytes: F64, now: float) -> F64:
        """How long until `size_bytes` (one for each target) sent from `source` now would have arrived."""
        begin = np.maximum(self.receiver_free[targets], max(now, float(self.sender_free[source])))
        rate = np.minimum(self._rate[targets], self._rate[source])
        seconds: F64 = begin - now + size_bytes / rate + self.latency_s
        return seconds

    def arrival_at(self, source: int, target: int, size_bytes: float, now: float) -> float:
        """As `arrival_seconds`, for one target."""
        begin = max(now, float(self.sender_free[source]), float(self.receiver_free[target]))
        rate = min(float(self._rate[target]), float(self._rate[source]))
        return begin - now + size_bytes / rate + self.latency_s

    def latest_arrival(self, source: int, size_bytes: float, now: float) -> float:
        """An upper bound of `arrival_seconds` over all targets; much cheaper."""
        begin = max(now, float(self.sender_free[source]), float(self.receiver_free.max()))
        return begin - now + size_bytes / self._slowest + self.latency_s

    def book(self, source: int, target: int, size_bytes: float, start: float) -> float:
        """Sends bytes from `start` on; the time of their arrival."""
        begin = max(start, float(self.sender_free[source]), float(self.receiver_free[target]))
        end = begin + size_bytes / min(float(self._rate[source]), float(self._rate[target]))
        self.sender_free[source] = self.receiver_free[target] = end
        return end + self.latency_s

    def observe(self, source: int, target: int, size_bytes: float, seconds: float) -> None:
        """Corrects the rates of both ends by a transfer that was seen; waiting must not be in `seconds`.

        A measured rate counts within a factor of 100 of the nominal one: one wrong report changes little.
        """
        if size_bytes <= 0 or seconds <= 0:
            return
        for end in (source, target):
            nominal = float(self._nominal[end])
            seen = min(max(size_bytes / seconds, nominal / _RATE_SPAN), nominal)
            self._rate[end] += _RATE_GAIN * (seen - self._rate[end])
        self._slowest = float(self._rate.min())
