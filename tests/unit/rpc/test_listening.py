"""The loop's poll returns for a descriptor of somebody else's, and can stay awake for an answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from moonpool.errors import ResourceError
from moonpool.native.io.rpc_server import RpcServer
from moonpool.rpc.limits import ServerLimits

LONG_MS = 20_000


@pytest.fixture
def server() -> Iterator[RpcServer]:
    made = RpcServer(ServerLimits())
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


def test_poll_returns_while_it_is_readable(server: RpcServer, pipe: tuple[int, int]) -> None:
    server.listen(pipe[0])
    writer = threading.Thread(target=os.write, args=(pipe[1], b"x"))
    started = time.monotonic()
    writer.start()
    assert server.poll(LONG_MS) == []
    assert server.poll(LONG_MS) == [], "its owner has not read it yet"
    writer.join()
    assert time.monotonic() - started < LONG_MS / 1e3
    assert os.read(pipe[0], 8) == b"x"


def test_an_unlistened_one_wakes_nobody(server: RpcServer, pipe: tuple[int, int]) -> None:
    server.listen(pipe[0])
    server.unlisten(pipe[0])
    server.unlisten(pipe[0])
    os.write(pipe[1], b"x")
    started = time.monotonic()
    server.poll(30)
    assert time.monotonic() - started >= 0.03


def test_what_cannot_be_watched_is_refused(server: RpcServer, pipe: tuple[int, int]) -> None:
    server.listen(pipe[0])
    with pytest.raises(ResourceError):
        server.listen(pipe[0])
    with pytest.raises(ResourceError):
        server.listen(-1)


def test_staying_awake_ends_by_itself(server: RpcServer) -> None:
    server.stay_awake(2_000)
    assert server.poll(50) == []


def test_the_native_core_can_be_taken_away(server: RpcServer) -> None:
    server.set_hot(None)
    assert server.poll(0) == []
    with pytest.raises(AttributeError):
        server.set_hot(object())  # type: ignore[arg-type]
