"""The placement kernel against plain numpy: the same choice, cost by cost, over random fleets and loads."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.property.conductor_sim.plain_affinity import PlainAffinity

from moonpool.conductor.affinity import AffinityWeights, WorkBoundedAffinity
from moonpool.conductor.cost import DecodeCost, PrefillCost
from moonpool.conductor.instance import InstanceSpec, LoadTable, Role
from moonpool.conductor.predictor import PrefillPredictor
from moonpool.conductor.request import Prompt
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.conductor.transfer_model import LinkClocks
from moonpool.conductor.view import Beliefs, View


def fleet(draw: random.Random, mixed: bool) -> list[InstanceSpec]:
    roles = [Role.BOTH] * 5 if mixed else [Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE, Role.PREFILL]
    if draw.random() < 0.3:
        roles[draw.randrange(5)] = Role.BOTH
    return [
        InstanceSpec(
            name=f"i{number}",
            role=role,
            prefill=PrefillCost(
                quadratic_s=draw.choice([0.0, 1e-10, 3e-9]), linear_s=draw.choice([1e-5, 4e-5])
            ),
            decode=DecodeCost(step_s=0.02, request_s=draw.choice([0.0, 1e-3]), context_token_s=1e-8),
            kv_tokens_max=1_000_000,
            chunk_tokens=draw.choice([0, 512, 2_048]),
            link_bytes_per_s=draw.choice([1e9, 1e10]),
        )
        for number, role in enumerate(roles)
    ]


def beliefs(draw: random.Random, instances: list[InstanceSpec], now: float) -> Beliefs:
    config = SchedulerConfig(block_tokens=16, tbt_limit_s=draw.choice([0.05, 0.5]))
    load = LoadTable(instances, balance_memory_s=60.0)
    predictor = PrefillPredictor(instances, learn=True)
    links = LinkClocks(np.array([each.link_bytes_per_s for each in instances]), config.link_latency_s)
    for at in range(len(instances)):
        for key in range(draw.choice([0, 0, 1, 3])):
            seconds = draw.choice([0.1, 0.5])
            load.queue_prefill((at, key), at, seconds, 100.0, now - draw.choice([0.0, 0.05, 9.0]))
        load.batch[at] = draw.choice([0, 0, 4, 60])
        load.waiting[at] = draw.choice([0, 2])
        load.context[at] = load.batch[at] * 1_000
        load.slow_steps[at] = draw.choice([0.0, 3.0, 100.0])
        links.sender_free[at] = now + draw.choice([-1.0, 0.0, 0.3])
        links.receiver_free[at] = now + draw.choice([-1.0, 0.0, 0.3])
        predictor.observe(at, 1_000, 0, draw.choice([0.01, 0.04]))
    return Beliefs(load, predictor, links, config, seed=draw.randrange(100))


@pytest.mark.parametrize("seed", range(400))
def test_the_kernel_chooses_as_plain_numpy_does(seed: int) -> None:
    draw = random.Random(seed)
    now = 100.0
    known = beliefs(draw, fleet(draw, mixed=draw.random() < 0.5), now)
    weights = AffinityWeights(
        fetch=draw.random() < 0.8,
        balance=draw.choice([0.0, 0.03]),
        displaced=draw.choice([0.0, 0.1]),
        slack=draw.choice([0.0, 0.03, 0.5]),
        slack_max_s=draw.choice([0.0, 0.02, 1.0]),
    )
    policy, plain = WorkBoundedAffinity(weights), PlainAffinity(weights)
    for number in range(3):
        deep = draw.choice([0, 1, 40])
        held = np.array([[draw.choice([0, deep, deep, deep // 2]) for _ in range(5)]], np.int32)
        prompt = Prompt(number, draw.choice([1, 17, 640, 50_000]), list(range(40)))
        state = known.random.getstate()
        expected = plain.choose(View(known, prompt, held, now))
        known.random.setstate(state)
        view = View(known, prompt, held, now)
        found = policy.choose(view)
        assert (found.at, found.source, found.fetch_blocks) == (
            expected.at,
            expected.source,
            expected.fetch_blocks,
        )
        assert found.cost is not None
        assert expected.cost is not None
        np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-12, atol=1e-15)
        again = View(known, prompt, held, now)
        np.testing.assert_allclose(view.queue_s, again.queue_s, rtol=1e-12)
        np.testing.assert_allclose(view.local_prefill_s, again.local_prefill_s, rtol=1e-12)
        assert view.best == again.best
        assert view.least_blocks == again.least_blocks
