"""Trace-driven simulation of a serving cluster with the scheduler that serves in production.

The loop: let the cluster act up to the next arrival, tell the scheduler what happened, ask it for a
decision, carry the decision out. Engines, links and caches are modelled by `ModelledCluster`; everything
that decides is `Scheduler`. Same inputs and seed, same result.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.admission import make_admission
from moonpool.conductor.affinity import AffinityWeights, WorkBoundedAffinity
from moonpool.conductor.cluster import ModelledCluster
from moonpool.conductor.cost import check_positive
from moonpool.conductor.forecast import DurationSurvival
from moonpool.conductor.policy import GlobalCacheAware, Policy, make_policy
from moonpool.conductor.request import NOBODY, CopyRequest, Decision, Prompt, Verdict
from moonpool.conductor.scheduler import Scheduler
from moonpool.conductor.settings import ClusterSettings
from moonpool.conductor.simulation_result import RunFacts, SimulationResult, collect
from moonpool.conductor.trace import Trace
from moonpool.errors import InternalError
from moonpool.kernels.cluster_state import FINISHED, JOINING, REFUSED

_VERDICTS: Final = tuple(Verdict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How a simulation runs. `policy` and `admission` are names; `weights` are for the policy `affinity`.

    `forecast` is how decode load is predicted: "learned" or the paper's "uniform" time. `sample_s` above 0
    records how many copies each block has, every so many seconds. Every decision refuses what its decode
    instance would have to refuse after prefill, unless `admission` is "none".
    """

    policy: str = "affinity"
    admission: str = "none"
    forecast: str = "learned"
    seed: int = 0
    sample_s: float = 0.0
    replicate: bool = True
    copies_in_flight_max: int = 256
    weights: AffinityWeights = field(default_factory=AffinityWeights)

    def __post_init__(self) -> None:
        check_positive(self, zero=("seed", "sample_s"))
        make_policy(self.policy)
        make_admission(self.admission)


@final
class Simulator:
    """One run of one trace on one cluster: `Simulator(settings, trace, options).run()`."""

    def __init__(
        self, settings: ClusterSettings, trace: Trace, options: SimulationOptions | None = None
    ) -> None:
        self.settings: Final = settings
        self.trace: Final = trace
        self.options: Final = options or SimulationOptions()
        self.cluster: Final = ModelledCluster(settings, trace)
        config = settings.scheduler_config()
        if not self.options.replicate or self.options.policy != "affinity":
            config = replace(config, copies_per_decision_max=0)
        admission = make_admission(self.options.admission)
        if admission.name != "none":
            self.cluster.refuse_above(settings.tbt_limit_s)
        bins = int(config.forecast_horizon_s / config.forecast_bin_s)
        self.scheduler: Final = Scheduler(
            settings.instances(),
            self.cluster,
            policy=self._policy(),
            admission=admission,
            config=config,
            survival=DurationSurvival(
                bins,
                config.forecast_bin_s,
                settings.uniform_decode_s,
                uniform=self.options.forecast == "uniform",
            ),
            seed=self.options.seed,
        )
        self._copies: list[tuple[float, int, int, NDArray[np.int32]]] = []
        self._copied_blocks = 0
        self._copy_order = 0
        self._verdicts: NDArray[np.int8] = np.zeros(len(trace), np.int8)
        self._predicted: NDArray[np.float64] = np.zeros(len(trace))
        self._samples: list[NDArray[np.int16]] = []

    def run(self) -> SimulationResult:
        """Serves the whole trace and lets the cluster run dry."""
        trace, options = self.trace, self.options
        arrivals, tokens, output = trace.arrival.tolist(), trace.tokens.tolist(), trace.output.tolist()
        starts = trace.starts.tolist()
        next_sample = options.sample_s or float("inf")
        for number, now in enumerate(arrivals):
            while now >= next_sample:
                self._advance(next_sample)
                self._samples.append(self.cluster.copies_of_blocks().astype(np.int16))
                next_sample += options.sample_s
            self._advance(now)
            prompt = Prompt(
                number, tokens[number], trace.block_ids[starts[number] : starts[number + 1]], output[number]
            )
            decision = self.scheduler.schedule(prompt, now)
            self._verdicts[number] = _VERDICTS.index(decision.verdict)
            if decision.accepted:
                self._carry_out(number, decision, now)
        self._advance(float("inf"))
        if len(self.scheduler):
            raise InternalError(f"{len(self.scheduler)} requests never ended in the simulation")
        return collect(self._run_facts())

    def _policy(self) -> Policy:
        if self.options.policy == GlobalCacheAware.name:
            return GlobalCacheAware(self.settings.balancing_threshold)
        if self.options.policy == WorkBoundedAffinity.name:
            return WorkBoundedAffinity(self.options.weights)
        return make_policy(self.options.policy)

    def _advance(self, until: float) -> None:
        while self._copies and self._copies[0][0] <= until:
            when, _, target, ids = heapq.heappop(self._copies)
            self._report(when)
            self.cluster.end_copy(target, ids)
        self._report(until)

    def _report(self, until: float) -> None:
        scheduler = self.scheduler
        for request, state, when in self.cluster.advance(until):
            if state == JOINING:
                record = self.cluster.arrays.requests[request]
                cached = int(record["cached_blocks"]) * self.settings.block_tokens
                scheduler.first_token(request, when, cached)
            elif state == FINISHED:
                scheduler.finished(request, when)
            elif state == REFUSED:
                scheduler.refused(request, when)

    def _carry_out(self, number: int, decision: Decision, now: float) -> None:
        self._predicted[number] = decision.ttft_s
        self.cluster.dispatch(number, decision.prefill, decision.decode, now)
        if decision.source != NOBODY:
            self.cluster.fetch(number, decision.source, decision.fetch_blocks, now)
        for copy in decision.copies:
            self._start_copy(copy, now)

    def _start_copy(self, copy: CopyRequest, now: float) -> None:
        if len(self._copies) >= self.options.copies_in_flight_max:
            return
        ids = np.array(copy.hashes, np.int32)
        ends = self.cluster.start_copy(copy.source, copy.target, ids, now)
        if ends is not None:
            self._copy_order += 1
            self._copied_blocks += len(ids)
            heapq.heappush(self._copies, (ends, self._copy_order, copy.target, ids))

    def _run_facts(self) -> RunFacts:
        return RunFacts(
            settings=self.settings,
            trace=self.trace,
            arrays=self.cluster.arrays,
            verdicts=self._verdicts,
            predicted_ttft_s=self._predicted,
            samples=tuple(self._samples),
            sample_s=self.options.sample_s,
            copied_blocks=self._copied_blocks,
            predictor_error=self.scheduler.predictor.error(),
        )
