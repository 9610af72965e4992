"""How long prefill and decode take: the published formulas, as values.

Prefill of n tokens of which p are cached costs `layers * (a (n^2 - p^2) width + b (n - p) width^2)`
operations (FAST'25 section 2.2, where a = 4 and b = 22 for the LLaMA3-70B shape), divided by what the
machine achieves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from moonpool.errors import UsageError

_Number = TypeVar("_Number", float, NDArray[np.float64])


def check_positive(value: Any, *, zero: tuple[str, ...] = ()) -> None:
    """Raises `UsageError` for a number field that is negative, not finite, or 0 unless in `zero`."""
    for each in fields(value):
        number = getattr(value, each.name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not (0 <= number < float("inf")) or (number == 0 and each.name not in zero):
            least = "0 or more" if each.name in zero else "above 0"
            raise UsageError(f"{each.name} must be {least} and finite", field=each.name, value=str(number))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its costs."""

    layers: int
    width: int
    query_groups: int
    value_bytes: int = 2
    attention_flops: float = 4.0
    linear_flops: float = 22.0

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def token_bytes(self) -> float:
        """Bytes of keys and values that one token leaves behind."""
        return self.layers * 2 * self.width / self.query_groups * self.value_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds of prefill: `quadratic_s (n^2 - p^2) + linear_s (n - p)` for n tokens with p of them cached."""

    quadratic_s: float
    linear_s: float

    def __post_init__(self) -> None:
        check_positive(self, zero=("quadratic_s",))

    @classmethod
    def of_model(cls, model: ModelShape, flops_per_s: float, utilisation: float) -> PrefillCost:
        """The cost on a machine that achieves `utilisation` of `flops_per_s` operations a second."""
        achieved = flops_per_s * utilisation
        return cls(
            quadratic_s=model.layers * model.attention_flops * model.width / achieved,
            linear_s=model.layers * model.linear_flops * model.width**2 / achieved,
        )

    def seconds(self, tokens: float, cached: _Number) -> _Number:
        """Time to prefill `tokens` when `cached` of them are there; element by element for an array."""
        return self.quadratic_s * (tokens * tokens - cached * cached) + self.linear_s * (tokens - cached)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Seconds of one decode step: `step_s + request_s * batch + context_token_s * context`."""

    step_s: float
    request_s: float
    context_token_s: float

    def __post_init__(self) -> None:
        check_positive(self, zero=("request_s", "context_token_s"))

    def step_seconds(self, batch: _Number, context: _Number) -> _Number:
        """One step over `batch` requests whose contexts sum up to `context` tokens."""
        return self.step_s + self.request_s * batch + self.context_token_s * context
