"""Those who must not suffer while a target is fuzzed, in a process of their own, and those who dawdle there.

A healthy initiator reads and writes a region that nobody else knows the keys of, and compares every byte. Now
and then it asks the target to describe itself, and a newcomer opens a segment. Slow clients send a byte at a
time of a hello, a group header, a frame's body and a control frame.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, final

import numpy as np

from moonpool.bench.frame_fuzz_model import Oracle, RegionFacts, TargetFacts, Violation
from moonpool.bench.frame_fuzz_wire import Where
from moonpool.engine.engine import Engine
from moonpool.errors import MoonpoolError
from moonpool.ids import new_instance_id
from moonpool.operations import Access
from moonpool.units import KIB
from moonpool.wire.control import RequestMessage, encode_message
from moonpool.wire.hello import NONCE_BYTES, ClientHello, ConnectionKind
from moonpool.wire.transfer import Entry, GroupHeader, LaneOp, encode_group

#: A slow client sends one byte in this time.
SLOW_BYTE_S: Final = 0.1
SLOW_CLIENTS_OF_A_KIND: Final = 4
#: Pause of the healthy initiator between two transfers, so that it leaves the machine to the fuzzers.
PAUSE_S: Final = 0.002
REFRESH_EVERY: Final = 64
NEWCOMER_EVERY_S: Final = 2.0
TRANSFER_BYTES_MAX: Final = 64 * KIB
PROBE_BYTES: Final = 4 * KIB


@final
class SlowClient:
    """Sends a script byte by byte, again and again, and reconnects when the target has had enough.

    With an answer the script is legal, and must be answered; without one it never ends, and the target must
    close the connection at its own bound.
    """

    def __init__(self, kind: str, connect: Callable[[], socket.socket], script: bytes, answer: bytes) -> None:
        self.kind = kind
        self._connect = connect
        self._script = script
        self._answer = answer
        self._sock: socket.socket | None = None
        self._sent = 0
        self._got = b""
        self.tally: Counter[str] = Counter()

    def step(self) -> None:
        """One byte; takes what came back. Raises `Violation` for a wrong answer."""
        if self._sock is None:
            self._sock = self._connect()
            self._sock.setblocking(False)
            self._sent, self._got = 0, b""
            self.tally[f"slow_{self.kind}_connections"] += 1
        try:
            if self._sent < len(self._script):
                self._sent += self._sock.send(self._script[self._sent : self._sent + 1])
            came = self._sock.recv(4_096)
        except BlockingIOError:
            return
        except ConnectionError:
            came = b""
        if came:
            self._take(came)
        else:
            self._closed()

    def _take(self, came: bytes) -> None:
        self._got += came
        if self._sent < len(self._script) or not self._answer.startswith(self._got):
            raise Violation(f"a slow {self.kind} was answered by {self._got.hex()}")
        if self._got == self._answer:
            self.tally["slow_groups"] += 1
            self._sent, self._got = 0, b""

    def _closed(self) -> None:
        if self._answer:
            raise Violation(f"the connection of a slow but legal {self.kind} was closed")
        self.tally[f"slow_{self.kind}_closed"] += 1
        self.close()

    @property
    def is_inside_group(self) -> bool:
        """A group header of this client's is whole, and its group not answered."""
        return bool(self._answer) and self._sock is not None and self._sent >= 32

    def close(self) -> None:
        """Leaves in the middle of whatever it was sending."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def slow_clients(where: Where) -> list[SlowClient]:
    """A bounded number of each kind, over both families where both can be used."""
    oracle = Oracle(where.facts)
    region = next(one for one in where.facts.regions if one.name == "both")
    ping = GroupHeader(LaneOp.PING, 0, 5, 0)
    entry = Entry(region.handle, 11, 40, region.write_key)
    write = GroupHeader(LaneOp.WRITE, 1, 6, 40)
    body = encode_group(write, [entry]) + oracle.payload(write, [entry])
    hello = ClientHello(ConnectionKind.LANE, new_instance_id(), os.urandom(NONCE_BYTES)).encode()
    frame = encode_message(RequestMessage(1, "probe", {"padding": "x" * 200}))
    made = []
    for k in range(SLOW_CLIENTS_OF_A_KIND):
        is_unix = k % 2 == 1

        def plain(is_unix: bool = is_unix) -> socket.socket:
            return where.connect(is_unix)

        def lane(is_unix: bool = is_unix) -> socket.socket:
            return where.greet(ConnectionKind.LANE, is_unix)

        def session(is_unix: bool = is_unix) -> socket.socket:
            return where.greet(ConnectionKind.CONTROL, is_unix)

        made += [
            SlowClient("hello", plain, hello[:-1], b""),
            SlowClient("header", lane, encode_group(ping), oracle.answer(ping, ())),
            SlowClient("body", lane, body, oracle.answer(write, [entry])),
            SlowClient("control", session, frame[:-1], b""),
        ]
    return made


@final
class HealthyInitiator:
    """Owns an engine, and knows what the target's region must hold."""

    def __init__(self, facts: TargetFacts, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._region: RegionFacts = next(one for one in facts.regions if one.name == facts.healthy)
        self._endpoint = f"127.0.0.1:{facts.port}"
        self._engine = Engine(transports=("tcp",))
        self._segment = self._engine.open(self._endpoint)
        own = self._engine.allocate(TRANSFER_BYTES_MAX, access=Access.NONE)
        self._address = own.address
        self._own = np.frombuffer(own.view, dtype=np.uint8)
        self._expected = np.zeros(self._region.size_bytes, dtype=np.uint8)
        self._newcomer_at = time.monotonic() + NEWCOMER_EVERY_S
        self.latencies_us: list[float] = []
        self.tally: Counter[str] = Counter()

    def step(self) -> None:
        """A write and a read somewhere, and a read of 4 KiB for its latency. Raises on any wrong byte."""
        length = int(self._rng.integers(1, TRANSFER_BYTES_MAX))
        offset = int(self._rng.integers(0, self._region.size_bytes - length))
        data = self._rng.integers(0, 256, length, dtype=np.uint8)
        self._own[:length] = data
        self._engine.write(self._segment, self._region.handle, offset, self._address, length)
        self._expected[offset : offset + length] = data
        self.tally["healthy_groups"] += 1
        self._read(int(self._rng.integers(0, self._region.size_bytes - length)), length)
        begin = time.perf_counter()
        self._read(0, PROBE_BYTES)
        self.latencies_us.append((time.perf_counter() - begin) * 1e6)
        if len(self.latencies_us) % REFRESH_EVERY == 0:
            self._engine.refresh(self._segment)
            self.tally["healthy_refreshes"] += 1
        if time.monotonic() > self._newcomer_at:
            self._newcomer_at = time.monotonic() + NEWCOMER_EVERY_S
            self._welcome()

    def _read(self, offset: int, length: int) -> None:
        self._engine.read(self._segment, self._region.handle, offset, self._address, length)
        self.tally["healthy_groups"] += 1
        self.tally["healthy_bytes"] += length
        self._compare(self._own[:length], offset)

    def _welcome(self) -> None:
        """A newcomer opens a segment and reads from it, however slow and rude the others at the door are."""
        out = np.zeros(PROBE_BYTES, dtype=np.uint8)
        with Engine(transports=("tcp",)) as engine:
            engine.read(engine.open(self._endpoint), self._region.handle, 0, out)
        self._compare(out, 0)
        self.tally["newcomers"] += 1
        self.tally["healthy_groups"] += 1

    def _compare(self, got: Any, offset: int) -> None:
        wrong = int((got != self._expected[offset : offset + len(got)]).sum())
        if wrong:
            raise Violation(f"the healthy initiator read {wrong} wrong bytes of {len(got)} at {offset}")

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()


def bystand(facts: TargetFacts, patience_s: float, seed: int, pipe: Connection) -> None:
    """Body of the bystanders' process: goes on until the pipe says stop; sends what it saw."""
    problems: list[str] = []
    slow = slow_clients(Where(facts, patience_s))
    healthy = HealthyInitiator(facts, seed)
    try:
        pipe.send("ready")
        next_byte = time.monotonic()
        while not pipe.poll(PAUSE_S):
            if time.monotonic() >= next_byte:
                next_byte = time.monotonic() + SLOW_BYTE_S
                for client in slow:
                    client.step()
            healthy.step()
    except (Violation, MoonpoolError, OSError) as exc:
        problems.append(f"a bystander suffered: {type(exc).__name__}: {exc}")
    finally:
        tally = sum((client.tally for client in slow), healthy.tally)
        tally["slow_groups"] += sum(client.is_inside_group for client in slow)
        for client in slow:
            client.close()
        healthy.close()
    pipe.send({"tally": tally, "problems": problems, "latencies_us": sorted(healthy.latencies_us)})
