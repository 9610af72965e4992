"""The scheduler: bookings, choices, rejections, explanations; a contract for every policy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from moonpool.conductor.admission import ADMISSIONS, Assessment, make_admission
from moonpool.conductor.affinity import AffinityWeights, WorkBoundedAffinity
from moonpool.conductor.cost import DecodeCost, PrefillCost
from moonpool.conductor.instance import InstanceSpec, Role
from moonpool.conductor.overlap import ResidencyTable
from moonpool.conductor.policy import LocalCacheAware, make_policy, policy_names, register_policy
from moonpool.conductor.request import NOBODY, Prompt, Verdict
from moonpool.conductor.scheduler import Scheduler
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.errors import LimitExceeded, UsageError

PREFILL = PrefillCost(quadratic_s=1e-9, linear_s=1e-4)
DECODE = DecodeCost(step_s=0.02, request_s=0.002, context_token_s=1e-7)
BLOCK = 100


def instances(prefill: int = 4, decode: int = 4, both: int = 0, **changes: Any) -> list[InstanceSpec]:
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.BOTH] * both
    facts: dict[str, Any] = {"prefill": PREFILL, "decode": DECODE, "kv_tokens_max": 200_000, **changes}
    return [InstanceSpec(name=f"i{at}", role=role, **facts) for at, role in enumerate(roles)]


def make(policy: str = "affinity", table: ResidencyTable | None = None, **options: Any) -> Scheduler:
    config = SchedulerConfig(block_tokens=BLOCK, **options.pop("config", {}))
    admission = make_admission(options.pop("admission", "none"))
    fleet = options.pop("fleet", None) or instances()
    index = table or ResidencyTable(len(fleet))
    return Scheduler(fleet, index, policy=make_policy(policy), admission=admission, config=config, **options)


def prompt(number: int, tokens: int = 1_000, chain: Any = (), **changes: Any) -> Prompt:
    return Prompt(number, tokens, chain, output_tokens=100, **changes)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("aggregated", [False, True])
def test_every_policy_keeps_the_books(policy: str, aggregated: bool) -> None:
    """Requests end in any order and by any way; afterwards nothing is booked."""
    fleet = instances(0, 0, 4) if aggregated else instances()
    table = ResidencyTable(len(fleet))
    scheduler = make(policy, table, fleet=fleet, seed=3)
    rng = random.Random(20)
    now, live = 0.0, []
    for number in range(200):
        now += rng.expovariate(5.0)
        family = rng.randrange(6)
        chain = [family * 100 + at for at in range(rng.randrange(12))]
        decision = scheduler.schedule(prompt(number, len(chain) * BLOCK + 50, chain), now)
        assert decision.accepted
        assert fleet[decision.prefill].role & Role.PREFILL
        assert fleet[decision.decode].role & Role.DECODE
        assert decision.prefill == decision.decode or not aggregated
        if decision.source != NOBODY:
            assert decision.source != decision.prefill
            assert 0 < decision.fetch_blocks <= len(chain)
        assert "\n* " in decision.explain()
        live.append((number, decision, chain))
        if len(live) > 20:
            ended, gone, held = live.pop(rng.randrange(len(live)))
            way = rng.randrange(4)
            if way < 3:
                scheduler.first_token(ended, now)
                table.store(gone.prefill, held)
            if way < 2:
                scheduler.finished(ended, now)
            else:
                scheduler.cancelled(ended, now)
            scheduler.check()
    for ended, _, _ in live:
        scheduler.finished(ended, now)
        scheduler.finished(ended, now)
    scheduler.check()
    assert len(scheduler) == 0
    assert scheduler.load.reserved.sum() == pytest.approx(0.0)
    assert not scheduler.load.queue_seconds(now).any()


@pytest.mark.parametrize("policy", policy_names())
def test_same_seed_same_decisions(policy: str) -> None:
    def run() -> list[tuple[int, int]]:
        scheduler = make(policy, seed=9)
        made = [scheduler.schedule(prompt(number, 500 + number), number * 0.01) for number in range(60)]
        return [(each.prefill, each.decode) for each in made]

    assert run() == run()


@pytest.mark.parametrize("policy", sorted(set(policy_names()) - {"random"}))
def test_a_burst_of_equal_arrivals_spreads(policy: str) -> None:
    """28 requests in one instant, as the published trace has them; all share their first block."""
    table = ResidencyTable(32)
    table.store(0, [0])
    scheduler = make(policy, table, fleet=instances(16, 16))
    counts = np.zeros(16, int)
    for number in range(28):
        chain = [0, *range(100 * number + 1, 100 * number + 20)]
        counts[scheduler.schedule(prompt(number, 2_000, chain), 5.0).prefill] += 1
    assert counts.max() <= 3
    assert (counts > 0).sum() >= 14


def test_affinity_wins_only_while_it_saves_more_than_the_queue() -> None:
    table = ResidencyTable(8)
    chain = list(range(20))
    table.store(2, chain)
    alone = WorkBoundedAffinity(AffinityWeights(balance=0.0, slack=0.0, fetch=False))
    config = SchedulerConfig(block_tokens=BLOCK, learn_prefill=False)
    scheduler = Scheduler(instances(), table, policy=alone, config=config)
    # A hit leaves 50 tokens, 5 ms; a miss costs 2,050 tokens, 209 ms: as long as 40 hits.
    chosen = [scheduler.schedule(prompt(number, 2_050, chain), 0.0).prefill for number in range(60)]
    assert set(chosen[:40]) == {2}
    assert set(chosen) == {0, 1, 2, 3}


def test_a_prefix_is_fetched_when_that_is_quicker_than_computing_it() -> None:
    table = ResidencyTable(8)
    chain = list(range(500))
    table.store(1, chain)
    scheduler = make("global", table)
    scheduler.schedule(prompt(0, 90_000, range(9_000, 9_900)), 0.0)
    for number in range(1, 6):
        scheduler.load.queue_prefill(f"busy{number}", 1, 50.0, 1_000, 0.0)
    decision = scheduler.schedule(prompt(7, 50_050, chain), 0.0)
    assert decision.prefill != 1
    assert (decision.source, decision.fetch_blocks) == (1, 500)
    assert "fetches 500 leading blocks from i1" in decision.explain()


def test_decode_goes_to_the_least_load_score_with_room() -> None:
    scheduler = make("round_robin")
    load = scheduler.load
    load.batch[4:8] = [3, 2, 9, 1]
    load.waiting[4:8] = [0, 0, 0, 4]
    assert scheduler.schedule(prompt(1), 0.0).decode == 5
    load.reserved[5] = 199_950
    assert scheduler.schedule(prompt(2), 0.0).decode == 4
    load.reserved[4:8] = 200_000
    refused = scheduler.schedule(prompt(3), 0.0)
    assert refused.verdict is Verdict.NO_ROOM
    assert "no decode instance has memory" in refused.explain()


def test_a_hot_prefix_is_copied_when_demand_repays_it() -> None:
    table = ResidencyTable(8)
    chain = list(range(400))
    table.store(0, chain)
    scheduler = make("affinity", table)
    copies = []
    for number in range(30):
        decision = scheduler.schedule(prompt(number, 40_050, chain), number * 0.5)
        scheduler.first_token(number, number * 0.5 + 0.1)
        scheduler.finished(number, number * 0.5 + 0.2)
        copies += decision.copies
    assert copies
    assert all(copy.source == 0 and copy.target != 0 for copy in copies)
    assert copies[0].hashes == tuple(chain)
    assert copies[0].expected_saving_s > 0
    quiet = make("affinity", table, config={"copies_per_decision_max": 0})
    assert not any(quiet.schedule(prompt(number, 40_050, chain), 0.0).copies for number in range(30))


@pytest.mark.parametrize(
    ("tokens", "chain", "reason"),
    [
        (99, (), "shorter than a block of 100"),
        (500, (), "carried no block hashes"),
        (500, (1, 2, 3), "no instance is known to hold its first block"),
    ],
)
def test_a_zero_hit_says_why(tokens: int, chain: Any, reason: str) -> None:
    assert reason in make().schedule(prompt(0, tokens, chain), 0.0).explain()


def test_bounds_and_misuse() -> None:
    scheduler = make(config={"requests_max": 1})
    scheduler.schedule(prompt(1), 0.0)
    with pytest.raises(UsageError, match="booked already"):
        scheduler.schedule(prompt(1), 0.0)
    with pytest.raises(LimitExceeded) as caught:
        scheduler.schedule(prompt(2), 0.0)
    assert caught.value.field == "requests_max"
    scheduler.first_token("unknown", 0.0)
    scheduler.finished("unknown", 0.0)
    with pytest.raises(UsageError, match="known are"):
        make_policy("nope")
    with pytest.raises(UsageError, match="known are"):
        make_admission("nope")
    with pytest.raises(UsageError, match="exists already"):
        register_policy("local", LocalCacheAware)
    for wrong in ({"tokens": 0}, {"output_tokens": -1}, {"priority": 101}):
        with pytest.raises(UsageError):
            Prompt(**{"id": 1, "tokens": 10, "hashes": (), **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageError) as field:
        SchedulerConfig(block_tokens=0)
    assert field.value.field == "block_tokens"


def test_a_measured_cache_hit_teaches_the_predictor() -> None:
    scheduler = make("round_robin")
    for number in range(200):
        now = number * 10.0
        decision = scheduler.schedule(prompt(number, 5_000 + 40 * number), now)
        truth = 3.0 * PREFILL.seconds(5_000.0 + 40 * number, 0.0)
        scheduler.first_token(number, now + truth, cached_tokens=0)
        scheduler.finished(number, now + truth + 1.0)
        assert decision.accepted
    late = scheduler.schedule(prompt("late", 8_000), 1e4)  # type: ignore[arg-type]
    assert late.ttft_s == pytest.approx(3.0 * PREFILL.seconds(8_000.0, 0.0), rel=0.05)


ASSESSED = {
    "ttft_load": 0.5,
    "decode_load_now": 0.5,
    "decode_load_then": 0.5,
    "relative_cost": 1.0,
    "priority": 0,
}


@pytest.mark.parametrize(
    ("name", "changes", "verdict"),
    [
        ("none", {"ttft_load": 9.0, "decode_load_then": 9.0}, Verdict.ACCEPTED),
        ("baseline", {"ttft_load": 1.1}, Verdict.SLOW_FIRST_TOKEN),
        ("baseline", {"decode_load_now": 1.1}, Verdict.ACCEPTED),
        ("early", {"decode_load_now": 1.1}, Verdict.SLOW_TOKENS),
        ("early", {"decode_load_then": 1.1}, Verdict.ACCEPTED),
        ("predictive", {"decode_load_now": 1.1}, Verdict.ACCEPTED),
        ("predictive", {"decode_load_then": 1.1}, Verdict.SLOW_TOKENS),
        ("predictive", {"decode_load_then": 1.1, "priority": 3}, Verdict.ACCEPTED),
        ("predictive", {"decode_load_then": 0.9, "priority": -3}, Verdict.SLOW_TOKENS),
        ("priced", {"decode_load_then": 0.95}, Verdict.ACCEPTED),
        ("priced", {"decode_load_then": 0.95, "relative_cost": 2.0}, Verdict.SLOW_TOKENS),
        ("priced", {"decode_load_then": 0.75, "relative_cost": 1e9}, Verdict.SLOW_TOKENS),
        ("priced", {"decode_load_then": 0.65, "relative_cost": 1e9}, Verdict.ACCEPTED),
    ],
)
def test_admission_rules(name: str, changes: dict[str, Any], verdict: Verdict) -> None:
    assert make_admission(name).judge(Assessment(**{**ASSESSED, **changes})) is verdict


def test_every_admission_takes_what_is_easy_and_all_but_none_refuse_what_is_late() -> None:
    for name in ADMISSIONS:
        rule = make_admission(name)
        assert rule.name == name
        assert rule.judge(Assessment(**ASSESSED)) is Verdict.ACCEPTED  # type: ignore[arg-type]
        late = rule.judge(Assessment(**{**ASSESSED, "ttft_load": 2.0}))  # type: ignore[arg-type]
        assert (late is Verdict.ACCEPTED) == (name == "none")
