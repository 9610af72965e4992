"""Mooncake's transfer engine, driven by its Python API: tcp, or the shared-memory transport of 0.3.14.

The Python API cannot allocate memory that the shared-memory transport reaches; the C++ function that can is
exported by the extension module and is called by its mangled name (found with ``nm -D``). Only the passive
side needs it.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final

import numpy as np

from moonpool.bench.workers.driver import (
    Bytes,
    Call,
    PreparedCalls,
    Timing,
    address_of,
    anonymous_memory,
    starts_of,
)
from moonpool.bench.workers.protocol import Job, Operation

mooncake_engine: Any = importlib.import_module("mooncake.engine")  # only its own environment has it

HOST: Final = "127.0.0.1"
ALLOCATE_SHARED_MEMORY: Final = "_ZN8mooncake14TransferEngine20allocateSharedMemoryEm"


def start_engine() -> Any:
    engine = mooncake_engine.TransferEngine()
    code = engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        raise RuntimeError(f"mooncake's initialize returned {code}")
    return engine


def register(engine: Any, memory: Bytes) -> None:
    code = engine.register_memory(address_of(memory), memory.nbytes)
    if code != 0:
        raise RuntimeError(f"mooncake's register_memory returned {code}")


def shared_memory(engine: Any, size_bytes: int) -> Bytes:
    """Memory that a peer of the shared-memory transport can map; lives as long as the process."""
    allocate = getattr(ctypes.CDLL(mooncake_engine.__file__), ALLOCATE_SHARED_MEMORY)
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = allocate(engine.get_engine_ptr(), size_bytes)
    if not address:
        raise RuntimeError("mooncake's allocateSharedMemory returned no memory")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


class MooncakeTarget:
    def __init__(self, options: dict[str, str]) -> None:
        self._shared = options.get("transport") == "shm"
        self._engine = start_engine()

    def start(self, size_bytes: int) -> tuple[Bytes, dict[str, Any]]:
        memory = shared_memory(self._engine, size_bytes) if self._shared else anonymous_memory(size_bytes)
        register(self._engine, memory)
        endpoint = f"{HOST}:{self._engine.get_rpc_port()}"
        return memory, {"endpoint": endpoint, "address": address_of(memory)}


class MooncakeInitiator:
    def __init__(self, options: dict[str, str]) -> None:
        self._shared = options.get("transport") == "shm"
        self._engine = start_engine()
        self._prepared = PreparedCalls(self._prepare)

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        self._memory = anonymous_memory(size_bytes)
        if not self._shared:  # the shared-memory transport wants only the passive side's memory registered
            register(self._engine, self._memory)
        self._endpoint = str(target["endpoint"])
        self._remote = int(target["address"])
        return self._memory

    def run(self, job: Job) -> Timing:
        return self._prepared.run(job)

    def _prepare(self, operation: Operation, block_bytes: int, count: int, variant: str) -> Call:
        starts = starts_of(self._memory.nbytes, block_bytes, count)
        local = address_of(self._memory)
        if count == 1:
            return self._single(operation, block_bytes, starts, local)
        name = f"batch_transfer_sync_{operation}" + ("_arrays" if variant == "arrays" else "")
        transfer = getattr(self._engine, name)
        inside = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        sources: list[Any] = [inside + np.uint64(local + start) for start in starts]
        targets: list[Any] = [inside + np.uint64(self._remote + start) for start in starts]
        lengths: Any = np.full(count, block_bytes, dtype=np.uint64)
        if variant != "arrays":
            sources, targets = [row.tolist() for row in sources], [row.tolist() for row in targets]
            lengths = lengths.tolist()
        endpoint, positions = self._endpoint, len(starts)

        def call(index: int) -> None:
            position = index % positions
            code = transfer(endpoint, sources[position], targets[position], lengths)
            if code != 0:
                raise RuntimeError(f"mooncake's {name} returned {code}")

        return call

    def _single(self, operation: Operation, block_bytes: int, starts: list[int], local: int) -> Call:
        transfer = getattr(self._engine, f"transfer_sync_{operation}")
        endpoint, remote, positions = self._endpoint, self._remote, len(starts)

        def call(index: int) -> None:
            start = starts[index % positions]
            code = transfer(endpoint, local + start, remote + start, block_bytes)
            if code != 0:
                raise RuntimeError(f"mooncake's transfer_sync_{operation} returned {code}")

        return call


def make_target(options: dict[str, str]) -> MooncakeTarget:
    return MooncakeTarget(options)


def make_initiator(options: dict[str, str]) -> MooncakeInitiator:
    return MooncakeInitiator(options)
