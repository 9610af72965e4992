"""A node: it offers memory to a pool, lets clients write and read it, and does what the master says.

It runs as a process of its own (`moonpool node`), or inside a client's process with the engine of that one.
Memory and what is in it live as long as the node: losing the master changes nothing for who reads, and when
one answers again the node tells it what it holds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from typing import Any, Final, Self, final

from moonpool.engine.engine import Engine
from moonpool.errors import EngineClosed, MoonpoolError
from moonpool.http_status import HttpStatus
from moonpool.store.node_config import NodeConfig
from moonpool.store.node_core import NodeCore, Phase
from moonpool.store.node_fencing import EngineFencing
from moonpool.store.node_hasher import Hasher
from moonpool.store.node_link import MasterLink
from moonpool.store.node_memory import SegmentBytes, SegmentMemory, allocate_segment
from moonpool.store.node_pages import node_pages, snapshot
from moonpool.store.node_view_port import ViewPort, view_endpoint
from moonpool.units import MS_PER_S

_made: Final = itertools.count(1)


def _default_name() -> str:
    """Host and process id; further nodes of a process have a number too."""
    number = next(_made)
    name = f"{socket.gethostname()}-{os.getpid()}"
    return name if number == 1 else f"{name}-{number}"


@final
class Node:
    """One node. `start` it, or use it as a context manager; `close` is idempotent.

    With `engine` given it shares that engine, which serves no other node, and leaves it open; the engine's
    settings count then. Making a node allocates its memory: it raises as `Engine.allocate`.
    """

    def __init__(self, config: NodeConfig, engine: Engine | None = None) -> None:
        self.config = config
        host = config.host or socket.gethostname()
        self.name: str = config.name or _default_name()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._closed = False
        self._memory: list[SegmentMemory] = []
        with contextlib.ExitStack() as undo:
            self._own_engine = engine is None
            self.engine = engine or undo.enter_context(Engine(config.engine_with_backing))
            self.engine.gate.claim()
            undo.callback(self.engine.gate.unclaim)
            undo.callback(self._free_memory)
            for number in range(config.segments):
                name = f"{self.name}/{number}"
                self._memory.append(allocate_segment(self.engine, config, name, number))
            identity = {
                "name": self.name,
                "host": host,
                "instance": self.engine.instance,
                "engine_endpoint": self.engine.endpoint,
                "view_endpoint": view_endpoint(self.engine.instance),
            }
            self._start_parts(identity, undo)
            undo.pop_all()

    def _start_parts(self, identity: dict[str, Any], undo: contextlib.ExitStack) -> None:
        config, bound_s = self.config, self.config.close_timeout_ms / MS_PER_S
        handles = [one.data.handle for one in self._memory]
        self._fencing = EngineFencing(self.engine.gate, handles, config.settle_timeout_ms)
        undo.callback(self._fencing.close, bound_s)
        segments = [one.core for one in self._memory]
        self._core = NodeCore(identity, segments, self._fencing, config.limits())
        payload = SegmentBytes(self.engine, [one.data for one in self._memory])
        self._hasher = Hasher(self._core.hashing, payload, self._lock)
        undo.callback(self._hasher.close, bound_s)
        secret = self.engine.config.cluster_secret
        guarded = (self._core.views, self._lock)
        self._views = ViewPort(self.engine.instance, secret, config.view_clients_max, guarded)
        undo.callback(self._views.close, bound_s)
        self._link = MasterLink(
            config, (self._core, self._lock), self.engine.instance, self._join_begins, self._hasher.wake
        )
        self._http: HttpStatus | None = None
        if config.http is not None:
            pages = node_pages(self.name, self._numbers, self.engine.metrics, self.problem)
            self._http = HttpStatus(pages, config.http)

    def _join_begins(self, key: bytes, zero_ns: int) -> None:
        """A new grant key; the core's lock is held."""
        self._fencing.join_begins()
        self.engine.gate.set_key(key, zero_ns)

    def start(self) -> None:
        """Begins to serve views and to look for a master; returns at once."""
        if self._closed:
            raise EngineClosed("the node is closed; make a new one")
        self._views.start()
        self._link.start()

    def wait_active(self, timeout_s: float) -> bool:
        """True once a master took the node in and has its report; False when that took too long."""
        return self._link.wait_active(timeout_s)

    def serve_forever(self) -> None:
        """Returns after `stop`."""
        self._stopped.wait()

    def stop(self) -> None:
        """Makes `serve_forever` return; safe in a signal handler."""
        self._stopped.set()

    @property
    def is_active(self) -> bool:
        """True while a master leads this node."""
        return self._core.phase is Phase.ACTIVE

    @property
    def address(self) -> str:
        """Where clients reach its engine."""
        return self.engine.endpoint

    @property
    def view_address(self) -> str:
        """Where clients of this host ask for views."""
        return self._views.address

    @property
    def http_address(self) -> str:
        """Where the status pages are; "" when there are none."""
        return "" if self._http is None else self._http.address

    def problem(self) -> str:
        """Why no master leads this node; "" while one does."""
        if self.is_active:
            return ""
        return self._link.problem or "joining"

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges of the node alone; those of its engine are `engine.metrics()`."""
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        with self._lock:
            core = {"counters": self._core.totals(), "gauges": self._core.gauges()}
        core["gauges"]["active"] = int(self.is_active)
        plain = {
            **{f"master_{name}": value for name, value in self._link.counters.items()},
            **self.engine.gate.counters(),
            "settle_rounds": self._fencing.rounds,
            "lanes_kicked": self._fencing.lanes_kicked,
        }
        return snapshot(core, plain, self._views.counters())

    def close(self) -> None:
        """Leaves the master, ends the threads (each within close_timeout_ms), and lets go of the memory."""
        if self._closed:
            return
        self._closed = True
        self._stopped.set()
        bound_s = self.config.close_timeout_ms / MS_PER_S
        if self._http is not None:
            self._http.close()
        self._link.close(bound_s)
        self._views.close(bound_s)
        self._hasher.close(bound_s)
        self._fencing.close(bound_s)
        self._free_memory()
        self.engine.gate.unclaim()
        if self._own_engine:
            self.engine.close()

    def _free_memory(self) -> None:
        """With another's engine: takes the regions back. What a client does not confirm the engine keeps."""
        memory, self._memory = self._memory, []
        for one in memory:
            one.core.directory.close()
            for region in () if self._own_engine else (one.data, one.directory):
                with contextlib.suppress(MoonpoolError):
                    self.engine.revoke(region)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()
