"""A modelled cluster as one value, and the committed settings of the studies."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, final

from moonpool.conductor.cost import DecodeCost, ModelShape, PrefillCost, check_positive
from moonpool.conductor.instance import InstanceSpec, Role
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.errors import UsageError

SETTINGS_BYTES_MAX: Final = 1 << 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Everything about a modelled cluster but the requests. Raises `UsageError` that names the wrong field.

    `prefill` and `decode` count instances of one kind; `aggregated` ones do both. `aggregated` instances keep
    cache and running requests in one memory of `cache_blocks`; the others cache prompts in host memory.
    """

    model: ModelShape
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    prefill: int = 8
    decode: int = 8
    aggregated: int = 0
    cache_blocks: int = 5_860
    kv_tokens_max: int = 1_400_000
    batch_max: int = 256
    block_tokens: int = 512
    prefill_chunk_tokens: int = 0
    layer_wise: bool = True
    host_load_bytes_per_s: float = 1.28e11
    link_bytes_per_s: float = 1.0e11
    link_latency_s: float = 0.0005
    ttft_limit_s: float = 30.0
    tbt_limit_s: float = 0.1
    waiting_weight: float = 1.0
    balancing_threshold: float = 1.5
    uniform_decode_s: float = 20.0
    queue_max: int = 65_536
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_positive(
            self,
            zero=(
                "prefill",
                "decode",
                "aggregated",
                "prefill_chunk_tokens",
                "link_latency_s",
                "waiting_weight",
            ),
        )
        if self.aggregated and (self.prefill or self.decode):
            raise UsageError(
                "instances are aggregated, or prefill and decode; not a mixture", field="aggregated"
            )
        if not self.aggregated and not (self.prefill and self.decode):
            raise UsageError("a cluster has aggregated instances, or both prefill and decode ones")

    def instances(self) -> tuple[InstanceSpec, ...]:
        """The cluster as the scheduler sees it: prefill instances first."""
        kinds = (("prefill", Role.PREFILL, self.prefill), ("decode", Role.DECODE, self.decode))
        if self.aggregated:
            kinds = (("instance", Role.BOTH, self.aggregated), ("decode", Role.DECODE, 0))
        room = self.cache_blocks * self.block_tokens if self.aggregated else self.kv_tokens_max
        return tuple(
            InstanceSpec(
                name=f"{kind}-{number}",
                role=role,
                prefill=self.prefill_cost,
                decode=self.decode_cost,
                kv_tokens_max=min(room, self.kv_tokens_max) if self.aggregated else self.kv_tokens_max,
                batch_max=self.batch_max,
                chunk_tokens=self.prefill_chunk_tokens,
                link_bytes_per_s=self.link_bytes_per_s,
            )
            for kind, role, count in kinds
            for number in range(count)
        )

    def scheduler_config(self) -> SchedulerConfig:
        """What the scheduler of such a cluster is told."""
        return SchedulerConfig(
            block_tokens=self.block_tokens,
            token_bytes=self.model.token_bytes,
            ttft_limit_s=self.ttft_limit_s,
            tbt_limit_s=self.tbt_limit_s,
            waiting_weight=self.waiting_weight,
            link_latency_s=self.link_latency_s,
            decode_prior_s=self.uniform_decode_s,
        )


def load_settings(path: Path | None = None, name: str = "paper_settings.toml") -> ClusterSettings:
    """Settings from a file, or those named that come with the package; raises `UsageError` for wrong ones."""
    where = str(path) if path else name
    try:
        data = path.read_bytes() if path else files("moonpool.conductor").joinpath(name).read_bytes()
    except OSError as exc:
        raise UsageError(f"cannot read the settings {where}: {exc.strerror}") from exc
    if len(data) > SETTINGS_BYTES_MAX:
        raise UsageError(f"{where} is larger than {SETTINGS_BYTES_MAX} bytes; is it the right file?")
    try:
        tables = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{where} is not TOML: {exc}") from exc
    try:
        return settings_of(tables)
    except (KeyError, TypeError) as exc:
        raise UsageError(f"{where} lacks or misnames a value: {exc}") from exc


def settings_of(tables: Mapping[str, Any]) -> ClusterSettings:
    """Settings from the tables of a settings file; raises KeyError or TypeError for what is missing."""
    shape = dict(tables["model"])
    shape.pop("name", None)
    model = ModelShape(**shape)
    machine, cluster, network = tables["instance"], tables["cluster"], tables["network"]
    policy, slo = tables["policy"], tables["slo"]
    return ClusterSettings(
        model=model,
        prefill_cost=PrefillCost.of_model(model, machine["flops_per_s"], machine["flops_utilisation"]),
        decode_cost=DecodeCost(**tables["decode"]),
        prefill=cluster.get("prefill", 0),
        decode=cluster.get("decode", 0),
        aggregated=cluster.get("aggregated", 0),
        cache_blocks=machine["cache_blocks"],
        kv_tokens_max=machine["kv_tokens_max"],
        batch_max=machine["batch_max"],
        block_tokens=cluster["block_tokens"],
        prefill_chunk_tokens=cluster["prefill_chunk_tokens"],
        layer_wise=cluster["layer_wise"],
        host_load_bytes_per_s=machine["host_load_bytes_per_s"],
        link_bytes_per_s=network["bytes_per_s"],
        link_latency_s=network["latency_s"],
        ttft_limit_s=slo["ttft_s"],
        tbt_limit_s=slo["tbt_s"],
        waiting_weight=policy["waiting_weight"],
        balancing_threshold=policy["balancing_threshold"],
        uniform_decode_s=tables.get("rejection", {}).get("uniform_decode_s", 20.0),
        extra=dict(tables),
    )
