"""Judges a history of puts, removes and gets against the first invariant of the store; pure.

A `get` must return exactly the bytes of some completed put of that key, or a miss: never torn, never
another key's, never the old value after an upsert or a remove had returned. Times are one monotonic clock's
readings, of any unit.

How it judges. Every value that is put is told apart by its content. A put is *complete* when its call
returned "stored", or when a get has returned its bytes. An *eraser* (a remove that returned, an upsert that
stored) ends each value that was complete before the eraser began: an object is never made twice, so no get
that begins after the eraser returned may show that value again. Calls that overlap may come in either
order, and a call whose outcome nobody knows (its client died, its answer was lost) may take effect at any
time or never.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, final

#: Contents shorter than this may be equal by chance.
DIGEST_BYTES = 16


class HistoryBroken(AssertionError):
    """A get returned what it must not."""


class Eraser(NamedTuple):
    """A remove that returned, from its begin to its end."""

    began: float
    ended: float


@dataclass(slots=True)
class PutRecord:
    """One attempt to put one value."""

    tag: int
    key: str
    content: bytes
    began: float
    #: When its bytes may be complete: `put_end` was called.
    ending: float | None = None
    #: When it was certainly complete.
    complete: float | None = None
    is_stored: bool = False
    ended: float | None = None


@dataclass(slots=True)
class _OfKey:
    puts: dict[bytes, list[PutRecord]] = field(default_factory=dict)
    #: When erasers ended, ascending; and for each the latest begin of those that had ended by then.
    ends: list[float] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    #: Removes that have begun and not returned, and those whose outcome is unknown, by their begin.
    open_removes: dict[int, float] = field(default_factory=dict)
    removes: list[Eraser] = field(default_factory=list)

    def erased(self, began: float, ended: float) -> None:
        """What was complete when it began is gone now that it has ended."""
        assert not self.ends or self.ends[-1] <= ended, "a history is told in the order of time"
        self.ends.append(ended)
        self.begins.append(max(began, self.begins[-1]) if self.begins else began)


def content_digest(content: bytes | bytearray | memoryview) -> bytes:
    """What a value is known by in a history."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@final
class History:
    """Records calls as they begin and end, and judges each get as it ends."""

    def __init__(self) -> None:
        self._keys: dict[str, _OfKey] = {}
        self._by_tag: dict[int, PutRecord] = {}
        self._next_remove = 1
        self.gets = 0
        self.hits = 0

    def put_began(self, tag: int, key: str, digest: bytes, at: float) -> None:
        """An attempt to put a value with this digest starts; a tag is used once."""
        assert tag not in self._by_tag, f"tag {tag} is used twice"
        record = PutRecord(tag, key, digest, at)
        self._by_tag[tag] = record
        self._of(key).puts.setdefault(digest, []).append(record)

    def put_ending(self, tag: int, at: float) -> None:
        """From now on the value may be complete."""
        record = self._by_tag[tag]
        record.ending = at if record.ending is None else record.ending

    def put_ended(self, tag: int, at: float, *, is_stored: bool, replaces: bool) -> None:
        """The put returned: stored, or not by this attempt. `replaces`: it was an upsert."""
        record = self._by_tag[tag]
        record.ended = at
        record.is_stored = is_stored
        if not is_stored:
            return
        record.complete = at if record.complete is None else min(record.complete, at)
        if replaces:
            self._of(record.key).erased(record.began, at)

    def remove_began(self, key: str, at: float) -> int:
        """A remove starts; returns its number for `remove_ended`."""
        number = self._next_remove
        self._next_remove += 1
        self._of(key).open_removes[number] = at
        return number

    def remove_ended(self, key: str, number: int, at: float, *, is_gone: bool) -> None:
        """The remove returned: the key is gone (removed, or was absent), or stays (leased, pinned)."""
        entry = self._of(key)
        began = entry.open_removes.pop(number)
        if is_gone:
            entry.erased(began, at)
            entry.removes.append(Eraser(began, at))

    def judge_get(self, key: str, began: float, ended: float, digest: bytes) -> int:
        """A get returned a value; raises HistoryBroken when it must not have. Returns the put's tag."""
        self.gets += 1
        self.hits += 1
        candidates = self._of(key).puts.get(digest, [])
        if not candidates:
            raise HistoryBroken(f"get of {key} returned bytes that nobody put there: {self._whose(digest)}")
        reasons = []
        for record in candidates:
            reason = self._why_not(record, began, ended)
            if reason is None:
                if record.complete is None or ended < record.complete:
                    record.complete = ended
                return record.tag
            reasons.append(f"put {record.tag} {reason}")
        raise HistoryBroken(f"get of {key} from {began} to {ended}: " + "; ".join(reasons))

    def judge_present(self, key: str, began: float, ended: float) -> None:
        """`exists` said yes; raises HistoryBroken when every value that could be there was erased before."""
        reasons = []
        for records in self._of(key).puts.values():
            for record in records:
                reason = self._why_not(record, began, ended)
                if reason is None:
                    return
                reasons.append(f"put {record.tag} {reason}")
        raise HistoryBroken(f"exists of {key} from {began} to {ended} said yes: " + "; ".join(reasons))

    def judge_miss(self, key: str, began: float, ended: float) -> list[PutRecord]:
        """A get missed: the stored puts that no remove explains (an eviction or a loss may)."""
        self.gets += 1
        entry = self._of(key)
        unexplained = []
        for records in entry.puts.values():
            for record in records:
                if not record.is_stored or record.ended is None or record.ended >= began:
                    continue
                if any(start < ended for start in entry.open_removes.values()):
                    continue
                if any(one.began < ended and one.ended > record.began for one in entry.removes):
                    continue
                if self._why_not(record, began, ended) is None:
                    unexplained.append(record)
        return unexplained

    def records(self, key: str) -> Iterable[PutRecord]:
        """All attempts for a key."""
        for records in self._of(key).puts.values():
            yield from records

    def record(self, tag: int) -> PutRecord:
        """The attempt with a tag."""
        return self._by_tag[tag]

    def keys(self) -> list[str]:
        """Keys that some attempt named, in the order of their first."""
        return [key for key, entry in self._keys.items() if entry.puts]

    def _of(self, key: str) -> _OfKey:
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _OfKey()
        return entry

    def _why_not(self, record: PutRecord, began: float, ended: float) -> str | None:
        """Why a get of that time cannot show the value; None when it can."""
        if record.ending is None or record.ending > ended:
            return "was not complete"
        if record.ended is not None and not record.is_stored and record.complete is None:
            return "did not store"
        if record.complete is None:
            return None
        entry = self._of(record.key)
        # An upsert began before its own value was complete: it never counts against that.
        found = bisect_left(entry.ends, began)
        if found and entry.begins[found - 1] > record.complete:
            erased = bisect_right(entry.begins, record.complete, 0, found)
            began, ended = entry.begins[erased], entry.ends[erased]
            return f"was complete at {record.complete}, erased from {began} to {ended}"
        return None

    def _whose(self, digest: bytes) -> str:
        for key, entry in self._keys.items():
            if digest in entry.puts:
                return f"they were put at {key}"
        return "torn or made up"
