"""A short chaos run on real processes: kills, stops and cuts within some seconds, and every get judged."""

from __future__ import annotations

import shutil

import pytest

from moonpool.bench.chaos import as_plain
from moonpool.bench.chaos_run import ChaosSettings, run_chaos

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None and shutil.which("valkey-server") is None,
    reason="redis-server is not on the path",
)


@needs_redis
def test_a_pool_that_is_struck_serves_and_comes_to_rest() -> None:
    settings = ChaosSettings(seconds=12.0, seed=4, nodes=2, clients=3)
    told: list[str] = []
    found = run_chaos(settings, told.append)
    plain = as_plain(found, settings)
    print("\n".join(told), plain)
    assert found.is_good, plain
    assert plain["events"] >= 5
    assert plain["calls"]["get hit"] > 20
    assert plain["calls"]["put stored"] > 10
    assert sum(plain["gauges"][name] for name in ("writing", "quarantined", "leaving")) == 0
