"""What a simulation found: latencies, promises kept, rejections, reuse, replication, load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.cost import PrefillCost
from moonpool.conductor.request import Verdict
from moonpool.conductor.settings import ClusterSettings
from moonpool.conductor.trace import Trace
from moonpool.kernels.cluster_state import FINISHED, REFUSED, ROLE_DECODE, ROLE_PREFILL, ClusterArrays

F64 = NDArray[np.float64]
_QUANTILES: Final = (0.5, 0.9, 0.99)
#: Ranks whose copies over time FAST'25 Fig. 11 shows.
REPLICATION_RANKS: Final = (10, 100, 1_000, 10_000)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the simulator hands over at the end of a run; arrays are float64[r] or int8[r]."""

    settings: ClusterSettings
    trace: Trace
    arrays: ClusterArrays
    verdicts: NDArray[np.int8]
    predicted_ttft_s: F64
    samples: tuple[NDArray[np.int16], ...]
    sample_s: float
    copied_blocks: int
    predictor_error: float


@final
@dataclass(frozen=True, slots=True)
class Latency:
    """A mean and quantiles, in seconds; zeros for no requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: F64) -> Latency:
        """The latency of finished requests."""
        if not len(seconds):
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        low, middle, high = np.quantile(seconds, _QUANTILES)
        return cls(float(seconds.mean()), float(low), float(middle), float(high), float(seconds.max()))


@final
@dataclass(frozen=True, slots=True, eq=False)
class InstanceLoad:
    """What one instance did: seconds of prefill and decode, and decoded tokens."""

    name: str
    prefills: int
    prefill_s: float
    decode_s: float
    decode_tokens: int


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SimulationResult:
    """One run. Ratios are shares of 1; `ttft_s`, `tbt_s` and `completed` are of each request, in order."""

    requests: int
    finished: int
    rejected: int
    refused: int
    in_slo: int
    ttft: Latency
    tbt: Latency
    hit_ratio: float
    token_hit_ratio: float
    fetched_share: float
    copied_blocks: int
    prefill_s_mean: float
    wasted_prefill_s: float
    work_imbalance: float
    predicted_ttft_error: float
    predictor_error: float
    elapsed_s: float
    verdicts: dict[str, int]
    instances: tuple[InstanceLoad, ...]
    replication: dict[int, tuple[int, ...]]
    sample_s: float
    ttft_s: F64
    tbt_s: F64
    completed: NDArray[np.bool_]

    @property
    def goodput(self) -> float:
        """Share of all requests that met both promises."""
        return self.in_slo / self.requests if self.requests else 0.0

    @property
    def rejections(self) -> int:
        """Turned away at arrival or after prefill."""
        return self.rejected + self.refused

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the arrays of each request."""
        plain: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                continue
            if isinstance(value, Latency):
                value = {each: getattr(value, each) for each in ("mean", "p50", "p90", "p99", "worst")}
            elif name == "instances":
                value = [{each: getattr(one, each) for each in one.__slots__} for one in value]
            elif name == "replication":
                value = {str(rank): list(copies) for rank, copies in value.items()}
            plain[name] = value
        plain["goodput"] = self.goodput
        plain["rejections"] = self.rejections
        return plain


