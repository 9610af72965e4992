"""Control sessions over real sockets: requests both ways, descriptors, addresses and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from moonpool.config import EngineConfig
from moonpool.engine.control import ControlService, Reply, ServiceHooks, SessionInfo
from moonpool.engine.control_channel import FRAME_FDS_MAX
from moonpool.errors import (
    InternalError,
    LimitExceeded,
    MoonpoolError,
    OutOfRange,
    PeerGone,
    QueueFull,
    ResourceError,
    StaleHandle,
    TransferTimeout,
    UnsupportedOperation,
    UsageError,
)
from moonpool.ids import InstanceId, new_instance_id

WAIT_S = 20.0
Make = Callable[..., ControlService]
NO_PARAMS: Mapping[str, Any] = {}


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


def address_of(service: ControlService, kind: str) -> str:
    return service.unix_name if kind == "unix" else service.endpoint


both_kinds = pytest.mark.parametrize("kind", ["tcp", "unix"])


@both_kinds
def test_requests_both_ways(make: Make, kind: str) -> None:
    asked: list[SessionInfo] = []

    def describe(info: SessionInfo, params: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(info)
        return {"echo": dict(params)}

    owner = make({"describe": describe})
    revoked: list[list[int]] = []
    initiator = make(session_handlers={"revoke": lambda info, params: revoked.append(params["handles"])})
    session = initiator.connect(address_of(owner, kind), owner.instance)
    params = {"numbers": [0, 2**64 - 1], "bytes": b"\x00\xff", "none": None}
    assert session.request("describe", params, WAIT_S).value == {"echo": params}
    assert asked[0].peer_instance == initiator.instance
    assert session.peer_instance == owner.instance
    assert asked[0].is_unix == session.is_unix == (kind == "unix")
    assert session.peer_pid == (os.getpid() if kind == "unix" else None)
    assert session.peer_uid == (os.geteuid() if kind == "unix" else None)
    assert asked[0].peer_pid == session.peer_pid
    assert (session.pidfd is not None) == (kind == "unix")
    assert owner.call_peers("revoke", {"handles": [7, 8]}, WAIT_S) == {asked[0].session_id: None}
    assert revoked == [[7, 8]]
    assert owner.counters["requests_served"] == 1
    session.close()
    assert not session.alive
    eventually(lambda: not owner.sessions(), "the owner's side ends")


@both_kinds
def test_large_replies_and_pipelined_requests(make: Make, kind: str) -> None:
    size = 5_000_000
    owner = make({"describe": lambda info, params: {"data": bytes([params["fill"]]) * size}})
    session = make().connect(address_of(owner, kind))
    with ThreadPoolExecutor(8) as pool:
        answers: list[Future[Any]] = [
            pool.submit(session.request, "describe", {"fill": fill}, WAIT_S) for fill in range(8)
        ]
        for fill, answer in enumerate(answers):
            assert answer.result(WAIT_S).value == {"data": bytes([fill]) * size}
    session.close()


@both_kinds
def test_errors_of_handlers_arrive_typed(make: Make, kind: str) -> None:
    def fail(_info: SessionInfo, params: Mapping[str, Any]) -> None:
        raise {"range": OutOfRange("beyond the end", offset=7), "bug": ZeroDivisionError("secret")}[
            params["how"]
        ]

    owner = make({"fail": fail, "unencodable": lambda info, params: object()})
    session = make().connect(address_of(owner, kind))
    with pytest.raises(OutOfRange, match="beyond the end") as caught:
        session.request("fail", {"how": "range"}, WAIT_S)
    assert caught.value.peer == address_of(owner, kind)
    with pytest.raises(InternalError, match="ZeroDivisionError") as hidden:
        session.request("fail", {"how": "bug"}, WAIT_S)
    assert "secret" not in str(hidden.value)
    with pytest.raises(UsageError, match="cannot be encoded"):
        session.request("unencodable", NO_PARAMS, WAIT_S)
    with pytest.raises(UnsupportedOperation, match="no control method 'nothing'"):
        session.request("nothing", NO_PARAMS, WAIT_S)
    with pytest.raises(UsageError, match="cannot be encoded"):
        session.request("fail", {"how": object()}, WAIT_S)
    assert session.alive
    counters = owner.counters
    assert (counters["requests_failed"], counters["handler_bugs"], counters["requests_unknown"]) == (4, 1, 1)
    session.close()


def test_a_handler_may_wait_without_stopping_others(make: Make) -> None:
    gates: list[asyncio.Event] = []

    async def wait_for_release() -> str:
        gates.append(asyncio.Event())
        await gates[-1].wait()
        return "released"

    def release(_info: SessionInfo, _params: Mapping[str, Any]) -> None:
        gates[0].set()

    owner = make({"wait": lambda info, params: wait_for_release(), "release": release})
    session = make().connect(owner.endpoint)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(session.request, "wait", NO_PARAMS, WAIT_S)
        eventually(lambda: bool(gates), "the handler waits")
        session.request("release", NO_PARAMS, WAIT_S)
        assert waiting.result(WAIT_S).value == "released"
    session.close()


def test_requests_in_flight_are_bounded(make: Make) -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    owner = make({"wait": lambda info, params: wait_for_ever()})
    initiator = make()
    session = initiator.connect(owner.endpoint)
    with ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(session.request, "wait", NO_PARAMS, WAIT_S) for _ in range(64)]
        connection = session._connection
        eventually(lambda: len(connection._waiting) == 64, "all requests are in flight")
        with pytest.raises(QueueFull):
            session.request("wait", NO_PARAMS, WAIT_S)
        session.close()
        for one in waiting:
            with pytest.raises(PeerGone):
                one.result(WAIT_S)


def test_descriptors_arrive_close_on_exec_and_owned(make: Make) -> None:
    memory = os.memfd_create("region")
    os.write(memory, b"the bytes of a region")
    owner = make({"map": lambda info, params: Reply({"length": 21}, [memory])})
    session = make().connect(owner.unix_name)
    before = len(open_fds())
    result = session.request("map", NO_PARAMS, WAIT_S)
    assert result.value == {"length": 21}
    (fd,) = result.take_fds()
    assert result.fds == ()
    assert not os.get_inheritable(fd)
    assert fd != memory
    assert os.pread(fd, 21, 0) == b"the bytes of a region"
    os.close(fd)

    with session.request("map", NO_PARAMS, WAIT_S) as unclaimed:
        assert len(unclaimed.fds) == 1
    session.request("map", NO_PARAMS, WAIT_S)
    eventually(lambda: len(open_fds()) == before, "unclaimed descriptors are closed")
    session.close()
    os.close(memory)


def test_each_reply_has_its_own_descriptors(make: Make) -> None:
    memories = [os.memfd_create(f"region {number}") for number in range(32)]
    for number, memory in enumerate(memories):
        os.write(memory, b"%04d" % number)

    def map_region(_info: SessionInfo, params: Mapping[str, Any]) -> Reply:
        number = params["number"]
        # Some replies are far above the socket's buffer, and some carry nothing.
        fds = memories[number : number + number % 3]
        return Reply({"count": len(fds), "filler": b"x" * (number * 40_000 % 700_000)}, fds)

    owner = make({"map": map_region})
    session = make().connect(owner.unix_name)

    def check(number: int) -> None:
        with session.request("map", {"number": number}, WAIT_S) as result:
            assert result.value["count"] == len(result.fds) == number % 3
            for index, fd in enumerate(result.fds):
                assert os.pread(fd, 4, 0) == b"%04d" % (number + index)

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(check, number) for number in range(30)]:
            done.result(WAIT_S)
    session.close()
    for memory in memories:
        os.close(memory)


def test_descriptors_are_refused_where_they_cannot_go(make: Make) -> None:
    too_many = [0] * (FRAME_FDS_MAX + 1)
    owner = make(
        {
            "map": lambda info, params: Reply(None, [0]),
            "many": lambda info, params: Reply(None, too_many),
            "closed": lambda info, params: Reply(None, [1 << 20]),
        }
    )
    initiator = make()
    tcp, unix = initiator.connect(owner.endpoint), initiator.connect(owner.unix_name)
    with pytest.raises(UnsupportedOperation, match="unix socket"):
        tcp.request("map", NO_PARAMS, WAIT_S)
    with pytest.raises(LimitExceeded):
        unix.request("many", NO_PARAMS, WAIT_S)
    with pytest.raises(ResourceError):
        unix.request("closed", NO_PARAMS, WAIT_S)
    assert tcp.alive
    assert unix.alive
    tcp.close()
    unix.close()


def test_descriptors_of_a_late_reply_are_closed(make: Make) -> None:
    memory = os.memfd_create("region")
    gates: list[asyncio.Event] = []

    async def map_late() -> Reply:
        gates.append(asyncio.Event())
        await gates[0].wait()
        return Reply(None, [memory])

    def release(_info: SessionInfo, _params: Mapping[str, Any]) -> None:
        gates[0].set()

    owner = make({"map": lambda info, params: map_late(), "release": release})
    initiator = make()
    session = initiator.connect(owner.unix_name)
    before = len(open_fds())
    with pytest.raises(TransferTimeout):
        session.request("map", NO_PARAMS, 0.05)
    eventually(lambda: bool(gates), "the handler waits")
    session.request("release", NO_PARAMS, WAIT_S)
    eventually(lambda: initiator.counters["replies_unclaimed"] == 1, "the late reply comes")
    assert len(open_fds()) == before
    session.close()
    os.close(memory)


def test_call_peers_tells_each_peers_outcome(make: Make) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    def refuse(_info: SessionInfo, _params: Mapping[str, Any]) -> None:
        raise StaleHandle("no such handle")

    owner = make({"probe": lambda info, params: info.session_id})
    answers = {"good": lambda info, params: "done", "slow": lambda info, params: never(), "bad": refuse}
    sessions = {
        name: make(session_handlers={"revoke": answer}).connect(owner.endpoint)
        for name, answer in answers.items()
    }
    ids = {name: session.request("probe", NO_PARAMS, WAIT_S).value for name, session in sessions.items()}
    outcome = owner.call_peers("revoke", NO_PARAMS, 0.3)
    assert outcome[ids["good"]] == "done"
    assert isinstance(outcome[ids["slow"]], TransferTimeout)
    assert isinstance(outcome[ids["bad"]], StaleHandle)
    assert owner.call_peers("revoke", NO_PARAMS, WAIT_S, [ids["good"]]) == {ids["good"]: "done"}
    owner.close_session(ids["slow"], PeerGone("revoked"))
    eventually(lambda: not sessions["slow"].alive, "the slow session is closed")
    assert sessions["good"].alive
    for session in sessions.values():
        session.close()


def test_the_control_thread_may_not_wait_for_itself(make: Make) -> None:
    owner = make({"ask": lambda info, params: owner.call_peers("revoke", {}, 1.0)})
    session = make().connect(owner.endpoint)
    with pytest.raises(InternalError, match="wait for itself"):
        session.request("ask", NO_PARAMS, WAIT_S)
    session.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses(make: Make, host: str) -> None:
    owner = make({"probe": lambda info, params: info.peer_address}, bind_host=host)
    session = make().connect(owner.endpoint)
    assert session.request("probe", NO_PARAMS, WAIT_S).value.startswith(
        "[::1]:" if host == "::1" else "127.0.0.1:"
    )
    session.close()


def test_listening_everywhere_serves_both_families(make: Make) -> None:
    owner = make({"probe": lambda info, params: {}}, bind_host="::", advertise_host="127.0.0.1")
    initiator = make()
    assert owner.endpoint == f"127.0.0.1:{owner.port}"
    for address in (owner.endpoint, f"[::1]:{owner.port}", f"localhost:{owner.port}"):
        session = initiator.connect(address)
        session.request("probe", NO_PARAMS, WAIT_S)
        session.close()


def test_a_port_clash_is_a_typed_error(make: Make) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as holder,
        pytest.raises(ResourceError, match="choose another") as caught,
    ):
        make(port=holder.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE
    owner = make()
    with pytest.raises(ResourceError) as caught:
        make(instance=owner.instance)
    assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(UsageError, match="bind_host"):
        make(bind_host="a..b")


def test_sessions_are_bounded_and_counted(make: Make) -> None:
    owner = make()
    initiator = make(peers_max=1)
    session = initiator.connect(owner.endpoint)
    with pytest.raises(LimitExceeded, match="peers_max") as caught:
        initiator.connect(owner.endpoint)
    assert caught.value.field == "peers_max"
    session.close()
    eventually(lambda: initiator.counters["sessions_closed"] == 1, "the session is gone")
    initiator.connect(owner.endpoint).close()


def test_the_owner_is_told_of_a_sessions_end(make: Make) -> None:
    ended: list[tuple[SessionInfo, MoonpoolError]] = []
    owner = make(
        {"probe": lambda i, p: i.session_id}, on_session_closed=lambda info, why: ended.append((info, why))
    )
    session = make().connect(owner.endpoint)
    session_id = session.request("probe", NO_PARAMS, WAIT_S).value
    assert [info.session_id for info in owner.sessions()] == [session_id]
    session.close()
    eventually(lambda: len(ended) == 1, "the owner is told")
    assert ended[0][0].session_id == session_id
    assert isinstance(ended[0][1], PeerGone)
