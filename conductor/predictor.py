"""Prefill times learned from what instances report: recursive least squares with quantiles.

Each instance has its own weights over (1, uncached tokens, n^2 - p^2), starting at its specification, so a
fleet may be mixed and a slow machine is found out. Quantiles come from the ratios of seen to predicted
times of the last requests (split conformal prediction), so they hold whatever the errors' distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.instance import InstanceSpec
from moonpool.errors import UsageError
from moonpool.kernels.placement import SPEED_ROWS

F64 = NDArray[np.float64]
#: Tokens and squares are scaled so that the three features are of one size.
_TOKENS_UNIT: Final = 1.0e4
_SQUARES_UNIT: Final = 1.0e8
_FORGETTING: Final = 0.999
_PRIOR_VARIANCE: Final = 1.0e-2
#: Standard deviation of a single prefill time, relative to its prediction.
_NOISE: Final = 0.05
_VARIANCE_MAX: Final = 1.0e2
_RATIOS_KEPT: Final = 512
_RATIOS_NEEDED: Final = 20
_RATIO_MAX: Final = 10.0
_SECONDS_MIN: Final = 1.0e-6


@final
class PrefillPredictor:
    """Prefill seconds on n instances. `observe` learns; `seconds` costs a few array operations for all n."""

    def __init__(self, instances: Sequence[InstanceSpec], *, learn: bool) -> None:
        self._learn: Final = learn
        self._weights: Final = [
            [0.0, each.prefill.linear_s * _TOKENS_UNIT, each.prefill.quadratic_s * _SQUARES_UNIT]
            for each in instances
        ]
        #: float64[SPEED_ROWS, n]: what the placement kernel reads; the arrays below are its rows.
        self.rows: Final[F64] = np.zeros((SPEED_ROWS, len(instances)))
        self._constant, self._linear, self._quadratic = self.rows
        self._linear[:] = [each.prefill.linear_s for each in instances]
        self._quadratic[:] = [each.prefill.quadratic_s for each in instances]
        #: The covariance of the weights: (00, 01, 02, 11, 12, 22) of a symmetric matrix for each instance.
        self._covariance: Final = [self._prior(weights) for weights in self._weights]
        self._trace_max: Final = [_VARIANCE_MAX * (c[0] + c[3] + c[5]) for c in self._covariance]
        self._ratios: Final[F64] = np.ones(_RATIOS_KEPT)
        self._seen = 0

    @staticmethod
    def _prior(weights: list[float]) -> tuple[float, float, float, float, float, float]:
        linear, quadratic = _PRIOR_VARIANCE * weights[1] ** 2, _PRIOR_VARIANCE * weights[2] ** 2
        return (0.0025 * linear, 0.0, 0.0, linear, 0.0, quadratic)

    def seconds(self, at: NDArray[np.intp], tokens: int, cached: F64) -> F64:
        """float64[k]: prefill time of `tokens` on the instances `at`, which hold `cached` of them."""
        squares = float(tokens) * tokens - cached * cached
        found: F64 = self._constant[at] + self._linear[at] * (tokens - cached) + self._quadratic[at] * squares
        return np.maximum(found, _SECONDS_MIN, out=found)

    def inherit(self, other: PrefillPredictor, place: Sequence[int]) -> None:
        """Takes over what another has learned; `place[i]` is where its instance i is here, or -1."""
        for there, here in enumerate(place):
            if here < 0:
                continue
            self._weights[here] = list(other._weights[there])
            self._covariance[here] = other._covariance[there]
            self._trace_max[here] = other._trace_max[there]
            self._constant[here] = other._constant[there]
            self._linear[here] = other._linear[there]
            self._quadratic[here] = other._quadratic[there]
        self._ratios[:] = other._ratios
        self._seen = other._seen

    def slopes(self, at: NDArray[np.intp]) -> tuple[F64, F64]:
        """float64[k] twice: seconds a token, and seconds a squared token, on the instances `at`."""
        return self._linear[at], self._quadratic[at]

    def slope(self, at: int) -> tuple[float, float]:
        """As `slopes`, for one instance."""
        return float(self._linear[at]), float(self._quadratic[at])

    def observe(self, at: int, tokens: int, cached: int, seconds: float) -> None:
        """Learns from a finished prefill; `seconds` is its service time alone.

        A time more than tenfold off counts as tenfold: one stalled request must not spoil the weights.
        """
        x1 = (tokens - cached) / _TOKENS_UNIT
        x2 = (float(tokens) ** 2 - float(cached) ** 2) / _SQUARES_UNIT
        weights = self._weights[at]
        predicted = max(weights[0] + weights[1] * x1 + weights[2] * x2, _SECONDS_MIN)
        ratio = min(max(seconds / predicted, 1 / _RATIO_MAX), _RATIO_MAX)
        self._ratios[self._seen % _RATIOS_KEPT] = ratio
        self._seen += 1
        if not self._learn:
            return
        c00, c01, c02, c11, c12, c22 = self._covariance[at]
        p0, p1, p2 = c00 + c01 * x1 + c02 * x2, c01 + c11 * x1 + c12 * x2, c02 + c12 * x1 + c22 * x2
        # Errors are relative: a request that takes ten times as long may be off by ten times as much.
        spread = (_NOISE * predicted) ** 2 + p0 + p1 * x1 + p2 * x2
        step = (ratio - 1.0) * predicted / spread
        weights[0] += step * p0
        weights[1] += step * p1
        weights[2] += step * p2
        c00, c11, c22 = c00 - p0 * p0 / spread, c11 - p1 * p1 / spread, c22 - p2 * p2 / spread
        # Forgetting without excitement would let the variance grow for ever.
        grow = min(1.0 / _FORGETTING, self._trace_max[at] / (c00 + c11 + c22))
        self._covariance[at] = (
            c00 * grow,
            (c01 - p0 * p1 / spread) * grow,
            (c02 - p0 * p2 / spread) * grow,
            c11 * grow,
            (c12 - p1 * p2 / spread) * grow,
            c22 * grow,
        )
        self._constant[at] = weights[0]
        self._linear[at] = weights[1] / _TOKENS_UNIT
        self._quadratic[at] = weights[2] / _SQUARES_UNIT

    def one(self, at: int, tokens: int, cached: float) -> float:
        """As `seconds`, for one instance."""
        weights = self._weights[at]
        x1 = (tokens - cached) / _TOKENS_UNIT
        x2 = (float(tokens) * tokens - cached * cached) / _SQUARES_UNIT
        return max(weights[0] + weights[1] * x1 + weights[2] * x2, _SECONDS_MIN)

    def quantile(self, share: float) -> float:
        """The factor on a prediction that `share` of the recent times stayed below; 1 until 20 were seen."""
        if not 0 < share < 1:
            raise UsageError("a quantile's share lies between 0 and 1", field="share", value=str(share))
        seen = min(self._seen, _RATIOS_KEPT)
        if seen < _RATIOS_NEEDED:
            return 1.0
        # One more than the plain rank: the conformal correction for a finite sample.
        rank = min(int(np.ceil(share * (seen + 1))), seen)
        return float(np.partition(self._ratios[:seen], rank - 1)[rank - 1])

    def error(self) -> float:
        """Mean of |seen / predicted - 1| over the last requests; 0 before the first."""
        seen = min(self._seen, _RATIOS_KEPT)
        return float(np.abs(self._ratios[:seen] - 1.0).mean()) if seen else 0.0
