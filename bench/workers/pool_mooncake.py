"""Mooncake's store by its Python API, in its three ways of taking part.

``local``: the client embeds the segment. ``remote``: the segment is another process's, reached over tcp.
``dummy``: a `mooncake_client` process owns the segment and this process is its dummy client over shared
memory.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from moonpool.bench.workers.driver import Bytes, address_of, anonymous_memory
from moonpool.bench.workers.pool_driver import Batch, Call
from moonpool.bench.workers.pool_protocol import PoolOperation
from moonpool.bench.workers.pool_servers import Servers, free_ports, listens, wait_for
from moonpool.units import GIB, MIB

HOST: Final = "127.0.0.1"
METADATA: Final = "P2PHANDSHAKE"
LOCAL_BUFFER_BYTES: Final = 512 * MIB
SETTLE_S: Final = 0.5
CLEAR_S: Final = 0.02
"""Its removal goes on after the call returns."""

OWNER: Final = """
import os, sys
out = os.dup(1); os.dup2(2, 1)
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup({host!r}, {metadata!r}, {segment}, {buffer}, "tcp", "", {master!r})
os.write(out, f"{{code}}\\n".encode())
sys.stdin.readline()
"""


class MooncakePool:
    """One kind of Mooncake client with its own master."""

    def __init__(self, options: dict[str, str]) -> None:
        self._servers = Servers()
        self._kind = options["kind"]
        self.capacity_bytes = int(options["capacity"])
        self._segment = self.capacity_bytes * 2
        try:
            self._start()
        except BaseException:
            self._servers.close()
            raise

    def _start(self) -> None:
        programs = Path(sys.executable).parent
        rpc, metrics, client, own, other = free_ports(5)
        master = f"{HOST}:{rpc}"
        flags = [f"-rpc_port={rpc}", f"-metrics_port={metrics}", "-enable_metric_reporting=false"]
        self._servers.start([str(programs / "mooncake_master"), *flags])
        wait_for(lambda: listens(rpc), "mooncake_master")
        store_module: Any = importlib.import_module("mooncake.store")  # only its own environment has it
        self._store = store_module.MooncakeDistributedStore()
        if self._kind == "dummy":
            self._start_client(programs, master, client)
            self._check("setup_dummy", self._store.setup_dummy(GIB, GIB, f"{HOST}:{client}"))
            self.memory = self._pooled(256 * MIB)
        else:
            if self._kind == "remote":
                self._start_owner(master, other)
            segment = self._segment if self._kind == "local" else 0
            self._check(
                "setup",
                self._store.setup(f"{HOST}:{own}", METADATA, segment, LOCAL_BUFFER_BYTES, "tcp", "", master),
            )
            self.memory = anonymous_memory(256 * MIB)
        self._base = address_of(self.memory)
        self._check("register_buffer", self._store.register_buffer(self._base, self.memory.nbytes))

    def _start_client(self, programs: Path, master: str, port: int) -> None:
        flags = [f"--master_server_address={master}", f"--host={HOST}", "--protocol=tcp", f"--port={port}"]
        size = f"--global_segment_size={self._segment // MIB} MB"
        self._servers.start(
            [str(programs / "mooncake_client"), *flags, size, f"--metadata_server={METADATA}"]
        )
        wait_for(lambda: listens(port), "mooncake_client")
        time.sleep(SETTLE_S)

    def _start_owner(self, master: str, port: int) -> None:
        code = OWNER.format(
            host=f"{HOST}:{port}", metadata=METADATA, segment=self._segment, buffer=64 * MIB, master=master
        )
        owner = self._servers.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert owner.stdout is not None
        self._check("the owner's setup", int(owner.stdout.readline() or -1))

    def _pooled(self, size_bytes: int) -> Bytes:
        address = self._store.alloc_from_mem_pool(size_bytes)
        if not address:
            raise RuntimeError("mooncake's alloc_from_mem_pool gave no memory")
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def pids(self) -> Sequence[int]:
        return self._servers.pids()

    def redis_pid(self) -> int:
        return 0

    def call(self, operation: PoolOperation, variant: str, size: int, batches: Sequence[Batch]) -> Call:
        store = self._store
        count = len(batches[0].keys)
        keys = [batch.keys if count > 1 else batch.keys[0] for batch in batches]
        places = [[self._base + offset for offset in batch.offsets] for batch in batches]
        if operation == "exists":
            return self._exists(keys, count)
        put = operation == "put"
        wanted = 0 if put else size
        if count == 1:
            single = store.put_from if put else store.get_into

            def call_one(index: int) -> None:
                code = single(keys[index], places[index][0], size)
                if code != wanted:
                    raise RuntimeError(f"mooncake's {operation} of {size} bytes returned {code}")

            return call_one
        many, sizes, all_well = (
            (store.batch_put_from if put else store.batch_get_into),
            [size] * count,
            [wanted] * count,
        )

        def call_many(index: int) -> None:
            codes = list(many(keys[index], places[index], sizes))
            if codes != all_well:
                raise RuntimeError(f"mooncake's {operation} of {count} x {size} bytes returned {codes[:3]}")

        return call_many

    def _exists(self, keys: list[Any], count: int) -> Call:
        one, many = self._store.is_exist, self._store.batch_is_exist

        def call(index: int) -> None:
            found = one(keys[index]) if count == 1 else sum(many(keys[index]))
            if found != count:
                raise RuntimeError(f"mooncake found {found} of {count} keys")

        return call

    def fill(self, variant: str, size: int, batches: Sequence[Batch]) -> None:
        put = self.call("put", variant, size, batches)
        for index in range(len(batches)):
            put(index)

    def clear(self) -> None:
        time.sleep(CLEAR_S)
        self._store.remove_all(True)

    def close(self) -> None:
        self._servers.close()

    @staticmethod
    def _check(what: str, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"mooncake's {what} returned {code}")


def make_driver(options: dict[str, str]) -> MooncakePool:
    return MooncakePool(options)
