"""Renews leases from one background thread, retries when the service is away, and reports what it sees.

Theory of operation. Each lease has a time at which it is due and a time at which it runs out. A renewal that
went well at `t` (read *before* asking, so that a slow answer never makes us believe too much) makes it due at
t + lease/3 and run out at t + lease. One that failed is tried again after a pause that doubles from lease/20
to lease/3: FAILING until the lease runs out, EXPIRED after it. A lease that another process took is LOST and
leaves the keeper. `due` and `run_out` are decided by `LeaseTimes`, which reads no clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, final

from moonpool.clock import Clock
from moonpool.errors import EngineClosed, LimitExceeded, MoonpoolError, NameInUse
from moonpool.metadata.base import Lease, LeaseState
from moonpool.units import NS_PER_MS, NS_PER_S

LEASES_MAX: Final = 1_024
PAUSE_MIN_NS: Final = 20 * NS_PER_MS
_LOG: Final = logging.getLogger("moonpool.metadata")


@final
@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """When a lease is due for renewal and when it runs out, as readings of the keeper's clock."""

    lease_ns: int
    due_ns: int
    run_out_ns: int
    pause_ns: int

    @classmethod
    def given(cls, asked_ns: int, lease_ns: int) -> LeaseTimes:
        """Times of a lease that was given or renewed by a request sent at `asked_ns`."""
        return cls(lease_ns, asked_ns + lease_ns // 3, asked_ns + lease_ns, max(PAUSE_MIN_NS, lease_ns // 20))

    def after_failure(self, now_ns: int) -> LeaseTimes:
        """Times after a renewal that failed at `now_ns`."""
        longest_ns = max(PAUSE_MIN_NS, self.lease_ns // 3)
        return replace(self, due_ns=now_ns + self.pause_ns, pause_ns=min(longest_ns, 2 * self.pause_ns))


@final
class LeaseKeeper:
    """Owns the renewing thread (daemon, named "moonpool-lease"), started with the first lease.

    `renew(lease)` asks the service once, in bounded time; it raises `NameInUse` when the name is lost and any
    other `MoonpoolError` when it may be tried again. `changed(lease)` is called on the keeper's thread each
    time a lease's state changes, and must not block.
    """

    def __init__(
        self, renew: Callable[[Lease], None], lease_ms: int, clock: Clock, changed: Callable[[Lease], None]
    ) -> None:
        self._renew = renew
        self._lease_ns = lease_ms * NS_PER_MS
        self._clock = clock
        self._changed = changed
        self._wake = threading.Condition()
        self._times: dict[Lease, LeaseTimes] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, lease: Lease, asked_ns: int) -> None:
        """Keeps a lease given by a request sent at `asked_ns`; raises `LimitExceeded` or `EngineClosed`."""
        with self._wake:
            if self._closed:
                raise EngineClosed("the metadata service of this engine is closed; make a new engine")
            if len(self._times) >= LEASES_MAX:
                raise LimitExceeded(f"this process already publishes {LEASES_MAX} segments", limit=LEASES_MAX)
            self._times[lease] = LeaseTimes.given(asked_ns, self._lease_ns)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="moonpool-lease", daemon=True)
                self._thread.start()
            self._wake.notify()

    def drop(self, lease: Lease) -> bool:
        """Stops renewing a lease; True when it was kept until now."""
        with self._wake:
            return self._times.pop(lease, None) is not None

    def leases(self) -> list[Lease]:
        """The leases kept now."""
        with self._wake:
            return list(self._times)

    def close(self, timeout_s: float) -> None:
        """Stops the thread and waits up to `timeout_s` for a renewal under way. Idempotent."""
        with self._wake:
            self._closed = True
            self._times.clear()
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def step(self) -> None:
        """Renews every lease that is due."""
        now_ns = self._clock.now_ns()
        with self._wake:
            due = [lease for lease, times in self._times.items() if times.due_ns <= now_ns]
        for lease in due:
            self._renew_one(lease)

    def _renew_one(self, lease: Lease) -> None:
        asked_ns = self._clock.now_ns()
        try:
            self._renew(lease)
        except NameInUse as exc:
            if self.drop(lease):
                self._note(lease, exc, LeaseState.LOST)
        except MoonpoolError as exc:
            now_ns = self._clock.now_ns()
            with self._wake:
                times = self._times.get(lease)
                if times is None:  # withdrawn meanwhile
                    return
                self._times[lease] = times.after_failure(now_ns)
            self._note(lease, exc, LeaseState.EXPIRED if now_ns >= times.run_out_ns else LeaseState.FAILING)
        else:
            with self._wake:
                if lease not in self._times:
                    return
                self._times[lease] = LeaseTimes.given(asked_ns, self._lease_ns)
            if lease.renewed().state is not LeaseState.HELD:
                _LOG.warning("the name %s is published again", lease.record.name)
                self._tell(lease)

    def _note(self, lease: Lease, error: MoonpoolError, state: LeaseState) -> None:
        if lease.failed(error, state).state is not state:
            _LOG.warning("the lease of the name %s is %s: %s", lease.record.name, state.value, error)
            self._tell(lease)

    def _tell(self, lease: Lease) -> None:
        try:
            self._changed(lease)
        except Exception:  # the owner's mistake must not end the renewing of other leases
            _LOG.exception("the owner of the name %s failed on a change of its lease", lease.record.name)

    def _run(self) -> None:
        while True:
            self.step()
            with self._wake:
                if self._closed:
                    return
                # Computed under the lock, so that a lease added since `step` is not slept through.
                due_ns = min((times.due_ns for times in self._times.values()), default=None)
                if due_ns is None:
                    self._wake.wait()
                else:
                    self._wake.wait(max(0, due_ns - self._clock.now_ns()) / NS_PER_S)
