"""Puts and gets through the store over the lab's fabrics or with payload in its devices; every byte compared.

    places.py --transports local,cxl,tcp [--on dax:/dev/dax0.0] [--location numa:1] [--expect cxl]

Master, node and client are this process (starting Python thrice takes long in there), each with an engine of
its own; `--expect` names the transport that must have carried the payload.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from contextlib import closing
from typing import Any

from tests.integration.pool_parts import open_master

import moonpool
from moonpool.config import EngineConfig
from moonpool.store.client import Pool
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig

SIZES = (1, 4_095, 65_536, 300_001)
WAIT_S = 120.0
PAGE = 4_096
#: The emulator is slow, and two cores are all there is.
PATIENCE: dict[str, Any] = {
    "transfer_timeout_ms": 120_000,
    "connect_timeout_ms": 60_000,
    "handshake_timeout_ms": 60_000,
    "stall_timeout_ms": 60_000,
    "rdma_timeout": 17,
    "rdma_retries": 5,
}


def block(size: int, seed: int) -> bytes:
    """Bytes that depend on the seed."""
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(size)


def open_node(address: str, arguments: argparse.Namespace, engine: EngineConfig) -> Node:
    """A node that has joined."""
    settings = {"backing": arguments.on, "location": arguments.location, "segment_bytes": arguments.bytes}
    node = Node(NodeConfig(addresses=(address,), name="lab", engine=engine, slot_bytes=16 * PAGE, **settings))
    node.start()
    if not node.wait_active(WAIT_S):
        raise SystemExit(f"the node did not join: {node.problem()}")
    return node


def exercise(pool: Pool) -> int:
    """Puts, reads by several ways, replaces, removes; how many bytes were compared."""
    compared = 0
    for seed, size in enumerate(SIZES):
        assert pool.put(f"k{seed}", block(size, seed)).stored, f"put of {size} bytes"
    for seed, size in enumerate(SIZES):
        room = bytearray(size)
        assert pool.get_into(f"k{seed}", room).hit
        assert room == block(size, seed), f"get_into of {size} bytes"
        compared += size
    for seed, value in enumerate(pool.get_many([f"k{seed}" for seed in range(len(SIZES))])):
        assert value is not None
        with value:
            assert bytes(value) == block(SIZES[seed], seed), f"get_many of {SIZES[seed]} bytes"
        compared += SIZES[seed]
    assert pool.upsert("k1", block(5_000, 99)).stored
    value = pool.get("k1")
    assert value is not None
    with value:
        assert bytes(value) == block(5_000, 99)
    pool.remove("k2")
    assert pool.get("k2") is None
    return compared


def carried(pool: Pool) -> dict[str, int]:
    """Bytes by transport."""
    found: dict[str, int] = {}
    for row in pool.metrics()["paths"]:
        found[row["transport"]] = found.get(row["transport"], 0) + row["bytes"]
    return found


def main() -> int:
    """0 when all was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default="")
    parser.add_argument("--location", default="cpu:0")
    parser.add_argument("--transports", required=True, type=lambda text: tuple(text.split(",")))
    parser.add_argument("--expect", default="")
    parser.add_argument("--bytes", type=int, default=8 << 20)
    arguments = parser.parse_args()
    began = time.monotonic()
    engine = EngineConfig(transports=arguments.transports, **PATIENCE)
    with (
        closing(open_master(suspect_ms=30_000, dead_ms=60_000)) as master,
        closing(open_node(master.addresses[0], arguments, engine)),
        closing(moonpool.connect(master.addresses[0], engine=engine, put_wait_ms=60_000)) as pool,
    ):
        compared = exercise(pool)
        by_transport = carried(pool)
    if arguments.expect and by_transport.get(arguments.expect, 0) < compared // 2:
        print(f"{arguments.expect} was to carry the payload: {by_transport}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - began
    print(json.dumps({"compared": compared, "bytes": by_transport, "seconds": round(seconds, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
