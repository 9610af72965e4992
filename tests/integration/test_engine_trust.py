"""Who may do what: other users, wrong secrets, hostile control messages, and keys that are not given away."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import (
    Access,
    AccessDenied,
    Engine,
    HandshakeFailed,
    PeerRefused,
    ProtocolError,
    Status,
)
from moonpool.engine.peer_address import unix_name_of
from moonpool.ids import new_instance_id
from moonpool.wire.control import ControlParser, ReplyMessage, RequestMessage, encode_message
from moonpool.wire.hello import ClientHello, ConnectionKind, ServerHello
from moonpool.wire.transfer import (
    HEADER_BYTES,
    Entry,
    GroupHeader,
    LaneOp,
    decode_reply_header,
    encode_group,
)

MIB = 1 << 20
WAIT_S = 20.0
SECRET = "a secret of at least sixteen bytes"
both_sockets = pytest.mark.parametrize("over", ["tcp", "unix"])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the lab: another user needs root")


class Stranger:
    """A client that speaks the wire itself, well or badly."""

    def __init__(self, engine: Engine, over: str, kind: ConnectionKind) -> None:
        if over == "unix":
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect("\0" + unix_name_of(engine.instance)[1:])
        else:
            host, _, port = engine.endpoint.rpartition(":")
            self.sock = socket.create_connection((host, int(port)), WAIT_S)
        self.sock.settimeout(WAIT_S)
        hello = ClientHello(kind, new_instance_id(), os.urandom(16), engine.instance)
        self.sock.sendall(hello.encode())
        self.server = ServerHello.decode(self.exactly(64))
        self._parser = ControlParser()
        self._next = 0

    def exactly(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            piece = self.sock.recv(size - len(got))
            if not piece:
                raise EOFError
            got += piece
        return bytes(got)

    def ask(self, method: str, **params: Any) -> Any:
        """One request on a control session: the result, or (code, name) of the error."""
        self._next += 1
        self.sock.sendall(encode_message(RequestMessage(self._next, method, params)))
        while (frame := self._parser.next_frame()) is None:
            piece = self.sock.recv(1 << 16)
            if not piece:
                raise EOFError
            self._parser.feed(piece)
        message = frame.message
        assert isinstance(message, ReplyMessage)
        return message.result if message.error is None else message.error

    def is_shut(self) -> bool:
        """Whether the other end has closed."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(1 << 16):
                pass
        return True


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(
        transports=("local", "shm", "tcp"), handshake_timeout_ms=1_000, stall_timeout_ms=1_000
    ) as made:
        yield made


@pytest.fixture
def meet(engine: Engine) -> Iterator[Any]:
    """`meet(over, kind)`: a stranger that has said hello."""
    met: list[Stranger] = []

    def make(over: str, kind: ConnectionKind = ConnectionKind.CONTROL) -> Stranger:
        met.append(Stranger(engine, over, kind))
        return met[-1]

    yield make
    for stranger in met:
        stranger.sock.close()


@pytest.fixture
def still_serves(engine: Engine) -> Iterator[None]:
    """After whatever a stranger did, the engine serves its friends as before."""
    memory = np.arange(4096, dtype=np.uint8)
    region = engine.register(memory)
    yield
    with Engine(transports=("tcp",)) as friend:
        segment = friend.open(engine.endpoint)
        back = bytearray(4096)
        friend.read(segment, region.handle, 0, back)
        assert back == np.arange(4096, dtype=np.uint8).tobytes()


pytestmark = pytest.mark.usefixtures("still_serves")


def name_of(error: Any) -> str:
    """The name of the error in a reply."""
    assert not isinstance(error, dict), f"it was granted: {error}"
    return str(getattr(error, "name", None) or error[1])


@both_sockets
def test_a_stranger_hears_what_is_published_and_no_key_that_it_may_not_use(
    engine: Engine, meet: Any, over: str
) -> None:
    hidden = engine.allocate(4096, access=Access.NONE)
    readable = engine.allocate(4096, access=Access.READ)
    about = {one["handle"]: one for one in meet(over).ask("describe")["regions"]}
    assert hidden.handle not in about
    assert about[readable.handle]["read_key"] == readable.read_key
    assert about[readable.handle]["write_key"] == bytes(16)


@pytest.mark.parametrize(
    ("access", "asked", "expected"),
    [
        (Access.READ, 2, "AccessDenied"),
        (Access.READ, 3, "AccessDenied"),
        (Access.WRITE, 1, "AccessDenied"),
        (Access.NONE, 1, "AccessDenied"),
        (Access.READ_WRITE, 0, "AccessDenied"),
        (Access.READ_WRITE, 4, "UnsupportedOperation"),
        (Access.READ_WRITE, -1, "UnsupportedOperation"),
        (Access.READ_WRITE, 1.5, "UnsupportedOperation"),
        (Access.READ_WRITE, "3", "UnsupportedOperation"),
        (Access.READ_WRITE, None, "UnsupportedOperation"),
    ],
)
@pytest.mark.parametrize("method", ["map", "grant_vm"])
def test_memory_is_given_only_with_the_right_to_it(
    engine: Engine, meet: Any, method: str, access: Access, asked: Any, expected: str
) -> None:
    region = engine.allocate(4096, access=access)
    answer = meet("unix").ask(method, handle=region.handle, access=asked)
    assert name_of(answer) == expected


