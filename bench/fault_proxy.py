"""A TCP proxy before an engine's port that delays, stalls, trickles, swallows or cuts, and changes no byte.

It tells control connections from data lanes by the hello's kind byte (docs/architecture.md, "Wire"), so a
fault can hit one kind and spare the other. Two threads a connection, one a direction; for tests and long
runs, not for traffic of worth.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias, final

Action: TypeAlias = Literal["pass", "delay", "stall", "trickle", "swallow", "cut"]
Direction: TypeAlias = Literal["up", "down", "both"]
Kind: TypeAlias = Literal["control", "lane", "any"]

ACTIONS: Final[tuple[Action, ...]] = ("delay", "stall", "trickle", "swallow", "cut")
READ_BYTES: Final = 65_536
CONNECT_TIMEOUT_S: Final = 5.0
#: Where the kind stands in a client's hello, and what it means.
_KIND_AT: Final = 10
_KINDS: Final[dict[int, Kind]] = {1: "control", 2: "lane"}
_HELLO_BYTES: Final = 64
_RESET: Final = struct.pack("ii", 1, 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to the bytes of connections of a kind, in a direction ("up" is towards the target).

    It begins `after_bytes` bytes after it was set (or after the hello, on a newer connection). `delay` holds
    each read `pause_ms` long, `trickle` sends a byte each `pause_ms`, `stall` holds everything until the
    fault is lifted and then delivers it, `swallow` drops everything for good, `cut` resets both sides.
    """

    action: Action
    kind: Kind = "lane"
    direction: Direction = "both"
    after_bytes: int = 0
    pause_ms: float = 10.0

    def hits(self, kind: Kind, direction: Direction) -> bool:
        """Whether it applies to a connection's direction."""
        return self.kind in (kind, "any") and self.direction in (direction, "both")


NO_FAULT: Final = Fault(action="pass", kind="any")


def random_fault(choice: random.Random, bytes_max: int) -> Fault:
    """A fault of a random action on lanes, beginning within `bytes_max` bytes; same seed, same fault."""
    return Fault(
        action=choice.choice(ACTIONS),
        direction=choice.choice(("up", "down")),
        after_bytes=choice.randrange(bytes_max),
        pause_ms=choice.uniform(0.1, 5.0),
    )


@final
class _Link:
    """One proxied connection: the client's socket, ours to the target, and what each direction has passed."""

    def __init__(self, client: socket.socket, target: socket.socket) -> None:
        self.client = client
        self.target = target
        self.kind: Kind = "any"
        self.passed = {"up": 0, "down": 0}
        self.held = {"up": 0, "down": 0}
        self.is_cut = False

    def reset(self) -> None:
        """Ends both sides at once."""
        self.is_cut = True
        for sock in (self.client, self.target):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@final
