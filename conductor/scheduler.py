"""The scheduler: decides, books, and learns from what instances report. Pure: the caller tells it the time.

A request's life here: `schedule` decides and books optimistically; `first_token` says that its prefill ended;
`finished` that its last token came; `refused` or `cancelled` take it out wherever it stands. Reports may be
missing or late: each only corrects what was booked, and every booking is released exactly once.

The steps of a decision: overlap (index, raised by what is pending) -> policy (prefill instance and source of
blocks) -> decode instance -> admission -> booking -> perhaps a copy of a hot prefix. Time is any float of
seconds that does not go back; instances are positions in the list given at the start.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from moonpool.conductor.admission import Admission, AdmitAll, Assessment
from moonpool.conductor.cost import DecodeCost
from moonpool.conductor.decode_choice import choose_decode
from moonpool.conductor.explanation import Terms
from moonpool.conductor.forecast import Booking, DecodeForecast, DurationSurvival
from moonpool.conductor.instance import InstanceSpec, LoadTable
from moonpool.conductor.interference import slow_steps_at
from moonpool.conductor.overlap import OverlapIndex
from moonpool.conductor.pending import PendingBlocks
from moonpool.conductor.policy import Placement, Policy, make_policy
from moonpool.conductor.predictor import PrefillPredictor
from moonpool.conductor.replication import HotPrefixes
from moonpool.conductor.request import NOBODY, CopyRequest, Decision, Prompt, Verdict
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.conductor.transfer_model import LinkClocks
from moonpool.conductor.view import Beliefs, View
from moonpool.errors import LimitExceeded, UsageError

#: Weight of the last request in the mean cost of those offered.
_SHARE_GAIN: Final = 0.005


@dataclass(slots=True)
class _Booked:
    """One request between `schedule` and its end."""

    prompt: Prompt
    decision: Decision
    reserved: float
    context: float
    booking: Booking
    slow_steps: float
    joined_at: float | None = None


@final
class Scheduler:
    """Places prompts on instances. Same calls, same seed: same decisions. Not thread safe: one owner calls
    it.

    `index` answers which blocks are where; `policy` and `admission` are plug-ins (default: affinity, admit
    all). One decision over 16 instances takes some tens of microseconds.
    """

    def __init__(
        self,
        instances: Sequence[InstanceSpec],
        index: OverlapIndex,
        *,
        policy: Policy | None = None,
        admission: Admission | None = None,
        config: SchedulerConfig | None = None,
        survival: DurationSurvival | None = None,
        seed: int = 0,
    ) -> None:
        self.config: Final = config or SchedulerConfig()
        self.policy: Final[Policy] = policy or make_policy("affinity")
        self.admission: Final[Admission] = admission or AdmitAll()
        self._index: Final = index
        self.load: Final = LoadTable(instances, balance_memory_s=self.config.balance_memory_s)
        self.predictor: Final = PrefillPredictor(instances, learn=self.config.learn_prefill)
        rates = np.array([each.link_bytes_per_s for each in instances])
        self.links: Final = LinkClocks(rates, self.config.link_latency_s)
        self._beliefs: Final = Beliefs(self.load, self.predictor, self.links, self.config, seed)
        self._names: Final = tuple(each.name for each in instances)
        horizon, width = self.config.forecast_horizon_s, self.config.forecast_bin_s
        self.survival: Final = survival or DurationSurvival(
            int(horizon / width), width, self.config.decode_prior_s
        )
        self.forecast: Final = DecodeForecast(
            len(instances), horizon_s=horizon, bin_s=width, survival=self.survival
        )
        self._pending: Final = PendingBlocks(self.config.pending_blocks_max, len(instances))
        self._hot: Final = HotPrefixes(
            prefixes_max=self.config.hot_prefixes_max, memory_s=self.config.demand_memory_s
        )
        self._booked: dict[Hashable, _Booked] = {}
        self._mean_share = 0.0

    def __len__(self) -> int:
        return len(self._booked)

    def schedule(self, prompt: Prompt, now: float) -> Decision:
        """Decides on a prompt and books it when it is accepted.

        Raises `UsageError` for an id that is booked already and `LimitExceeded` at `requests_max`.
        """
        if prompt.id in self._booked:
            raise UsageError(f"request {prompt.id!r} is booked already; finish or cancel it first")
        if len(self._booked) >= self.config.requests_max:
            raise LimitExceeded(
                "too many requests are booked; finish some, or raise requests_max",
                field="requests_max",
                limit=self.config.requests_max,
            )
        held = self._index.overlap(prompt.hashes)
        if len(self._pending):
            self._pending.raise_overlap(prompt.hashes, held, prompt.space)
        view = View(self._beliefs, prompt, held, now)
        placement = self.policy.choose(view)
        decision, context = self._decide(view, placement)
        if decision.accepted:
            self._book(view, decision, context)
        return decision

    def first_token(self, request_id: Hashable, now: float, cached_tokens: int | None = None) -> None:
        """The prefill of a request ended; `cached_tokens` is what its engine found cached, if it says so."""
        booked = self._booked.get(request_id)
        if booked is None or booked.joined_at is not None:
            return
        prompt, decision = booked.prompt, booked.decision
        service = self._end_prefill(booked, now)
        if service is not None and service > 0:
            blocks = decision.fetch_blocks if decision.source != NOBODY else decision.cached_blocks
            believed = min(blocks * self.config.block_tokens, prompt.tokens - 1)
            cached = believed if cached_tokens is None else min(max(cached_tokens, 0), prompt.tokens - 1)
            if not self._beliefs.mixed:
                # With decode steps between its chunks a service time says little about prefill alone.
                self.predictor.observe(decision.prefill, prompt.tokens, cached, service)
        booked.joined_at = now
        self.load.waiting[decision.decode] -= 1
        self.load.batch[decision.decode] += 1
        self.load.context[decision.decode] += booked.context

    def finished(self, request_id: Hashable, now: float) -> None:
        """The last token of a request came; a request that nobody knows is no error."""
        booked = self._booked.get(request_id)
        if booked is None:
            return
        if booked.joined_at is None:
            self.first_token(request_id, now)
        self.survival.observe(max(now - (booked.joined_at or now), 0.0))
        self._release(request_id, now)

    def refused(self, request_id: Hashable, now: float) -> None:
        """An instance would not take the request, or it failed: everything booked for it is released."""
        if request_id in self._booked:
            self._release(request_id, now)

    cancelled = refused

    def inherit(self, previous: Scheduler, now: float) -> int:
        """Takes over the requests of a scheduler over other instances, by their names.

        Requests whose prefill or decode instance is gone are dropped: their engines will not finish them.
        Returns how many were taken over. This scheduler must be fresh; `previous` is of no use afterwards.
        """
        at = {name: position for position, name in enumerate(self._names)}
        place = [at.get(name, NOBODY) for name in previous._names]
        self.predictor.inherit(previous.predictor, place)
        for request_id, old in previous._booked.items():
            prefill, decode = place[old.decision.prefill], place[old.decision.decode]
            if NOBODY in (prefill, decode):
                continue
            source = place[old.decision.source] if old.decision.source != NOBODY else NOBODY
            decision = replace(old.decision, prefill=prefill, decode=decode, source=source, terms=None)
            ends = max(now, old.booking.start * self.config.forecast_bin_s)
            booking = self.forecast.book(decode, ends, old.context, now)
            self._booked[request_id] = _Booked(
                old.prompt, decision, old.reserved, old.context, booking, old.slow_steps, old.joined_at
            )
            self.load.reserved[decode] += old.reserved
            if old.joined_at is not None:
                self.load.batch[decode] += 1
                self.load.context[decode] += old.context
                continue
            self.load.waiting[decode] += 1
            self.load.slow_steps[prefill] += old.slow_steps
            self.load.inherit_prefill(previous.load, request_id, (old.decision.prefill, prefill), now)
            self._pending.add(request_id, prefill, old.prompt.hashes, old.prompt.space)
        return len(self._booked)

    def check(self) -> None:
        """Asserts that the books balance."""
        self.load.check()
        waiting = sum(1 for each in self._booked.values() if each.joined_at is None)
        assert abs(float(self.load.waiting.sum()) - waiting) < 1e-6, (self.load.waiting, waiting)
        assert abs(float(self.load.batch.sum()) - (len(self._booked) - waiting)) < 1e-6
        reserved = sum(each.reserved for each in self._booked.values())
        assert abs(float(self.load.reserved.sum()) - reserved) < 1e-3 * (1 + reserved)

    def _decide(self, view: View, placement: Placement) -> tuple[Decision, float]:
        load, config, prompt = self.load, self.config, view.prompt
        prefill = int(load.prefills[placement.at])
        fetches = placement.source != NOBODY
        blocks = placement.fetch_blocks if fetches else int(view.local[placement.at])
        ends = load.queue_at(prefill, view.now) + view.prefill_at(placement.at, blocks)
        if fetches:
            missing = np.maximum(placement.fetch_blocks - view.local, 0)
            ends = max(ends, float(view.fetch_seconds(placement.source, missing)[placement.at]))
        decode = choose_decode(view, prefill, ends)
        context = prompt.tokens + (prompt.output_tokens or config.expected_output_tokens) / 2
        verdict, step = Verdict.NO_ROOM, 0.0
        if decode != NOBODY:
            then = view.now + ends
            present = (load.batch.item(decode), load.context.item(decode))
            requests, tokens = self.forecast.expected_at(decode, then, view.now, present)
            cost = load.instances[decode].decode
            step = cost.step_seconds(requests + 1, tokens + context)
            verdict = self.admission.judge(
                Assessment(
                    ends / config.ttft_limit_s,
                    load.step_at(decode, 1.0, context) / config.tbt_limit_s,
                    step / config.tbt_limit_s,
                    self._relative_cost(cost, context),
                    prompt.priority,
                )
            )
        decision = Decision(
            id=prompt.id,
            verdict=verdict,
            prefill=prefill,
            decode=decode,
            source=placement.source,
            fetch_blocks=placement.fetch_blocks,
            cached_blocks=int(view.local[placement.at]),
            ttft_s=ends,
            tbt_s=step,
            copies=self._copies(view, prefill) if verdict is Verdict.ACCEPTED else (),
            terms=self._terms(view, placement),
        )
        return decision, context

    def _relative_cost(self, cost: DecodeCost, context: float) -> float:
        share = cost.request_s + cost.context_token_s * context
        self._mean_share += (share - self._mean_share) * _SHARE_GAIN if self._mean_share else share
        return share / self._mean_share if self._mean_share else 1.0

    def _copies(self, view: View, prefill: int) -> tuple[CopyRequest, ...]:
        if not self.config.copies_per_decision_max:
            return ()
        proposed = self._hot.propose(view, prefill)
        if proposed is None:
            return ()
        size = len(proposed.hashes) * self.config.block_tokens * self.config.token_bytes
        self.links.book(proposed.source, proposed.target, size, view.now)
        return (proposed,)

    def _terms(self, view: View, placement: Placement) -> Terms:
        return Terms(
            policy=self.policy.name,
            names=self._names,
            positions=self.load.prefills,
            queue_s=view.queue_s,
            prefill_s=view.local_prefill_s,
            local_blocks=view.local,
            cost=placement.cost,
            prompt_blocks=len(view.prompt.hashes),
            block_tokens=self.config.block_tokens,
            tokens=view.tokens,
        )

    def _book(self, view: View, decision: Decision, context: float) -> None:
        prompt, now, load = view.prompt, view.now, self.load
        at = int(np.searchsorted(load.prefills, decision.prefill))
        blocks = max(decision.fetch_blocks, decision.cached_blocks)
        seconds = view.prefill_at(at, blocks)
        uncached = prompt.tokens - min(blocks * self.config.block_tokens, prompt.tokens - 1)
        load.queue_prefill(prompt.id, decision.prefill, seconds, uncached, now)
        if decision.source != NOBODY:
            missing = decision.fetch_blocks - decision.cached_blocks
            size = missing * self.config.block_tokens * self.config.token_bytes
            self.links.book(decision.source, decision.prefill, size, now)
        if decision.decode != decision.prefill:
            # Booked as of now although it begins with the prefill: a link is not blocked until then.
            self.links.book(decision.prefill, decision.decode, prompt.tokens * self.config.token_bytes, now)
        reserved = float(prompt.tokens + (prompt.output_tokens or self.config.expected_output_tokens))
        load.waiting[decision.decode] += 1
        load.reserved[decision.decode] += reserved
        booking = self.forecast.book(decision.decode, now + decision.ttft_s, context, now)
        self._pending.add(prompt.id, decision.prefill, prompt.hashes, prompt.space)
        slow = 0.0
        if self._beliefs.mixed:
            slow = slow_steps_at(view, at, prompt.tokens - uncached)
            load.slow_steps[decision.prefill] += slow
        self._booked[prompt.id] = _Booked(prompt, decision, reserved, context, booking, slow)
        self.policy.booked(prompt, decision)

    def _end_prefill(self, booked: _Booked, now: float) -> float | None:
        self._pending.drop(booked.prompt.id)
        at = booked.decision.prefill
        # Sums of many bookings must not keep a rest of rounding.
        self.load.slow_steps[at] = max(self.load.slow_steps[at] - booked.slow_steps, 0.0)
        return self.load.end_prefill(booked.prompt.id, at, now)

    def _release(self, request_id: Hashable, now: float) -> None:
        booked = self._booked.pop(request_id)
        prompt, decision, load = booked.prompt, booked.decision, self.load
        if booked.joined_at is None:
            self._end_prefill(booked, now)
            load.waiting[decision.decode] -= 1
        else:
            load.batch[decision.decode] -= 1
            load.context[decision.decode] -= booked.context
        load.reserved[decision.decode] -= booked.reserved
        self.forecast.release(booked.booking, now)
        self.policy.released(prompt, decision)
