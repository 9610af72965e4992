"""The conductor's HTTP service against Dynamo's indexer: ``python -m moonpool.bench.conductor_service_pair``.

Both servers are processes of their own, subscribed to the same 16 publishers of block events in vLLM's form,
which go on publishing while queries are timed. A query is a prompt of 8,192 tokens; each server is asked in
turn over one connection. Ours is asked twice: as JSON, and as MessagePack with packed tokens, which Dynamo
does not take. CPU is the server's, from /proc.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from moonpool.bench.interval import Interval, bootstrap_median, paired_ratios
from moonpool.bench.peers_setup import load_peer, with_environment
from moonpool.bench.program import Program, module_words
from moonpool.errors import ResourceError

PEER: Final = "dynamo-1.6.1"
ENGINES: Final = 16
PROMPTS_EACH: Final = 8
TOKENS: Final = 8_192
SHARED_TOKENS: Final = 1_024
BLOCK_TOKENS: Final = 16
START_TIMEOUT_S: Final = 60.0
WARM_TIMEOUT_S: Final = 60.0
#: Share of the two costs that a floor allows.
SHARE_MAX: Final = 0.5
_STAMP: Final = struct.Struct(">Q")


class Prompt(NamedTuple):
    """A prompt that engine `engine` has cached, and its engine's own block hashes."""

    engine: int
    tokens: list[int]
    hashes: list[int]


def make_prompts(seed: int = 3) -> list[Prompt]:
    """Prompts with a common start; the hashes are an engine's own, so both servers go by tokens."""
    draw = random.Random(seed)
    start = [draw.randrange(150_000) for _ in range(SHARED_TOKENS)]
    first = [draw.getrandbits(63) for _ in range(SHARED_TOKENS // BLOCK_TOKENS)]
    rest = (TOKENS - SHARED_TOKENS) // BLOCK_TOKENS
    return [
        Prompt(
            engine,
            start + [draw.randrange(150_000) for _ in range(TOKENS - SHARED_TOKENS)],
            first + [draw.getrandbits(63) for _ in range(rest)],
        )
        for engine in range(ENGINES)
        for _ in range(PROMPTS_EACH)
    ]


class Publishers:
    """The engines' event streams."""

    def __init__(self) -> None:
        import zmq

        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUB) for _ in range(ENGINES)]
        self.endpoints: list[str] = []
        for sock in self._sockets:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
            self.endpoints.append(f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}")
        self._numbers = [0] * ENGINES

    def publish(self, engine: int, *events: Any) -> None:
        """One batch of one engine."""
        import msgpack  # type: ignore[import-untyped]

        payload = msgpack.packb([time.time(), list(events), 0], use_bin_type=True)
        number = _STAMP.pack(self._numbers[engine])
        self._sockets[engine].send_multipart([b"", number, payload])
        self._numbers[engine] += 1

    def publish_prompt(self, prompt: Prompt, known: set[int]) -> None:
        """What the engine newly holds of a prompt."""
        held = 0
        while held < len(prompt.hashes) and prompt.hashes[held] in known:
            held += 1
        known.update(prompt.hashes)
        parent = prompt.hashes[held - 1] if held else None
        tokens = prompt.tokens[held * BLOCK_TOKENS :]
        self.publish(
            prompt.engine, ["BlockStored", prompt.hashes[held:], parent, tokens, BLOCK_TOKENS, None, "GPU"]
        )

    def close(self) -> None:
        """Ends the streams."""
        for sock in self._sockets:
            sock.close()
        self._context.term()


