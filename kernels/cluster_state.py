"""What a modelled serving cluster is made of: record types, states and arrays, for `cluster_sim`.

Blocks are dense integers, 0 to the number of distinct blocks. Caches are lists linked through `newer` and
`older`. Times are in seconds.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Records: TypeAlias = NDArray[np.void]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
F64: TypeAlias = NDArray[np.float64]

ROLE_PREFILL: Final = 1
ROLE_DECODE: Final = 2
ROLE_BOTH: Final = 3

WAITING: Final = 0
PREFILLING: Final = 1
JOINING: Final = 2
DECODING: Final = 3
FINISHED: Final = 4
REFUSED: Final = 5

ABSENT: Final = -1
INSTANCE: Final = np.dtype(
    [
        ("role", "i4"), ("cache_blocks", "i4"), ("cached", "i4"), ("batch_max", "i4"),
        ("kv_tokens_max", "i8"), ("chunk_tokens", "i8"), ("shares_memory", "i4"), ("batch", "i4"),
        ("quadratic_s", "f8"), ("linear_s", "f8"), ("step_s", "f8"), ("request_s", "f8"), ("context_s", "f8"),
        ("now", "f8"), ("in_flight", "i8"), ("in_flight_chunk", "i8"), ("steps", "i8"), ("context", "i8"),
        ("reserved", "i8"), ("output_blocks", "i8"), ("prefill_head", "i4"), ("prefill_count", "i4"),
        ("join_count", "i4"), ("segments", "i8"), ("segment_batch", "i4"), ("sender_free", "f8"),
        ("receiver_free", "f8"), ("prefill_busy_s", "f8"), ("decode_busy_s", "f8"), ("decode_tokens", "i8"),
    ]
)  # fmt: skip
"""One instance. Parameters first; `in_flight` steps end at `now`, the last of which may prefill a chunk."""

REQUEST: Final = np.dtype(
    [
        ("arrival", "f8"), ("tokens", "i8"), ("output", "i8"), ("first_block", "i8"), ("blocks", "i4"),
        ("prefill", "i4"), ("decode", "i4"), ("fetch_blocks", "i4"), ("fetch_end", "f8"),
        ("stream_end", "f8"), ("cached_blocks", "i4"), ("fetched_blocks", "i4"), ("done", "i8"),
        ("started", "f8"), ("load_end", "f8"), ("first_token", "f8"), ("ready", "f8"), ("gap_s", "f8"),
        ("join_step", "i8"), ("finish_step", "i8"), ("finish", "f8"), ("tbt", "f8"), ("state", "i4"),
    ]
)  # fmt: skip
"""One request. `blocks` ids start at `first_block` of the trace's id array; times in seconds."""

CLUSTER: Final = np.dtype(
    [
        ("block_tokens", "i8"), ("layer_wise", "i4"), ("token_bytes", "f8"), ("link_bytes_per_s", "f8"),
        ("link_latency_s", "f8"), ("host_bytes_per_s", "f8"), ("refuse_tbt_s", "f8"), ("notices", "i8"),
        ("lost", "i8"),
    ]
)  # fmt: skip
"""What is the same for all; `notices` written since the caller last set it to 0; `lost`: queue overflows."""

NOTICE: Final = np.dtype([("request", "i8"), ("state", "i8"), ("time", "f8")])
"""A request got its first token (state JOINING), finished, or was refused by its decode instance."""


class ClusterArrays(NamedTuple):
    """All state. n instances, r requests, u distinct blocks; `newer` and `older` end lists with u."""

    cluster: Records  # CLUSTER[1]
    instances: Records  # INSTANCE[n]
    requests: Records  # REQUEST[r]
    notices: Records  # NOTICE[2 r + 2]
    block_ids: I32  # int32[sum of blocks]
    newer: I32  # int32[n, u + 1]; ABSENT: not cached; column u: the oldest
    older: I32  # int32[n, u + 1]; column u: the newest
    prefill_queue: I32  # int32[n, q]
    join_queue: I32  # int32[n, q], by ready time
    running: I32  # int32[n, batch_max]
    segment_step: I64  # int64[n, s]: the first step of a stretch of equal batches
    segment_s: F64  # float64[n, s]: how long that step took
    segment_growth_s: F64  # float64[n, s]: how much longer each next one takes
