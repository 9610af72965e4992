"""What the processes of an endurance run do: targets, initiators, and the healthy pair beside them."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool import Engine, MoonpoolError, Op, Segment, Status
from moonpool.bench.endurance_children import Answers, observe, thread_names
from moonpool.bench.endurance_plan import (
    BOUNDS_MS,
    BULK_AT,
    BULK_COUNT,
    CHECKED_BYTES,
    DEADLINE_LONG_MS,
    DEADLINE_SHORT_MS,
    REGION_BYTES,
    STALL_MS,
)
from moonpool.engine.batch import Batch
from moonpool.units import MIB, MS_PER_S

HEALTHY_BYTES: Final = 1 * MIB
#: How often a condition of a peer is looked at.
_LOOK_S: Final = 0.002
_BULK_BYTES: Final = REGION_BYTES - BULK_AT


@final
@dataclass(frozen=True, slots=True)
class Names:
    """Where a target is: its port, its published name ("" without metadata), and where names are."""

    port: int
    name: str = ""
    metadata: str = "p2p"

    @property
    def endpoint(self) -> str:
        """ "host:port"."""
        return f"127.0.0.1:{self.port}"


def pattern_of(life: int) -> bytes:
    """What a target's checked bytes hold in its n-th life: older bytes are told from newer ones."""
    return bytes((life * 37 + place) & 0xFF for place in range(256)) * (CHECKED_BYTES // 256)


def _settings(way: str, patient: bool) -> dict[str, Any]:
    tcp_io = "io_uring" if way == "tcp-io_uring" else "auto"
    stall_ms = DEADLINE_LONG_MS if patient else STALL_MS
    return {
        "transports": ("shm",) if way == "shm" else ("tcp",),
        "tcp_io": tcp_io,
        "stall_timeout_ms": stall_ms,
        # Workers are started when all others are busy, up to one for each lane of a striped batch: with one
        # at the most, their number is the same before and after.
        "bulk_lanes_remote": 1,
    }


@final
class Seat:
    """An initiator's engine, its memory, and the target's segment, opened when it is needed."""

    def __init__(self, engine: Engine, target: str) -> None:
        self.engine = engine
        self.local = engine.allocate(REGION_BYTES)
        self._target = target
        self._opened: tuple[Segment, int] | None = None

    def open(self) -> tuple[Segment, int]:
        """The open segment and its region's handle."""
        if self._opened is None:
            segment = self.engine.open(self._target)
            self._opened = segment, segment.regions[0].handle
        return self._opened

    def close_segment(self) -> None:
        """Close the segment, if it is open."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self.engine.close_segment(opened[0])

    def path(self, transport: str) -> int:
        """The id of the segment's path of that transport."""
        return next(path.id for path in self.open()[0].paths if path.transport == transport)

    def begin(self, is_write: bool, deadline_ms: float, path: int | None = None) -> Batch:
        """Submit a batch that takes long."""
        from numpy import full, uint64

        segment, handle = self.open()
        op, timeout_s = (Op.WRITE if is_write else Op.READ), deadline_ms / MS_PER_S
        address = full(BULK_COUNT, self.local.address + BULK_AT, dtype=uint64)
        return self.engine.submit(
            op, segment, address, handle, BULK_AT, _BULK_BYTES, path=path, timeout_s=timeout_s
        )

    def check(self, life: int) -> None:
        """Read what the target's n-th life holds, write, read back; AssertionError for wrong bytes."""
        segment, handle = self.open()
        engine, view, address = self.engine, self.local.view, self.local.address
        engine.read(segment, handle, 0, address, CHECKED_BYTES)
        if view[:CHECKED_BYTES] != pattern_of(life):
            raise AssertionError(f"the bytes read are not those of life {life}")
        sent = os.urandom(CHECKED_BYTES)
        view[CHECKED_BYTES : 2 * CHECKED_BYTES] = sent
        engine.write(segment, handle, CHECKED_BYTES, address + CHECKED_BYTES, CHECKED_BYTES)
        engine.read(segment, handle, CHECKED_BYTES, address, CHECKED_BYTES)
        if view[:CHECKED_BYTES] != sent:
            raise AssertionError("the bytes read are not those just written")


def make_target(names: Names, life: int, transports: tuple[str, ...] = ("shm", "tcp")) -> Answers:
    """A target with one region; `life` is written into its checked bytes."""
    engine = Engine(transports=transports, name=names.name, port=names.port, metadata=names.metadata)
    engine.allocate(REGION_BYTES).view[:CHECKED_BYTES] = pattern_of(life)

    def sessions() -> int:
        found = engine.metrics()
        counters = found["counters"]
        opened = counters["control_sessions_opened"] - counters["control_sessions_closed"]
        return int(opened + found["gauges"]["lanes_open"])

    def wait_alone(within_s: float) -> bool:
        """Wait until no peer is connected; False when one still is."""
        started, pause = time.monotonic(), threading.Event()
        while sessions():
            if time.monotonic() - started > within_s:
                return False
            pause.wait(_LOOK_S)
        return True

    return {
        "endpoint": lambda: engine.endpoint,
        "wait_alone": wait_alone,
        "observe": observe,
        "thread_names": thread_names,
        "close": engine.close,
    }


def make_victim(target: Names, own: Names, life: int) -> Answers:
    """An initiator that is killed: it checks transfers first, then begins one that it will not end."""
    engine = Engine(transports=("shm", "tcp"), metadata=own.metadata, name=own.name, port=own.port)
    seat = Seat(engine, target.name or target.endpoint)

    def begin(way: str, is_write: bool) -> bool:
        path = seat.path("shm" if way == "shm" else "tcp")
        return not seat.begin(is_write, DEADLINE_LONG_MS, path).done

    return {"check": lambda: seat.check(life), "begin": begin, "close": engine.close}


@final
class Survivor:
    """The initiator under observation: its peers die, stop and come back while it lives.

    For each way it has an engine that waits long and one that gives up soon.
    """

    def __init__(self, target: Names, ways: tuple[str, ...]) -> None:
        self._target = target
        self._pause = threading.Event()
        self._seats = {(way, patient): self._seat(way, patient) for way in ways for patient in (False, True)}

    def _seat(self, way: str, patient: bool) -> Seat:
        # One way takes the address, the others the published name: a restart must serve both.
        if way == "tcp" or not self._target.name:
            return Seat(Engine(**_settings(way, patient)), self._target.endpoint)
        engine = Engine(**_settings(way, patient), metadata=self._target.metadata)
        return Seat(engine, self._target.name)

    def answers(self) -> Answers:
        """What the parent may ask."""
        return {
            "kill": self.kill,
            "stop": self.stop,
            "pause": self.pause,
            "again": self.again,
            "clean": self.clean,
            "settle": self.settle,
            "observe": observe,
            "thread_names": thread_names,
            "close": self.close,
        }

    def kill(self, pid: int, way: str, is_write: bool, delay_ms: float) -> dict[str, Any]:
        """kill -9 the target under a batch; then close every segment of it."""
        batch = self._seats[way, True].begin(is_write, DEADLINE_LONG_MS)
        self._pause.wait(delay_ms / MS_PER_S)
        hit, started = not batch.done, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        batch.wait(DEADLINE_LONG_MS / MS_PER_S)
        ended = time.monotonic()
        self.settle()
        closed = time.monotonic()
        return {
            "hit": hit,
            "status": _status(batch),
            "ended_ms": (ended - started) * MS_PER_S,
            "closed_ms": (closed - ended) * MS_PER_S,
        }

    def stop(self, pid: int, way: str, is_write: bool, delay_ms: float, is_stall: bool) -> dict[str, Any]:
        """SIGSTOP the target under a batch whose deadline, or stall time, passes; then SIGCONT.

        `late_ms` is how long after that moment the batch ended.
        """
        deadline_ms = DEADLINE_LONG_MS if is_stall else DEADLINE_SHORT_MS
        submitted = time.monotonic()
        batch = self._seats[way, False].begin(is_write, deadline_ms)
        self._pause.wait(delay_ms / MS_PER_S)
        hit, stopped = not batch.done, time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            batch.wait(DEADLINE_LONG_MS / MS_PER_S)
            ended = time.monotonic()
        finally:
            os.kill(pid, signal.SIGCONT)
        due = stopped + STALL_MS / MS_PER_S if is_stall else submitted + deadline_ms / MS_PER_S
        return {"hit": hit, "status": _status(batch), "late_ms": (ended - due) * MS_PER_S}

    def pause(self, pid: int, way: str, is_write: bool, delay_ms: float, stop_ms: float) -> dict[str, Any]:
        """SIGSTOP and SIGCONT under a batch whose deadline outlives both; `ended_ms` counts from SIGCONT."""
        batch = self._seats[way, True].begin(is_write, DEADLINE_LONG_MS)
        self._pause.wait(delay_ms / MS_PER_S)
        hit = not batch.done
        os.kill(pid, signal.SIGSTOP)
        try:
            self._pause.wait(stop_ms / MS_PER_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        continued = time.monotonic()
        batch.wait(DEADLINE_LONG_MS / MS_PER_S)
        return {
            "hit": hit,
            "status": _status(batch),
            "ended_ms": (time.monotonic() - continued) * MS_PER_S,
        }

    def again(self, way: str, patient: bool, life: int) -> dict[str, Any]:
        """Read and write checked bytes of the target's present life; an error reopens the segment."""
        started, attempts = time.monotonic(), 0
        bound_s = BOUNDS_MS["transfers work again"] / MS_PER_S
        while True:
            attempts += 1
            try:
                self._seats[way, patient].check(life)
                break
            except MoonpoolError:
                if time.monotonic() - started > bound_s:
                    raise
                self._seats[way, patient].close_segment()
        return {"ended_ms": (time.monotonic() - started) * MS_PER_S, "attempts": attempts}

    def clean(self, way: str, life: int) -> float:
        """A whole engine's life: made, opened, used, closed. Milliseconds."""
        started = time.monotonic()
        seat = self._seat(way, patient=True)
        try:
            seat.check(life)
            seat.close_segment()
        finally:
            seat.engine.close()
        return (time.monotonic() - started) * MS_PER_S

    def settle(self) -> None:
        """Close every segment."""
        for seat in self._seats.values():
            seat.close_segment()

    def close(self) -> None:
        """Close every engine."""
        for seat in self._seats.values():
            seat.engine.close()


def _status(batch: Batch) -> str:
    return Status(batch.native.worst).name if batch.done else Status.PENDING.name


def make_healthy_initiator(endpoint: str, way: str) -> Answers:
    """The initiator of the healthy pair: 1 MiB READs, one after another, in windows."""
    engine = Engine(transports=(way,))
    segment = engine.open(endpoint)
    handle = segment.regions[0].handle
    local = engine.allocate(HEALTHY_BYTES)

    def window(duration_s: float) -> dict[str, float]:
        """Bytes moved in about `duration_s`, and the seconds it was."""
        started, count = time.monotonic(), 0
        while (elapsed_s := time.monotonic() - started) < duration_s:
            engine.read(segment, handle, count % 15 * HEALTHY_BYTES, local.address, HEALTHY_BYTES)
            count += 1
        return {"bytes": count * HEALTHY_BYTES, "seconds": elapsed_s}

    return {"window": window, "close": engine.close}