@pytest.mark.parametrize("handle", [0, 1, 1 << 32 | 9_999, (1 << 64) - 1, -1, "1", None, 1.0, [1], {}])
@pytest.mark.parametrize("method", ["map", "grant_vm"])
def test_made_up_handles_get_nothing(meet: Any, method: str, handle: Any) -> None:
    assert name_of(meet("unix").ask(method, handle=handle, access=1)) in (
        "StaleHandle",
        "UnsupportedOperation",
    )


@pytest.mark.parametrize("method", ["map", "grant_vm"])
def test_memory_is_never_passed_over_tcp(engine: Engine, meet: Any, method: str) -> None:
    region = engine.allocate(4096)
    assert name_of(meet("tcp").ask(method, handle=region.handle, access=1)) == "UnsupportedOperation"


def test_a_reader_gets_a_descriptor_that_cannot_write(engine: Engine, meet: Any) -> None:
    import mmap

    region = engine.allocate(4096, access=Access.READ)
    stranger = meet("unix")
    stranger.sock.sendall(encode_message(RequestMessage(1, "map", {"handle": region.handle, "access": 1})))
    _, fds, _, _ = socket.recv_fds(stranger.sock, 1 << 16, 4)
    (fd,) = fds
    try:
        with pytest.raises(OSError, match=r"denied|permitted"):
            mmap.mmap(fd, 4096)
        with pytest.raises(OSError, match=r"denied|permitted|argument"):
            os.ftruncate(fd, 0)
        with contextlib.closing(mmap.mmap(fd, 4096, prot=mmap.PROT_READ)) as seen:
            assert seen[:] == bytes(4096)
        # What was opened for reading could be opened again for writing, were it not for the seal or the mode.
        with contextlib.suppress(OSError):
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            os.close(again)
    finally:
        os.close(fd)


@both_sockets
@pytest.mark.parametrize(
    "garbage",
    [
        bytes(4),
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\x7f" + b"x" * 100,
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x90",
        struct.pack("<I", 3) + b"\x93\x07\x01",
        b"GET / HTTP/1.1\r\n\r\n" * 50,
        bytes(range(256)) * 40,
    ],
    ids=["empty frame", "huge", "negative", "no msgpack", "no fields", "no kind", "http", "bytes"],
)
def test_garbage_closes_that_session_only(engine: Engine, meet: Any, over: str, garbage: bytes) -> None:
    good = meet(over)
    assert good.ask("probe") == {}
    stranger = meet(over)
    stranger.sock.sendall(garbage)
    assert stranger.is_shut()
    assert good.ask("probe") == {}


@both_sockets
def test_unknown_methods_and_odd_params_are_answered(meet: Any, over: str) -> None:
    stranger = meet(over)
    for method, params in (
        ("no_such", {}),
        ("revoke", {"handles": "all"}),
        ("describe", {"x": [[[]]]}),
        ("x" * 60, {}),
    ):
        answer = stranger.ask(method, **params)
        assert isinstance(answer, dict) == (method == "describe")
    assert stranger.ask("probe") == {}


def lane_answer(stranger: Stranger, header: GroupHeader, entries: list[Entry], payload: bytes) -> Any:
    """Status of a group sent by hand."""
    stranger.sock.sendall(encode_group(header, entries) + payload)
    return decode_reply_header(stranger.exactly(HEADER_BYTES))


@pytest.mark.parametrize("op", [LaneOp.READ, LaneOp.WRITE])
def test_a_wrong_key_opens_nothing(engine: Engine, meet: Any, op: LaneOp) -> None:
    region = engine.allocate(4096)
    right = region.read_key if op is LaneOp.READ else region.write_key
    other = region.write_key if op is LaneOp.READ else region.read_key
    stranger = meet("tcp", ConnectionKind.LANE)
    payload = b"\xaa" * 16 if op is LaneOp.WRITE else b""
    flipped = bytes([right[0] ^ 1, *right[1:]])
    for number, key in enumerate((bytes(16), other, flipped, right[:15] + bytes([right[15] ^ 0x80]))):
        header = GroupHeader(op, 1, number, 16)
        answer = lane_answer(stranger, header, [Entry(region.handle, 0, 16, key)], payload)
        assert answer.status is Status.ACCESS_DENIED
        assert stranger.exactly(1) == bytes([Status.ACCESS_DENIED])
        assert bytes(region.view) == bytes(4096)
    answer = lane_answer(stranger, GroupHeader(op, 1, 9, 16), [Entry(region.handle, 0, 16, right)], payload)
    assert answer.status is Status.COMPLETE
    if op is LaneOp.READ:
        assert stranger.exactly(16) == bytes(16)
    else:
        assert bytes(region.view[:16]) == payload


