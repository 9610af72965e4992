"""Instances that come and go: what is under way survives a change, and nothing is booked twice or lost."""

from __future__ import annotations

import random

import pytest

from moonpool.conductor.cost import DecodeCost, PrefillCost
from moonpool.conductor.fleet import Fleet, Member
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.instance import InstanceSpec, Role
from moonpool.conductor.request import Prompt
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.errors import LimitExceeded, UsageError
from moonpool.events import CacheContext, Holder

CONTEXT = CacheContext("m", 16)


def member(name: str, role: Role = Role.BOTH) -> Member:
    spec = InstanceSpec(
        name=name,
        role=role,
        prefill=PrefillCost(quadratic_s=1e-10, linear_s=5e-5),
        decode=DecodeCost(step_s=0.01, request_s=1e-4, context_token_s=1e-8),
        kv_tokens_max=1_000_000,
    )
    return Member(Holder(name), spec, f"http://{name}")


def fleet(index: PrefixIndex | None = None, **more: int) -> Fleet:
    return Fleet(PrefixIndex() if index is None else index, config=SchedulerConfig(block_tokens=16), **more)


def check(made: Fleet) -> None:
    assert made.scheduler is not None
    made.scheduler.check()


def test_nobody_to_schedule_on_is_said() -> None:
    made = fleet(members_max=2)
    with pytest.raises(UsageError, match="register some"):
        made.schedule(Prompt("r", 10, ()), None, 0.0)
    made.put(member("p", Role.PREFILL), 0.0)
    with pytest.raises(UsageError, match="register some"):
        made.schedule(Prompt("r", 10, ()), None, 0.0)
    assert made.put(member("d", Role.DECODE), 0.0)
    assert not made.put(member("d", Role.DECODE), 0.0)
    assert made.schedule(Prompt("r", 10, ()), None, 0.0).accepted
    with pytest.raises(LimitExceeded, match="instances_max"):
        made.put(member("e"), 0.0)
    with pytest.raises(UsageError, match="policy"):
        Fleet(PrefixIndex(), config=SchedulerConfig(), policy="none such")


def test_matches_are_of_the_prompts_context_and_members_in_order() -> None:
    index = PrefixIndex()
    made = fleet(index)
    for name in ("a", "b", "c"):
        made.put(member(name), 0.0)
    index.store(CONTEXT, Holder("c"), list(range(1, 41)))
    index.store(CONTEXT, Holder("stranger"), list(range(1, 41)))
    decision = made.schedule(Prompt("r", 650, list(range(1, 41))), CONTEXT, 0.0)
    assert made.members[decision.prefill].spec.name == "c"
    assert decision.cached_blocks == 40
    other = made.schedule(Prompt("s", 650, list(range(1, 41))), CONTEXT._replace(tenant="x"), 0.0)
    assert other.cached_blocks == 0


@pytest.mark.parametrize("seed", range(10))
def test_requests_under_way_survive_changes_of_the_fleet(seed: int) -> None:
    draw = random.Random(seed)
    made = fleet()
    made.put(member("base"), 0.0)
    names = ["base"]
    running: dict[str, tuple[str, str]] = {}
    now = 0.0
    for step in range(300):
        now += draw.random() * 0.05
        kind = draw.random()
        if kind < 0.5:
            request = f"r{step}"
            decision = made.schedule(Prompt(request, draw.randrange(1, 5_000), ()), None, now)
            if decision.accepted:
                places = [made.members[at].spec.name for at in (decision.prefill, decision.decode)]
                running[request] = (places[0], places[1])
        elif kind < 0.8 and running:
            request = draw.choice(sorted(running))
            draw.choice([made.first_token, made.finished, made.cancelled])(request, now)
            assert made.scheduler is not None
            if request not in made.scheduler._booked:
                del running[request]
        elif kind < 0.9:
            names.append(f"i{step}")
            made.put(member(names[-1], draw.choice([Role.PREFILL, Role.DECODE, Role.BOTH])), now)
        elif len(names) > 1:
            name = names.pop(draw.randrange(1, len(names)))
            assert made.drop(name, now)
            running = {request: where for request, where in running.items() if name not in where}
        check(made)
        assert made.scheduler is not None
        assert set(made.scheduler._booked) == set(running)
    for request in list(running):
        made.finished(request, now)
    check(made)
    assert made.scheduler is not None
    assert len(made.scheduler) == 0
    assert float(made.scheduler.load.queued_s.sum()) == pytest.approx(0.0)


def test_what_was_learned_and_the_running_head_stay() -> None:
    made = fleet()
    made.put(member("p", Role.PREFILL), 0.0)
    made.put(member("d", Role.DECODE), 0.0)
    for number in range(60):
        made.schedule(Prompt(number, 1_000, ()), None, float(number))
        made.first_token(number, number + 0.1)  # twice as slow as specified
        made.finished(number, number + 0.5)
    assert made.scheduler is not None
    slow = made.scheduler.predictor.one(0, 1_000, 0)
    made.schedule(Prompt("head", 1_000, ()), None, 100.0)
    waits = float(made.scheduler.load.queue_seconds(100.05)[0])
    made.put(member("a", Role.BOTH), 100.05)
    assert made.scheduler.predictor.one(0, 1_000, 0) == slow
    assert float(made.scheduler.load.queue_seconds(100.05)[0]) == pytest.approx(waits)
