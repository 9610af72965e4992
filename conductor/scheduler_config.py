"""What the scheduler may be told, with defaults; one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from moonpool.conductor.cost import check_positive


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits, weights and bounds of a `Scheduler`. Raises `UsageError` that names the wrong field."""

    #: Tokens of one block of the hashes that prompts carry.
    block_tokens: int = 512
    #: Bytes of keys and values of one token.
    token_bytes: float = 327_680.0
    #: Promised time to the first token, in seconds.
    ttft_limit_s: float = 30.0
    #: Promised time between tokens, in seconds.
    tbt_limit_s: float = 0.1
    #: k of `load_score = batch + k * waiting`, by which decode instances are chosen.
    waiting_weight: float = 1.0
    #: Time that a transfer needs before its first byte arrives, in seconds.
    link_latency_s: float = 0.0005
    #: A prompt whose answer's length nobody knows is expected to take this many tokens.
    expected_output_tokens: int = 350
    #: Demand for a prefix fades by e in this time, in seconds.
    demand_memory_s: float = 60.0
    #: Work given to each instance fades by e in this time, for balance; in seconds.
    balance_memory_s: float = 600.0
    #: How far ahead decode load is forecast, and in what steps, in seconds.
    forecast_horizon_s: float = 120.0
    forecast_bin_s: float = 0.25
    #: Expected decode time before any request has finished, in seconds.
    decode_prior_s: float = 20.0
    #: Most requests between `schedule` and `finished`; beyond it `schedule` raises `LimitExceeded`.
    requests_max: int = 1_000_000
    #: Most blocks that are expected on an instance before it has reported them; the oldest are forgotten.
    pending_blocks_max: int = 1_000_000
    #: Most prefixes whose demand is followed for replication; the least recent are forgotten.
    hot_prefixes_max: int = 16_384
    #: Most copies asked for with one decision; 0 turns replication off.
    copies_per_decision_max: int = 1
    #: Whether prefill times are learned from what instances report.
    learn_prefill: bool = True

    def __post_init__(self) -> None:
        check_positive(self, zero=("waiting_weight", "link_latency_s", "copies_per_decision_max"))
