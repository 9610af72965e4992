"""Blocks of 4,096 bytes on a real kernel, by both ways: every alignment, neighbours untouched."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from nvme_target import NQN, large_blocks, wait_until

from moonpool import Engine
from moonpool.transport.nvme_fabrics import Attached
from moonpool.transport.nvme_sysfs import Namespace, read_subsystems

SIZE = 200_001


def large_namespaces() -> list[Namespace]:
    return [
        one
        for subsystem in read_subsystems()
        for one in subsystem.namespaces
        if subsystem.nqn == NQN and one.block_bytes == 4096
    ]


@pytest.mark.parametrize("passthrough", ["yes", "no"])
def test_large_blocks(attached: Attached, passthrough: str) -> None:
    assert attached.controller.is_live
    chance = random.Random(4096)
    with large_blocks(8 << 20):
        wait_until(lambda: bool(large_namespaces()), "the second namespace comes")
        (namespace,) = large_namespaces()
        with (
            Engine(transports=("nvmeof",), nvmeof_passthrough=passthrough) as initiator,
            Engine(transports=("nvmeof", "tcp"), nvmeof_passthrough=passthrough) as owner,
        ):
            region = owner.offer(f"nvme:{namespace.wwid}", SIZE, offset=1 << 20, fua=True)
            segment = initiator.open(owner.endpoint)
            shadow = bytearray(os.urandom(SIZE))
            initiator.write(segment, region.handle, 0, bytes(shadow), timeout_s=60)
            for _ in range(12):
                size = chance.choice([1, 511, 4096, 5000, 40_000])
                offset = chance.randrange(SIZE - size)
                data = chance.randbytes(size)
                initiator.write(segment, region.handle, offset, data, timeout_s=60)
                shadow[offset : offset + size] = data
                out = bytearray(9_000)
                start = chance.randrange(SIZE - len(out))
                initiator.read(segment, region.handle, start, out, timeout_s=60)
                assert out == shadow[start : start + len(out)]
            out = bytearray(SIZE)
            own = owner.open(owner.endpoint)
            owner.read(own, region.handle, 0, out, timeout_s=60)
            assert out == shadow
            initiator.flush(segment)
    wait_until(lambda: not large_namespaces(), "the second namespace goes")
