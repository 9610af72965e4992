"""A term under way, driven by two threads: the journal's, which waits and times, and the loop's, which helps.

A fact that a reply waits for would cost two more wake-ups of threads (tens of microseconds each) if only the
journal's thread spoke to Redis. So the loop thread sends what it just decided and takes answers in by itself
(`assist`), whenever nobody else is at it: it never waits for the lock, nor for the socket. What goes wrong on
its way is kept, and ends the term or the connection in the journal's thread (`advance`).
"""

from __future__ import annotations

import logging
import threading
from typing import Final, Protocol, final

from moonpool.errors import InternalError
from moonpool.store.errors import JournalFenced, JournalUnavailable
from moonpool.store.journal import SnapshotWanted
from moonpool.store.journal_mailbox import Mailbox
from moonpool.store.journal_snapshots import SnapshotDuty
from moonpool.store.journal_term import Term
from moonpool.store.redis_link import RedisLink

_LOG: Final = logging.getLogger("moonpool.store.journal")
#: Shortest time between two words on a trouble.
_SAY_EVERY_NS: Final = 1_000_000_000


class Listener(Protocol):
    """The loop thread's poll, which can return when a descriptor is readable (`RpcServer`)."""

    def listen(self, fd: int) -> None:
        """Begins to watch it."""

    def unlisten(self, fd: int) -> None:
        """Ends watching it."""


@final
class LiveTerm:
    """The term that is led, or none. `progress`, `trouble` and `lease_until_ns` may be read by any thread."""

    def __init__(self, mail: Mailbox, snapshots: SnapshotDuty, listener: Listener | None) -> None:
        #: The number of the term, and the last sequence that is durable in it: one value, so that they match.
        self.progress = (0, 0)
        #: Why the journal takes nothing now; "" when it does.
        self.trouble = ""
        #: The trouble that the log has, and since when.
        self._said = ("", 0)
        #: Asked for by the loop thread: give the term up, for this reason; raise the epoch above this.
        self.resigned = ""
        self.epoch_asked = -1
        self._mail = mail
        self._snapshots = snapshots
        self._listener = listener
        self._lock = threading.Lock()
        self._term: Term | None = None
        self._number = 0
        self._link: RedisLink | None = None
        self._failure: Exception | None = None
        #: The journal's thread knows that facts linger, and looks in time.
        self._timed = False

    @property
    def lease_until_ns(self) -> int:
        """The reading of CLOCK_BOOTTIME at which the lease ends; 0 without a term."""
        term = self._term
        return term.lease.until_ns if term is not None else 0

    @property
    def link(self) -> RedisLink:
        """The connection; `JournalUnavailable` without one."""
        if self._link is None:
            raise JournalUnavailable("the connection to Redis was closed")
        return self._link

    @property
    def queued_bytes(self) -> int:
        """Bytes of facts that are not durable."""
        term = self._term
        return self._mail.bytes + (term.queue.bytes if term is not None else 0)

    @property
    def appends(self) -> int:
        """Groups confirmed in this term."""
        term = self._term
        return term.appends if term is not None else 0

    # -- the journal's thread

    def begin(self, term: Term, number: int) -> None:
        """A term begins; it counts as `number`."""
        with self._lock:
            self._number = number
            self.resigned, self.epoch_asked = "", -1
            self.progress = (number, term.queue.durable)
            self._failure = None
            self._term = term

    def end(self) -> None:
        """The term is over: nobody answers in it any more."""
        self.disconnected()
        with self._lock:
            if self._term is not None:
                self._term.lease.end()
            self._term = None

    def connected(self, link: RedisLink) -> None:
        """The term goes on over this connection, which it was attached to."""
        with self._lock:
            self._failure = None
            self._link = link
        if self._listener is not None:
            self._listener.listen(link.fileno())

    def disconnected(self) -> None:
        """Closes the connection, if there is one."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            if self._listener is not None:
                self._listener.unlisten(link.fileno())
            link.close()

    def advance(self, now_ns: int) -> int:
        """Does everything that is due; how long until it is to be called again. Raises what went wrong."""
        with self._lock:
            term, link = self._term, self._link
            if term is None or link is None:
                raise InternalError("a term without a connection cannot advance; please report this")
            if self._failure is not None:
                raise self._failure
            before = (self.progress, self.trouble)
            self._work(term, link, now_ns)
            wanted = self._snapshots.work(term, link, now_ns)
            changed = before != (self.progress, self.trouble)
            self._timed = term.queue.lingers
            due_ns = min(term.due_in_ns(now_ns), self._snapshots.due_in_ns(now_ns))
        if wanted and self._snapshots.prepare(link.address, term.queue.epoch, now_ns):
            self._mail.tell(SnapshotWanted())
        if changed:
            self._mail.nudge()
        return due_ns

    @property
    def settled(self) -> bool:
        """Everything that was appended is durable, and no answer is owed."""
        term = self._term
        return term is not None and not self._mail.bytes and term.queue.idle and term.owes_nothing

    # -- the loop thread

    def assist(self, now_ns: int) -> None:
        """Sends what was appended and takes in answers that came; never waits."""
        if not self._lock.acquire(blocking=False):
            self._mail.poke()
            return
        try:
            term, link = self._term, self._link
            if term is None or link is None or self._failure is not None:
                return
            self._work(term, link, now_ns)
            if link.unsent or (term.queue.lingers and not self._timed):
                self._mail.poke()
            self._timed = term.queue.lingers
        except Exception as exc:
            self._failure = exc
            self._mail.poke()
        finally:
            self._lock.release()

    # -- either, with the lock

    def _work(self, term: Term, link: RedisLink, now_ns: int) -> None:
        if not term.owes_nothing:
            link.flush()
            term.answered(link, link.receive(), now_ns)
        for one in self._mail.take_facts(self._number):
            term.queue.add(one.first, one.facts, one.now_ms, urgent=one.urgent, now_ns=now_ns)
        if self.resigned:
            raise JournalFenced(self.resigned)
        if self.epoch_asked >= 0:
            term.raise_epoch(self.epoch_asked)
            self.epoch_asked = -1
        term.pump(link, now_ns)
        self._say(term.trouble, now_ns)
        self.progress, self.trouble = (self._number, term.queue.durable), term.trouble

    def _say(self, trouble: str, now_ns: int) -> None:
        """Another trouble goes to the log, and one that comes and goes now and then only."""
        trouble = trouble.partition(" script: ")[0]  # which of ours was refused says nothing
        if trouble and trouble != self._said[0] and now_ns - self._said[1] >= _SAY_EVERY_NS:
            _LOG.warning("the journal is in trouble: %s", trouble)
            self._said = (trouble, now_ns)
        elif not trouble and now_ns - self._said[1] >= _SAY_EVERY_NS:
            self._said = ("", self._said[1])
