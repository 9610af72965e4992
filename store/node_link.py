"""A node's way to the master that leads: join, report, apply what it pushes, acknowledge; again when lost.

One thread does it all: it waits for pushes, and answers each bunch of them at once, because replies of the
master's wait for that. While no master answers everything goes on but this: clients read, views are pinned.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, final

from moonpool.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ids import InstanceId
from moonpool.rpc.client import RpcClient
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.store.errors import ERRORS_BY_CODE, NotLeader, error_of_code
from moonpool.store.node_config import NodeConfig
from moonpool.store.node_core import NodeCore, Phase
from moonpool.store.node_packed import PackedEffects
from moonpool.units import MS_PER_S, NS_PER_MS
from moonpool.wire.rpc import RpcFault

logger: Final = logging.getLogger("moonpool.node")

BEAT_MS: Final = 200
#: How often held extents are looked at while there are some.
_HELD_LOOK_S: Final = 0.02
#: Pushes that are applied before they are acknowledged together.
_PUSHES_AT_ONCE: Final = 64
#: Different problems that are remembered as told.
_TOLD_MAX: Final = 64


def boot_ms() -> int:
    """CLOCK_BOOTTIME in milliseconds: the clock of a node."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // NS_PER_MS


@final
class MasterLink:
    """Runs from `start` to `close`. `joined(key, zero_ns)` is called with each join's grant key and clock."""

    def __init__(
        self,
        config: NodeConfig,
        guarded: tuple[NodeCore, threading.Lock],
        instance: InstanceId,
        joined: Callable[[bytes, int], None],
        work_came: Callable[[], None],
    ) -> None:
        self._config = config
        self._core, self._lock = guarded
        self._effects = PackedEffects(self._core)
        self._instance = instance
        self._joined = joined
        self._work_came = work_came
        self._addresses = list(config.addresses)
        self._timeout_s = config.request_timeout_ms / MS_PER_S
        self._limits = ClientLimits(
            connect_ms=config.connect_timeout_ms, handshake_ms=config.connect_timeout_ms
        )
        self._stop = threading.Event()
        #: Saying goodbye: nothing is acknowledged and no master joined any more.
        self._leaving = False
        self._client: RpcClient | None = None
        #: What kept the node from its master last; "" while it is joined.
        self.problem = "not connected yet"
        self._told: set[str] = set()
        self.counters = {"connections": 0, "connections_lost": 0, "acks": 0, "pushes": 0}
        self._active = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moonpool-node", daemon=True)

    def start(self) -> None:
        """Begins to look for the master."""
        self._thread.start()

    def wait_active(self, timeout_s: float) -> bool:
        """True once the node has joined and reported; False when that took too long."""
        with self._active:
            return self._active.wait_for(lambda: self._core.phase is Phase.ACTIVE, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Leaves the master and ends the thread. A master that does not answer finds out by itself."""
        self._leaving = True
        client = self._client
        if client is not None:
            if self._core.phase is Phase.ACTIVE:
                with contextlib.suppress(MoonpoolError):
                    client.call("node_leave", [], min(timeout_s, self._config.ack_timeout_ms / MS_PER_S))
            self._stop.set()
            client.close()
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_ms = self._config.retry_first_ms
        failures = 0
        while not (self._stop.is_set() or self._leaving):
            joins = self._core.counters["joins"]
            began = time.monotonic()
            try:
                self._serve(self._addresses[0])
                failures = 0
                continue
            except MoonpoolError as problem:
                self._note(problem)
            except Exception as problem:
                # A bug must not end the only thread that keeps the node in the pool.
                logger.exception("the node's link to its master failed")
                self.problem = f"{type(problem).__name__}: {problem}"
            with self._lock:
                self._core.lost()
            lasted_ms = (time.monotonic() - began) * MS_PER_S
            if self._core.counters["joins"] > joins and lasted_ms >= self._config.retry_max_ms:
                # One that ended at once was no good: another process may have the same name.
                failures, pause_ms = 0, self._config.retry_first_ms
            failures += 1
            if failures % len(self._addresses) == 0:
                self._stop.wait(pause_ms / MS_PER_S)
                pause_ms = min(2 * pause_ms, self._config.retry_max_ms)

    def _note(self, problem: MoonpoolError) -> None:
        """Says what happened, once until the next join, and chooses whom to ask next."""
        self.problem = f"{self._addresses[0]}: {problem}"
        if self.problem not in self._told and not self._stop.is_set():
            if len(self._told) >= _TOLD_MAX:
                self._told.clear()
            self._told.add(self.problem)
            logger.warning("no master at %s", self.problem)
        named = []
        if isinstance(problem, NotLeader):
            named = [address for address in self._addresses if address in problem.message]
        chosen = named[0] if named else self._addresses[0]
        self._addresses.remove(chosen)
        self._addresses.insert(0 if named else len(self._addresses), chosen)

    # ---- one connection ------------------------------------------------------------------------------------

    def _serve(self, address: str) -> None:
        """Joins and serves until the connection ends, which raises, or a new join is due."""
        secret = self._config.engine.cluster_secret
        with RpcClient(
            address,
            instance=self._instance,
            secret=secret,
            limits=self._limits,
            make_error=lambda fault: _error_of(fault, address),
        ) as client:
            self._client = client
            self.counters["connections"] += 1
            try:
                self._join(client)
                while not self._stop.is_set() and not self._core.wants_join(boot_ms()):
                    self._turn(client)
            finally:
                self._client = None
                self.counters["connections_lost"] += 1

    def _join(self, client: RpcClient) -> None:
        with self._lock:
            params = self._core.join_params(boot_ms())
            zero_ns = self._core.zero_ms * NS_PER_MS
        reply = client.call("node_join", params, self._timeout_s)
        with self._lock:
            self._core.joined(reply)
            # Before the report: nobody is given a grant for this node's memory earlier.
            self._joined(self._core.grant_key, zero_ns)
        while True:
            with self._lock:
                page = self._core.next_page()
            if page is None:
                break
            reply = client.call("node_report", page, self._timeout_s)
            with self._lock:
                self._core.page_answered(reply)
        self.problem = ""
        self._told.clear()
        logger.info("joined the master at %s as node %d", client.address, self._core.node_id)
        with self._active:
            self._active.notify_all()

    def _turn(self, client: RpcClient) -> None:
        """Waits for a push, up to the next beat, applies what came, and acknowledges."""
        beat_s = self._beat_s()
        until = time.monotonic() + beat_s
        while True:
            left = until - time.monotonic()
            with self._lock:
                held = self._core.is_waiting
            push = client.native.next_push(max(0.0, min(left, _HELD_LOOK_S) if held else left))
            if push is not None:
                self._take(client, push)
            with self._lock:
                say = self._core.tick(boot_ms())
                away = self._core.phase is Phase.AWAY
            if away:
                return
            if push is not None or say or time.monotonic() >= until:
                break
            if self._stop.is_set():
                raise PeerGone("the node is closing")
        self._acknowledge(client)

    def _take(self, client: RpcClient, push: tuple[str, bytes]) -> None:
        taken = 0
        found: tuple[str, bytes] | None = push
        while found is not None:
            method, packed = found
            if method != "effects":
                raise ProtocolError(f"the master pushed {method!r}, which a node does not know")
            with self._lock:
                self._effects.take(packed, boot_ms())
            taken += 1
            found = client.native.next_push(0.0) if taken < _PUSHES_AT_ONCE else None
        self.counters["pushes"] += taken
        if self._core.hashing.jobs:
            self._work_came()

    def _acknowledge(self, client: RpcClient) -> None:
        with self._lock:
            params = None if self._leaving else self._core.ack_params(boot_ms())
        if params is None:
            return
        # A master that is stopped keeps its connections open: do not wait long for one.
        reply = client.call("node_ack", params, self._config.ack_timeout_ms / MS_PER_S)
        with self._lock:
            self._core.ack_answered(reply)
        self.counters["acks"] += 1

    def _beat_s(self) -> float:
        told = self._core.settings.get("beat_ms", BEAT_MS)
        return max(1, told if type(told) is int else BEAT_MS) / MS_PER_S


def _error_of(fault: RpcFault, address: str) -> MoonpoolError:
    """The store's own class of what a master answered, else the rpc's."""
    if fault.code in ERRORS_BY_CODE:
        return error_of_code(fault.code, fault.message)
    return RpcError(fault, address)
