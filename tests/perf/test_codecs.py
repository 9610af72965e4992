"""Micro-benchmarks of what runs once a batch or once a frame: codecs, striping, the bench's own bookkeeping.

They assert that the result is right and print what it costs; no time is asserted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.bench.interval import bootstrap_median
from moonpool.bench.latency import CHUNK, LatencyRecorder
from moonpool.errors import Status
from moonpool.kernels import striping
from moonpool.native.io import copying
from moonpool.units import KIB, MIB
from moonpool.wire import control, transfer

ENTRIES = tuple(
    transfer.Entry(region=1 << 32 | 7, offset=i * 4096, length=4096, key=bytes(16)) for i in range(128)
)
GROUP = transfer.GroupHeader(op=transfer.LaneOp.READ, count=128, group_id=9, payload_bytes=128 * 4096)
ROUNDS = 20


def measure(benchmark: Any, call: Callable[[], Any], iterations: int = 10) -> Any:
    """A bounded number of rounds, so that the suite stays short."""
    return benchmark.pedantic(call, rounds=ROUNDS, iterations=iterations, warmup_rounds=1)


def test_encode_a_group_of_128(benchmark: Any) -> None:
    frame = measure(benchmark, lambda: transfer.encode_group(GROUP, ENTRIES))
    assert len(frame) == transfer.HEADER_BYTES + 128 * transfer.ENTRY_BYTES


def test_decode_a_group_of_128(benchmark: Any) -> None:
    frame = transfer.encode_group(GROUP, ENTRIES)

    def decode() -> Any:
        header = transfer.decode_group_header(frame[: transfer.HEADER_BYTES])
        return transfer.decode_entries(header, frame[transfer.HEADER_BYTES :])

    assert measure(benchmark, decode) == ENTRIES


def test_decode_a_reply(benchmark: Any) -> None:
    reply = transfer.encode_reply(transfer.reply_to(GROUP, [Status.COMPLETE] * 128))
    header = measure(benchmark, lambda: transfer.decode_reply_header(reply), iterations=100)
    assert header.payload_bytes == GROUP.payload_bytes


def test_encode_a_control_request(benchmark: Any) -> None:
    request = control.RequestMessage(7, "map", {"handle": 1 << 32 | 3, "access": 3})
    assert b"map" in measure(benchmark, lambda: control.encode_message(request), iterations=100)


@pytest.mark.parametrize("paths", [1, 4])
def test_stripe_a_batch_of_1024(benchmark: Any, paths: int) -> None:
    count = 1024
    each = np.arange(count, dtype=np.uint64) * np.uint64(64 * KIB)
    lengths = np.full(count, 64 * KIB, dtype=np.uint64)
    slices = measure(benchmark, lambda: striping.stripe_evenly(each, each, lengths, paths))
    assert int(slices.length.sum()) == count * 64 * KIB


@pytest.mark.parametrize("digest", [False, True], ids=["copy", "copy-and-digest"])
@pytest.mark.parametrize("size_bytes", [4 * KIB, 1 * MIB])
def test_copy(benchmark: Any, size_bytes: int, digest: bool) -> None:
    source, target = os.urandom(size_bytes), bytearray(size_bytes)
    digests = measure(benchmark, lambda: copying.copy_buffer(target, source, digest=digest))
    assert target == source
    assert digests == (copying.chunk_digests(source) if digest else None)


def test_record_latencies(benchmark: Any) -> None:
    recorder = LatencyRecorder()
    values = list(range(1000, 1000 + CHUNK))
    measure(benchmark, lambda: recorder.extend(values), iterations=1)
    assert recorder.operations in (CHUNK, (ROUNDS + 1) * CHUNK)  # once where nothing is measured


def test_bootstrap_of_fifteen_rounds(benchmark: Any) -> None:
    values = np.random.default_rng(1).normal(4.0, 0.5, 15).tolist()
    seen = measure(benchmark, lambda: bootstrap_median(values), iterations=1)
    assert seen.low <= seen.median <= seen.high
