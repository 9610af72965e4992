"""The processes of a chaos run: Redis, two masters, nodes, clients, and the proxies between them.

Every process is the real one: `redis-server`, `moonpool master`, `moonpool node`, a client in a process of
its own. Who talks to a master, and who reaches a node over tcp, goes through a fault proxy; clients of the
same host also map memory.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Final, Self, final

from moonpool.bench.chaos_client import ClientSettings
from moonpool.bench.fault_proxy import FaultProxy
from moonpool.bench.program import Program, module_words
from moonpool.errors import MoonpoolError, PeerStalled

MASTERS: Final = 2
KEYS: Final = 48
NODE_BYTES: Final = 64 << 20
START_S: Final = 30.0
#: Where nodes are told to be reached: the loopback address that the proxies listen on.
PROXY_HOST: Final = "127.0.0.2"
KINDS: Final = ("node", "master", "redis", "client")


class NoRedis(MoonpoolError):
    """There is no redis-server here."""


def free_port() -> int:
    """A TCP port that is free now; kept by nobody, so take it soon."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@final
class Member:
    """One process that may be struck, by its kind and number; started anew after a kill."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number
        self.program: Program | None = None
        self.proxy: FaultProxy | None = None
        self.births = 0
        self.is_stopped = False
        #: Where a client writes down what it does.
        self.record = Path()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def kill(self) -> None:
        """kill -9, and its end."""
        if self.program is not None:
            self.program.kill()
            self.program = None
        self.is_stopped = False

    def stop(self) -> None:
        """SIGSTOP."""
        if self.program is not None:
            self.program.signal(signal.SIGSTOP)
            self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        if self.program is not None:
            self.program.signal(signal.SIGCONT)
        self.is_stopped = False


@final
class ChaosPool:
    """A running pool. Use as a context manager: at the end everything is gone."""

    def __init__(self, folder: Path, seed: int, nodes: int, clients: int) -> None:
        self.folder = folder
        self._seed = seed
        counts = {"node": nodes, "master": MASTERS, "redis": 1, "client": clients}
        self.members = {
            (kind, number): Member(kind, number) for kind in KINDS for number in range(counts[kind])
        }
        self.counts = counts
        self._ports = {key: free_port() for key, one in self.members.items() if one.kind != "client"}
        self._births = 0
        self.records: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._open_proxies()
            for kind in ("redis", "master", "node", "client"):
                for number in range(self.counts[kind]):
                    self.start(self.members[kind, number])
            for kind in ("master", "node", "client"):
                for number in range(self.counts[kind]):
                    self.wait_ready(self.members[kind, number])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and proxy. Idempotent."""
        for kind in ("client", "node", "master", "redis"):
            for number in range(self.counts[kind]):
                self.members[kind, number].kill()
        for member in self.members.values():
            if member.proxy is not None:
                member.proxy.close()
                member.proxy = None

    def _open_proxies(self) -> None:
        for key, port in self._ports.items():
            listen = (PROXY_HOST, port) if key[0] == "node" else None
            self.members[key].proxy = FaultProxy(f"127.0.0.1:{port}", listen=listen)

    @property
    def master_addresses(self) -> list[str]:
        """Where clients and nodes find the masters: behind their proxies."""
        proxies = [self.members["master", number].proxy for number in range(MASTERS)]
        return [proxy.endpoint for proxy in proxies if proxy is not None]

    def start(self, member: Member) -> None:
        """Starts the process of a member that has none."""
        member.births += 1
        if member.kind == "redis":
            self._start_redis(member)
            return
        words = {"master": self._master_words, "node": self._node_words, "client": self._client_words}
        self._run(member, words[member.kind](member))

    def _run(self, member: Member, words: list[str]) -> None:
        member.program = Program(member.name, words, str(self.folder / f"{member.kind}-{member.number}.log"))

    def wait_ready(self, member: Member) -> None:
        """Waits for a process to say that it serves; one that ended meanwhile raises."""
        if member.program is not None and member.kind != "redis":
            member.program.wait_line(START_S)

    def _start_redis(self, member: Member) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise NoRedis("redis-server (or valkey-server) is not on the path")
        folder = self.folder / "redis"
        folder.mkdir(exist_ok=True)
        port = self._ports["redis", 0]
        words = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
        words += ["--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"]
        self._run(member, [program, *words, "--loglevel", "warning"])
        wait_for_port(port, START_S)

    @property
    def redis_url(self) -> str:
        """Of the run's Redis, behind its proxy."""
        proxy = self.members["redis", 0].proxy
        assert proxy is not None
        return f"redis://{proxy.endpoint}/0"

    def _master_words(self, member: Member) -> list[str]:
        assert member.proxy is not None
        where = ["--listen", f"127.0.0.1:{self._ports['master', member.number]}"]
        told = ["--advertise", member.proxy.endpoint, "--name", member.name]
        return module_words(
            "moonpool.cli", "master", *where, *told, "--redis", self.redis_url, "--log", "warning", "--json"
        )

    def _node_words(self, member: Member) -> list[str]:
        masters = [word for address in self.master_addresses for word in ("--master", address)]
        where = ["--port", str(self._ports["node", member.number]), "--advertise", PROXY_HOST]
        offer = ["--memory", str(NODE_BYTES), "--name", f"node-{member.number}"]
        return module_words("moonpool.cli", "node", *masters, *where, *offer, "--log", "warning", "--json")

    def _client_words(self, member: Member) -> list[str]:
        self._births += 1
        record = self.folder / f"client-{self._births}.jsonl"
        self.records.append(record)
        member.record = record
        far = member.number % 2 == 1
        settings = ClientSettings(
            number=member.number,
            birth=self._births,
            seed=self._seed * 10_007 + self._births,
            addresses=self.master_addresses,
            record=str(record),
            keys=KEYS,
            transports=["tcp"] if far else ["local", "shm", "tcp"],
            cached=member.number % 4 >= 2,
        )
        return module_words("moonpool.bench.chaos_client", settings.to_json())

    def end_clients(self, timeout_s: float) -> list[str]:
        """Asks all clients to end; the names of those that do not within the time."""
        living = [one for one in self.members.values() if one.kind == "client" and one.program is not None]
        for member in living:
            assert member.program is not None
            member.program.end_input()
        deadline = time.monotonic() + timeout_s
        late = []
        for member in living:
            assert member.program is not None
            if not member.program.wait(max(0.1, deadline - time.monotonic())):
                late.append(member.name)
        return late

    def silent_deaths(self) -> list[str]:
        """Processes that ended although nobody killed them, with their last words."""
        return [
            f"{member.name}: {member.program.last_words()}"
            for member in self.members.values()
            if member.program is not None
            and not member.program.is_alive
            and member.program.process.returncode
        ]


def wait_for_port(port: int, timeout_s: float) -> None:
    """Waits until somebody listens on a loopback port; PeerStalled when nobody does in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    raise PeerStalled(f"nobody listens on port {port}", timeout_ms=timeout_s * 1e3)
