"""A client of a node in a process of its own, to be stopped and killed: it views an object, or may write.

Usage: node_visitor.py view ADDRESS SEGMENT SLOT OBJECT_ID, view_and_fork with the same,
or write MASTER NODE KEY SIZE.
"""

from __future__ import annotations

import os
import signal
import sys

from moonpool import Engine
from moonpool.rpc.client import RpcClient
from moonpool.store.node_effects import INSTANCE_BYTES


def view(address: str, segment: str, slot: str, object_id: str) -> None:
    """Pins an object and says whether that worked; holds it until standard input ends."""
    with RpcClient(address) as client:
        answer = client.call("view_open", [[[int(segment), int(slot), int(object_id)]]])
        print(answer.hex(), flush=True)
        sys.stdin.read()


def view_and_fork(address: str, segment: str, slot: str, object_id: str) -> None:
    """As `view`, with a child that has the socket as well; says the child's process id too."""
    with RpcClient(address) as client:
        answer = client.call("view_open", [[[int(segment), int(slot), int(object_id)]]])
        child = os.fork()
        if child == 0:
            # Not killed with its parent, and not waiting on its standard input.
            signal.pause()
        print(answer.hex(), child, flush=True)
        sys.stdin.read()


def write(master: str, node: str, key: str, size: str) -> None:
    """Maps the memory and starts a put of which it never writes a byte; waits for the end of input."""
    with Engine() as engine, RpcClient(master) as client:
        assert len(engine.instance) == INSTANCE_BYTES
        client.call("client_join", [engine.instance, "visitor", "host", "default", b""])
        segment = engine.open(node)
        reply = client.call("put_start", [[key.encode()], [int(size)], None, 5_000])
        print(reply[4][0][0], segment.paths[0].transport, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"view": view, "view_and_fork": view_and_fork, "write": write}[sys.argv[1]](*sys.argv[2:])
