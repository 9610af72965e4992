"""A master and nodes in this process, and a client of them that is told each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from moonpool.ids import InstanceId, new_instance_id
from moonpool.native.io.copying import chunk_digests, root_digest
from moonpool.rpc.client import RpcClient
from moonpool.store.journal_config import JournalConfig
from moonpool.store.master import Master
from moonpool.store.master_config import MasterConfig
from moonpool.store.master_service_config import MasterServiceConfig
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig
from moonpool.units import MIB

WAIT_S: Final = 20.0
SEGMENT_BYTES: Final = 4 * MIB


def open_master(endpoint: str = "127.0.0.1:0", **rules: Any) -> Master:
    """A leader with a journal in memory."""
    config = MasterServiceConfig(
        journal=JournalConfig(address="memory://"), endpoints=(endpoint,), rules=MasterConfig(**rules)
    )
    master = Master(config)
    master.start()
    return master


def open_node(*addresses: str, name: str = "node", **changes: Any) -> Node:
    """A node that has joined and reported."""
    settings: dict[str, Any] = {"segment_bytes": SEGMENT_BYTES, "retry_max_ms": 100, **changes}
    node = Node(NodeConfig(addresses=addresses, name=name, **settings))
    try:
        node.start()
        assert node.wait_active(WAIT_S), node.problem()
    except BaseException:
        node.close()
        raise
    return node


def until(what: Callable[[], bool], about: Callable[[], object] = lambda: "") -> None:
    """Returns once it is so; the bound is far above what it takes."""
    give_up = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < give_up, f"it did not come to pass: {about()}"
        time.sleep(0.005)


class Caller:
    """A client by hand: the rpc alone. `places` are [segment, offset, slot, grant]."""

    def __init__(self, address: str, instance: InstanceId | None = None) -> None:
        self.instance = instance or new_instance_id()
        self.rpc = RpcClient(address)
        self.joined = self.rpc.call("client_join", [self.instance, "caller", "host", "default", b""])

    def segments(self) -> dict[int, dict[str, Any]]:
        return {one["id"]: one for one in self.rpc.call("segments")[2]}

    def start(self, key: bytes, size: int, policy: dict[str, Any] | None = None) -> tuple[int, list[Any]]:
        """The put's id and the first place."""
        reply = self.rpc.call("put_start", [[key], [size], policy, 5_000])
        code, places = reply[4][0]
        assert code == 0, reply
        return reply[2], places[0]

    def end(self, put_id: int, payload: bytes) -> tuple[int, int]:
        """Code and object id."""
        digests = chunk_digests(payload)
        chunks = b"".join(one.to_bytes(8, "little") for one in digests) if len(digests) > 1 else b""
        code, object_id = self.rpc.call("put_end", [put_id, [[0, root_digest(digests), chunks]]])[1][0]
        return code, object_id

    def remove(self, key: bytes) -> int:
        return int(self.rpc.call("remove", [[key], "defer", False])[1][0])

    def gauges(self) -> dict[str, int]:
        status = self.rpc.call("status")
        assert sum(status["gauges"].values()) == status["capacity"], status["gauges"]
        return dict(status["gauges"])

    def at_rest(self) -> bool:
        """True when no extent is being written or waits for anybody."""
        now = self.gauges()
        return now["writing"] == now["quarantined"] == now["leaving"] == 0

    def close(self) -> None:
        self.rpc.close()
