"""Reading a journal: the current snapshot, then group after group, each following the one before.

Nothing is served from a state that was read with a doubt: a gap, an unknown version, a damaged piece or a
sequence that does not follow raises, and what was read is thrown away. The same reader serves a start, a
standby that follows, and the last stretch of a takeover. It belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from moonpool.errors import MoonpoolError
from moonpool.store.errors import (
    JournalLost,
    JournalUnavailable,
    JournalUnreadable,
    SnapshotDamaged,
    UnknownFact,
)
from moonpool.store.facts import decode_group
from moonpool.store.redis_link import RedisLink
from moonpool.store.redis_scripts import FORMAT_VERSION, GROUP_FIELD, Keys
from moonpool.store.snapshots import read_snapshot
from moonpool.store.state import State
from moonpool.store.tables import ObjectTable

#: Entries of the stream read at once: a fraction of a second's work, so that a lease is renewed between.
PAGE_GROUPS: Final = 16
#: Loading starts again when a snapshot was replaced meanwhile, but not for ever.
_LOADS_MAX: Final = 5


@final
class JournalReader:
    """A state that follows a journal. `make_objects` gives an empty table."""

    def __init__(self, keys: Keys, make_objects: Callable[[], ObjectTable]) -> None:
        self._keys = keys
        self._make_objects = make_objects
        self.state = State(make_objects())
        #: Names the journal; b"" before there is one.
        self.journal = b""
        #: The epoch of the last group, or of the head where that is higher.
        self.epoch = 0
        #: The snapshot that Redis holds, and its number of pieces: the next one replaces it.
        self.snapshot_number = 0
        self.snapshot_pieces = 0
        self._snapshot_sequence = 0
        #: Its bytes, compressed.
        self.snapshot_bytes = 0
        #: Bytes of groups read since that snapshot.
        self.journal_bytes = 0

    @property
    def sequence(self) -> int:
        """The last fact applied."""
        return self.state.sequence

    def hand_over(self) -> State:
        """The state, which is the caller's from now on; this reader must load before it follows again."""
        state, self.state = self.state, State(self._make_objects())
        return state

    def load(self, link: RedisLink, breathe: Callable[[], None]) -> None:
        """Reads everything afresh; calls `breathe` between pieces, so that a lease can be renewed.

        Raises `JournalUnreadable` for what cannot be loaded; the state is then empty.
        """
        problem = "it changed each time"
        for _ in range(_LOADS_MAX):
            self._forget()
            try:
                if self._load_once(link, breathe):
                    return
            except JournalLost as exc:  # trimmed to a newer snapshot while it was read
                problem = str(exc)
            except JournalUnavailable:
                self._forget()
                raise
            except MoonpoolError as exc:
                self._forget()
                raise self._unreadable(str(exc)) from exc
        self._forget()
        raise self._unreadable(problem)

    def follow(self, link: RedisLink, block_ms: int) -> int:
        """Applies groups that came, waiting at most `block_ms` for the first; returns how many.

        Raises `JournalLost` when the stream no longer follows what was applied: load again.
        """
        words: list[bytes | int] = [b"XREAD", b"COUNT", PAGE_GROUPS]
        if block_ms:
            words += [b"BLOCK", block_ms]
        words += [b"STREAMS", self._keys.journal]
        answer: Any = link.call(*words, b"%d-0" % self.sequence, timeout_ms=link.timeout_ms + block_ms)
        if not answer:
            return 0
        entries = answer[0][1]
        for entry in entries:
            self._apply(entry)
        return len(entries)

    def _unreadable(self, problem: str) -> JournalUnreadable:
        return JournalUnreadable(
            f"the journal under {self._keys.prefix!r} cannot be loaded: {problem}; nothing is served from it",
            reason=problem,
        )

    def _forget(self) -> None:
        self.state = State(self._make_objects())
        self.epoch = self.journal_bytes = self.snapshot_number = self._snapshot_sequence = 0
        self.snapshot_pieces = self.snapshot_bytes = 0
        self.journal = b""

    def _load_once(self, link: RedisLink, breathe: Callable[[], None]) -> bool:
        head = read_head(link, self._keys)
        if not head:
            return True
        self.journal = head[b"journal"]
        number = _number(head, b"snapshot")
        if number:
            found = read_snapshot(link, self._keys, number, self._make_objects(), breathe)
            if found is None:
                return False  # replaced while it was read
            self.state, about = found
            self.snapshot_number, self.snapshot_pieces, self.snapshot_bytes = number, about.pieces, about.size
            self.epoch = self.state.epoch
            self._snapshot_sequence = self.state.sequence
        wanted = _number(head, b"sequence")
        while self.sequence < wanted:
            breathe()
            if self.follow(link, 0) == 0:
                raise JournalUnreadable(
                    f"the stream ends at fact {self.sequence} and its head names {wanted}: facts are missing"
                )
        self.epoch = max(self.epoch, _number(head, b"epoch"))
        return True

    def _apply(self, entry: list[Any]) -> None:
        name, fields = entry
        if not isinstance(fields, list) or fields[0] != GROUP_FIELD:
            raise UnknownFact(f"the entry {name!r} of the stream is no group")
        group = decode_group(fields[1])
        last = group.first_sequence + len(group.facts) - 1
        if name != b"%d-0" % last:
            raise UnknownFact(f"the entry {name!r} of the stream holds facts up to {last}")
        known = self.sequence + 1 - group.first_sequence
        if known > 0 and self.sequence == self._snapshot_sequence:
            # A snapshot may end amid a group, which is kept whole: its first facts are in the snapshot.
            group = group._replace(first_sequence=self.sequence + 1, facts=group.facts[known:])
        if group.first_sequence != self.sequence + 1 or group.epoch < self.epoch:
            raise JournalLost(
                f"the stream goes on with fact {group.first_sequence} of epoch {group.epoch} "
                f"after fact {self.sequence} of epoch {self.epoch}"
            )
        self.state.apply_group(group)
        self.epoch = group.epoch
        self.journal_bytes += len(fields[1])


def read_head(link: RedisLink, keys: Keys) -> dict[bytes, bytes]:
    """The journal's head; empty when there is none. Raises `JournalUnreadable` for an unknown version."""
    flat: Any = link.call(b"HGETALL", keys.head)
    head: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    if not head:
        if link.call(b"EXISTS", keys.journal):
            raise JournalUnreadable(
                "the stream is there without its head: restore it, or delete what is left"
            )
        return {}
    if head.get(b"version") != b"%d" % FORMAT_VERSION or not head.get(b"journal"):
        raise JournalUnreadable(
            f"it has version {head.get(b'version', b'')!r} and this program knows {FORMAT_VERSION}: "
            "run the version that wrote it"
        )
    return head


def _number(head: dict[bytes, bytes], name: bytes) -> int:
    text = head.get(name, b"")
    if not text.isdigit() or len(text) > 19:
        raise SnapshotDamaged(f"the journal's head has {text!r} for its {name.decode()}")
    return int(text)
