"""What one task of a client does over and over: operations drawn from a workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simworld.client import Client
from simworld.loop import MS
from simworld.reading import Reader
from simworld.workloads import Workload
from simworld.writing import Writer


class Work:
    """One task. It ends when the world is calm; `final` looks at every key once more."""

    def __init__(self, client: Client, workload: Workload, is_over: Callable[[], bool]) -> None:
        self._client = client
        self._workload = workload
        self._is_over = is_over
        self._writer = Writer(client)
        self._reader = Reader(client)
        self._names = list(workload.mix)
        self._weights = list(workload.mix.values())

    async def run(self) -> None:
        """Works until the calm."""
        client, chance = self._client, self._client.process.loop.chance
        while not self._is_over():
            await client.process.sleep(chance.randint(0, self._workload.think_us))
            name = chance.choices(self._names, self._weights)[0]
            outcome = await self._do(name, self._key())
            client.around.note(f"{name} {outcome}")

    def _key(self) -> bytes:
        return b"key%d" % self._client.process.loop.chance.randrange(self._workload.keys)

    async def _do(self, name: str, key: bytes) -> object:
        if name in ("put", "upsert"):
            return await self._put(key, replace=name == "upsert")
        if name in ("get", "cached"):
            return await self._reader.get(key, cached=name == "cached")
        if name == "view":
            return await self._reader.view(key, self._client.process.loop.chance.randint(0, 900 * MS))
        if name == "exists":
            return await self._reader.exists(key)
        if name == "remove":
            return await self._writer.remove(key, force=self._client.process.loop.chance.random() < 0.5)
        if name == "pin":
            await self._writer.pin(key, self._client.process.loop.chance.randrange(3))
            return "set"
        keys = [b"key%d" % number for number in range(self._workload.keys)]
        return await self._writer.remove_many(name, key[:4] if name == "remove_prefix" else b"", keys)

    async def _put(self, key: bytes, *, replace: bool) -> str:
        chance, workload = self._client.process.loop.chance, self._workload
        policy: dict[str, Any] = {"replicas": chance.choice(workload.replicas)}
        if replace:
            policy["replace"] = True
        if workload.groups:
            policy["group"] = f"group{chance.randrange(workload.groups)}"
            policy["pin"] = chance.choice((0, 0, 1))
            policy["soft_pin_ms"] = 500
        return await self._writer.put(key, chance.choice(workload.sizes), policy)
