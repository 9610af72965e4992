"""Entry of a worker process: ``main --driver NAME [--option KEY=VALUE]... [--cubic]``.

The initiator starts its target as a child (same arguments and ``--role target``), connects, and then answers
requests (protocol.py). With ``--cubic`` both live in a network namespace of their own whose default
congestion control is cubic: the way to give it to a system that has no setting for it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, Final, TextIO

import numpy as np

from moonpool.bench.workers.driver import (
    Bytes,
    Initiator,
    Target,
    Timing,
    pattern,
    take_pages_as_they_come,
)
from moonpool.bench.workers.protocol import Job, JobReport, Operation, Ready, decode, encode

DRIVERS: Final = {
    "moonpool": "moonpool.bench.workers.moonpool",
    "mooncake": "moonpool.bench.workers.mooncake",
    "nixl": "moonpool.bench.workers.nixl",
    "ceilings": "moonpool.bench.workers.ceilings",
}
TARGET_SEED: Final = 7
WRITE_SEED: Final = 11
COMMAND_TIMEOUT_S: Final = 10
NEW_NETWORK_NAMESPACE: Final = 0x40000000  # CLONE_NEWNET, sched.h
SET_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG, sys/prctl.h
LOOPBACK_ROUTES: Final = ("127.0.0.0/8", "127.0.0.1")


def enter_cubic_namespace() -> None:
    """Moves this process, before it has threads, into a network namespace whose loopback routes say cubic.

    Routes and not the sysctl: the kernel lets a namespace choose only among the system's unrestricted
    controls.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(NEW_NETWORK_NAMESPACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"a network namespace of its own (needs root): {os.strerror(code)}")
    commands = [["ip", "link", "set", "lo", "up"]]
    for route in LOOPBACK_ROUTES:
        where = ["dev", "lo", "proto", "kernel", "scope", "host", "src", "127.0.0.1", "table", "local"]
        commands.append(["ip", "route", "replace", "local", route, *where, "congctl", "cubic"])
    for command in commands:
        subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it ends, also while it is stopped."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def claim_standard_output() -> TextIO:
    """A stream for the protocol alone: what libraries print to standard output goes to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, ns resolution (clock id as in the kernel's posix-timers.h)."""
    return time.clock_gettime((~pid << 3) | 2)


def percentile_us(ordered_ns: list[int], fraction: float) -> float:
    return ordered_ns[min(len(ordered_ns) - 1, int(len(ordered_ns) * fraction))] / 1e3


def serve_target(target: Target, size_bytes: int, stream: TextIO) -> None:
    memory, information = target.start(size_bytes)
    memory[:] = pattern(size_bytes, TARGET_SEED)
    stream.write(json.dumps({**information, "target_pid": os.getpid()}) + "\n")
    stream.flush()
    while sys.stdin.readline():
        pass


def start_target(arguments: list[str]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, *sys.orig_argv[1 : -len(arguments)], *arguments, "--role", "target"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"the target process ended with code {child.wait()} before it was ready")
    return child, json.loads(line)


class Worker:
    """The initiator's side of one contender and its requests."""

    def __init__(self, initiator: Initiator, memory: Bytes, target_pid: int) -> None:
        self._initiator = initiator
        self._memory = memory
        self._target_pid = target_pid

    def run(self, job: Job) -> JobReport:
        self._initiator.run(replace(job, minimum_s=job.warmup_s, minimum_operations=1))
        own, other = cpu_seconds(os.getpid()), cpu_seconds(self._target_pid)
        timing = self._initiator.run(job)
        own, other = cpu_seconds(os.getpid()) - own, cpu_seconds(self._target_pid) - other
        ordered = sorted(timing.latencies_ns)
        return JobReport(
            operations=timing.operations,
            transferred_bytes=timing.operations * job.operation_bytes,
            elapsed_s=timing.elapsed_s,
            p50_us=percentile_us(ordered, 0.5),
            p99_us=percentile_us(ordered, 0.99),
            initiator_cpu_s=own,
            target_cpu_s=other,
        )

    def check(self, block_bytes: int, count: int, variant: str) -> int:
        """Moves patterns both ways and compares every byte; returns how many. Raises when one differs."""
        length = block_bytes * count
        fresh = pattern(length, TARGET_SEED)  # the beginning of the target's
        written = pattern(length, WRITE_SEED)
        for expected, source in ((fresh, "the target's own bytes"), (written, "the bytes written before")):
            if expected is written:
                self._memory[:length] = written
                self._once("write", block_bytes, count, variant)
            self._memory[:length] = 0
            self._once("read", block_bytes, count, variant)
            wrong = np.flatnonzero(self._memory[:length] != expected)
            if wrong.size:
                raise RuntimeError(f"read of {length} bytes: byte {wrong[0]} is not of {source}")
        self._memory[:length] = fresh
        self._once("write", block_bytes, count, variant)
        return length

    def _once(self, operation: Operation, block_bytes: int, count: int, variant: str) -> Timing:
        job = Job(
            operation=operation,
            block_bytes=block_bytes,
            count=count,
            minimum_s=0.0,
            minimum_operations=1,
            maximum_operations=1,
            variant=variant,
        )
        return self._initiator.run(job)

    def answer(self, line: str) -> str:
        try:
            kind, value = decode(line)
            if kind == "job":
                return encode("report", self.run(Job(**value)))
            return encode("checked", self.check(value["block_bytes"], value["count"], value["variant"]))
        except Exception as failure:  # the process boundary: the harness decides what a failure means
            return encode("error", f"{type(failure).__name__}: {failure}")


def serve_initiator(initiator: Initiator, arguments: list[str], size_bytes: int, stream: TextIO) -> None:
    child, information = start_target(arguments)
    try:
        memory = initiator.start(size_bytes, information)
        worker = Worker(initiator, memory, child.pid)
        stream.write(encode("ready", Ready(initiator_pid=os.getpid(), target_pid=child.pid)))
        stream.flush()
        for line in sys.stdin:
            stream.write(worker.answer(line))
            stream.flush()
    finally:
        child.kill()
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", required=True, choices=sorted(DRIVERS))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--cubic", action="store_true")
    parser.add_argument("--role", choices=("initiator", "target"), default="initiator")
    chosen = parser.parse_args()
    die_with_parent()
    stream = claim_standard_output()
    if chosen.cubic and chosen.role == "initiator":
        enter_cubic_namespace()  # the target is a child and inherits it
    driver = importlib.import_module(DRIVERS[chosen.driver])
    options = dict(item.split("=", 1) for item in chosen.option)
    if options.pop("pages", "") == "4k":
        take_pages_as_they_come()
    if chosen.role == "target":
        serve_target(driver.make_target(options), chosen.size_bytes, stream)
    else:
        serve_initiator(driver.make_initiator(options), sys.argv[1:], chosen.size_bytes, stream)
    stream.flush()
    os._exit(0)  # a peer's static destructors may wait for threads that never end


if __name__ == "__main__":
    main()
