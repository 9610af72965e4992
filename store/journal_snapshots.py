"""When a snapshot is taken, and what becomes of it: wanted, being written, written, current.

Two threads meet here. The journal's thread asks for a snapshot when enough has been appended or enough time
went by, and has a connection ready for it; the loop thread forks the child (`begin`), since only it may
look at the state; the journal's thread sees the child end and makes the snapshot current once the journal
holds every fact that it does. Numbers are never used twice, so a child that outlived its term writes keys
that nobody reads, and that expire.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum
from typing import Final, final

from moonpool.errors import MoonpoolError
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_fork import SnapshotChild
from moonpool.store.journal_reader import JournalReader
from moonpool.store.journal_term import Published, Term
from moonpool.store.redis_link import RedisAddress, RedisLink
from moonpool.store.redis_scripts import Keys
from moonpool.store.snapshots import SnapshotAbout, SnapshotPlace, snapshot_keys
from moonpool.store.state import State
from moonpool.units import NS_PER_MS, NS_PER_S

_LOG: Final = logging.getLogger("moonpool.store.journal")
#: Pause after a snapshot that failed.
_AGAIN_NS: Final = 5 * NS_PER_S
#: How often a child at work is looked at.
_LOOK_NS: Final = 20 * NS_PER_MS
_NEVER_NS: Final = 3_600 * NS_PER_S
#: A snapshot's number is epoch * this + how many this process took: unique, and growing.
_PER_EPOCH: Final = 1_000_000


class _Stage(Enum):
    IDLE = 0
    #: The loop thread was asked; `link` is ready for the child.
    ASKED = 1
    WRITING = 2
    WRITTEN = 3
    #: The script that makes it current is on its way.
    PUBLISHING = 4


@final
class SnapshotDuty:
    """The snapshots of one master, term after term."""

    def __init__(self, config: JournalConfig, keys: Keys) -> None:
        self._config = config
        self._keys = keys
        self._lock = threading.Lock()
        self._stage = _Stage.IDLE
        self._link: RedisLink | None = None
        self._child: SnapshotChild | None = None
        self._place: SnapshotPlace | None = None
        self._written: SnapshotAbout | None = None
        self._current = (0, 0)  # number and pieces
        self._bytes_before = 0  # read or appended since the current snapshot, before this term
        self._appended = 0
        self._mark = 0  # bytes appended when the snapshot under way was taken
        self._begun_ns = self._next_ns = 0
        self._taken = self._failed = 0
        self._bytes = 0  # of the current snapshot, compressed

    @property
    def journal_bytes(self) -> int:
        """Bytes of groups that the stream holds, about."""
        return self._bytes_before + self._appended

    @property
    def has_room(self) -> bool:
        """Whether the stream may grow: to `journal_bytes_max`, or twice the snapshot where that is more."""
        return self.journal_bytes < self._limit

    @property
    def _limit(self) -> int:
        return max(self._config.journal_bytes_max, 2 * self._bytes)

    def counters(self) -> dict[str, int]:
        """For metrics."""
        return {
            "journal_bytes": self.journal_bytes,
            "journal_snapshots": self._taken,
            "journal_snapshots_failed": self._failed,
            "journal_snapshot_bytes": self._bytes,
        }

    def lead(self, reader: JournalReader, now_ns: int) -> None:
        """A term begins with what this reader found."""
        self._current = (reader.snapshot_number, reader.snapshot_pieces)
        self._bytes_before, self._appended = reader.journal_bytes, 0
        self._bytes = reader.snapshot_bytes
        self._next_ns = now_ns + self._config.snapshot_every_ms * NS_PER_MS

    def work(self, term: Term, link: RedisLink, now_ns: int) -> bool:
        """Goes on with what is due; True when a snapshot is to be prepared."""
        self._appended = term.appended_bytes
        with self._lock:
            if self._stage is _Stage.IDLE:
                return self._wanted(now_ns)
            if self._stage in (_Stage.ASKED, _Stage.WRITING):
                self._look(now_ns)
            if self._stage is _Stage.WRITTEN:
                self._publish(term, link, now_ns)
        return False

    def prepare(self, address: RedisAddress, epoch: int, now_ns: int) -> bool:
        """Connects for the child; True when the loop thread is to be asked for a snapshot. May wait."""
        problem = ""
        link = None
        try:
            link = RedisLink(address, self._config.timeout_ms)
        except MoonpoolError as exc:
            problem = str(exc)
        with self._lock:
            self._begun_ns = now_ns
            self._next_ns = now_ns + max(_AGAIN_NS, self._config.snapshot_every_ms * NS_PER_MS)
            if link is None:
                self._fail(problem, now_ns)
                return False
            self._link = link
            number = epoch * _PER_EPOCH + self._taken + self._failed + 1
            self._place = SnapshotPlace(
                self._keys, number, self._config.snapshot_piece_bytes, self._config.snapshot_timeout_ms
            )
            self._stage = _Stage.ASKED
        return True

    def due_in_ns(self, now_ns: int) -> int:
        """How long until `work` has something to do."""
        if self._stage is _Stage.IDLE:
            return max(_LOOK_NS, self._next_ns - now_ns) if self.journal_bytes else _NEVER_NS
        return _NEVER_NS if self._stage is _Stage.PUBLISHING else _LOOK_NS

    def begin(self, state: State) -> None:
        """The loop thread's part: forks the child, unless the term ended meanwhile."""
        with self._lock:
            if self._stage is not _Stage.ASKED or self._link is None or self._place is None:
                return
            self._mark = self._appended
            try:
                self._child = SnapshotChild(self._link, self._place, state)
                self._stage = _Stage.WRITING
            except OSError as exc:
                self._fail(f"cannot fork: {exc}", self._begun_ns)

    def published(self, done: bool) -> None:
        """The script answered: the snapshot is current, or not yet."""
        with self._lock:
            if self._stage is not _Stage.PUBLISHING or self._place is None or self._written is None:
                return
            if not done:
                self._fail("a piece expired before it was made current", self._begun_ns)
                return
            self._current = (self._place.number, self._written.pieces)
            self._bytes_before -= self._mark
            self._bytes, self._taken = self._written.size, self._taken + 1
            self._next_ns = self._begun_ns + self._config.snapshot_every_ms * NS_PER_MS
            self._clear()

    def reattached(self) -> None:
        """The connection was lost, and with it an answer: a script that may have run is run again."""
        with self._lock:
            if self._stage is _Stage.PUBLISHING:
                self._stage = _Stage.WRITTEN

    def abandon(self) -> None:
        """The term ended: whatever is under way is dropped."""
        with self._lock:
            self._clear()

    def close(self) -> None:
        """Ends a child that still runs. Idempotent."""
        self.abandon()

    def _wanted(self, now_ns: int) -> bool:
        enough = max(self._config.snapshot_after_bytes, self._bytes)
        if self.journal_bytes >= min(enough, self._limit // 2):
            return not self._failed_lately(now_ns)
        return self.journal_bytes > 0 and now_ns >= self._next_ns

    def _failed_lately(self, now_ns: int) -> bool:
        return self._begun_ns + _AGAIN_NS > now_ns and self._failed > 0

    def _look(self, now_ns: int) -> None:
        if self._child is not None and self._child.done():
            self._written = self._child.result()
            if self._written is None:
                self._fail(self._child.problem(), now_ns)
                return
            self._stage = _Stage.WRITTEN
        elif now_ns - self._begun_ns > self._config.snapshot_timeout_ms * NS_PER_MS:
            self._fail(f"it was not written within {self._config.snapshot_timeout_ms} ms", now_ns)

    def _publish(self, term: Term, link: RedisLink, now_ns: int) -> None:
        if self._written is None or self._place is None or self._written.sequence > term.queue.durable:
            return
        self._stage = _Stage.PUBLISHING
        number = self._place.number
        ready = Published(
            number,
            self._written.sequence,
            snapshot_keys(self._keys, number, self._written.pieces),
            snapshot_keys(self._keys, *self._current),
        )
        term.publish(link, ready, now_ns)

    def _fail(self, problem: str, now_ns: int) -> None:
        _LOG.warning("a snapshot was not taken: %s", problem)
        self._failed += 1
        self._next_ns = max(self._next_ns, now_ns + _AGAIN_NS)
        self._clear()

    def _clear(self) -> None:
        if self._child is not None:
            self._child.close()
        if self._link is not None:
            self._link.close()
        self._child = self._link = self._place = self._written = None
        self._stage = _Stage.IDLE
