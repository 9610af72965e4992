"""The modelled cluster: the arrays that the kernels advance, and what the scheduler may ask of them."""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.overlap import Chain
from moonpool.conductor.settings import ClusterSettings
from moonpool.conductor.trace import Trace
from moonpool.errors import LimitExceeded, UsageError
from moonpool.kernels import cluster_queue, cluster_sim, prefix_sim, token_intervals
from moonpool.kernels.cluster_state import (
    ABSENT,
    CLUSTER,
    INSTANCE,
    NOTICE,
    REQUEST,
    ClusterArrays,
)

#: Bound of instances x distinct blocks: 8 bytes each.
CACHE_CELLS_MAX: Final = 1 << 30


@final
class ModelledCluster:
    """n instances that serve the requests of a trace, as time is told to them."""

    def __init__(self, settings: ClusterSettings, trace: Trace) -> None:
        if trace.block_tokens != settings.block_tokens:
            raise UsageError(
                f"the trace has blocks of {trace.block_tokens} tokens, the settings {settings.block_tokens}"
            )
        specs = settings.instances()
        n, r, u = len(specs), len(trace), trace.distinct
        if n * (u + 1) > CACHE_CELLS_MAX:
            raise LimitExceeded(
                "too many instances times distinct blocks for one simulation; use a part of the trace",
                limit=CACHE_CELLS_MAX,
            )
        newer = np.full((n, u + 1), ABSENT, np.int32)
        older = np.full((n, u + 1), ABSENT, np.int32)
        newer[:, u] = older[:, u] = u
        queue = max(1, min(settings.queue_max, r))
        # A request meets at most one stretch of equal steps for each of its tokens.
        stretches = int(trace.output.max(initial=1)) + 4
        self.arrays: Final = ClusterArrays(
            cluster=np.zeros(1, CLUSTER),
            instances=np.zeros(n, INSTANCE),
            requests=np.zeros(r, REQUEST),
            notices=np.zeros(2 * r + 2, NOTICE),
            block_ids=np.ascontiguousarray(trace.block_ids, np.int32),
            newer=newer,
            older=older,
            prefill_queue=np.zeros((n, queue), np.int32),
            join_queue=np.zeros((n, queue), np.int32),
            running=np.zeros((n, settings.batch_max), np.int32),
            segment_step=np.zeros((n, stretches), np.int64),
            segment_s=np.zeros((n, stretches), np.float64),
            segment_growth_s=np.zeros((n, stretches), np.float64),
        )
        self._fill(settings, trace)
        self._depths: Final = np.zeros(n, np.int32)

    def _fill(self, settings: ClusterSettings, trace: Trace) -> None:
        for record, spec in zip(self.arrays.instances, settings.instances(), strict=True):
            record["role"] = int(spec.role)
            record["cache_blocks"] = settings.cache_blocks
            record["shares_memory"] = int(settings.aggregated > 0)
            record["batch_max"] = spec.batch_max
            record["kv_tokens_max"] = spec.kv_tokens_max
            record["chunk_tokens"] = spec.chunk_tokens
            record["quadratic_s"], record["linear_s"] = spec.prefill.quadratic_s, spec.prefill.linear_s
            record["step_s"], record["request_s"] = spec.decode.step_s, spec.decode.request_s
            record["context_s"] = spec.decode.context_token_s
            record["segment_batch"] = ABSENT
        cluster, requests = self.arrays.cluster[0], self.arrays.requests
        cluster["block_tokens"] = settings.block_tokens
        cluster["layer_wise"] = int(settings.layer_wise)
        cluster["token_bytes"] = settings.model.token_bytes
        cluster["link_bytes_per_s"] = settings.link_bytes_per_s
        cluster["link_latency_s"] = settings.link_latency_s
        cluster["host_bytes_per_s"] = settings.host_load_bytes_per_s
        cluster["refuse_tbt_s"] = np.inf
        requests["arrival"], requests["tokens"], requests["output"] = (
            trace.arrival,
            trace.tokens,
            trace.output,
        )
        requests["first_block"], requests["blocks"] = trace.starts[:-1], np.diff(trace.starts)
        requests["prefill"] = requests["decode"] = -1

    def refuse_above(self, tbt_s: float) -> None:
        """Decode instances refuse a prefilled request that would make their steps longer than this."""
        self.arrays.cluster[0]["refuse_tbt_s"] = tbt_s

    def overlap(self, hashes: Chain) -> NDArray[np.int32]:
        """int32[1, n], as `OverlapIndex.overlap`: an index that knows the caches as they are."""
        prefix_sim.leading_blocks(self.arrays.newer, np.asarray(hashes, np.int32), self._depths)
        return self._depths.reshape(1, -1).copy()

    def advance(self, until: float) -> list[tuple[int, int, float]]:
        """Lets the cluster act up to a time; (request, state, time) of what happened, sorted by time."""
        cluster = self.arrays.cluster[0]
        cluster["notices"] = 0
        cluster_sim.advance_cluster(self.arrays, until)
        number = int(cluster["notices"])
        if not number:
            return []
        token_intervals.measure_finished(self.arrays)
        self._check_queues()
        happened: list[tuple[int, int, float]] = self.arrays.notices[:number].tolist()
        if number > 1:
            happened.sort(key=lambda notice: notice[2])
        return happened

    def dispatch(self, request: int, prefill: int, decode: int, now: float) -> None:
        """Queues a request on its instances."""
        record = self.arrays.requests[request]
        record["prefill"], record["decode"], record["fetch_end"] = prefill, decode, now
        cluster_queue.enqueue_prefill(self.arrays, request, now)
        self._check_queues()

    def fetch(self, request: int, source: int, blocks: int, now: float) -> None:
        """Pulls the first `blocks` blocks of a queued request from `source` to its prefill instance."""
        record = self.arrays.requests[request]
        target = int(record["prefill"])
        first = int(record["first_block"])
        missing = self._missing(target, self.arrays.block_ids[first : first + blocks])
        if missing > 0:
            record["fetch_blocks"] = blocks
            record["fetch_end"] = self._send(source, target, missing, now)

    def start_copy(self, source: int, target: int, ids: NDArray[np.int32], now: float) -> float | None:
        """Books the links for a copy of a chain; when it arrives, or None when nothing is missing."""
        missing = self._missing(target, ids)
        return self._send(source, target, missing, now) if missing > 0 else None

    def end_copy(self, target: int, ids: NDArray[np.int32]) -> None:
        """The chain of a copy is cached on its target."""
        cluster_sim.store_chain(self.arrays, target, ids)

    def copies_of_blocks(self) -> NDArray[np.int64]:
        """int64[u]: how many instances cache each block now."""
        held: NDArray[np.int64] = (self.arrays.newer[:, :-1] != ABSENT).sum(axis=0)
        return held

    def check(self) -> None:
        """Asserts that every cache's list holds just the blocks that count as cached, within its capacity."""
        newer, older = self.arrays.newer, self.arrays.older
        end = newer.shape[1] - 1
        for at, record in enumerate(self.arrays.instances):
            listed, block = 0, int(newer[at, end])
            while block != end:
                assert older[at, newer[at, block]] == block, (at, block)
                listed, block = listed + 1, int(newer[at, block])
            held = int((newer[at, :-1] != ABSENT).sum())
            assert listed == held == record["cached"] <= record["cache_blocks"], (at, listed, held, record)

    def _missing(self, target: int, ids: NDArray[np.int32]) -> int:
        return len(ids) - int(prefix_sim.leading_here(self.arrays.newer, target, ids))

    def _send(self, source: int, target: int, blocks: int, now: float) -> float:
        cluster: Any = self.arrays.cluster[0]
        size = blocks * float(cluster["block_tokens"]) * float(cluster["token_bytes"])
        return float(cluster_sim.book_link(self.arrays, source, target, now, size))

    def _check_queues(self) -> None:
        if self.arrays.cluster[0]["lost"]:
            raise LimitExceeded(
                "an instance's queue is full; raise queue_max, use more instances, or reject requests",
                field="queue_max",
                limit=int(self.arrays.prefill_queue.shape[1]),
            )
