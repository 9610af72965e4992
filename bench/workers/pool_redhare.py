"""redhare's store by its Python API: metadata in Redis, data in the clients' own memory, tcp between them.

Puts go into the client's own memory. Gets of the variant ``remote`` are of objects that a second process put.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from moonpool.bench.workers.driver import address_of, anonymous_memory
from moonpool.bench.workers.pool_driver import Batch, Call
from moonpool.bench.workers.pool_protocol import PoolOperation
from moonpool.bench.workers.pool_servers import Servers, free_ports
from moonpool.units import MIB

HOST: Final = "127.0.0.1"
MEMORY_BYTES: Final = 256 * MIB
SETTLE_S: Final = 2.0
"""Its clients learn of each other by heartbeats."""

MEMORY_FACTOR: Final = 4
"""With twice the payload, puts of many large objects fail."""

VISIBLE_S: Final = 10.0
RETRY_S: Final = 0.02

OWNER: Final = """
import sys; sys.path.append(sys.argv[1])
from moonpool.bench.workers.pool_redhare import serve_owner
serve_owner(sys.argv[2])
"""


def make_store(redis_url: str, cluster: str, name: str, capacity: int) -> Any:
    """A client with memory of its own."""
    module: Any = importlib.import_module("redhare")  # only its own environment has it
    (port,) = free_ports(1)
    return module.KvStore(
        redis_url=redis_url,
        cluster=cluster,
        transport="tcp",
        capacity=capacity,
        client_id=name,
        data_plane_addr=f"{HOST}:{port}",
    )


def serve_owner(settings: str) -> None:
    """The second process: puts what it is told to, with the first bytes of a file, or removes it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    redis_url, cluster, capacity = json.loads(settings)
    store = make_store(redis_url, cluster, "owner", capacity)
    memory = anonymous_memory(MEMORY_BYTES)
    base = address_of(memory)
    store.register_buffer(base, memory.nbytes)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        size, source, batches = json.loads(line)
        if not source:
            print(json.dumps(sum(store.remove(key) for key in batches)), file=out, flush=True)
            continue
        filled = np.fromfile(source, dtype=np.uint8)
        memory[: filled.size] = filled
        codes: list[int] = []
        for keys, offsets in batches:
            places = [[base + offset] for offset in offsets]
            codes += store.batch_put_from_multi_buffers(keys, places, [[size]] * len(keys))
        print(json.dumps(codes.count(0)), file=out, flush=True)
    os._exit(0)


class RedharePool:
    """Redis, a process that owns objects, and the client in this process."""

    def __init__(self, options: dict[str, str]) -> None:
        self._servers = Servers()
        self.capacity_bytes = int(options["capacity"])
        try:
            url, self._redis = self._servers.start_redis_tcp()
            cluster = f"bench{os.getpid()}"
            settings = json.dumps([url, cluster, self.capacity_bytes * MEMORY_FACTOR])
            words = [sys.executable, "-P", "-c", OWNER, options["imports"], settings]
            self._owner = self._servers.start(words, stdout=subprocess.PIPE)
            assert self._owner.stdout is not None
            if self._owner.stdout.readline().strip() != "ready":
                raise RuntimeError("redhare's owner process did not start")
            self._store = make_store(url, cluster, "client", self.capacity_bytes * MEMORY_FACTOR)
            self.memory = anonymous_memory(MEMORY_BYTES)
            self._base = address_of(self.memory)
            self._put: list[str] = []
            self._owned: list[str] = []
            self._store.register_buffer(self._base, self.memory.nbytes)
            self._file = self._servers.folder / "bytes"
            time.sleep(SETTLE_S)
        except BaseException:
            self._servers.close()
            raise

    def pids(self) -> Sequence[int]:
        return self._servers.pids()

    def redis_pid(self) -> int:
        return self._redis

    def call(self, operation: PoolOperation, variant: str, size: int, batches: Sequence[Batch]) -> Call:
        store = self._store
        count = len(batches[0].keys)
        keys = [batch.keys for batch in batches]
        if operation == "exists":
            ones = [1] * count

            def call_exists(index: int) -> None:
                found = list(store.batch_is_exist(keys[index]))
                if found != ones:
                    raise RuntimeError(f"redhare found {found.count(1)} of {count} keys")

            return call_exists
        move = (
            store.batch_put_from_multi_buffers if operation == "put" else store.batch_get_into_multi_buffers
        )
        if operation == "put":
            self._put += [key for batch in batches for key in batch.keys]
        places = [[[self._base + offset] for offset in batch.offsets] for batch in batches]
        sizes, zeros = [[size]] * count, [0] * count

        def call(index: int) -> None:
            codes = list(move(keys[index], places[index], sizes))
            if codes != zeros:
                raise RuntimeError(f"redhare's {operation} of {count} x {size} bytes returned {codes[:3]}")

        return call

    def fill(self, variant: str, size: int, batches: Sequence[Batch]) -> None:
        if variant != "remote":
            put = self.call("put", variant, size, batches)
            for index in range(len(batches)):
                put(index)
            return
        self.memory.tofile(self._file)
        keys = sum(len(batch.keys) for batch in batches)
        plain = [[batch.keys, batch.offsets] for batch in batches]
        self._owned += [key for batch in batches for key in batch.keys]
        stored = self._tell_owner([size, str(self._file), plain])
        if stored != keys:
            raise RuntimeError(f"redhare's owner stored {stored} of {keys} objects")
        self._await_visible(size, batches)

    def _await_visible(self, size: int, batches: Sequence[Batch]) -> None:
        """Its objects are seen by others some time after a put: reads untimed until each was found once."""
        get = self.call("get", "remote", size, batches)
        deadline = time.monotonic() + VISIBLE_S
        for index in range(len(batches)):
            while True:
                try:
                    get(index)
                    break
                except RuntimeError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(RETRY_S)

    def _tell_owner(self, request: Any) -> int:
        assert self._owner.stdin is not None
        assert self._owner.stdout is not None
        self._owner.stdin.write(json.dumps(request) + "\n")
        self._owner.stdin.flush()
        return int(self._owner.stdout.readline() or -1)

    def clear(self) -> None:
        """Each process removes its own objects, key by key: there is no call for all."""
        for key in self._put:
            self._store.remove(key)
        if self._owned:
            self._tell_owner([0, "", self._owned])
        self._put, self._owned = [], []

    def close(self) -> None:
        self._servers.close()


def make_driver(options: dict[str, str]) -> RedharePool:
    return RedharePool(options)
