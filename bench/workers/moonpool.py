"""Our engine, driven by its public Python API the way a user would.

Single blocks go through the synchronous ``read`` and ``write``, batches through one vectorised ``transfer``.
Buffers come from ``engine.allocate``. Option ``transport`` names the one transport allowed; variant
``digest`` asks for the digest of every transfer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from moonpool import Engine, EngineConfig, Op
from moonpool.bench.workers.driver import Bytes, Call, PreparedCalls, Timing, starts_of
from moonpool.bench.workers.protocol import Job, Operation

OPEN_TIMEOUT_S: Final = 10.0
DIGEST_VARIANT: Final = "digest"


def start_engine(options: dict[str, str]) -> Engine:
    return Engine(EngineConfig(transports=(options["transport"],)))


class MoonpoolTarget:
    def __init__(self, options: dict[str, str]) -> None:
        self._engine = start_engine(options)

    def start(self, size_bytes: int) -> tuple[Bytes, dict[str, Any]]:
        self._region = self._engine.allocate(size_bytes)
        memory = np.frombuffer(self._region.view, dtype=np.uint8)
        return memory, {"endpoint": self._engine.endpoint, "region": self._region.handle}


class MoonpoolInitiator:
    def __init__(self, options: dict[str, str]) -> None:
        self._engine = start_engine(options)
        self._prepared = PreparedCalls(self._prepare)

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        self._region = self._engine.allocate(size_bytes)
        self._segment = self._engine.open(target["endpoint"], timeout_s=OPEN_TIMEOUT_S)
        self._remote = int(target["region"])
        self._size_bytes = size_bytes
        return np.frombuffer(self._region.view, dtype=np.uint8)

    def run(self, job: Job) -> Timing:
        return self._prepared.run(job)

    def _prepare(self, operation: Operation, block_bytes: int, count: int, variant: str) -> Call:
        starts = starts_of(self._size_bytes, block_bytes, count)
        digest = variant == DIGEST_VARIANT
        if count == 1:
            return self._single(operation, block_bytes, starts, digest)
        transfer, segment, remote = self._engine.transfer, self._segment, self._remote
        op = Op.READ if operation == "read" else Op.WRITE
        inside = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        offsets = [inside + np.uint64(start) for start in starts]
        locals_ = [offset + np.uint64(self._region.address) for offset in offsets]
        positions = len(starts)

        def call(index: int) -> None:
            position = index % positions
            transfer(op, segment, locals_[position], remote, offsets[position], block_bytes, digest=digest)

        return call

    def _single(self, operation: Operation, block_bytes: int, starts: list[int], digest: bool) -> Call:
        move = self._engine.read if operation == "read" else self._engine.write
        segment, remote, local, positions = self._segment, self._remote, self._region.address, len(starts)

        def call(index: int) -> None:
            start = starts[index % positions]
            move(segment, remote, start, local + start, block_bytes)

        def call_with_digest(index: int) -> None:
            start = starts[index % positions]
            move(segment, remote, start, local + start, block_bytes, digest=True)

        return call_with_digest if digest else call


def make_target(options: dict[str, str]) -> MoonpoolTarget:
    return MoonpoolTarget(options)


def make_initiator(options: dict[str, str]) -> MoonpoolInitiator:
    return MoonpoolInitiator(options)
