"""What the replay has done so far, and the result that it prints at the end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from moonpool.cli.demonstration.cache_model import Hits
from moonpool.metrics import LatencyHistogram, quantile_us

REPLAY_SCHEMA: Final = 1
PUT_OUTCOMES: Final = ("stored", "exists", "no_space")


@final
@dataclass(slots=True)
class RequestOutcome:
    """What one worker did for one request; travels as a list of plain values.

    `found` has one byte a block of the chain, 1 where the pool had it. `puts` counts each of
    `PUT_OUTCOMES`. Latencies are of whole calls, each of up to as many blocks as a window has.
    """

    number: int
    found: bytes
    wrong_blocks: int = 0
    wrong_bytes: int = 0
    puts: list[int] = field(default_factory=lambda: [0] * len(PUT_OUTCOMES))
    get_us: list[float] = field(default_factory=list)
    put_us: list[float] = field(default_factory=list)

    def to_list(self) -> list[Any]:
        """Plain values for JSON."""
        return [
            self.number,
            self.found.hex(),
            self.wrong_blocks,
            self.wrong_bytes,
            self.puts,
            [round(each, 1) for each in self.get_us],
            [round(each, 1) for each in self.put_us],
        ]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> RequestOutcome:
        """The inverse of `to_list`."""
        number, found, wrong_blocks, wrong_bytes, puts, get_us, put_us = values
        return cls(number, bytes.fromhex(found), wrong_blocks, wrong_bytes, puts, get_us, put_us)


@final
@dataclass(slots=True)
class ReplayTally:
    """Sums over all workers. `block_bytes` is the size of every block."""

    block_bytes: int
    requests: int = 0
    wrong_blocks: int = 0
    wrong_bytes: int = 0
    hits: Hits = field(default_factory=Hits)
    puts: Counter[str] = field(default_factory=Counter)
    gets: LatencyHistogram = field(default_factory=LatencyHistogram)
    put_calls: LatencyHistogram = field(default_factory=LatencyHistogram)

    def add(self, outcome: RequestOutcome) -> None:
        """Counts one request."""
        self.requests += 1
        self.wrong_blocks += outcome.wrong_blocks
        self.wrong_bytes += outcome.wrong_bytes
        self.hits.count([bool(each) for each in outcome.found])
        self.puts.update(dict(zip(PUT_OUTCOMES, outcome.puts, strict=True)))
        for latency in outcome.get_us:
            self.gets.add(latency)
        for latency in outcome.put_us:
            self.put_calls.add(latency)

    @property
    def verified_bytes(self) -> int:
        """Bytes that were read from the pool and compared."""
        return self.hits.found * self.block_bytes

    @property
    def stored_bytes(self) -> int:
        """Payload of the puts that stored something."""
        return self.puts["stored"] * self.block_bytes


@final
@dataclass(frozen=True, slots=True)
class ReplayFacts:
    """What was set before the replay began: the stream, the pool, and what ideal caches would have found."""

    source: str
    block_bytes: int
    distinct_blocks: int
    pool_bytes: int
    nodes: int
    workers: int
    unlimited: Hits
    lru: Hits

    @property
    def capacity_blocks(self) -> int:
        """How many blocks fit into the pool's payload: also the size of the LRU beside it."""
        return self.pool_bytes // self.block_bytes


def replay_result(
    facts: ReplayFacts, tally: ReplayTally, seconds: float, transports: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """The demo's JSON. `transports` are bytes by transport, of reads ("get") and writes ("put")."""
    hits = tally.hits
    return {
        "schema": REPLAY_SCHEMA,
        "ok": tally.wrong_blocks == 0 and tally.requests > 0,
        "source": facts.source,
        "requests": tally.requests,
        "blocks": hits.references,
        "distinct_blocks": facts.distinct_blocks,
        "block_bytes": facts.block_bytes,
        "pool_bytes": facts.pool_bytes,
        "capacity_blocks": facts.capacity_blocks,
        "nodes": facts.nodes,
        "workers": facts.workers,
        "verify_errors": tally.wrong_blocks,
        "wrong_bytes": tally.wrong_bytes,
        "verified_bytes": tally.verified_bytes,
        "stored_bytes": tally.stored_bytes,
        "hit_kind": "prefix",
        "hit_ratio": hits.leading_ratio,
        "max_hit_ratio": facts.unlimited.leading_ratio,
        "lru_hit_ratio": facts.lru.leading_ratio,
        "block_hit_ratio": hits.found_ratio,
        "max_block_hit_ratio": facts.unlimited.found_ratio,
        "lru_block_hit_ratio": facts.lru.found_ratio,
        "puts": {name: tally.puts[name] for name in PUT_OUTCOMES},
        "bytes_by_transport": {name: dict(moved) for name, moved in sorted(transports.items())},
        "get_p50_us": quantile_us(tally.gets.buckets, 0.5),
        "get_p99_us": quantile_us(tally.gets.buckets, 0.99),
        "put_p50_us": quantile_us(tally.put_calls.buckets, 0.5),
        "put_p99_us": quantile_us(tally.put_calls.buckets, 0.99),
        "seconds": seconds,
    }


def merge_transports(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Sums of `{transport: {"get": bytes, "put": bytes}}` over the workers."""
    merged: dict[str, dict[str, int]] = {}
    for part in parts:
        for transport, moved in part.items():
            total = merged.setdefault(transport, {"get": 0, "put": 0})
            for direction, count in moved.items():
                total[direction] += count
    return merged
