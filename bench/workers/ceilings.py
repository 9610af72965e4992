"""The bare C ceilings: a TCP socket pair, and copies through memory that two processes map.

Timing happens in C; Python only hands over the job. Option ``program`` is ``socket`` or ``copy``; a job's
variant picks ``blocking`` or ``spinning`` receivers, or one of the copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from moonpool.bench.ceiling import JobStructure, OutcomeStructure, compile_ceiling
from moonpool.bench.workers.driver import Bytes, Timing, address_of, anonymous_memory
from moonpool.bench.workers.protocol import Job

SPIN_NS: Final = 50_000  # longer than the wake-up of a halted CPU that it saves
SOCKET_OPERATIONS: Final = {"read": 1, "write": 2}
COPY_VARIANTS: Final = {"memcpy": 0, "avx2-nt": 1, "avx512-nt": 2}


def load(name: str, options: dict[str, str]) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_ceiling(name, Path(options["directory"]))))


def check(code: int, what: str) -> int:
    if code < 0:
        raise OSError(-code, f"{what}: {os.strerror(-code)}")
    return code


def structure_of(job: Job, kind: int, span_bytes: int, spin_ns: int = 0) -> JobStructure:
    return JobStructure(
        kind=kind,
        count=job.count,
        block_bytes=job.block_bytes,
        span_bytes=span_bytes,
        spin_ns=spin_ns,
        minimum_ns=int(job.minimum_s * 1e9),
        minimum_operations=job.minimum_operations,
        maximum_operations=job.maximum_operations,
    )


def timing_of(outcome: OutcomeStructure, latencies: np.ndarray[Any, np.dtype[np.uint64]]) -> Timing:
    measured = latencies[: outcome.operations].tolist()
    return Timing(operations=outcome.operations, elapsed_s=outcome.elapsed_ns / 1e9, latencies_ns=measured)


class SocketTarget:
    """Two listeners, one for each way to wait; each serves one connection in a thread of its own."""

    def __init__(self, options: dict[str, str]) -> None:
        self._library = load("socket_pair", options)

    def start(self, size_bytes: int) -> tuple[Bytes, dict[str, Any]]:
        memory = anonymous_memory(size_bytes)
        ports: dict[str, int] = {}
        for way, spin_ns in (("blocking", 0), ("spinning", SPIN_NS)):
            port = ctypes.c_uint16()
            listener = check(
                self._library.socket_listen(ctypes.byref(port)), "listening on the loopback address"
            )
            arguments = (
                listener,
                ctypes.c_void_p(address_of(memory)),
                ctypes.c_uint64(size_bytes),
                ctypes.c_uint64(spin_ns),
            )
            threading.Thread(target=self._library.socket_serve, args=arguments, daemon=True).start()
            ports[way] = port.value
        return memory, {"ports": ports}


class SocketInitiator:
    def __init__(self, options: dict[str, str]) -> None:
        self._library = load("socket_pair", options)

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        self._memory = anonymous_memory(size_bytes)
        self._connections = {
            way: check(self._library.socket_connect(ctypes.c_uint16(port)), "connecting to the target")
            for way, port in target["ports"].items()
        }
        return self._memory

    def run(self, job: Job) -> Timing:
        latencies = np.full(job.maximum_operations, 0, dtype=np.uint64)  # every page present
        outcome = OutcomeStructure()
        spin_ns = SPIN_NS if job.variant == "spinning" else 0
        structure = structure_of(job, SOCKET_OPERATIONS[job.operation], self._memory.nbytes, spin_ns)
        code = self._library.socket_run(
            self._connections[job.variant],
            ctypes.byref(structure),
            ctypes.c_void_p(address_of(self._memory)),
            ctypes.c_void_p(latencies.ctypes.data),
            ctypes.byref(outcome),
        )
        check(code, "moving bytes over the socket pair")
        return timing_of(outcome, latencies)


class CopyTarget:
    """Owns the shared memory; the copies happen in the initiator."""

    def start(self, size_bytes: int) -> tuple[Bytes, dict[str, Any]]:
        self._fd = os.memfd_create("moonpool-ceiling")
        os.ftruncate(self._fd, size_bytes)
        memory = np.frombuffer(mmap.mmap(self._fd, size_bytes), dtype=np.uint8)
        memory[:] = 0
        return memory, {"pid": os.getpid(), "fd": self._fd}


class CopyInitiator:
    def __init__(self, options: dict[str, str]) -> None:
        self._library = load("copy_loop", options)

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        self._memory = anonymous_memory(size_bytes)
        fd = os.open(f"/proc/{target['pid']}/fd/{target['fd']}", os.O_RDWR)
        try:
            self._shared = np.frombuffer(mmap.mmap(fd, size_bytes), dtype=np.uint8)
        finally:
            os.close(fd)
        every_page = self._shared[::4096]
        every_page |= 0  # map all of them, writable, before anything is timed
        return self._memory

    def run(self, job: Job) -> Timing:
        variant = COPY_VARIANTS[job.variant]
        if not self._library.copy_supported(ctypes.c_uint32(variant)):
            raise RuntimeError(f"this CPU has no {job.variant} copy")
        latencies = np.full(job.maximum_operations, 0, dtype=np.uint64)  # every page present
        outcome = OutcomeStructure()
        structure = structure_of(job, variant, self._memory.nbytes)
        source, destination = self._memory, self._shared
        if job.operation == "read":
            source, destination = destination, source
        code = self._library.copy_run(
            ctypes.byref(structure),
            ctypes.c_void_p(address_of(destination)),
            ctypes.c_void_p(address_of(source)),
            ctypes.c_void_p(latencies.ctypes.data),
            ctypes.byref(outcome),
        )
        check(code, "copying through the shared mapping")
        return timing_of(outcome, latencies)


def make_target(options: dict[str, str]) -> SocketTarget | CopyTarget:
    return SocketTarget(options) if options["program"] == "socket" else CopyTarget()


def make_initiator(options: dict[str, str]) -> SocketInitiator | CopyInitiator:
    return SocketInitiator(options) if options["program"] == "socket" else CopyInitiator(options)
