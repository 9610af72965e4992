"""A station runs late-bytes cases one after another: two engines, the proxy between them, one destination.

The target's memory, the destination and the initiator's settings stay; each case gets a part of the
destination of its own, and all parts are looked at again when the group is full.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any, Final, final

from moonpool import Engine, MoonpoolError, Op, Segment, Status
from moonpool.bench.fault_proxy import FaultProxy
from moonpool.bench.late_bytes_cases import FILL, Case, Ledger, Tally, WayPlan, draw_case, gaps_of
from moonpool.engine.batch import END_BOUND_S, Batch
from moonpool.errors import status_of
from moonpool.native.io.copying import chunk_digests
from moonpool.units import KIB, MS_PER_S

#: The longest a case's READ may run when nothing ends it sooner.
TRANSFER_BOUND_S: Final = 20.0
DRAIN_BOUND_S: Final = 10.0
COMPANION_BYTES: Final = 96 * KIB
#: Ends that this program brings about; PEER_GONE besides, where the proxy cuts.
_EXPECTED: Final = frozenset({Status.COMPLETE, Status.TIMED_OUT, Status.CANCELLED})


@final
class Station:
    """Owns its engines and its proxy; use as a context manager, on one thread. `tally` is its result.

    `ledger` watches the destination.
    """

    def __init__(self, way: WayPlan, seed: str) -> None:
        self.way = way
        self.tally = Tally()
        self._seed = seed
        self._stack = contextlib.ExitStack()
        self._pause = threading.Event()
        self._content = random.Random(seed).randbytes(way.slot_bytes)
        with contextlib.ExitStack() as made:
            self._open(made)
            self._stack = made.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        way = self.way
        bounds: dict[str, Any] = {"close_timeout_ms": 10_000, "handshake_timeout_ms": 10_000}
        self._target = stack.enter_context(Engine(transports=("shm", "tcp"), tcp_io=way.tcp_io, **bounds))
        if way.foreign:
            self._target.register(bytearray(self._content))
        else:
            self._target.allocate(way.slot_bytes).view[: way.slot_bytes] = self._content
        self._proxy: FaultProxy | None = None
        if way.transport == "tcp":
            self._proxy = stack.enter_context(FaultProxy(self._target.endpoint))
        initiator = Engine(transports=(way.transport,), tcp_io=way.tcp_io, **bounds)
        self._initiator = stack.enter_context(initiator)
        pool = initiator.allocate(way.slot_bytes * way.group_cases)
        self._address = pool.address
        self.ledger = Ledger(pool.view, way.slot_bytes)
        self._companion = initiator.allocate(COMPANION_BYTES)
        self._segment = self._open_segment()

    def _open_segment(self) -> Segment:
        segment = self._initiator.open(self._proxy.endpoint if self._proxy else self._target.endpoint)
        assert segment.paths[0].transport == self.way.transport
        self._region = segment.regions[0].handle
        return segment

    def __enter__(self) -> Station:
        return self

    def __exit__(self, *_problem: object) -> None:
        self._stack.close()

    def run(self, first: int, count: int) -> None:
        """Cases `first` to `first + count - 1` of this station, and the last look at their destinations."""
        for number in range(first, first + count):
            slot = (number - first) % self.way.group_cases
            if slot == 0 and number > first:
                self.end_group()
            self.run_case(number, slot)
        self.end_group()

    def end_group(self) -> None:
        """The last look at the slots of a group; then they may be used again."""
        for slot in self.ledger.changed():
            self.tally.violate(f"{self._seed}, slot {slot} of a group: changed before the group's end")
        self.ledger.forget()
        self.tally.checks += 1

    def run_case(self, number: int, slot: int) -> None:
        """One case in one slot of the destination."""
        name = f"{self._seed}:{number}"
        case = draw_case(name, self.way)
        view = self.ledger.slot(slot)
        view[:] = bytes((FILL,)) * len(view)
        if not self._segment.peer.alive:
            self._initiator.close_segment(self._segment)
            self._segment = self._open_segment()
            self.tally.reopened += 1
        if case.is_warm:
            self._initiator.read(self._segment, self._region, 0, self._companion.address, 1)
        if self._proxy is not None:
            self._proxy.set_fault(case.fault)
        companion = self._begin_companion() if case.has_companion else None
        statuses, late_ms = self._end_early(case, self._address + slot * self.way.slot_bytes)
        self.ledger.remember(slot)
        self._count(case, statuses, late_ms)
        self._check_content(name, case, statuses, view)
        self._deliver_late(name)
        if companion is not None:
            self._end_companion(name, case, companion)
        if not self.ledger.is_unchanged(slot):
            self.tally.violate(f"{name}: {case} changed after it had ended as {statuses}")
        self.tally.checks += 2

    def _end_early(self, case: Case, address: int) -> tuple[list[Status], float]:
        """Runs the READ to its early end; statuses by piece, and how long after the wanted moment it came."""
        started, wait_s = time.monotonic(), case.wait_ms / MS_PER_S
        if case.ending == "read":
            piece = case.pieces[0]
            statuses = [Status.COMPLETE]
            try:
                self._initiator.read(
                    self._segment,
                    self._region,
                    piece.offset,
                    address + piece.at,
                    piece.length,
                    timeout_s=wait_s,
                )
            except MoonpoolError as problem:
                statuses = [status_of(problem)]
        else:
            statuses = [Status(one) for one in self._end_batch(case, address).status]
        return statuses, (time.monotonic() - started - wait_s) * MS_PER_S

    def _end_batch(self, case: Case, address: int) -> Batch:
        # Arrays are made here only: numpy has no part in the rest of this program.
        from numpy import array, uint64

        local = array([address + piece.at for piece in case.pieces], dtype=uint64)
        offset = array([piece.offset for piece in case.pieces], dtype=uint64)
        length = array([piece.length for piece in case.pieces], dtype=uint64)
        what = (Op.READ, self._segment, local, self._region, offset, length)
        wait_s = case.wait_ms / MS_PER_S
        if case.ending == "transfer":
            return self._initiator.transfer(*what, timeout_s=wait_s, check=False)
        bound_s = wait_s if case.ending == "deadline" else TRANSFER_BOUND_S
        batch = self._initiator.submit(*what, timeout_s=bound_s)
        if case.ending == "result":
            with contextlib.suppress(MoonpoolError):
                batch.result(wait_s)
        elif case.ending == "cancel":
            self._pause.wait(wait_s)
            batch.cancel()
        else:
            batch.wait(TRANSFER_BOUND_S + END_BOUND_S)
        return batch

    def _count(self, case: Case, statuses: list[Status], late_ms: float) -> None:
        tally = self.tally
        tally.cases[f"{self.way.name} {case.ending}"] += 1
        tally.ended[max(statuses).name] += 1
        tally.end_late_ms_max = max(tally.end_late_ms_max, late_ms)
        # Nothing is waited for: what is held at this moment comes late.
        if self._proxy is not None and self._proxy.wait_held(1, 0.0):
            tally.held += 1
        if late_ms > END_BOUND_S * MS_PER_S:
            tally.violate(f"{self._seed}: {case} ended {late_ms:.0f} ms late")

    def _check_content(self, name: str, case: Case, statuses: list[Status], view: memoryview) -> None:
        """Complete pieces have their bytes, gaps are untouched, and no end is of an unexpected kind."""
        torn = False
        for piece, status in zip(case.pieces, statuses, strict=True):
            got = view[piece.at : piece.at + piece.length]
            if not is_expected(status, case):
                self.tally.violate(f"{name}: {case} ended as {status.name}")
            elif status != Status.COMPLETE:
                torn = torn or is_touched(got)
            elif not is_same(got, self._content[piece.offset : piece.offset + piece.length]):
                self.tally.violate(f"{name}: {case}: COMPLETE, but the bytes at {piece} are wrong")
        self.tally.torn += torn
        for start, stop in gaps_of(case, self.way.slot_bytes):
            if is_touched(view[start:stop]):
                self.tally.violate(f"{name}: {case}: bytes between {start} and {stop} of the slot changed")

    def _deliver_late(self, name: str) -> None:
        if self._proxy is not None:
            self._proxy.heal()
            if not self._proxy.wait_delivered(DRAIN_BOUND_S):
                self.tally.violate(f"{name}: the proxy still held bytes {DRAIN_BOUND_S} s after the fault")

    def _begin_companion(self) -> Batch:
        """A READ on another lane that is not ended early: late bytes must not reach it either."""
        self._companion.view[:COMPANION_BYTES] = bytes(COMPANION_BYTES)
        return self._initiator.submit(
            Op.READ,
            self._segment,
            self._companion.address,
            self._region,
            0,
            COMPANION_BYTES,
            timeout_s=TRANSFER_BOUND_S,
        )

    def _end_companion(self, name: str, case: Case, batch: Batch) -> None:
        batch.wait(TRANSFER_BOUND_S + END_BOUND_S)
        status = Status(batch.status[0])
        self.tally.companions[status.name] += 1
        if status == Status.COMPLETE:
            if not is_same(self._companion.view[:COMPANION_BYTES], self._content[:COMPANION_BYTES]):
                self.tally.violate(f"{name}: the companion is COMPLETE, but its bytes are wrong")
        elif not is_expected(status, case):
            self.tally.violate(f"{name}: {case}: the companion ended as {status.name}")


def is_expected(status: Status, case: Case) -> bool:
    """Whether a READ may end so under the fault of a case."""
    return status in _EXPECTED or (status == Status.PEER_GONE and case.fault.action == "cut")


def is_touched(view: memoryview) -> bool:
    """Whether any byte is not `FILL`."""
    return not is_same(view, bytes((FILL,)) * len(view))


def is_same(left: memoryview, right: bytes) -> bool:
    """Whether two ranges hold the same bytes; by digest, which reads memory at its speed."""
    return chunk_digests(left) == chunk_digests(right)
