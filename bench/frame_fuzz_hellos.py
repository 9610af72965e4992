"""Fuzzes the hello on both listeners: connections with one hello each, good, mutated, cut or random."""

from __future__ import annotations

import os
import random
import socket
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, final

from moonpool.bench.frame_fuzz_model import Violation
from moonpool.bench.frame_fuzz_wire import Where, receive_up_to
from moonpool.errors import ProtocolError, Status
from moonpool.wire.hello import (
    CLIENT_HELLO_BYTES,
    NONCE_BYTES,
    SERVER_HELLO_BYTES,
    ClientHello,
    ConnectionKind,
    ServerHandshake,
    ServerHello,
    ServerIdentity,
)

#: Well below `handshakes_max`, beyond which the oldest unfinished hello would be closed.
AT_ONCE: Final = 16
_REFUSALS: Final = {Status.PROTOCOL: "versions_refused", Status.STALE_HANDLE: "instances_refused"}


@final
@dataclass(frozen=True, slots=True)
class SentHello:
    """A hello and what must come back: a status, or None for a connection closed without a word."""

    data: bytes
    status: Status | None
    counter: str


@final
class HelloFuzzer:
    """A handful of hellos at a time. `tally` counts what was sent and what the target must have counted."""

    def __init__(self, where: Where, seed: int) -> None:
        self._where = where
        self._seed = seed
        self._runs = 0
        self._identity = ServerIdentity(where.facts.instance, None)  # type: ignore[arg-type]
        self.tally: Counter[str] = Counter()

    def run(self, frames_max: int) -> int:
        """At most `frames_max` hellos at once; returns how many. Raises `Violation`."""
        self._runs += 1
        rng = random.Random(f"{self._seed} hello {self._runs}")
        hellos = [self._hello(rng) for _ in range(min(AT_ONCE, frames_max))]
        try:
            with ExitStack() as stack:
                socks = [
                    stack.enter_context(self._where.connect(is_unix=bool(k % 2))) for k in range(len(hellos))
                ]
                for sock, hello in zip(socks, hellos, strict=True):
                    sock.sendall(hello.data)
                    if hello.counter == "cut_off":
                        sock.shutdown(socket.SHUT_WR)
                for sock, hello in zip(socks, hellos, strict=True):
                    self._check(sock, hello)
        except Violation as exc:
            raise Violation(f"hello run {self._runs} of seed {self._seed}: {exc}") from exc
        return len(hellos)

    def _hello(self, rng: random.Random) -> SentHello:
        instance = self._where.facts.instance
        hello = bytearray(
            ClientHello(
                rng.choice((ConnectionKind.CONTROL, ConnectionKind.LANE)),
                rng.randbytes(16),
                rng.randbytes(NONCE_BYTES),
                rng.choice((instance, instance, bytes(16), rng.randbytes(16))),
            ).encode()
        )
        choice = rng.random()
        if choice < 0.1:
            hello = bytearray(rng.randbytes(CLIENT_HELLO_BYTES))
        elif choice < 0.7:
            for _ in range(rng.randint(1, 3)):
                # Mostly the fields that mean something: magic, version, kind, flags.
                at = rng.choice((rng.randrange(16), rng.randrange(16), rng.randrange(CLIENT_HELLO_BYTES)))
                hello[at] = rng.choice((0, 1, 2, 3, 255, rng.getrandbits(8)))
        elif choice < 0.8:
            return SentHello(bytes(hello[: rng.randrange(CLIENT_HELLO_BYTES)]), None, "cut_off")
        return self._judged(bytes(hello))

    def _judged(self, data: bytes) -> SentHello:
        handshake = ServerHandshake(self._identity, os.urandom(NONCE_BYTES))
        try:
            status = handshake.receive(data)
        except ProtocolError:
            return SentHello(data, None, "malformed")
        if status is Status.COMPLETE and ClientHello.decode(data).kind is ConnectionKind.RPC:
            # A kind that there is, and that an engine's port does not serve.
            return SentHello(data, Status.PROTOCOL, "kinds_refused")
        return SentHello(data, status, _REFUSALS.get(status, "completed"))

    def _check(self, sock: socket.socket, hello: SentHello) -> None:
        self.tally["frames"] += 1
        self.tally["connections"] += 1
        self.tally[hello.counter] += 1
        try:
            answer = receive_up_to(sock, SERVER_HELLO_BYTES)
        except ConnectionResetError:
            answer = b""
        except TimeoutError as exc:
            raise Violation(f"nothing happens after the hello {hello.data.hex()}") from exc
        if hello.status is None:
            if answer:
                raise Violation(f"the broken hello {hello.data.hex()} was answered by {answer.hex()}")
        else:
            self.tally["answered"] += 1
            if len(answer) != SERVER_HELLO_BYTES or ServerHello.decode(answer).status is not hello.status:
                raise Violation(f"{answer.hex()} answers {hello.data.hex()}, not {hello.status.name}")
        if hello.status is Status.COMPLETE:
            sock.shutdown(socket.SHUT_WR)
        try:
            if sock.recv(1):
                raise Violation(f"more than one answer came to the hello {hello.data.hex()}")
        except ConnectionResetError:
            pass
        except TimeoutError as exc:
            raise Violation(f"the connection of the hello {hello.data.hex()} stays open") from exc
        self.tally["closed"] += 1
