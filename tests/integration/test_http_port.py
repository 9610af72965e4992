"""The conductor's HTTP port over real sockets: what is well formed is answered, all else ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from moonpool.conductor.http_connection import HEAD_BYTES_MAX
from moonpool.conductor.http_messages import HttpLimits, HttpRequest, HttpResponse, Outcome
from moonpool.conductor.http_port import HttpPort
from moonpool.conductor.http_routes import Routes
from moonpool.conductor.service import listen

BODY_MAX = 4_096
WAIT_S = 10.0


def echo(request: HttpRequest) -> Outcome:
    """Tells what came; `/slow` takes its time, `/broken` fails, `/large` is more than a socket holds."""
    if request.path == "/broken":
        raise RuntimeError("broken on purpose")
    if "x-late" in request.headers:
        raise RuntimeError("a trailer among the headers")
    if request.path == "/slow":
        return later(request)
    if request.path == "/large":
        return HttpResponse(b"x" * (32 << 20), "text/plain")
    return HttpResponse(f"{request.method} {request.path} ".encode() + request.body, "text/plain")


async def later(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(0.05)
    return HttpResponse(b"late " + request.body, "text/plain")


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        lines = head.split(b"\r\n")
        length = next(
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        )
        return int(lines[0].split()[1]), await asyncio.wait_for(self.reader.readexactly(length), WAIT_S)

    async def ended(self) -> bool:
        """True once the server has ended the connection; what it still sent is dropped."""
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(self.reader.read(1 << 16), WAIT_S):
                pass
        return True


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[HttpPort, Callable[[], Awaitable[Client]]]]:
    """A port, and what connects to it."""
    port = HttpPort(echo, HttpLimits(body_bytes_max=BODY_MAX, **limits))  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    number = listener.getsockname()[1]
    await port.start(listener)
    clients: list[Client] = []

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", number)))
        return clients[-1]

    try:
        yield port, connect
    finally:
        for client in clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()
        await port.close()
        assert not port.connections


def post(path: str, body: bytes, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def test_answers_come_in_the_order_of_pipelined_requests() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(post("/slow", b"1") + b"".join(post("/q", b"%d" % k) for k in range(40)))
            assert await client.answer() == (200, b"late 1")
            for k in range(40):
                assert await client.answer() == (200, b"POST /q %d" % k)

    asyncio.run(run())


def test_a_request_may_come_byte_by_byte_chunked_or_after_a_promise() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            for letter in post("/q?x=1", b"abc"):
                client.send(bytes([letter]))
                await client.writer.drain()
            assert await client.answer() == (200, b"POST /q abc")
            head = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.send(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
            assert await client.answer() == (200, b"POST /c abcde")
            client.send(b"POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), WAIT_S) == (
                b"HTTP/1.1 100 Continue\r\n\r\n"
            )
            client.send(b"ok")
            assert await client.answer() == (200, b"POST /e ok")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (post("/", b"x" * (BODY_MAX + 1)), 413),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"400\r\n%s\r\n" % (b"y" * 0x400) * (BODY_MAX // 0x400 + 1),
            413,
        ),
        (b"GET / HTTP/1.1\r\nX: " + b"h" * (2 * HEAD_BYTES_MAX), 431),
        (b"GET /" + b"p" * (2 * HEAD_BYTES_MAX), 431),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", 415),
    ],
)
def test_what_is_no_request_is_refused_with_a_reason_and_the_connection_ends(
    sent: bytes, status: int
) -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(sent)
            found, body = await client.answer()
            assert (found, b"error" in body) == (status, True)
            assert await client.ended()
            other = await connect()
            other.send(post("/q", b""))
            assert await other.answer() == (200, b"POST /q ")

    asyncio.run(run())


CHUNKED = b"POST /q HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "endless",
    [b"x: " + b"t" * 4_000 + b"\r\n", b"t" * 4_000, b"1;" + b"e" * 4_000 + b"\r\na\r\n"],
    ids=["trailers", "one trailer", "extensions"],
)
def test_framing_that_costs_more_than_it_carries_is_cut(endless: bytes) -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(CHUNKED + (b"" if endless[:1] == b"1" else b"2\r\nab\r\n0\r\nname: "))
            for _ in range(100):  # the request never ends
                client.send(endless)
                await client.writer.drain()
            assert (await client.answer())[0] == 400

    asyncio.run(run())


def test_trailers_are_no_headers_and_tiny_chunks_are_one_body() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(CHUNKED + b"1\r\na\r\n" * 500 + b"0\r\nX-Late: 1\r\n\r\n" + post("/q", b"z"))
            assert await client.answer() == (200, b"POST /q " + b"a" * 500)
            assert await client.answer() == (200, b"POST /q z")

    asyncio.run(run())


def test_a_refusal_comes_after_the_answers_before_it() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(post("/slow", b"1") + post("/q", b"2") + b"GARBAGE\r\n\r\n")
            assert await client.answer() == (200, b"late 1")
            assert await client.answer() == (200, b"POST /q 2")
            assert (await client.answer())[0] == 400
            assert await client.ended()

    asyncio.run(run())


def test_half_closed_clients_get_their_answers() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(post("/slow", b"1") + post("/q", b"2"))
            client.writer.write_eof()
            assert await client.answer() == (200, b"late 1")
            assert await client.answer() == (200, b"POST /q 2")
            assert await client.ended()

    asyncio.run(run())


def test_upgrades_are_ignored_and_absolute_targets_are_paths() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(b"GET http://a/x?y HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await client.answer() == (200, b"GET /x ")
            client.send(b"GET /u HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
            assert await client.answer() == (200, b"GET /u ")
            assert await client.ended()

    asyncio.run(run())


def test_one_connection_with_many_requests_leaves_turns_to_others() -> None:
    async def run() -> None:
        async with serving() as (port, connect):
            many, other = await connect(), await connect()
            many.send(post("/q", b"") * 2_000)
            await many.writer.drain()
            other.send(post("/q", b"other"))
            assert await other.answer() == (200, b"POST /q other")
            for _ in range(2_000):
                assert (await many.answer())[0] == 200
            assert port.held_bytes == 0

    asyncio.run(run())


def test_bodies_together_are_bounded() -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            clients = [await connect() for _ in range(6)]
            for client in clients:
                client.send(b"POST /q HTTP/1.1\r\nHost: a\r\nContent-Length: 4000\r\n\r\n" + b"x" * 3_999)
            found = await asyncio.gather(*(client.reader.read(12) for client in clients[-1:]))
            assert found == [b"HTTP/1.1 503"]
            clients[0].send(b"x")
            assert (await clients[0].answer())[0] == 200

    asyncio.run(run())


def test_a_large_answer_that_was_taken_does_not_shorten_what_follows() -> None:
    async def run() -> None:
        async with serving(request_s=0.5, idle_s=30.0) as (port, connect):
            client = await connect()
            client.send(post("/large", b""))
            assert len((await client.answer())[1]) == 32 << 20
            (connection,) = port.connections
            assert not connection.is_busy
            assert connection.deadline > port.loop.time() + 10

    asyncio.run(run())


def test_a_failing_handler_is_answered_and_logged_and_the_connection_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with serving() as (_, connect):
            client = await connect()
            client.send(post("/broken", b"") + post("/q", b"z"))
            assert (await client.answer())[0] == 500
            assert await client.answer() == (200, b"POST /q z")

    asyncio.run(run())
    assert "/broken failed" in caplog.text


def test_slow_clients_are_cut_in_time_and_others_are_served_meanwhile() -> None:
    async def run() -> None:
        async with serving(request_s=0.2, idle_s=0.2) as (port, connect):
            slow, idle, deaf = await connect(), await connect(), await connect()
            slow.send(b"POST /q HTTP/1.1\r\nContent-Le")
            idle.send(post("/q", b"a"))
            assert await idle.answer() == (200, b"POST /q a")
            deaf.send(post("/large", b""))
            busy = await connect()
            busy.send(post("/q", b"b"))
            assert await busy.answer() == (200, b"POST /q b")
            assert await slow.ended()
            assert await idle.ended()
            async with asyncio.timeout(WAIT_S):
                while port.connections:
                    await asyncio.sleep(0.01)
            assert port.slow >= 2  # the one that never ended its request, and the one that never read

    asyncio.run(run())


def test_connections_beyond_the_bound_are_told_so() -> None:
    async def run() -> None:
        async with serving(connections_max=2) as (port, connect):
            first, second = await connect(), await connect()
            for client in (first, second):
                client.send(post("/q", b""))
                assert (await client.answer())[0] == 200
            third = await connect()
            assert (await third.answer())[0] == 503
            assert await third.ended()
            assert port.refused == 1
            first.send(post("/q", b"again"))
            assert await first.answer() == (200, b"POST /q again")

    asyncio.run(run())


def test_closing_lets_the_request_under_way_end() -> None:
    async def run() -> None:
        async with serving() as (port, connect):
            client, idle = await connect(), await connect()
            idle.send(post("/q", b""))
            await idle.answer()
            client.send(post("/slow", b"x"))
            async with asyncio.timeout(WAIT_S):
                while not port.tasks:
                    await asyncio.sleep(0.001)
            await port.close()
            assert await client.answer() == (200, b"late x")
            assert await client.ended()
            assert await idle.ended()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_mutated_requests_never_stop_the_port(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        async with serving(request_s=1.0) as (_, connect):
            for _ in range(60):
                data = bytearray(post("/q", b"abc", "Transfer-Encoding: chunked\r\n" * rng.randrange(2)))
                for _ in range(rng.randrange(1, 6)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                client = await connect()
                client.send(bytes(data) * rng.randrange(1, 4))
                client.writer.write_eof()
                assert await client.ended()
            client = await connect()
            client.send(post("/q", b"still"))
            assert await client.answer() == (200, b"POST /q still")

    asyncio.run(run())


def test_routes_find_names_parts_and_methods() -> None:
    routes = Routes([("get", "/a", "list"), ("post", "/a", "add"), ("delete", "/a/{x}/{y}", "drop")])
    assert routes.find("GET", "/a") == ("list", ())
    assert routes.find("HEAD", "/a") == ("list", ())
    assert routes.find("POST", "/a") == ("add", ())
    assert routes.find("DELETE", "/a/m%2Fn/%C3%A9") == ("drop", ("m/n", "é"))
    assert routes.find("PUT", "/a") == (None, ("GET", "POST"))
    assert routes.find("GET", "/a/x/y") == (None, ("DELETE",))
    assert routes.find("DELETE", "/a//y") == (None, ())
    assert routes.find("GET", "/b") == (None, ())
