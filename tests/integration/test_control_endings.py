"""How control sessions and services end: peers killed, stopped and restarted, and every kind of close."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moonpool.config import EngineConfig
from moonpool.engine.control import ControlService, ServiceHooks, SessionInfo
from moonpool.engine.session import ControlSession
from moonpool.errors import (
    EngineClosed,
    InternalError,
    MoonpoolError,
    PeerGone,
    PeerRefused,
    StaleHandle,
    TransferTimeout,
)
from moonpool.ids import InstanceId, new_instance_id

WAIT_S = 20.0
Make = Callable[..., ControlService]
NO_PARAMS: Mapping[str, Any] = {}
both_kinds = pytest.mark.parametrize("kind", ["tcp", "unix"])

TARGET = """
import sys
from moonpool.config import EngineConfig
from moonpool.engine.control import ControlService, ServiceHooks
from moonpool.ids import InstanceId
hooks = ServiceHooks(handlers={"probe": lambda info, params: {}}, on_lane=lambda fd, info: None)
config = EngineConfig(port=int(sys.argv[2]))
service = ControlService(config, InstanceId(bytes.fromhex(sys.argv[1])), hooks)
service.start()
print(service.endpoint, flush=True)
sys.stdin.read()
service.close()
"""


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition that another thread or process brings about; fails after a generous bound."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.002)


def open_fds() -> set[str]:
    return {
        f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}"
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    }


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Descriptors and threads after a test are those from before it."""
    before = open_fds()
    yield
    eventually(lambda: open_fds() <= before, f"no descriptor is left: {open_fds() - before}")
    eventually(
        lambda: all(not one.name.startswith("moonpool") for one in threading.enumerate()), "threads ended"
    )


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes started services; they are closed after the test, newest first."""
    with contextlib.ExitStack() as stack:

        def make_service(
            handlers: Mapping[str, Any] | None = None,
            session_handlers: Mapping[str, Any] | None = None,
            on_session_closed: Callable[[SessionInfo, MoonpoolError], object] = lambda info, reason: None,
            instance: InstanceId | None = None,
            **fields: Any,
        ) -> ControlService:
            hooks = ServiceHooks(
                handlers=handlers or {},
                session_handlers=session_handlers or {},
                on_lane=lambda fd, info: os.close(fd),
                on_session_closed=on_session_closed,
            )
            service = ControlService(EngineConfig(**fields), instance or new_instance_id(), hooks)
            stack.callback(service.close)
            service.start()
            return service

        yield make_service


@contextlib.contextmanager
def target_process(instance: InstanceId, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service in another process, and its endpoint."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", TARGET, instance.hex(), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@both_kinds
def test_a_killed_peer_is_noticed(make: Make, kind: str) -> None:
    instance = new_instance_id()
    initiator = make()
    with target_process(instance) as (process, endpoint):
        session = initiator.connect(f"@moonpool/{instance.hex()}" if kind == "unix" else endpoint, instance)
        assert session.peer_pid == (process.pid if kind == "unix" else None)
        reasons: list[MoonpoolError] = []
        on_loop: list[str] = []
        session.on_closed(lambda reason: on_loop.append(threading.current_thread().name))
        session.on_closed(reasons.append)
        session.on_closed(lambda reason: 1 // 0)
        assert session.alive
        session.request("probe", NO_PARAMS, WAIT_S)
        process.kill()
        eventually(lambda: not session.alive, "the session ends")
        eventually(lambda: len(reasons) == 1, "the callback is called")
        assert isinstance(reasons[0], PeerGone)
        assert on_loop == ["moonpool-control"]
        assert initiator.counters["handler_bugs"] == 1
        with pytest.raises(PeerGone):
            session.request("probe", NO_PARAMS, WAIT_S)
        late: list[MoonpoolError] = []
        session.on_closed(late.append)
        eventually(lambda: len(late) == 1, "a late callback is called too")
        session.close()
        assert len(reasons) == 1


def test_the_end_of_a_process_ends_a_session_that_its_child_keeps_open(make: Make) -> None:
    instance = new_instance_id()
    initiator = make()
    with target_process(instance) as (process, _):
        session = initiator.connect(f"@moonpool/{instance.hex()}", instance)
        # Another process that still holds a copy of the peer's end, as a fork of the peer would.
        keeper = os.pidfd_open(process.pid)
        copies = [_copy_of_fd(keeper, fd) for fd in _socket_fds(process.pid)]
        os.close(keeper)
        process.kill()
        eventually(lambda: not session.alive, "the session ends")
        assert isinstance(session.closed_reason, PeerGone)
        assert "process has ended" in str(session.closed_reason)
        for fd in copies:
            os.close(fd)
        session.close()


def _socket_fds(pid: int) -> list[int]:
    folder = f"/proc/{pid}/fd"
    return [int(fd) for fd in os.listdir(folder) if os.readlink(f"{folder}/{fd}").startswith("socket:")]


def _copy_of_fd(pidfd: int, fd: int) -> int:
    """pidfd_getfd(2), which has the number 438 on every architecture."""
    import ctypes

    copy = int(ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0))
    assert copy >= 0, os.strerror(ctypes.get_errno())
    return copy


def test_a_stopped_peer_times_out_and_lives_on(make: Make) -> None:
    instance = new_instance_id()
    initiator = make(connect_timeout_ms=200, handshake_timeout_ms=200)
    with target_process(instance) as (process, endpoint):
        session = initiator.connect(endpoint, instance, WAIT_S)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            session.request("probe", NO_PARAMS, 0.2)
        assert session.alive
        process.send_signal(signal.SIGCONT)
        session.request("probe", NO_PARAMS, WAIT_S)
        session.close()


def test_a_restart_takes_its_port_back_at_once(make: Make) -> None:
    initiator = make()
    first = new_instance_id()
    with target_process(first) as (process, endpoint):
        session = initiator.connect(endpoint, first)
        process.kill()
        process.wait(WAIT_S)
        with pytest.raises(PeerRefused):
            initiator.connect(endpoint, first)
        session.close()
    second = new_instance_id()
    with target_process(second, int(endpoint.rpartition(":")[2])) as (_, again):
        assert again == endpoint
        with pytest.raises(StaleHandle):
            initiator.connect(endpoint, first)
        session = initiator.connect(endpoint, second)
        session.request("probe", NO_PARAMS, WAIT_S)
        session.close()


def test_a_restart_in_this_process_takes_its_port_back(make: Make) -> None:
    owner = make({"probe": lambda info, params: {}})
    session = make().connect(owner.endpoint)
    session.request("probe", NO_PARAMS, WAIT_S)
    owner.close()  # the owner closes first, so its end waits in TIME_WAIT
    eventually(lambda: not session.alive, "the session ends")
    session.close()
    assert make(port=owner.port).port == owner.port


def test_close_is_idempotent_and_ends_what_waits(make: Make) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    owner = make({"wait": lambda info, params: never()})
    initiator = make()
    session = initiator.connect(owner.unix_name)
    reasons: list[MoonpoolError] = []
    session.on_closed(reasons.append)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(session.request, "wait", NO_PARAMS, WAIT_S)
        eventually(lambda: len(session._connection._waiting) == 1, "the request is in flight")
        initiator.close()
        with pytest.raises(EngineClosed):
            waiting.result(WAIT_S)
    initiator.close()
    assert isinstance(reasons[0], EngineClosed)
    assert not session.alive
    assert session.pidfd is None
    with pytest.raises(EngineClosed):
        initiator.connect(owner.endpoint)
    with pytest.raises(EngineClosed):
        initiator.call_peers("revoke", NO_PARAMS, 1.0)
    with pytest.raises(PeerGone):
        session.request("wait", NO_PARAMS, 1.0)
    with pytest.raises(EngineClosed):
        session.on_closed(reasons.append)
    session.close()


def test_close_of_a_service_that_never_started() -> None:
    hooks = ServiceHooks(handlers={}, on_lane=lambda fd, info: None)
    service = ControlService(EngineConfig(), new_instance_id(), hooks)
    service.close()
    service.close()


def test_a_hook_that_does_not_return_is_named_by_close(make: Make) -> None:
    release = threading.Event()
    entered = threading.Event()

    def stick(_info: SessionInfo, _params: Mapping[str, Any]) -> None:
        entered.set()
        release.wait(WAIT_S)

    owner = make({"stick": stick}, close_timeout_ms=50)
    session = make().connect(owner.endpoint)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(session.request, "stick", NO_PARAMS, WAIT_S)
        assert entered.wait(WAIT_S)
        with pytest.raises(InternalError, match="a hook does not return"):
            owner.close()
        release.set()
        with contextlib.suppress(MoonpoolError):
            waiting.result(WAIT_S)
    eventually(lambda: not owner._loop_thread._thread.is_alive(), "the thread ends once the hook returned")
    session.close()


def test_a_session_that_is_dropped_unclosed_warns(make: Make) -> None:
    owner = make()
    initiator = make()
    session: ControlSession | None = initiator.connect(owner.unix_name)
    owner.close()
    assert session is not None
    eventually(lambda: initiator.counters["sessions_closed"] == 1, "the session ends")
    with pytest.warns(ResourceWarning, match="was not closed"):
        session = None
