"""Who on other hosts was told of a region in a namespace, and until when they could still write it.

They reach the device by themselves, so nothing that the owner does keeps a command of theirs from landing.
What bounds it is time: an initiator issues nothing more once its session has ended, and the kernel takes back
what it has issued when the command's own timeout is over. Peers on this host are in the engine's own books:
their process can be watched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class _Reader:
    instance: bytes
    #: By region: whether the session writes it.
    handles: dict[int, bool] = field(default_factory=dict)
    over_at: float | None = None


@final
class RangeBook:
    """Thread-safe. `grace_s` is how long after its session's end an initiator's commands may still land."""

    def __init__(self, grace_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._now = now
        self._changed = threading.Condition()
        self._readers: dict[int, _Reader] = {}

    def note(self, handle: int, session_id: int, instance: bytes, *, writes: bool) -> None:
        """A session was told of a region."""
        with self._changed:
            self._sweep()
            reader = self._readers.setdefault(session_id, _Reader(instance))
            reader.over_at = None  # one that was done with everything begins anew
            reader.handles[handle] = reader.handles.get(handle, False) or writes

    def holders(self, handle: int) -> set[int]:
        """Live sessions that were told of the region."""
        with self._changed:
            return {
                session
                for session, reader in self._readers.items()
                if handle in reader.handles and reader.over_at is None
            }

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Sessions, live or ended a moment ago, that may still write the region."""
        with self._changed:
            self._sweep()
            return {
                session
                for session, reader in self._readers.items()
                if reader.handles.get(handle) and instance in (None, reader.instance)
            }

    def session_ended(self, session_id: int) -> None:
        """From now on the session's last commands run out."""
        with self._changed:
            reader = self._readers.get(session_id)
            if reader is not None and reader.over_at is None:
                reader.over_at = self._now() + self._grace_s

    def is_over(self, session_id: int, timeout_s: float) -> bool:
        """Wait until nothing of an ended session can land; False for a live one, and when it takes longer."""
        return self._wait(
            lambda: [self._readers[session_id]] if session_id in self._readers else [], timeout_s
        )

    def forget(self, handle: int, timeout_s: float) -> bool:
        """The region is revoked, live sessions have been asked: wait for the ended ones that wrote it."""

        def late() -> list[_Reader]:
            return [
                reader
                for reader in self._readers.values()
                if reader.handles.get(handle) and reader.over_at is not None
            ]

        is_over = self._wait(late, timeout_s)
        with self._changed:
            for reader in self._readers.values():
                if reader.over_at is None:
                    reader.handles.pop(handle, None)
        return is_over

    def _wait(self, waited_for: Callable[[], list[_Reader]], timeout_s: float) -> bool:
        until = self._now() + timeout_s
        with self._changed:
            while True:
                self._sweep()
                found = waited_for()
                if not found:
                    return True
                ends = [reader.over_at for reader in found]
                if None in ends:
                    return False
                last = max(end for end in ends if end is not None)
                now = self._now()
                if last > until or now >= until:
                    return False
                self._changed.wait(max(0.0, last - now))

    def _sweep(self) -> None:
        """Forget sessions whose last command has run out."""
        now = self._now()
        self._readers = {
            session: reader
            for session, reader in self._readers.items()
            if reader.over_at is None or reader.over_at > now
        }
