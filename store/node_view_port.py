"""A node's view endpoint: clients of this host and user pin extents over a unix socket.

`view_open [[segment, slot, object id], ...]` answers a byte for each, 1 when that object is there and pinned;
`view_close` of the same shape answers how many pins it dropped. Pins are the connection's: they go with it,
and with the process that made it, even while another process keeps the socket open.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Any, Final, final

from moonpool.errors import MoonpoolError
from moonpool.ids import InstanceId
from moonpool.rpc.limits import ServerLimits
from moonpool.rpc.server import Closed, Request, RpcPort
from moonpool.store.errors import BadParams, UnknownMethod, wire_error
from moonpool.store.node_views import Views
from moonpool.wire.rpc import RpcFault

METHODS: Final = ("view_open", "view_close")
_POLL_MS: Final = 200
_LABEL: Final = "unix process "


def view_endpoint(instance: bytes) -> str:
    """The address of an engine's view endpoint: an abstract unix name, gone with its process."""
    return f"@moonpool-view-{instance.hex()}"


@final
class ViewPort:
    """Serves `views`, which `lock` guards, in a thread of its own. Raises as `RpcPort`."""

    def __init__(
        self,
        instance: InstanceId,
        secret: bytes | None,
        clients_max: int,
        guarded: tuple[Views, threading.Lock],
    ) -> None:
        self._views, self._lock = guarded
        limits = ServerLimits(connections_max=clients_max)
        self._port = RpcPort(
            [view_endpoint(instance)], instance=instance, secret=secret, limits=limits, methods=METHODS
        )
        self._pidfds: dict[int, int] = {}
        self._ended = select.poll()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="moonpool-views", daemon=True)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._port.addresses[0]

    def start(self) -> None:
        """Begins to serve."""
        self._port.start()
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Totals and gauges of the port."""
        return self._port.counters()

    def close(self, timeout_s: float) -> None:
        """Stops serving; all pins go."""
        self._closing = True
        self._port.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._port.close()
        for connection in list(self._pidfds):
            self._forget(connection)

    def _run(self) -> None:
        while not self._closing:
            for event in self._port.poll(_POLL_MS):
                if isinstance(event, Closed):
                    self._gone(event.connection)
                else:
                    self._serve(event)
            self._look_for_ended()

    def _serve(self, request: Request) -> None:
        self._watch(request.connection)
        try:
            result = self._answer(request)
        except MoonpoolError as problem:
            code, name, message = wire_error(problem)
            self._port.fail(
                request.connection, request.message_id, RpcFault(int(code), str(name), str(message))
            )
        else:
            self._port.reply(request.connection, request.message_id, result)

    def _answer(self, request: Request) -> Any:
        if request.method not in METHODS:
            raise UnknownMethod(f"a view endpoint knows {' and '.join(METHODS)}, not {request.method!r}")
        if len(request.params) != 1:
            raise BadParams("one list of [segment, slot, object id] is needed")
        with self._lock:
            if request.method == "view_open":
                return self._views.open(request.connection, request.params[0])
            return self._views.close(request.connection, request.params[0])

    def _gone(self, connection: int) -> None:
        self._forget(connection)
        with self._lock:
            self._views.holder_gone(connection)

    def _watch(self, connection: int) -> None:
        """A pidfd of the client's process: a child of it that inherited the socket must not keep its pins."""
        if connection in self._pidfds:
            return
        label = self._port.native.label(connection)
        pid = label.removeprefix(_LABEL)
        if not label.startswith(_LABEL) or not pid.isdecimal():
            return
        # Where there is none to be had, the end of the connection still tells.
        with contextlib.suppress(OSError):
            self._pidfds[connection] = os.pidfd_open(int(pid))
            self._ended.register(self._pidfds[connection], select.POLLIN)

    def _look_for_ended(self) -> None:
        ended = {fd for fd, _ in self._ended.poll(0)} if self._pidfds else set()
        for connection in [one for one, fd in self._pidfds.items() if fd in ended]:
            self._port.close_connection(connection)
            self._gone(connection)

    def _forget(self, connection: int) -> None:
        fd = self._pidfds.pop(connection, None)
        if fd is not None:
            self._ended.unregister(fd)
            os.close(fd)
