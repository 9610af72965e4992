"""How a client gets: look up, read in pieces, verify; fall over; by a cached location; as a pinned view.

It returns bytes only when their digest is the one that the leader gave. A lease is counted from before it
was asked for, and a cached location is used no longer than the location lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.bench.chaos_history import content_digest
from simworld.calls import dial
from simworld.client import Client, Remote
from simworld.loop import MS
from simworld.memory import ReadPart, copy_out

WORDS_AT = 4_096


class ViewChanged(AssertionError):
    """Bytes under a pinned view changed."""


class LeaseBroken(AssertionError):
    """Bytes changed while a reader had a lease on them."""


@dataclass(frozen=True, slots=True)
class Found:
    """A key's object as looked up."""

    object_id: int
    size: int
    digest: bytes
    places: list[list[int]]
    asked_ms: int
    join: int


class Reader:
    """Gets of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._locations: dict[bytes, Found] = {}

    async def get(self, key: bytes, *, cached: bool = False) -> str:
        """Gets and judges one key: "hit", "miss" or "unavailable"."""
        client = self._client
        began = client.now
        if cached and await self._get_cached(key, began):
            return "hit"
        for _ in range(client.options.attempts_max):
            found = await self.look_up(key, client.options.lease_ms)
            if found is None:
                await client.process.sleep(20 * MS)
                continue
            if found == "miss":
                client.around.note("miss")
                self.misses(key, began)
                return "miss"
            assert isinstance(found, Found)
            for place in found.places:
                content = await self._read(found, place)
                if content is None:
                    continue
                if content_digest(content) == found.digest:
                    client.around.history.judge_get(client.named(key), began, client.now, found.digest)
                    self._locations[key] = found
                    return "hit"
                if client.clock_ms() < found.asked_ms + client.options.lease_ms * 9 // 10:
                    raise LeaseBroken(f"{client.named(key)}: other bytes at {place} while a lease lasts")
            client.around.note("reread")
        return "unavailable"

    def misses(self, key: bytes, began: int) -> None:
        """A miss, judged only where the world says that nothing explains one; see `World`."""
        unexplained = self._client.around.history.judge_miss(self._client.named(key), began, self._client.now)
        for record in unexplained:
            self._client.around.watch.missed(record, self._client.now)

    async def look_up(self, key: bytes, lease_ms: int) -> Found | str | None:
        """What the leader says of a key; "miss", or None when it said nothing."""
        client = self._client
        asked_ms = client.clock_ms()
        answer = await client.link.call("lookup", [[key], lease_ms])
        if answer is None or answer[0] is not None:
            return None
        entry = answer[1][2][0]
        if entry is None:
            return "miss"
        object_id, size, digest, _, places = entry
        return Found(object_id, size, digest, places, asked_ms, client.link.joins)

    async def exists(self, key: bytes) -> bool | None:
        """Asks, and judges a yes."""
        client = self._client
        began = client.now
        answer = await client.link.call("exists", [[key], 0])
        if answer is None or answer[0] is not None:
            return None
        is_there = bool(answer[1][0]) if isinstance(answer[1], bytes) else bool(answer[1][1][0])
        if is_there:
            client.around.history.judge_present(client.named(key), began, client.now)
        return is_there

    async def _get_cached(self, key: bytes, began: int) -> bool:
        client = self._client
        found = self._locations.get(key)
        if found is None:
            return False
        for place in found.places:
            if client.clock_ms() >= found.asked_ms + client.options.location_ms:
                break
            content = await self._read(found, place, with_word=True)
            if content is not None and content_digest(content) == found.digest:
                client.around.history.judge_get(client.named(key), began, client.now, found.digest)
                client.around.note("cached hit")
                return True
        self._locations.pop(key, None)
        return False

    async def _read(self, found: Found, place: list[int], *, with_word: bool = False) -> bytes | None:
        """The bytes of one place; with the state word read after them, None when the word says otherwise."""
        client = self._client
        segment, offset, slot = place
        remote = await client.remote(found.join, segment)
        if remote is None:
            return None
        parts = [ReadPart(segment, offset, found.size)]
        if with_word:
            parts.append(ReadPart(segment, WORDS_AT + 8 * slot, 8, in_directory=True))
        results = await self._read_parts(remote, parts)
        if results is None:
            return None
        if with_word and int.from_bytes(results[1], "little") != found.object_id:
            return None
        return results[0]

    async def _read_parts(self, remote: Remote, parts: list[ReadPart]) -> list[bytes] | None:
        client = self._client
        engine = client.mapped(remote)
        if engine is not None:
            memory = engine.segments.get(remote.segment)
            if memory is None:
                return None
            return [await copy_out(client.process, memory, part, engine.piece_us()) for part in parts]
        lane = await client.lane(remote)
        if lane is None:
            return None
        results = await lane.read(parts, client.options.read_timeout_ms * MS)
        return results if isinstance(results, list) else None

    async def view(self, key: bytes, hold_us: int) -> str:
        """Pins the object on this host, verifies it, holds it for a time, and looks once more."""
        client = self._client
        began = client.now
        found = await self.look_up(key, client.options.lease_ms)
        if not isinstance(found, Found):
            return "miss"
        for segment, offset, slot in found.places:
            remote = await client.remote(found.join, segment)
            engine = client.mapped(remote) if remote is not None else None
            if remote is None or engine is None:
                continue
            caller = await dial(client.process, client.around.network, remote.view_endpoint, is_local=True)
            if caller is None:
                continue
            answer = await caller.call("view_open", [[[segment, slot, found.object_id]]], 500)
            memory = engine.segments.get(segment)
            if answer is None or answer[0] is not None or not answer[1][0] or memory is None:
                caller.close()
                continue
            part = ReadPart(segment, offset, found.size)
            content = await copy_out(client.process, memory, part, engine.piece_us())
            if content_digest(content) != found.digest:
                caller.close()
                raise ViewChanged(f"{client.named(key)}: a pinned object does not have its digest")
            client.around.history.judge_get(client.named(key), began, client.now, found.digest)
            await client.process.sleep(hold_us)
            if bytes(memory.data[offset : offset + found.size]) != content:
                raise ViewChanged(f"{client.named(key)}: bytes changed under a pinned view")
            client.around.note("view")
            caller.close()
            return "hit"
        return "unavailable"