def test_a_lane_opened_by_hand_is_cut_for_a_broken_frame(engine: Engine, meet: Any) -> None:
    for broken in (bytes(32), b"\xff" * 32, encode_group(GroupHeader(LaneOp.PING, 0, 1, 0))[:-1] + b"\x01"):
        stranger = meet("tcp", ConnectionKind.LANE)
        stranger.sock.sendall(broken)
        assert stranger.is_shut()
    assert engine.metrics()["counters"]["target_lanes_broken"] == 3


@pytest.mark.parametrize(("mine", "theirs"), [(None, SECRET), ("another secret of some length", SECRET)])
def test_the_secret_guards_both_ports(make_peer: Any, mine: str | None, theirs: str) -> None:
    target = make_peer(secret=theirs)
    handle = target.ask("offer", size=4096, seed=1)
    with Engine(transports=("shm", "tcp"), cluster_secret=mine and mine.encode()) as engine:
        for _ in range(3):
            with pytest.raises(AccessDenied, match="secret"):
                engine.open(target.endpoint)
    with Engine(transports=("shm", "tcp"), cluster_secret=theirs.encode()) as engine:
        segment = engine.open(target.endpoint)
        assert segment.paths[0].transport == "shm"
        engine.read(segment, handle, 0, bytearray(4096))
    counters = target.ask("counters")
    assert counters["control_secrets_refused"] == (3 if mine else 0)


def test_something_else_on_the_port_is_said_to_be_that() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        Engine(transports=("tcp",), handshake_timeout_ms=500) as engine,
    ):
        other.settimeout(WAIT_S)
        port = other.getsockname()[1]
        with pytest.raises(HandshakeFailed):
            engine.open(f"127.0.0.1:{port}")
    with pytest.raises(PeerRefused), Engine(transports=("tcp",)) as engine:
        engine.open(f"127.0.0.1:{port}")


def test_a_server_that_talks_nonsense_is_a_protocol_error() -> None:
    import threading

    with socket.create_server(("127.0.0.1", 0)) as other:

        def talk() -> None:
            client, _ = other.accept()
            with client:
                client.recv(64)
                client.sendall(b"220 smtp.example.org ESMTP ready, and a good deal more than that" * 2)

        talker = threading.Thread(target=talk)
        talker.start()
        try:
            with Engine(transports=("tcp",)) as engine, pytest.raises(ProtocolError):
                engine.open(f"127.0.0.1:{other.getsockname()[1]}")
        finally:
            talker.join()


@as_root
@pytest.mark.parametrize("who", ["target", "initiator"])
def test_another_user_gets_tcp_and_no_memory(make_peer: Any, who: str) -> None:
    target = make_peer(as_nobody=who == "target")
    handle = target.ask("offer", size=MIB, seed=1)
    foreign = target.ask("offer", size=MIB, seed=2, foreign=True)
    initiator = make_peer(as_nobody=who == "initiator")
    assert initiator.ask("open", endpoint=target.endpoint) == ["tcp"]
    assert initiator.ask("read", handle=handle, length=MIB, seed=1)
    assert initiator.ask("read", handle=foreign, length=MIB, seed=2)
    assert {row["transport"] for row in initiator.ask("rows")} == {"tcp"}
    refused = target.ask("counters")["control_users_refused"]
    # A target turns strangers away; an initiator does not even speak to a stranger's socket.
    assert refused == (1 if who == "initiator" else 0)


@as_root
def test_a_process_that_may_not_be_read_falls_back_to_tcp_and_counts_it(make_peer: Any) -> None:
    # The same user, but not dumpable: the kernel refuses process_vm on it.
    target = make_peer(as_nobody=True)
    initiator = make_peer(as_nobody=True)
    foreign = target.ask("offer", size=MIB, seed=2, foreign=True)
    mapped = target.ask("offer", size=MIB, seed=3)
    assert initiator.ask("open", endpoint=target.endpoint) == ["shm", "shm", "tcp"]
    assert initiator.ask("read", handle=mapped, length=MIB, seed=3)
    for _ in range(3):
        assert initiator.ask("read", handle=foreign, length=MIB, seed=2)
    rows = {row["transport"]: row["transfers"] for row in initiator.ask("rows") if row["op"] == "READ"}
    assert rows == {"shm": 1, "tcp": 3}
    assert initiator.ask("counters")["path_fallbacks"] >= 1