class FaultProxy:
    """Listens from creation to `close` and forwards to `target` ("host:port").

    It listens on a free loopback port, or at `listen`: another loopback address with the target's port, say.
    """

    def __init__(
        self, target: str, fault: Fault = NO_FAULT, *, listen: tuple[str, int] | None = None
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        loopback = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._listener = socket.create_server(listen or (loopback, 0), family=family)
        self._changed = threading.Condition()
        self._fault = fault
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._start(self._accept_forever)

    @property
    def endpoint(self) -> str:
        """ "host:port" where clients connect."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def links(self) -> int:
        """Connections open now."""
        with self._changed:
            return len(self._links)

    def set_fault(self, fault: Fault) -> None:
        """From now on this happens; what an earlier stall held is delivered unless this one holds it too."""
        with self._changed:
            self._fault = fault
            for link in self._links:
                link.passed = {"up": 0, "down": 0}
            self._changed.notify_all()

    def heal(self) -> None:
        """Lift the fault: held bytes go on, late."""
        self.set_fault(NO_FAULT)

    def cut(self, kind: Kind = "any") -> None:
        """Reset every connection of a kind; new ones are taken."""
        with self._changed:
            for link in self._links:
                if kind in ("any", link.kind):
                    link.reset()
            self._changed.notify_all()

    def wait_held(self, bytes_min: int, timeout_s: float) -> bool:
        """Wait until at least so many bytes are held back; False when the wait ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held() >= bytes_min, timeout_s)

    def wait_delivered(self, timeout_s: float) -> bool:
        """Wait until no byte is held back: each was delivered, or its receiver was gone."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held() == 0, timeout_s)

    def close(self) -> None:
        """End the listener, every connection and every thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._fault = NO_FAULT
            for link in self._links:
                link.reset()
            self._changed.notify_all()
            threads = list(self._threads)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def _held(self) -> int:
        return sum(sum(link.held.values()) for link in self._links)

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="fault-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept_forever(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                target = socket.create_connection(self._target, CONNECT_TIMEOUT_S)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            for sock in (client, target):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                if self._is_closed:
                    client.close()
                    target.close()
                    return
                link = _Link(client, target)
                self._links.append(link)
                self._start(self._run_link, link)

    def _run_link(self, link: _Link) -> None:
        down = threading.Thread(target=self._pump, args=(link, "down"), name="fault-proxy", daemon=True)
        down.start()
        self._pump(link, "up")
        down.join()
        with self._changed:
            self._links.remove(link)
            self._changed.notify_all()
        link.client.close()
        link.target.close()

    def _pump(self, link: _Link, direction: Direction) -> None:
        source, sink = (link.client, link.target) if direction == "up" else (link.target, link.client)
        hello = b""
        try:
            while data := source.recv(READ_BYTES):
                if direction == "up" and len(hello) < _HELLO_BYTES:
                    hello += data[: _HELLO_BYTES - len(hello)]
                    link.kind = _KINDS.get(hello[_KIND_AT], "any") if len(hello) > _KIND_AT else "any"
                with self._changed:
                    link.held[direction] = len(data)
                    self._changed.notify_all()
                self._forward(link, direction, sink, data)
            self._wait_while_swallowed(link, direction)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            # Whoever still sends on the other side must not wait for a reader that is gone.
            link.reset()
        with self._changed:
            link.held[direction] = 0
            self._changed.notify_all()

    def _wait_while_swallowed(self, link: _Link, direction: Direction) -> None:
        """A half-open connection loses the news of its end as well."""
        while (fault := self._fault_of(link, direction)) is not None and fault.action == "swallow":
            self._wait_for_another(link, fault)
            if link.is_cut:
                return

    def _wait_for_another(self, link: _Link, fault: Fault) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not fault or link.is_cut)

    def _forward(self, link: _Link, direction: Direction, sink: socket.socket, data: bytes) -> None:
        """Sends one read's bytes as the fault of the moment wants; raises OSError when the link is to end."""
        at = 0
        while at < len(data):
            fault = self._fault_of(link, direction)
            passed = link.passed[direction]
            stop = len(data)
            if fault is not None and passed < fault.after_bytes:
                stop = min(stop, at + fault.after_bytes - passed)
                fault = None
            if fault is not None:
                stop = self._suffer(link, fault, at, len(data))
                if stop == at:
                    continue
            if fault is None or fault.action != "swallow":
                sink.sendall(memoryview(data)[at:stop])
            with self._changed:
                link.passed[direction] += stop - at
                link.held[direction] -= stop - at
                self._changed.notify_all()
            at = stop

    def _fault_of(self, link: _Link, direction: Direction) -> Fault | None:
        with self._changed:
            fault = self._fault
        return fault if fault.action != "pass" and fault.hits(link.kind, direction) else None

    def _suffer(self, link: _Link, fault: Fault, at: int, stop: int) -> int:
        """Waits as the fault wants; returns up to where the bytes may go on now."""
        if fault.action == "cut":
            link.reset()
            raise ConnectionResetError("cut by the proxy")
        if fault.action == "stall":
            self._wait_for_another(link, fault)
            if link.is_cut:
                raise ConnectionResetError("cut by the proxy")
            return at
        if fault.action == "swallow":
            return stop
        time.sleep(fault.pause_ms / 1e3)
        return at + 1 if fault.action == "trickle" else stop
