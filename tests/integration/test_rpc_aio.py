"""The asyncio client against a server process: pipelining, pushes, time-outs, endings."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import (
    AccessDenied,
    LimitExceeded,
    PeerGone,
    PeerRefused,
    ProtocolError,
    QueueFull,
    Status,
    TransferTimeout,
    UsageError,
)
from moonpool.rpc.aio import AsyncRpcClient
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.wire.rpc import FrameSplitter, RpcReply, RpcRequest, decode_body, encode_frame

PEER = Path(__file__).parent / "rpc_peer.py"
WAIT_S = 20.0
SECRET = b"a secret of the cluster"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    """Addresses over tcp and unix."""
    name = f"@moonpool-test-{os.getpid()}-{os.urandom(6).hex()}"
    told = {"endpoints": ["127.0.0.1:0", name], "secret": SECRET.hex()}
    process = subprocess.Popen(
        [sys.executable, PEER, json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        tcp, unix = json.loads(process.stdout.readline())
        yield tcp, unix
    finally:
        process.communicate(timeout=WAIT_S)


Work = Callable[[AsyncRpcClient], Awaitable[None]]


def run(address: str, work: Work, **limits: int) -> None:
    """Runs the work with a client of its own, within a bound."""

    async def main() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            await AsyncRpcClient.connect(address, secret=SECRET, limits=ClientLimits(**limits)) as client,
        ):
            await work(client)

    asyncio.run(main())


@pytest.mark.parametrize("transport", [0, 1], ids=["tcp", "unix"])
def test_many_calls_at_once_each_get_their_answer(server: tuple[str, str], transport: int) -> None:
    async def work(client: AsyncRpcClient) -> None:
        payloads = [[number, os.urandom(number % 700)] for number in range(600)]
        assert await asyncio.gather(*[client.call("echo", one) for one in payloads]) == payloads
        large = os.urandom(3 << 20)
        assert await client.call("echo", [large]) == [large]
        assert client.unclaimed == 0

    run(server[transport], work)


def test_pushes_come_in_order(server: tuple[str, str]) -> None:
    async def work(client: AsyncRpcClient) -> None:
        waiting = asyncio.create_task(client.next_push(WAIT_S))
        await client.call("push", [4, b"x"])
        assert await waiting == ("told", [0, b"x"])
        for number in range(1, 4):
            assert await client.next_push(WAIT_S) == ("told", [number, b"x"])
        assert await client.next_push(0.01) is None

    run(server[1], work)


def test_errors_timeouts_and_cancelled_calls_leave_the_connection_as_it_was(server: tuple[str, str]) -> None:
    async def work(client: AsyncRpcClient) -> None:
        with pytest.raises(RpcError) as caught:
            await client.call("nothing")
        assert caught.value.code == 64
        with pytest.raises(TransferTimeout):
            await client.call("keep", ["late"], 0.02)
        cancelled = asyncio.create_task(client.call("keep", ["never taken"]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await client.call("answer")
        assert await client.call("echo", [1]) == [1]
        assert client.unclaimed == 2
        assert client.closed_reason is None

    run(server[1], work)


def test_bounds_are_typed_errors(server: tuple[str, str]) -> None:
    async def work(client: AsyncRpcClient) -> None:
        held = [asyncio.create_task(client.call("keep", [n])) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await client.call("echo")
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        with pytest.raises(LimitExceeded):
            await client.call("echo", [bytes(5_000)])
        with pytest.raises(UsageError):
            await client.exists([b""])
        await client.call("answer")
        with pytest.raises(QueueFull):
            await client.call("push", [5])
        assert client.closed_reason is Status.QUEUE_FULL

    run(server[1], work, calls_max=2, frame_bytes_max=4_096, pushes_max=4)


def test_an_end_reaches_everyone(server: tuple[str, str]) -> None:
    async def work(client: AsyncRpcClient) -> None:
        waits = [asyncio.create_task(client.call("keep")) for _ in range(3)]
        waits.append(asyncio.create_task(client.next_push(WAIT_S)))
        await client.call("echo")
        assert await client.call("leave") == "bye"
        found = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(one) for one in found] == [PeerGone] * 4
        with pytest.raises(PeerGone):
            await client.call("echo")
        await client.close()

    run(server[0], work)


def test_closing_here_reaches_everyone_too(server: tuple[str, str]) -> None:
    async def work(client: AsyncRpcClient) -> None:
        wait = asyncio.create_task(client.call("keep"))
        await client.call("echo")
        await client.close()
        with pytest.raises(PeerGone, match="closed on this end"):
            await wait
        with pytest.raises(PeerGone, match="closed on this end"):
            await client.next_push(0)

    run(server[0], work)


def test_who_is_not_let_in(server: tuple[str, str]) -> None:
    async def main() -> None:
        with pytest.raises(AccessDenied):
            await AsyncRpcClient.connect(server[0])
        with pytest.raises(PeerRefused):
            await AsyncRpcClient.connect(f"@moonpool-test-nobody-{os.urandom(6).hex()}")

    asyncio.run(main())


HOT: dict[str, tuple[Any, ...]] = {
    "exists": (["k"],),
    "lookup": (["k"],),
    "put_start": (["k"], [1]),
    "put_end": (1, [0], bytes(16)),
}


@pytest.mark.parametrize("method", HOT)
def test_hot_methods_go_out_as_they_should_and_wrong_answers_are_refused(
    server: tuple[str, str], method: str
) -> None:
    """The server knows no hot method, so it answers with the method's own name."""

    async def work(client: AsyncRpcClient) -> None:
        with pytest.raises(RpcError, match=f"UNKNOWN_METHOD: {method}"):
            await getattr(client, method)(*HOT[method])

    run(server[1], work)


ANSWERS: dict[str, Any] = {
    "exists": b"\x01",
    "lookup": [1, 2, [[5, 10, bytes(16), 1, [[3, 4_096, 2]]]]],
    "put_start": [1, 2, 3, 4, [[0, [[3, 4_096, 2, bytes(24)]]]]],
    "put_end": [1, [[0, 5]]],
}


@pytest.mark.parametrize("method", HOT)
@pytest.mark.parametrize("is_right", [True, False])
def test_hot_answers_are_read_or_refused(method: str, is_right: bool) -> None:
    async def main() -> None:
        client = AsyncRpcClient("a pair", ClientLimits(), None)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            await client.attach(ours)
            waiting = asyncio.create_task(getattr(client, method)(*HOT[method]))
            splitter, bodies = FrameSplitter(), []
            loop = asyncio.get_running_loop()
            while not bodies:
                bodies = splitter.feed(await loop.sock_recv(theirs, 1 << 16))
            request = decode_body(bodies[0])
            assert isinstance(request, RpcRequest)
            assert request.method == method
            answer = ANSWERS[method] if is_right else [1, "wrong"]
            await loop.sock_sendall(theirs, encode_frame(RpcReply(request.message_id, None, answer)))
            if is_right:
                reply = await waiting
                assert reply == b"\x01" if method == "exists" else reply.epoch == 1
            else:
                with pytest.raises(ProtocolError):
                    await waiting
            await client.close()

    asyncio.run(main())