class Server:
    """A server process and one connection to it."""

    def __init__(self, command: list[str], port: int) -> None:
        self._program = Program(command[-1], command)
        try:
            self._socket = self._connect(port)
        except BaseException:
            self._program.kill()
            raise

    def _connect(self, port: int) -> socket.socket:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=START_TIMEOUT_S)
            except OSError as exc:
                if time.monotonic() > deadline or not self._program.is_alive:
                    raise ResourceError(f"the server does not listen on port {port}") from exc
                time.sleep(0.05)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock

    def cpu_s(self) -> float:
        """CPU seconds that the server has used."""
        fields = Path(f"/proc/{self._program.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def post(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        """One request and the body of its answer."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        header, _, rest = received.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in header.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        while len(rest) < length:
            rest += self._more()
        if not header.startswith((b"HTTP/1.1 2", b"HTTP/1.0 2")):
            raise ResourceError(f"{path} failed: {header.splitlines()[0]!r} {rest[:200]!r}")
        return rest

    def _more(self) -> bytes:
        piece = self._socket.recv(1 << 18)
        if not piece:
            raise ResourceError("the server closed the connection")
        return piece

    def close(self) -> None:
        """Ends the process."""
        self._socket.close()
        self._program.stop()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def moonpool_server(endpoints: list[str]) -> Iterator[Server]:
    """Ours, with all engines registered."""
    port = free_port()
    server = Server(module_words("moonpool.cli", "conductor", "--port", str(port)), port)
    try:
        for engine, endpoint in enumerate(endpoints):
            body = {"instance_id": str(engine), "modelname": "m", "block_size": BLOCK_TOKENS}
            server.post("/register", json.dumps({**body, "endpoint": endpoint}).encode())
        yield server
    finally:
        server.close()


@contextmanager
def dynamo_server(endpoints: list[str], python: str) -> Iterator[Server]:
    """Dynamo's standalone indexer, likewise."""
    port = free_port()
    indexer = [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    server = Server(with_environment(indexer, {"DYN_LOG": "error"}), port)
    try:
        for engine, endpoint in enumerate(endpoints):
            body = {"instance_id": engine + 1, "model_name": "m", "block_size": BLOCK_TOKENS}
            server.post("/register", json.dumps({**body, "endpoint": endpoint}).encode())
        yield server
    finally:
        server.close()


class Way(NamedTuple):
    """One way to ask: a server, and the bodies to send in turn."""

    name: str
    server: Server
    bodies: list[bytes]
    kind: str = "application/json"


def ways_of(ours: Server, dynamo: Server | None, prompts: list[Prompt]) -> list[Way]:
    """All ways, with prepared bodies."""
    import msgpack

    tokens = [prompt.tokens for prompt in prompts[:: max(1, len(prompts) // 32)]]
    packed = [
        msgpack.packb({"model": "m", "token_ids": struct.pack(f"<{len(each)}I", *each)}, use_bin_type=True)
        for each in tokens
    ]
    ways = [
        Way("moonpool", ours, packed, "application/msgpack"),
        Way(
            "moonpool json", ours, [json.dumps({"model": "m", "token_ids": each}).encode() for each in tokens]
        ),
    ]
    if dynamo is not None:
        bodies = [json.dumps({"model_name": "m", "token_ids": each}).encode() for each in tokens]
        ways.append(Way("dynamo", dynamo, bodies))
    return ways


def ask(way: Way, count: int, publishers: Publishers) -> tuple[float, float]:
    """(p50, CPU) of a query in microseconds; an event goes out for each eighth query."""
    began, times = way.server.cpu_s(), []
    for number in range(count):
        if number % 8 == 0:
            event = ["BlockStored", [random.getrandbits(63)], None, [number] * BLOCK_TOKENS, BLOCK_TOKENS]
            publishers.publish(number // 8 % ENGINES, event)
        body = way.bodies[number % len(way.bodies)]
        at = time.perf_counter()
        way.server.post("/query", body, way.kind)
        times.append(time.perf_counter() - at)
    return sorted(times)[count // 2] * 1e6, (way.server.cpu_s() - began) / count * 1e6


def wait_until_warm(ways: list[Way], prompts: list[Prompt]) -> None:
    """Until each server has the whole of each engine's last prompt; raises `ResourceError` after a minute."""
    last = {prompt.engine: prompt for prompt in prompts}
    deadline = time.monotonic() + WARM_TIMEOUT_S
    for way in ways:
        model = "model_name" if way.name == "dynamo" else "model"
        for engine, prompt in last.items():
            body = json.dumps({model: "m", "token_ids": prompt.tokens}).encode()
            while not matches_all(way, engine, json.loads(way.server.post("/query", body))):
                if time.monotonic() > deadline:
                    raise ResourceError(f"{way.name} did not take in all events of engine {engine}")
                time.sleep(0.01)


def matches_all(way: Way, engine: int, answer: dict[str, Any]) -> bool:
    """Whether the engine holds the whole prompt, as this server answers."""
    if way.name == "dynamo":
        found = answer["instances"].get(str(engine + 1), {})
        found = found.get("default", found)
    else:
        found = answer["default"].get(str(engine), {})
    return isinstance(found, dict) and found.get("longest_matched") == TOKENS


def measure(rounds: int, queries: int) -> dict[str, list[tuple[float, float]]]:
    """(p50, CPU) by way and round."""
    prompts = make_prompts()
    peer = load_peer(PEER)
    found: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        publishers = Publishers()
        stack.callback(publishers.close)
        ours = stack.enter_context(moonpool_server(publishers.endpoints))
        dynamo = None
        if peer is not None:
            dynamo = stack.enter_context(dynamo_server(publishers.endpoints, peer.python))
        time.sleep(1.5)  # a publisher does not say when its subscribers have arrived
        known: list[set[int]] = [set() for _ in range(ENGINES)]
        for prompt in prompts:
            publishers.publish_prompt(prompt, known[prompt.engine])
        ways = ways_of(ours, dynamo, prompts)
        wait_until_warm(ways, prompts)
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                found.setdefault(way.name, []).append(ask(way, queries, publishers))
    return found


def ratio(found: dict[str, list[tuple[float, float]]], ours: str, column: int) -> Interval | None:
    """Ours over Dynamo's, round by round."""
    if "dynamo" not in found:
        return None
    left = {n: each[column] for n, each in enumerate(found[ours])}
    right = {n: each[column] for n, each in enumerate(found["dynamo"])}
    return bootstrap_median(paired_ratios(left, right))


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 1_000), default=15, show_default=True)
@click.option(
    "--queries", type=click.IntRange(8, 100_000), default=400, show_default=True, help="Each round."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(rounds: int, queries: int, as_json: bool) -> None:
    """The command; its help is this module's own docstring."""
    found = measure(rounds, queries)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, each in found.items():
        p50 = bootstrap_median([row[0] for row in each])
        cpu = bootstrap_median([row[1] for row in each])
        click.echo(f"{name:14} p50 {p50} us   CPU {cpu} us")
    for name in ("moonpool", "moonpool json"):
        for column, what in enumerate(("p50", "CPU")):
            share = ratio(found, name, column)
            if share is None:
                click.echo(f"dynamo is missing: make it with `python -m moonpool.bench.peers_setup {PEER}`")
                return
            verdict = "met" if share.median <= SHARE_MAX else f"not met: {SHARE_MAX}"
            click.echo(f"{name:14} {what} / dynamo's {share}: {verdict}")


if __name__ == "__main__":
    main()
