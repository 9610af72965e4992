"""What the rpc costs: codecs of the hot methods, and a round trip to another process through Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from moonpool.native.io import rpc_frames
from moonpool.rpc.client import RpcClient

PEER = Path(__file__).parents[1] / "integration" / "rpc_peer.py"
WAIT_S = 20.0
KEYS = [f"key-{number:022d}" for number in range(500)]
FOUND = [[number + 1, 4_096, bytes(16), 1, [[1, 4_096 * number, number]]] for number in range(500)]


def measure(benchmark: Any, call: Callable[[], Any], iterations: int = 20) -> Any:
    """A bounded number of rounds, so that the suite stays short."""
    return benchmark.pedantic(call, rounds=30, iterations=iterations, warmup_rounds=1)


@pytest.mark.parametrize("count", [1, 500])
def test_encode_lookup(benchmark: Any, count: int) -> None:
    keys = KEYS[:count]
    frame = measure(benchmark, lambda: rpc_frames.lookup_frame(7, keys, 0))
    assert len(frame) > 27 * count


@pytest.mark.parametrize("count", [1, 500])
def test_decode_lookup(benchmark: Any, count: int) -> None:
    body = msgpack.packb([1, 2, FOUND[:count]])
    reply = measure(benchmark, lambda: rpc_frames.lookup_result(body, count))
    assert reply.entry(count - 1)[0] == count


@pytest.fixture(scope="module", params=["tcp", "unix"])
def client(request: pytest.FixtureRequest) -> Iterator[RpcClient]:
    name = f"@moonpool-perf-{os.getpid()}-{os.urandom(6).hex()}"
    told = json.dumps({"endpoints": ["127.0.0.1:0" if request.param == "tcp" else name]})
    process = subprocess.Popen(
        [sys.executable, PEER, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        with RpcClient(json.loads(process.stdout.readline())[0]) as made:
            yield made
    finally:
        process.communicate(timeout=WAIT_S)


def test_round_trip_through_python(benchmark: Any, client: RpcClient) -> None:
    assert measure(benchmark, lambda: client.call("echo", [1])) == [1]
