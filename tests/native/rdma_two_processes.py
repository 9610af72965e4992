"""Two engines in processes of their own over one fake fabric; the owner is killed under a transfer.

python rdma_two_processes.py initiator|owner LIBRARY (with FAKE_VERBS_SHARE in the environment)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from moonpool import Engine, Op, PeerGone
from moonpool.native.verbs.devices import live_objects, use_library

MIB = 1 << 20
CONFIG: dict[str, Any] = {"rdma_timeout": 8, "rdma_retries": 1, "transfer_timeout_ms": 20_000}
WAIT_S = 20.0


def owner() -> None:
    """Offers a region, tells where, and waits to be killed."""
    with Engine(transports=("rdma", "tcp"), **CONFIG) as engine:
        region = engine.allocate(MIB)
        region.view[:] = bytes(range(256)) * (MIB // 256)
        print(engine.endpoint, region.handle, flush=True)
        signal.pause()


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.002)


def initiator(library: str) -> None:
    """Moves bytes with one owner after the other, and kills each under a batch."""
    with Engine(transports=("rdma",), **CONFIG) as engine:
        mine = engine.allocate(MIB)
        transport: Any = engine._by_name["rdma"]
        before = live_objects()
        for _ in range(3):
            child = subprocess.Popen(
                [sys.executable, __file__, "owner", library], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            try:
                endpoint, handle = child.stdout.readline().split()
                segment = engine.open(endpoint)
                mine.view[:] = bytes(MIB)
                engine.read(segment, int(handle), 0, mine.address, MIB)
                assert bytes(mine.view) == bytes(range(256)) * (MIB // 256)
                batch = engine.submit(Op.WRITE, segment, [mine.address] * 20_000, int(handle), 0, MIB)
                (link,) = transport.links()
                wait_until(
                    lambda link=link: any(rail.bytes_written for rail in link.rails()), "it is on its way"
                )
                os.kill(child.pid, signal.SIGKILL)
                child.wait(WAIT_S)
                killed = time.monotonic()
                assert batch.wait(WAIT_S)
                assert time.monotonic() - killed < 5
                try:
                    batch.check()
                except PeerGone:
                    pass
                else:
                    raise AssertionError("the batch outlived its peer")
                engine.close_segment(segment)
                wait_until(lambda: not transport.links(), "the link is gone")
                assert live_objects() == before, (before, live_objects())
            finally:
                child.kill()
                child.wait(WAIT_S)
                child.stdout.close()
    print("done", flush=True)


if __name__ == "__main__":
    use_library(sys.argv[2])
    if sys.argv[1] == "owner":
        owner()
    else:
        initiator(sys.argv[2])
