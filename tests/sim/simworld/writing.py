"""How a client puts: start, write every replica at once in pieces, end; and how it removes.

It posts nothing after 90 % of the put's deadline, counted from before it asked. It aborts only what it
never posted, or what the node itself refused; whatever it does not know of, it leaves to the deadline.
"""

from __future__ import annotations

from typing import Any

from simworld.client import Client
from simworld.loop import MS, Future
from simworld.memory import copy_in

STORED, EXISTS, NO_SPACE = 0, 1, 2


class Writer:
    """Puts of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def put(self, key: bytes, size: int, policy: dict[str, Any] | None = None) -> str:
        """Puts a new value of that size: "stored", "exists", "no space", "failed" or "unknown"."""
        client = self._client
        tag, content, digest = client.around.values.new(size)
        history = client.around.history
        history.put_began(tag, client.named(key), digest, client.now)
        asked_ms = client.clock_ms()
        answer = await client.link.call("put_start", [[key], [size], policy, 200])
        if answer is None or answer[0] is not None:
            # Nothing was written: at worst an open put that its deadline ends.
            history.put_ended(tag, client.now, is_stored=False, replaces=False)
            return "failed"
        join = client.link.joins
        _, _, put_id, remaining_ms, entries = answer[1]
        code, places = entries[0]
        if code != STORED:
            history.put_ended(tag, client.now, is_stored=False, replaces=False)
            return {EXISTS: "exists", NO_SPACE: "no space"}.get(code, "failed")
        stop_at_ms = asked_ms + remaining_ms * 9 // 10
        written = await self._write_all(places, content, put_id, (join, stop_at_ms))
        if not any(one is True for one in written):
            history.put_ended(tag, client.now, is_stored=False, replaces=False)
            if all(one is False for one in written):
                await client.link.call("put_abort", [put_id, None])
            return "failed"
        entry: list[Any] = [0, digest, b""]
        if not all(one is True for one in written):
            entry.append(sum(1 << at for at, one in enumerate(written) if one is not True))
        history.put_ending(tag, client.now)
        answer = await client.link.call("put_end", [put_id, [entry]])
        return self._settle(tag, answer, replaces=bool(policy and policy.get("replace")))

    def _settle(self, tag: int, answer: Any, *, replaces: bool) -> str:
        if answer is None or answer[0] is not None:
            return "unknown"
        code = answer[1][1][0][0]
        if code == 3:
            # An earlier leader may have ended it, and its answer was lost.
            return "unknown"
        client = self._client
        if code == STORED:
            client.around.watch.stored(tag, answer[1][1][0][1])
        client.around.history.put_ended(tag, client.now, is_stored=code == STORED, replaces=replaces)
        return {STORED: "stored", EXISTS: "exists"}.get(code, "failed")

    async def _write_all(
        self, places: list[list[Any]], content: bytes, put_id: int, term: tuple[int, int]
    ) -> list[bool | None]:
        """True, False (refused, or never posted) or None (nobody knows) for each place."""
        results: list[Future[bool | None]] = []
        for place in places:
            result: Future[bool | None] = Future()
            results.append(result)
            self._client.process.spawn(self._write_one(place, content, put_id, (*term, result)))
        return [await result for result in results]

    async def _write_one(
        self, place: list[Any], content: bytes, put_id: int, term: tuple[int, int, Future[bool | None]]
    ) -> None:
        join, stop_at_ms, result = term
        client = self._client
        segment, offset, _, grant = place
        remote = await client.remote(join, segment)
        engine = client.mapped(remote) if remote is not None else None
        if remote is None or client.clock_ms() >= stop_at_ms:
            result.set(False)
        elif engine is not None:
            memory = engine.segments.get(segment)
            if memory is None:
                result.set(False)
                return
            # Mapped memory is written by this process itself: the deadline was looked at before, not within.
            await copy_in(client.writer, memory, (offset, content, put_id), engine.piece_us())
            result.set(True)
        else:
            lane = await client.lane(remote)
            if lane is None or client.clock_ms() >= stop_at_ms:
                result.set(False)
                return
            landed = await lane.write(
                (segment, offset, content, grant, put_id), client.options.write_timeout_ms * MS
            )
            result.set(landed if isinstance(landed, bool) else None)

    async def remove(self, key: bytes, *, force: bool = False) -> int | None:
        """Removes a key: the reply's code, or None when the outcome is unknown."""
        client = self._client
        name = client.named(key)
        number = client.around.history.remove_began(name, client.now)
        answer = await client.link.call("remove", [[key], "defer", force])
        if answer is None or answer[0] is not None:
            return None
        code: int = answer[1][1][0]
        client.around.history.remove_ended(name, number, client.now, is_gone=code in (0, 1))
        return code

    async def remove_many(self, method: str, prefix: bytes, keys: list[bytes]) -> str:
        """Removes by prefix or all, page after page; `keys` are those that this ends, for the history."""
        client = self._client
        history = client.around.history
        names = [client.named(key) for key in keys if key.startswith(prefix)]
        numbers = [history.remove_began(name, client.now) for name in names]
        cursor, epoch = None, None
        while True:
            head = [prefix] if method == "remove_prefix" else []
            answer = await client.link.call(method, [*head, "defer", True, 4, cursor])
            # Cursors are a leader's own: with another one in between, nothing can be said.
            if answer is None or answer[0] is not None or epoch not in (None, answer[1][0]):
                return "unknown"
            epoch, _, cursor = answer[1]
            if cursor is None:
                break
        for name, number in zip(names, numbers, strict=True):
            history.remove_ended(name, number, client.now, is_gone=True)
        return "removed"

    async def pin(self, key: bytes, pin: int) -> None:
        """Sets a pin, as soft, hard or none."""
        await self._client.link.call("pin", [[key], pin, 500])
