"""NIXL with its UCX back end; ``UCX_TLS`` decides how the bytes move (default: CMA on one host).

Transfer handles are prepared before the clock starts and used again, which is in NIXL's favour.
"""

from __future__ import annotations

import base64
import importlib
from typing import Any, Final

from moonpool.bench.workers.driver import (
    Bytes,
    Call,
    PreparedCalls,
    Timing,
    address_of,
    anonymous_memory,
    starts_of,
)
from moonpool.bench.workers.protocol import Job, Operation

nixl_api: Any = importlib.import_module("nixl_cu12._api")  # only its own environment has it

ENTRIES_PREPARED: Final = 4096  # descriptors in prepared handles of one cell


def start_agent(name: str, memory: Bytes) -> Any:
    agent = nixl_api.nixl_agent(name, nixl_api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address_of(memory), memory.nbytes, 0, "bench")], "DRAM")
    return agent


class NixlTarget:
    def start(self, size_bytes: int) -> tuple[Bytes, dict[str, Any]]:
        memory = anonymous_memory(size_bytes)
        self._agent = start_agent("target", memory)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return memory, {"address": address_of(memory), "metadata": metadata}


class NixlInitiator:
    def __init__(self) -> None:
        self._prepared = PreparedCalls(self._prepare)

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        self._memory = anonymous_memory(size_bytes)
        self._agent = start_agent("initiator", self._memory)
        name = self._agent.add_remote_agent(base64.b64decode(target["metadata"]))
        self._peer = name if isinstance(name, str) else name.decode()
        self._remote = int(target["address"])
        return self._memory

    def run(self, job: Job) -> Timing:
        return self._prepared.run(job)

    def _prepare(self, operation: Operation, block_bytes: int, count: int, variant: str) -> Call:
        agent = self._agent
        handles = [
            agent.initialize_xfer(
                operation.upper(),
                self._descriptors(address_of(self._memory) + start, block_bytes, count),
                self._descriptors(self._remote + start, block_bytes, count),
                self._peer,
            )
            for start in starts_of(self._memory.nbytes, block_bytes, count, ENTRIES_PREPARED)
        ]
        positions = len(handles)

        def call(index: int) -> None:
            handle = handles[index % positions]
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"nixl's transfer ended as {state}")

        return call

    def _descriptors(self, start: int, block_bytes: int, count: int) -> Any:
        return self._agent.get_xfer_descs(
            [(start + i * block_bytes, block_bytes, 0) for i in range(count)], "DRAM"
        )


def make_target(options: dict[str, str]) -> NixlTarget:
    return NixlTarget()


def make_initiator(options: dict[str, str]) -> NixlInitiator:
    return NixlInitiator()
