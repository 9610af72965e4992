"""Where objects were when last looked up: bounded, least recently used first, good for the location lease.

An entry is a hint. It serves a read only together with the state word of its slot, read after the payload:
the word says whether that object is still complete and true. And only within the location lease of the
look-up that made it, because a node that cannot be reached by the master cannot have its words stamped, and
then `remove` and `upsert` wait that long and no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, final


class Location(NamedTuple):
    """One object and its copies: `places` are (segment, offset, slot), the master's choice first."""

    object_id: int
    size: int
    digest: bytes
    object_type: int
    places: tuple[tuple[int, int, int], ...]


class Cached(NamedTuple):
    """A location, and until when (monotonic ns) it may be used."""

    location: Location
    until_ns: int


@final
class LocationCache:
    """Pure: times are given. Not thread-safe by itself, but each method is one step under the GIL."""

    def __init__(self, keys_max: int, lease_ns: int) -> None:
        self._keys_max = keys_max
        self._lease_ns = lease_ns
        self._entries: OrderedDict[bytes, Cached] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def shorten(self, lease_ns: int) -> None:
        """From now on locations are good for at most so long."""
        self._lease_ns = min(self._lease_ns, lease_ns)

    def find(self, key: bytes, now_ns: int) -> Location | None:
        """The location, or None when it is unknown or its lease is over."""
        found = self._entries.get(key)
        if found is None:
            return None
        if now_ns >= found.until_ns:
            self._entries.pop(key, None)
            return None
        return found.location

    def remember(self, key: bytes, location: Location, asked_ns: int) -> None:
        """Notes what a look-up said that was sent at `asked_ns`."""
        entries = self._entries
        entries[key] = Cached(location, asked_ns + self._lease_ns)
        entries.move_to_end(key)
        while len(entries) > self._keys_max:
            try:
                entries.popitem(last=False)
            except KeyError:  # another thread took the last one
                break

    def forget(self, key: bytes) -> None:
        """Drops a key; nothing happens when it is not there."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Drops everything (another leader, another journal)."""
        self._entries.clear()
