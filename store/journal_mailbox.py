"""What the loop thread and the journal's thread hand to each other: facts one way, notices the other.

Both are deques, whose ends can be used by two threads without a lock, and each number is written by one
thread only. An eventfd wakes the journal's thread, `wake` the loop thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, final

from moonpool.store.journal import Elected, Notice
from moonpool.units import MS_PER_S


class Appended(NamedTuple):
    """Facts of one decision, of the term that was led when they were decided."""

    term: int
    first: int
    facts: Sequence[bytes]
    now_ms: int
    urgent: bool


@final
class Mailbox:
    """Owns the eventfd until `close`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._facts: deque[Appended] = deque()
        self._notices: deque[Notice] = deque()
        #: The term that was taken last.
        self.term = 0
        self._bytes_put = 0  # written by the loop thread
        self._bytes_taken = 0  # written by the journal's thread
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable when the journal's thread has something to look at."""
        return self._event

    def close(self) -> None:
        """Closes the eventfd."""
        os.close(self._event)

    # -- the loop thread

    def put_facts(self, first: int, facts: Sequence[bytes], now_ms: int, *, urgent: bool) -> None:
        """Queues facts of the term that was taken last; wakes nobody."""
        self._bytes_put += sum(map(len, facts))
        self._facts.append(Appended(self.term, first, facts, now_ms, urgent))

    def take_notices(self) -> list[Notice]:
        """All notices, in order; an `Elected` begins the term that facts are put for."""
        taken: list[Notice] = []
        while self._notices:
            notice = self._notices.popleft()
            if isinstance(notice, Elected):
                self.term = notice.term
            taken.append(notice)
        return taken

    def poke(self) -> None:
        """Wakes the journal's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._event, 1)

    @property
    def bytes(self) -> int:
        """Bytes of facts that were put and not taken yet."""
        return max(0, self._bytes_put - self._bytes_taken)

    # -- the journal's thread

    def take_facts(self, term: int) -> Iterator[Appended]:
        """Facts of a term; those of earlier ones are dropped."""
        while self._facts:
            one = self._facts.popleft()
            self._bytes_taken += sum(map(len, one.facts))
            if one.term == term:
                yield one

    def tell(self, notice: Notice) -> None:
        """Queues a notice and wakes the loop thread."""
        self._notices.append(notice)
        self._wake()

    def nudge(self) -> None:
        """Wakes the loop thread: a number that it reads has changed."""
        self._wake()

    def drain(self) -> None:
        """Takes back what made the descriptor readable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def pause(self, pause_s: float, stopped: Callable[[], bool]) -> None:
        """Waits; facts that come meanwhile stay queued. Ends early when `stopped` says so after a poke."""
        end = time.monotonic() + pause_s
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        while not stopped() and (left := end - time.monotonic()) > 0:
            if poller.poll(left * MS_PER_S):
                self.drain()
