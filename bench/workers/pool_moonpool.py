"""Moonpool's store: a Redis, a master and a node, each a process, and clients in this one.

Variants of the client: ``shm`` and ``tcp`` reach the node by that transport, ``cached`` is ``shm`` with a
location cache. With the option ``own`` there is no node, and the client ``own`` brings the memory itself.
The master is reached over a unix socket.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from moonpool.bench.workers.driver import anonymous_memory
from moonpool.bench.workers.pool_driver import Batch, Call
from moonpool.bench.workers.pool_protocol import PoolOperation
from moonpool.bench.workers.pool_servers import Servers, wait_for
from moonpool.store.client import Pool, connect
from moonpool.units import MIB

COMMAND: Final = (sys.executable, "-P", "-m", "moonpool.cli")
CACHE_KEYS: Final = 1 << 20
NO_SPACE_WAIT_MS: Final = 5_000
"""What was removed before a job may still be on its way out when its puts begin."""


class MoonpoolPool:
    """The servers, and a client for each variant that is asked for."""

    def __init__(self, options: dict[str, str]) -> None:
        self._servers = Servers()
        self._own = options.get("own") == "yes"
        self.capacity_bytes = int(options["capacity"])
        self._memory_bytes = self.capacity_bytes * 2
        self._pools: dict[str, Pool] = {}
        try:
            url, self._redis = self._servers.start_redis()
            durability = options.get("durability", "async")
            socket = str(self._servers.folder / "master.sock")
            words = ["master", "--listen", socket, "--redis", url, "--durability", durability]
            self._address = self._servers.start_json([*COMMAND, *words, "--log", "error", "--json"])[
                "address"
            ]
            if not self._own:
                words = ["node", "--master", self._address, "--memory", str(self._memory_bytes)]
                self._servers.start_json([*COMMAND, *words, "--log", "error", "--json"])
            self.memory = anonymous_memory(256 * MIB)
        except BaseException:
            self._servers.close()
            raise

    def _pool(self, variant: str) -> Pool:
        if variant not in self._pools:
            every: dict[str, dict[str, Any]] = {
                "shm": {"transports": ("local", "shm")},
                "cached": {"transports": ("local", "shm"), "location_cache_keys": CACHE_KEYS},
                "tcp": {"transports": ("tcp",)},
                "own": {"contribute_bytes": self._memory_bytes},
            }
            self._pools[variant] = connect(self._address, put_wait_ms=NO_SPACE_WAIT_MS, **every[variant])
        return self._pools[variant]

    def pids(self) -> Sequence[int]:
        return self._servers.pids()

    def redis_pid(self) -> int:
        return self._redis

    def call(self, operation: PoolOperation, variant: str, size: int, batches: Sequence[Batch]) -> Call:
        pool = self._pool(variant)
        keys = [batch.keys for batch in batches]
        places = [[self.memory[offset : offset + size] for offset in batch.offsets] for batch in batches]
        count = len(keys[0])
        if operation == "exists":
            return exists_call(pool, keys, count)
        if count == 1:
            return single_call(pool, operation, keys, places)
        if operation == "put":

            def put_many(index: int) -> None:
                results = pool.put_many(keys[index], places[index])
                if not all(result.stored for result in results):
                    raise RuntimeError(f"put of {count} x {size} bytes: {results[:3]}")

            return put_many

        def get_many(index: int) -> None:
            results = pool.get_into_many(keys[index], places[index])
            if not all(result.hit for result in results):
                raise RuntimeError(f"get of {count} x {size} bytes: {results[:3]}")

        return get_many

    def fill(self, variant: str, size: int, batches: Sequence[Batch]) -> None:
        put = self.call("put", variant, size, batches)
        for index in range(len(batches)):
            put(index)
        if variant == "cached":  # a location is known to who has read the object once
            get = self.call("get", variant, size, batches)
            for index in range(len(batches)):
                get(index)

    def clear(self) -> None:
        """Removes everything and waits until its memory is free again: that is the next job's start."""
        pool = next(iter(self._pools.values()))
        pool.remove_all(force=True)
        wait_for(lambda: pool.status()["gauges"]["quarantined"] == 0, "room for new objects")

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._servers.close()


def single_call(
    pool: Pool, operation: PoolOperation, keys: Sequence[list[str]], places: Sequence[list[Any]]
) -> Call:
    """Calls of one key: `put` and `get_into`."""
    if operation == "put":

        def put(index: int) -> None:
            result = pool.put(keys[index][0], places[index][0])
            if not result.stored:
                raise RuntimeError(f"put: {result}")

        return put

    def get(index: int) -> None:
        result = pool.get_into(keys[index][0], places[index][0])
        if not result.hit:
            raise RuntimeError(f"get: {result}")

    return get


def exists_call(pool: Pool, keys: Sequence[list[str]], count: int) -> Call:
    """Calls of `exists` for one key or many."""

    def call(index: int) -> None:
        found = pool.exists(keys[index][0]) if count == 1 else sum(pool.exists_many(keys[index]))
        if found != count:
            raise RuntimeError(f"{found} of {count} keys exist")

    return call


def make_driver(options: dict[str, str]) -> MoonpoolPool:
    return MoonpoolPool(options)
