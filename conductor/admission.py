"""Whether a request is taken at all: rejecting early what would miss its promise anyway.

Load is a pool's predicted latency over the promised one (arXiv 2407.00079, section 7): 1 is the limit. A
priority moves the limit, so that under load the lesser requests are turned away first. Rules are plug-ins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, final

from moonpool.conductor.request import Verdict
from moonpool.errors import UsageError

#: How much one step of priority moves the limit.
PRIORITY_STEP: Final = 0.05
_LIMIT_MIN: Final = 0.05


@final
@dataclass(frozen=True, slots=True)
class Assessment:
    """What taking a request would give, as shares of what is promised."""

    ttft_load: float
    """Predicted time to its first token over the limit."""
    decode_load_now: float
    """Step time of the chosen decode instance over the limit, were the request in its batch now."""
    decode_load_then: float
    """The same when its prefill is expected to end."""
    relative_cost: float
    """Decode work of this request over the mean of those offered lately; 1 is the mean."""
    priority: int

    @property
    def limit(self) -> float:
        return max(1.0 + PRIORITY_STEP * self.priority, _LIMIT_MIN)


class Admission(Protocol):
    """Decides on a request before anything is spent on it."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""

    def judge(self, assessment: Assessment) -> Verdict:
        """ACCEPTED, or why not."""


@final
class AdmitAll:
    """Takes everything."""

    name: Final = "none"

    def judge(self, assessment: Assessment) -> Verdict:
        return Verdict.ACCEPTED


@final
class PrefillOnly:
    """The papers' baseline: the prefill side judges its own load; the decode side refuses after prefill."""

    name: Final = "baseline"

    def judge(self, assessment: Assessment) -> Verdict:
        slow = assessment.ttft_load > assessment.limit
        return Verdict.SLOW_FIRST_TOKEN if slow else Verdict.ACCEPTED


@final
class EarlyRejection:
    """Both sides' present load at arrival: no prefill is wasted, but decode load is seen too early."""

    name: Final = "early"

    def judge(self, assessment: Assessment) -> Verdict:
        if assessment.ttft_load > assessment.limit:
            return Verdict.SLOW_FIRST_TOKEN
        slow = assessment.decode_load_now > assessment.limit
        return Verdict.SLOW_TOKENS if slow else Verdict.ACCEPTED


@final
class PredictedRejection:
    """Decode load as predicted for the end of the prefill."""

    name: Final = "predictive"

    def judge(self, assessment: Assessment) -> Verdict:
        if assessment.ttft_load > assessment.limit:
            return Verdict.SLOW_FIRST_TOKEN
        slow = assessment.decode_load_then > assessment.limit
        return Verdict.SLOW_TOKENS if slow else Verdict.ACCEPTED


@final
class PricedRejection:
    """As predicted, with room kept for those that cost little (trunk reservation in loss networks).

    Under overload somebody is turned away; turning away one request that holds twice the mean decode work
    spares two of half that. Each doubling of the cost must leave `reserve` of the limit free, up to
    `doublings_max`.
    """

    name: Final = "priced"

    def __init__(self, reserve: float = 0.1, doublings_max: float = 3.0) -> None:
        if not 0 <= reserve * doublings_max < 1:
            raise UsageError("reserve times doublings_max lies between 0 and 1", field="reserve")
        self._reserve: Final = reserve
        self._doublings_max: Final = doublings_max

    def judge(self, assessment: Assessment) -> Verdict:
        if assessment.ttft_load > assessment.limit:
            return Verdict.SLOW_FIRST_TOKEN
        doublings = min(max(math.log2(max(assessment.relative_cost, 1e-9)), 0.0), self._doublings_max)
        limit = assessment.limit - self._reserve * doublings
        return Verdict.SLOW_TOKENS if assessment.decode_load_then > limit else Verdict.ACCEPTED


ADMISSIONS: Final[dict[str, Callable[[], Admission]]] = {
    AdmitAll.name: AdmitAll,
    PrefillOnly.name: PrefillOnly,
    EarlyRejection.name: EarlyRejection,
    PredictedRejection.name: PredictedRejection,
    PricedRejection.name: PricedRejection,
}


def make_admission(name: str) -> Admission:
    """The rule of that name; raises `UsageError` that lists the known ones."""
    if name not in ADMISSIONS:
        known = ", ".join(sorted(ADMISSIONS))
        raise UsageError(f"there is no admission {name!r}; known are {known}", field="admission", value=name)
    return ADMISSIONS[name]()
