"""A master or a node in a process of its own, for the tests: says its address, ends when its input does.

`python store_peer.py master '{"journal": {...}}'` or `python store_peer.py node '{"addresses": [...], ...}'`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from moonpool.config import EngineConfig
from moonpool.store.journal_config import JournalConfig
from moonpool.store.master import Master
from moonpool.store.master_config import MasterConfig
from moonpool.store.master_service_config import MasterServiceConfig
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig


def make_master(told: dict[str, Any]) -> Master:
    return Master(
        MasterServiceConfig(
            journal=JournalConfig(**told.get("journal", {"address": "memory://"})),
            endpoints=tuple(told.get("endpoints", ("127.0.0.1:0",))),
            rules=MasterConfig(**{"rebuild_ms": 0, **told.get("rules", {})}),
        )
    )


def make_node(told: dict[str, Any]) -> Node:
    engine = EngineConfig(transports=tuple(told.pop("transports", ("local", "shm", "tcp"))))
    return Node(NodeConfig(**{**told, "addresses": tuple(told["addresses"]), "engine": engine}))


def main() -> None:
    role, told = sys.argv[1], json.loads(sys.argv[2])
    peer = make_master(told) if role == "master" else make_node(told)
    peer.start()
    print(peer.address, flush=True)
    sys.stdin.read()
    peer.close()


if __name__ == "__main__":
    main()
