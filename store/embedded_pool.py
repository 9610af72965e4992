"""A whole pool inside one process: a master with a journal in memory, and a node on the client's own engine.

Nothing survives the process, and nothing outside it is needed. The client talks to this master over a unix
socket as to any other, so an embedded pool behaves as a real one does; clients of other processes may join
it by its address and the engine's port.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, final

from moonpool.ids import new_instance_id
from moonpool.store.errors import MasterUnavailable
from moonpool.store.journal_config import MEMORY_ADDRESS, JournalConfig
from moonpool.store.master import Master
from moonpool.store.master_config import MasterConfig
from moonpool.store.master_service_config import MasterServiceConfig
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig
from moonpool.units import KIB, MS_PER_S

if TYPE_CHECKING:
    from moonpool.engine.engine import Engine
    from moonpool.store.client_config import ClientConfig

_START_S: Final = 30.0
_PAGE_BYTES: Final = 4 * KIB
#: The smallest extents are 64 bytes: an embedded pool keeps small objects too.
_SLOT_BYTES: Final = 1 * KIB


@final
class EmbeddedPool:
    """Started by being made; `close` ends node and master. Making one takes some milliseconds."""

    def __init__(self, config: ClientConfig, engine: Engine) -> None:
        # An abstract name that nobody can guess, and that is gone with the process.
        endpoint = f"@moonpool-{new_instance_id().hex()}"
        self.master = Master(
            MasterServiceConfig(
                journal=JournalConfig(address=MEMORY_ADDRESS),
                endpoints=(endpoint,),
                secret=config.engine.cluster_secret,
                rules=MasterConfig(
                    # There is no other master whose nodes could still come back.
                    rebuild_ms=0,
                    location_lease_ms=config.location_lease_ms,
                ),
            )
        )
        try:
            self.master.start()
            self.node = start_node(config, engine, (self.master.address,), config.embedded_bytes)
        except BaseException:
            self.master.close()
            raise

    @property
    def address(self) -> str:
        """Where clients of this host connect to."""
        return self.master.address

    def close(self) -> None:
        """Ends node and master. Idempotent."""
        self.node.close()
        self.master.close()


def start_node(config: ClientConfig, engine: Engine, addresses: tuple[str, ...], size_bytes: int) -> Node:
    """A node with one segment of so many bytes on an engine that is there; returns once a master has it.

    Raises MasterUnavailable when no master takes it within the time.
    """
    node = Node(
        NodeConfig(
            addresses=addresses,
            name=f"{config.name}-memory" if config.name else "",
            segment_bytes=-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES,
            slot_bytes=_SLOT_BYTES,
            engine=config.engine,
        ),
        engine,
    )
    node.start()
    started = time.monotonic()
    if node.wait_active(max(_START_S, config.unavailable_ms / MS_PER_S)):
        return node
    problem = node.problem()
    node.close()
    raise MasterUnavailable(
        f"no master took this process's memory into the pool ({problem})",
        reason=problem,
        elapsed_ms=(time.monotonic() - started) * MS_PER_S,
    )


def contribute(config: ClientConfig, engine: Engine) -> Node:
    """This process's own memory, offered to the pool that it joins."""
    return start_node(config, engine, config.addresses, config.contribute_bytes)
