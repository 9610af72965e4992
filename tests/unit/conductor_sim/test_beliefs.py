"""What the scheduler believes: loads, links, forecasts, predictions, pending blocks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from tests.property.conductor_sim.plain_affinity import slow_steps

from moonpool.conductor.cost import DecodeCost, ModelShape, PrefillCost
from moonpool.conductor.forecast import DecodeForecast, DurationSurvival
from moonpool.conductor.instance import FadingWork, InstanceSpec, LoadTable, Role
from moonpool.conductor.interference import slow_steps_at
from moonpool.conductor.overlap import ResidencyTable
from moonpool.conductor.pending import PendingBlocks
from moonpool.conductor.predictor import PrefillPredictor
from moonpool.conductor.request import Prompt
from moonpool.conductor.scheduler import Scheduler
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.conductor.transfer_model import LinkClocks
from moonpool.conductor.view import View
from moonpool.errors import UsageError

PREFILL = PrefillCost(quadratic_s=1e-9, linear_s=1e-4)
DECODE = DecodeCost(step_s=0.02, request_s=0.001, context_token_s=1e-7)


def spec(name: str, role: Role = Role.BOTH) -> InstanceSpec:
    return InstanceSpec(name=name, role=role, prefill=PREFILL, decode=DECODE, kv_tokens_max=100_000)


def load_table(count: int = 2) -> LoadTable:
    return LoadTable([spec(f"i{at}") for at in range(count)], balance_memory_s=600.0)


def test_published_figures_of_the_model() -> None:
    model = ModelShape(layers=80, width=8192, query_groups=8)
    assert model.token_bytes == 327_680
    cost = PrefillCost.of_model(model, 2.496e15, 1.0)
    by_hand = 80 * (4 * 8192 * (1e4**2 - 2e3**2) + 22 * 8192**2 * 8e3) / 2.496e15
    assert cost.seconds(1e4, 2e3) == pytest.approx(by_hand)
    assert DECODE.step_seconds(3.0, 1e6) == pytest.approx(0.02 + 0.003 + 0.1)


@pytest.mark.parametrize("wrong", [{"linear_s": 0.0}, {"quadratic_s": -1.0}, {"linear_s": math.inf}])
def test_wrong_costs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        PrefillCost(**{"quadratic_s": 1e-9, "linear_s": 1e-4, **wrong})
    assert caught.value.field == next(iter(wrong))


def test_a_queue_shrinks_while_its_head_runs_but_not_below_what_follows() -> None:
    load = load_table()
    load.queue_prefill("a", 0, 2.0, 100, now=10.0)
    load.queue_prefill("b", 0, 3.0, 200, now=10.0)
    assert load.queue_seconds(11.0).tolist() == [4.0, 0.0]
    assert load.queue_seconds(20.0)[0] == 3.0
    assert load.end_prefill("a", 0, 20.0) == 10.0
    assert load.queue_seconds(21.0)[0] == 2.0
    assert load.end_prefill("b", 0, 22.0) == 2.0
    load.check()
    assert load.queue_seconds(22.0)[0] == 0.0


def test_a_request_that_leaves_from_behind_takes_its_work_along() -> None:
    load = load_table()
    load.queue_prefill("a", 1, 2.0, 100, now=0.0)
    load.queue_prefill("b", 1, 3.0, 200, now=0.0)
    assert load.end_prefill("b", 1, 1.0) is None
    assert load.queue_seconds(1.0)[1] == 1.0
    load.check()


def test_instances_must_serve_both_sides_and_differ_by_name() -> None:
    with pytest.raises(UsageError, match="prefills and one that decodes"):
        LoadTable([spec("a", Role.PREFILL)], balance_memory_s=1)
    with pytest.raises(UsageError, match="one name"):
        LoadTable([spec("a"), spec("a")], balance_memory_s=1)


def test_work_fades_by_e_in_its_memory() -> None:
    work = FadingWork(2, memory_s=10.0)
    assert work.at(5.0).tolist() == [0.0, 0.0]
    work.add(0, 3.0, now=5.0)
    work.add(1, 1.0, now=15.0)
    assert work.at(15.0).tolist() == pytest.approx([3.0 / math.e, 1.0])
    # A clock reading of the past changes nothing.
    assert work.at(2.0).tolist() == pytest.approx([3.0 / math.e, 1.0])


def test_a_busy_sender_delays_its_receivers() -> None:
    links = LinkClocks(np.full(3, 100.0), latency_s=0.5)
    assert links.book(0, 1, 200.0, start=1.0) == 3.5
    targets = np.array([1, 2])
    assert links.arrival_seconds(0, targets, np.array([100.0, 100.0]), 1.0).tolist() == [3.5, 3.5]
    assert links.arrival_seconds(2, targets, np.array([100.0, 100.0]), 1.0).tolist() == [3.5, 1.5]
    links.observe(0, 1, 1000.0, 1e9)
    assert links.arrival_seconds(0, np.array([2]), np.array([100.0]), 9.0)[0] > 1.5


def test_a_wrong_link_is_refused() -> None:
    with pytest.raises(UsageError, match="rate above 0"):
        LinkClocks(np.array([1.0, 0.0]), 0.0)


def test_the_survival_curve_is_that_of_what_was_seen() -> None:
    survival = DurationSurvival(100, 1.0, prior_s=50.0)
    rng = random.Random(7)
    for _ in range(3_000):
        survival.observe(rng.uniform(10.0, 20.0))
    curve = survival.curve
    assert (np.diff(curve) <= 1e-12).all()
    assert curve[9] > 0.95
    assert curve[15] == pytest.approx(0.5, abs=0.12)
    assert curve[25] < 0.05
    assert survival.mean_s == pytest.approx(15.0, rel=0.1)


def test_a_uniform_time_is_a_step_and_never_learns() -> None:
    survival = DurationSurvival(10, 1.0, prior_s=4.0, uniform=True)
    survival.observe(9.0)
    assert survival.curve.tolist() == [1.0] * 4 + [0.0] * 6


def test_a_forecast_counts_who_joins_and_leaves() -> None:
    survival = DurationSurvival(40, 1.0, prior_s=5.0, uniform=True)
    forecast = DecodeForecast(2, horizon_s=40.0, bin_s=1.0, survival=survival)
    nobody = np.zeros(2)
    booking = forecast.book(1, join=3.0, tokens=100.0, now=0.0)
    assert forecast.expected(2.0, 0.0, nobody, nobody)[0].tolist() == [0.0, 0.0]
    requests, context = forecast.expected(4.0, 0.0, nobody, nobody)
    assert requests[0] == 0.0
    assert requests[1] >= 1.0
    assert context[1] >= 100.0
    forecast.release(booking, 0.0)
    assert forecast.expected(4.0, 0.0, nobody, nobody)[0][1] < 1.0


def test_the_present_batch_corrects_a_forecast_and_fades() -> None:
    survival = DurationSurvival(40, 1.0, prior_s=5.0)
    forecast = DecodeForecast(1, horizon_s=40.0, bin_s=1.0, survival=survival)
    batch, context = np.array([8.0]), np.array([800.0])
    seen = [float(forecast.expected(when, 0.0, batch, context)[0][0]) for when in (0.0, 5.0, 30.0)]
    assert seen[0] == 8.0
    assert seen[1] == pytest.approx(8.0 / math.e)
    assert seen[2] < 0.1


def test_a_forecast_slides_on_for_ever_and_ends_empty() -> None:
    survival = DurationSurvival(8, 0.5, prior_s=2.0)
    forecast = DecodeForecast(1, horizon_s=4.0, bin_s=0.5, survival=survival)
    rng = random.Random(3)
    now, open_bookings = 0.0, []
    for _ in range(500):
        now += rng.expovariate(1.0)
        open_bookings.append(forecast.book(0, now + rng.uniform(0, 9), 10.0, now))
        if len(open_bookings) > 3:
            forecast.release(open_bookings.pop(0), now)
    for booking in open_bookings:
        forecast.release(booking, now)
    later = now + 1_000.0
    requests, context = forecast.expected(later, later, np.zeros(1), np.zeros(1))
    assert abs(float(requests[0])) < 1e-6
    assert abs(float(context[0])) < 1e-6


def test_prefill_times_are_learned_for_each_instance() -> None:
    predictor = PrefillPredictor([spec("fast"), spec("slow")], learn=True)
    rng = random.Random(11)
    for _ in range(400):
        tokens = rng.randrange(1_000, 60_000)
        cached = rng.randrange(0, tokens)
        truth = 2.0 * PREFILL.seconds(float(tokens), float(cached)) + 0.05
        predictor.observe(1, tokens, cached, truth * rng.uniform(0.97, 1.03))
    both = np.array([0, 1])
    fast, slow = predictor.seconds(both, 20_000, np.array([5_000.0, 5_000.0]))
    assert fast == pytest.approx(PREFILL.seconds(20_000.0, 5_000.0))
    assert slow == pytest.approx(2.0 * fast + 0.05, rel=0.05)
    assert predictor.one(1, 20_000, 5_000.0) == pytest.approx(float(slow))
    assert predictor.error() < 0.08


def test_quantiles_hold_for_what_comes_next() -> None:
    predictor = PrefillPredictor([spec("a")], learn=False)
    assert predictor.quantile(0.9) == 1.0
    rng = random.Random(5)
    base = predictor.one(0, 10_000, 0.0)
    for _ in range(500):
        predictor.observe(0, 10_000, 0, base * rng.lognormvariate(0.0, 0.3))
    factor = predictor.quantile(0.9)
    covered = sum(rng.lognormvariate(0.0, 0.3) <= factor for _ in range(2_000)) / 2_000
    assert covered == pytest.approx(0.9, abs=0.04)
    with pytest.raises(UsageError):
        predictor.quantile(1.0)


def test_one_stalled_request_does_not_spoil_the_weights() -> None:
    predictor = PrefillPredictor([spec("a")], learn=True)
    for _ in range(100):
        predictor.observe(0, 10_000, 0, predictor.one(0, 10_000, 0.0))
    before = predictor.one(0, 10_000, 0.0)
    predictor.observe(0, 10_000, 0, 1e6)
    assert predictor.one(0, 10_000, 0.0) < 3 * before


def test_pending_blocks_raise_an_overlap_and_go() -> None:
    pending = PendingBlocks(blocks_max=100, instances=3)
    pending.add("a", 1, [5, 6, 7])
    held = np.array([[1, 0, 2], [1, 3, 2]], np.int32)
    pending.raise_overlap([5, 6, 9], held)
    assert held.tolist() == [[1, 2, 2], [1, 3, 2]]
    pending.drop("a")
    pending.drop("a")
    assert len(pending) == 0
    held[:] = 0
    pending.raise_overlap([5, 6, 9], held)
    assert not held.any()


def test_pending_blocks_of_other_spaces_do_not_match() -> None:
    pending = PendingBlocks(blocks_max=100, instances=2)
    pending.add("a", 1, [5, 6, 7], space=1)
    pending.add("b", 0, [5], space=2**64 - 1)
    for space, expected in ((0, [0, 0]), (1, [0, 3]), (2**64 - 1, [1, 0])):
        held = np.zeros((1, 2), np.int32)
        pending.raise_overlap([5, 6, 7], held, space)
        assert held[0].tolist() == expected
    pending.drop("b")
    held = np.zeros((1, 2), np.int32)
    pending.raise_overlap([5], held, 2**64 - 1)
    assert not held.any()


def test_pending_blocks_are_bounded() -> None:
    pending = PendingBlocks(blocks_max=10, instances=1)
    for number in range(50):
        pending.add(number, 0, range(number * 4, number * 4 + 4))
        assert len(pending) <= 10
    held = np.zeros((1, 1), np.int32)
    pending.raise_overlap(range(196, 200), held)
    assert held[0, 0] == 4
    pending.add("too long", 0, range(11))
    assert len(pending) <= 10


def test_the_residency_table_answers_tier_by_tier() -> None:
    table = ResidencyTable(3, tiers=2)
    table.store(0, [1, 2])
    table.store(1, [1, 2, 3], tier=1)
    table.store(0, [3], tier=1)
    assert table.overlap([1, 2, 3, 4]).tolist() == [[2, 0, 0], [3, 3, 0]]
    table.remove(1, [2, 99], tier=1)
    assert table.overlap(np.array([1, 2, 3])).tolist() == [[2, 0, 0], [3, 1, 0]]
    table.clear(0)
    assert table.overlap([1, 2]).tolist() == [[0, 0, 0], [0, 1, 0]]
    with pytest.raises(UsageError, match="no instance 3"):
        table.store(3, [1])


@pytest.mark.parametrize("chunk", [0, 700])
def test_what_is_computed_for_one_candidate_equals_the_array(chunk: int) -> None:
    fleet = [
        InstanceSpec(
            name=f"i{at}",
            role=Role.BOTH,
            prefill=PrefillCost(quadratic_s=2e-8, linear_s=1e-5 * (at + 1)),
            decode=DECODE,
            kv_tokens_max=10**6,
            chunk_tokens=chunk,
        )
        for at in range(3)
    ]
    scheduler = Scheduler(fleet, ResidencyTable(3), config=SchedulerConfig(block_tokens=100))
    scheduler.load.batch[1] = 5
    scheduler.links.book(0, 2, 1e10, 0.0)
    held = np.array([[0, 3, 40]], np.int32)
    view = View(scheduler._beliefs, Prompt("a", 9_050, range(90)), held, now=1.0)
    local = view.prefill_seconds(view.local)
    steps = slow_steps(view, view.cached_tokens(view.local))
    arrivals = view.fetch_seconds(0, np.full(3, 50, np.int32))
    for at in range(3):
        blocks = int(view.local[at])
        assert view.prefill_at(at, blocks) == pytest.approx(float(local[at]))
        assert slow_steps_at(view, at, blocks * 100.0) == pytest.approx(float(steps[at]))
        size = 50 * 100 * scheduler.config.token_bytes
        assert scheduler.links.arrival_at(0, at, size, 1.0) == pytest.approx(float(arrivals[at]))
        assert arrivals[at] <= scheduler.links.latest_arrival(0, size, 1.0) + 1e-9
    assert (steps > 0).any()
