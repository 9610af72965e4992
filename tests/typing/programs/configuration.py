"""What a user writes around a configuration: mypy must accept this, and refuse the marked lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import assert_type

from moonpool import EngineConfig, UsageError, load_config


def build(path: Path) -> EngineConfig:
    base = load_config(path) if path.exists() else EngineConfig(bind_host="::1", transports=("tcp",))
    merged = EngineConfig.from_env({"MOONPOOL_PORT": "7420"}, base=base)
    assert_type(merged.stripe_min_bytes, int)
    assert_type(merged.cluster_secret, bytes | None)
    assert_type(merged.transports, tuple[str, ...])
    return replace(merged, lanes_per_peer_max=2)


def explain(path: Path) -> str:
    try:
        return build(path).metadata
    except UsageError as error:
        assert_type(error.field, str | None)
        return error.message


EngineConfig(port="7420")  # E: arg-type
EngineConfig("name")  # E: misc
EngineConfig(ports=1)  # E: call-arg
EngineConfig().port = 1  # E: misc
