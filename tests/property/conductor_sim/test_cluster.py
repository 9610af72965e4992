"""The kernels of the modelled cluster equal a plain simulation that goes token by token."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.cluster import ModelledCluster
from moonpool.conductor.cost import DecodeCost, ModelShape, PrefillCost
from moonpool.conductor.settings import ClusterSettings
from moonpool.conductor.trace import trace_of
from moonpool.kernels.cluster_state import FINISHED, REFUSED


def load_plain_cluster() -> ModuleType:
    path = Path(__file__).with_name("plain_cluster.py")
    spec = importlib.util.spec_from_file_location("conductor_plain_cluster", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


PLAIN: Any = load_plain_cluster()
BLOCK = 16
BASE = ClusterSettings(
    model=ModelShape(layers=2, width=64, query_groups=2),
    prefill_cost=PrefillCost(quadratic_s=1e-6, linear_s=1e-3),
    decode_cost=DecodeCost(step_s=0.01, request_s=0.003, context_token_s=1e-5),
    prefill=2,
    decode=2,
    cache_blocks=12,
    kv_tokens_max=900,
    batch_max=4,
    block_tokens=BLOCK,
    link_bytes_per_s=1.0e6,
    host_load_bytes_per_s=4.0e5,
)
APART = replace(BASE, layer_wise=True)
TOGETHER = replace(BASE, prefill=0, decode=0, aggregated=2, prefill_chunk_tokens=24, cache_blocks=40)


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[float, int, int, list[int]]]:
    """Requests whose block ids are those of equal prefixes: chains of a few families."""
    made: list[tuple[float, int, int, list[int]]] = []
    now = 0.0
    for _ in range(draw(st.integers(1, 14))):
        now += draw(st.sampled_from([0.0, 0.003, 0.05, 0.4]))
        family, depth = draw(st.integers(0, 3)), draw(st.integers(1, 9))
        tokens = depth * BLOCK - draw(st.integers(0, BLOCK - 1))
        output = draw(st.sampled_from([1, 2, 3, 11, 40, 200]))
        made.append((now, tokens, output, [family * 100 + at for at in range(depth)]))
    return made


def compare(cluster_settings: ClusterSettings, made: list[Any], places: list[int], refuse: float) -> None:
    trace = trace_of(made, BLOCK)
    cluster = ModelledCluster(cluster_settings, trace)
    cluster.refuse_above(refuse)
    plain = PLAIN.PlainCluster(cluster_settings, refuse)
    requests = []
    for number, (now, tokens, output, _) in enumerate(made):
        prefill = places[number] % 2
        decode = prefill if cluster_settings.aggregated else 2 + places[number] // 2 % 2
        ids = trace.block_ids[trace.starts[number] : trace.starts[number + 1]].tolist()
        requests.append(PLAIN.PlainRequest(now, tokens, output, ids, prefill, decode))
        cluster.advance(now)
        cluster.dispatch(number, prefill, decode, now)
    cluster.advance(float("inf"))
    cluster.check()
    plain.run(requests)
    for number, request in enumerate(requests):
        seen = cluster.arrays.requests[number]
        assert seen["cached_blocks"] == request.cached, number
        assert seen["first_token"] == pytest.approx(request.first_token, rel=1e-9), number
        assert (seen["state"] == REFUSED) == request.refused, number
        if request.refused:
            continue
        assert seen["state"] == FINISHED, number
        assert seen["finish"] == pytest.approx(request.finish, rel=1e-9), number
        if request.output > 1:
            expected = PLAIN.mean_of_longest_tenth(request.intervals)
            # Stretches of steps that overlap in length are taken one after the other.
            assert seen["tbt"] == pytest.approx(expected, rel=0.02), number


PLACES = st.lists(st.integers(0, 3), min_size=14, max_size=14)


@settings(max_examples=60)
@given(rows(), PLACES, st.sampled_from([float("inf"), 0.02]))
def test_prefill_and_decode_apart(made: list[Any], places: list[int], refuse: float) -> None:
    compare(APART, made, places, refuse)


@settings(max_examples=60)
@given(rows(), PLACES)
def test_prefill_and_decode_in_one_instance(made: list[Any], places: list[int]) -> None:
    compare(TOGETHER, made, places, float("inf"))
