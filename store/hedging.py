"""A second read where the first one is slow: of another copy, into memory of its own.

A read over the network that has taken longer than almost all before it is probably waiting for a node that is
stopped, overloaded or cut off. Then the same objects are read from their other copies; when these bytes are
right before the first read has ended, that one is cancelled, and the caller takes the staged bytes. Reads of
objects that have one copy, and reads of memory on this host, are never hedged and cost nothing here.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from moonpool.errors import MoonpoolError
from moonpool.units import NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    from moonpool.native.io.batch import Batch as NativeBatch
    from moonpool.store.value import Value

#: The estimate of the slowest hundredth moves by this share of itself, up 99 times as far as down.
_STEP: Final = 0.05
#: A read is slow when it takes this many times as long as 99 of 100.
_SLOW_TIMES: Final = 2
#: What each byte adds to the time that a read may take: 200 MB/s is slow on any network.
_NS_PER_BYTE: Final = 5
_JOIN_S: Final = 10.0
_IDLE_S: Final = 5.0


class Staged(NamedTuple):
    """An object read for the second time: its key's number in the call, and its bytes, verified."""

    number: int
    value: Value


#: Reads the other copies: what was right. Runs in a thread of the hedger.
ReadAgain = Callable[[], Sequence[Staged]]


@final
class Guard:
    """Watches one batch from before it is driven until `settle`."""

    __slots__ = ("_again", "_batch", "allowance_ns", "ended", "staged", "started_ns")

    def __init__(self, batch: NativeBatch, again: ReadAgain) -> None:
        self._batch = batch
        self._again = again
        self.ended = False
        self.started_ns = time.monotonic_ns()
        #: The time that its bytes take on a slow network.
        self.allowance_ns = batch.total_bytes * _NS_PER_BYTE
        #: What the second read brought; empty unless all of it was right before the first read ended.
        self.staged: Sequence[Staged] = ()

    @property
    def is_over(self) -> bool:
        """True when a second read would come too late."""
        return self.ended or self._batch.done

    def read_again(self) -> None:
        """The second read, to its end; cancels the first when it wins."""
        staged = self._again()
        if staged and len(staged) == self._batch.n and not self.is_over:
            self.staged = staged  # first: who sees the batch cancelled finds it here
            self._batch.cancel()


@final
class Hedger:
    """Starts second reads in time. Thread-safe; has one thread while there is something to watch."""

    def __init__(self, after_us: int, at_once_max: int) -> None:
        self._least_ns = after_us * NS_PER_US
        self._at_once_max = at_once_max
        self._estimate_ns = float(self._least_ns)
        self._lock = threading.Condition()
        self._waiting: list[tuple[int, int, Guard]] = []
        self._turn = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._running = 0
        #: Second reads begun, and those that were first.
        self.begun = self.won = 0

    @property
    def is_on(self) -> bool:
        """False when the config switched it off."""
        return self._least_ns > 0 and not self._closed

    @property
    def delay_ns(self) -> int:
        """After how long a read counts as slow now, besides the time for its bytes."""
        return max(self._least_ns, int(_SLOW_TIMES * self._estimate_ns))

    def watch(self, batch: NativeBatch, again: ReadAgain) -> Guard:
        """Watches a batch that is about to be driven. Call `settle` when it has ended."""
        guard = Guard(batch, again)
        slow_at_ns = guard.started_ns + guard.allowance_ns + self.delay_ns
        entry = (slow_at_ns, next(self._turn), guard)
        with self._lock:
            if not self._closed:
                heapq.heappush(self._waiting, entry)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="moonpool-hedger", daemon=True)
                    self._thread.start()
                elif self._waiting[0] is entry:  # else the thread wakes early enough by itself
                    self._lock.notify_all()
        return guard

    def settle(self, guard: Guard) -> Sequence[Staged]:
        """Takes a guard off; returns what its second read brought, if that was first."""
        guard.ended = True
        took = time.monotonic_ns() - guard.started_ns - guard.allowance_ns
        step = self._estimate_ns * _STEP
        self._estimate_ns += step * 0.99 if took > self._estimate_ns else -step * 0.01
        if guard.staged:
            self.won += 1
        return guard.staged

    def close(self) -> None:
        """Watches nothing any more; waits, bounded, for second reads that run."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            thread, self._thread = self._thread, None
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._running == 0, _JOIN_S)
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                guard = self._next()
                if guard is None:
                    return
                self._running += 1
                self.begun += 1
            threading.Thread(target=self._hedge, args=(guard,), name="moonpool-hedge", daemon=True).start()

    def _next(self) -> Guard | None:
        """The next guard whose time has come; None when nothing came for a while, or at the end."""
        while not self._closed:
            while self._waiting and self._waiting[0][2].is_over:
                heapq.heappop(self._waiting)
            if not self._waiting:
                if not self._lock.wait(_IDLE_S) and not self._waiting:
                    self._thread = None
                    return None
                continue
            left_ns = self._waiting[0][0] - time.monotonic_ns()
            if left_ns > 0:
                self._lock.wait(left_ns / NS_PER_S)
            elif self._running < self._at_once_max:
                return heapq.heappop(self._waiting)[2]
            else:
                self._lock.wait(_IDLE_S)
        return None

    def _hedge(self, guard: Guard) -> None:
        try:
            guard.read_again()
        except MoonpoolError:
            return  # then the first read decides
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()
