"""What a user writes to move bytes: mypy must accept this, and refuse the marked lines."""

from __future__ import annotations

from typing import assert_type

import numpy as np

from moonpool import Access, Batch, Engine, EngineConfig, Op, Region, Segment, Status, TransferTimeout


def offer(config: EngineConfig) -> None:
    with Engine(config, port=7420) as engine:
        region = engine.allocate(1 << 20, access=Access.READ, location="cpu:1")
        assert_type(region, Region)
        assert_type(region.view, memoryview)
        assert_type(region.handle, int)
        foreign = engine.register(np.zeros(64, dtype=np.float32), access=Access.READ_WRITE)
        assert_type(engine.regions, list[Region])
        for note in engine.notifications(16, timeout_s=1.0):
            assert_type(note.message, bytes)
            assert_type(note.number, int)
        engine.revoke(foreign)
        engine.revoke(region.handle)


def move(engine: Engine, name: str) -> list[int]:
    segment = engine.open(name, timeout_s=3.0)
    assert_type(segment, Segment)
    remote = segment.regions[0]
    assert_type(remote.access, Access)
    into = bytearray(64)
    assert_type(engine.read(segment, remote.handle, 0, into), list[int] | None)
    engine.write(segment.handle, remote.handle, 0, b"constant")
    mine = engine.allocate(1 << 16)
    engine.read(segment, remote.handle, 0, mine.address, 4096, digest=True, timeout_s=0.5)
    places = np.arange(16, dtype=np.uint64) * np.uint64(4096)
    batch = engine.transfer(
        Op.READ, segment, places + np.uint64(mine.address), remote.handle, places, 4096, check=False
    )
    assert_type(batch, Batch)
    assert_type(batch.status, memoryview)
    assert_type(batch.digests, list[list[int]] | None)
    assert_type(batch.ok, bool)
    engine.flush(segment)
    engine.notify(segment, b"done")
    assert_type(engine.refresh(segment), Segment)
    return [index for index, status in enumerate(batch.status) if status != Status.COMPLETE]


async def move_later(engine: Engine, segment: Segment, region: Region) -> int:
    batch = engine.submit(Op.WRITE, segment, region.address, 1 << 32, 0, region.size_bytes, notify=b"written")
    assert_type(batch, Batch)
    try:
        assert_type(await batch, Batch)
    except TransferTimeout:
        assert_type(batch.cancel(), bool)
    assert_type(batch.wait(0.1), bool)
    assert_type(batch.result(), Batch)
    return batch.bytes_done


def mistakes(engine: Engine, segment: Segment) -> None:
    engine.allocate("1 MiB")  # E: arg-type
    engine.allocate(1 << 20, Access.READ)  # E: misc
    engine.open(7420)  # E: arg-type
    engine.read(segment, "region", 0, bytearray(8))  # E: arg-type
    engine.read(segment, 1 << 32, 0)  # E: call-arg
    engine.read(segment, 1 << 32, 0, bytearray(8), deadline=1)  # E: call-arg
    engine.transfer("READ", segment, 0, 0, 0, 0)  # E: arg-type
    engine.notify(segment, "text")  # E: arg-type
    segment.region("first")  # E: arg-type
    segment.endpoint = "elsewhere:1"  # E: misc
    Batch()  # E: call-arg