def collect(facts: RunFacts) -> SimulationResult:
    """The result of a run from the state that its cluster ended in."""
    requests, trace, settings = facts.arrays.requests, facts.trace, facts.settings
    state = requests["state"]
    done = state == FINISHED
    prefilled = requests["first_token"] > 0
    ttft, tbt = requests["first_token"] - trace.arrival, requests["tbt"].copy()
    kept = done & (ttft <= settings.ttft_limit_s) & (tbt <= settings.tbt_limit_s)
    cached = requests["cached_blocks"] * prefilled
    saved = np.minimum(cached * settings.block_tokens, trace.tokens - 1)
    work = prefill_seconds(facts.settings.prefill_cost, trace.tokens, saved) * prefilled
    offered_blocks = float(np.diff(trace.starts)[prefilled].sum()) or 1.0
    predicted = facts.predicted_ttft_s
    named = {each.value: int((facts.verdicts == at).sum()) for at, each in enumerate(Verdict)}
    return SimulationResult(
        requests=len(trace),
        finished=int(done.sum()),
        rejected=len(trace) - named[Verdict.ACCEPTED.value],
        refused=int((state == REFUSED).sum()),
        in_slo=int(kept.sum()),
        ttft=Latency.of(ttft[done]),
        tbt=Latency.of(tbt[done]),
        hit_ratio=float(cached.sum()) / offered_blocks,
        token_hit_ratio=float((saved * prefilled).sum()) / (float(trace.tokens[prefilled].sum()) or 1.0),
        fetched_share=float((requests["fetched_blocks"] * prefilled).sum()) / offered_blocks,
        copied_blocks=facts.copied_blocks,
        prefill_s_mean=float(work[prefilled].mean()) if prefilled.any() else 0.0,
        wasted_prefill_s=float(work[state == REFUSED].sum()),
        work_imbalance=imbalance(facts.arrays),
        predicted_ttft_error=relative_error(predicted[done], ttft[done]),
        predictor_error=facts.predictor_error,
        elapsed_s=float(max(requests["finish"].max(initial=0.0), requests["first_token"].max(initial=0.0))),
        verdicts=named,
        instances=instance_loads(facts),
        replication=replication_curves(facts.samples),
        sample_s=facts.sample_s,
        ttft_s=np.where(prefilled, ttft, np.nan),
        tbt_s=np.where(done, tbt, np.nan),
        completed=done,
    )


def prefill_seconds(cost: PrefillCost, tokens: NDArray[np.int64], cached: NDArray[np.int64]) -> F64:
    """float64[r]: what each prefill took, waiting apart."""
    whole, saved = tokens.astype(np.float64), cached.astype(np.float64)
    return cost.quadratic_s * (whole**2 - saved**2) + cost.linear_s * (whole - saved)


def imbalance(arrays: ClusterArrays) -> float:
    """Largest prefill work of an instance over the mean; 1 is perfect balance."""
    work = arrays.instances["prefill_busy_s"][(arrays.instances["role"] & ROLE_PREFILL) > 0]
    return float(work.max() / work.mean()) if work.sum() > 0 else 1.0


def relative_error(predicted: F64, seen: F64) -> float:
    """Median of |predicted / seen - 1|; 0 for no requests."""
    valid = seen > 0
    return float(np.median(np.abs(predicted[valid] / seen[valid] - 1.0))) if valid.any() else 0.0


def instance_loads(facts: RunFacts) -> tuple[InstanceLoad, ...]:
    """One row for each instance, in the scheduler's order."""
    started = facts.arrays.requests["first_token"] > 0
    counts = np.bincount(facts.arrays.requests["prefill"][started], minlength=len(facts.arrays.instances))
    return tuple(
        InstanceLoad(
            spec.name,
            int(counts[at]),
            float(facts.arrays.instances["prefill_busy_s"][at]),
            float(facts.arrays.instances["decode_busy_s"][at]) if spec.role & ROLE_DECODE else 0.0,
            int(facts.arrays.instances["decode_tokens"][at]),
        )
        for at, spec in enumerate(facts.settings.instances())
    )


def replication_curves(samples: tuple[NDArray[np.int16], ...]) -> dict[int, tuple[int, ...]]:
    """Copies over time of the blocks that rank 10th, 100th, ... by copies summed over all samples."""
    if not samples:
        return {}
    table = np.stack(samples)
    order = np.argsort(-table.sum(axis=0, dtype=np.int64), kind="stable")
    return {
        rank: tuple(int(copies) for copies in table[:, order[rank - 1]])
        for rank in REPLICATION_RANKS
        if rank <= len(order)
    }
