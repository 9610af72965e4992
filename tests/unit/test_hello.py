"""The hello: bytes pinned, both halves played against each other, and every way to be turned away."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable

import pytest

from moonpool.errors import (
    AccessDenied,
    InternalError,
    MoonpoolError,
    PeerStalled,
    ProtocolError,
    QueueFull,
    StaleHandle,
    Status,
)
from moonpool.ids import ANY_INSTANCE, InstanceId
from moonpool.wire.hello import (
    CLIENT_HELLO_BYTES,
    PROOF_BYTES,
    SERVER_HELLO_BYTES,
    VERDICT_BYTES,
    ClientHandshake,
    ClientHello,
    ConnectionKind,
    ServerHandshake,
    ServerHello,
    ServerIdentity,
    client_proof,
    decode_verdict,
    encode_verdict,
    server_proof,
)

CLIENT = InstanceId(bytes(range(1, 17)))
SERVER = InstanceId(bytes(range(101, 117)))
OTHER = InstanceId(b"\xee" * 16)
SECRET = b"a secret of a cluster, 32 bytes."
WRONG_SECRET = b"another cluster's secret, longer."
CLIENT_NONCE = b"c" * 16
SERVER_NONCE = b"s" * 16


def client_hello(
    expected: bytes = ANY_INSTANCE, kind: ConnectionKind = ConnectionKind.CONTROL
) -> ClientHello:
    return ClientHello(kind, CLIENT, CLIENT_NONCE, expected)


def server_handshake(secret: bytes | None = None, pid: int = 0) -> ServerHandshake:
    return ServerHandshake(ServerIdentity(SERVER, secret, pid), SERVER_NONCE)


def play(
    client: ClientHandshake,
    server: ServerHandshake,
    refusal: Status = Status.COMPLETE,
    tamper: Callable[[int, bytes], bytes] = lambda _step, data: data,
) -> Status:
    """Passes messages to and fro until both are done; `tamper(step, bytes)` sits on the wire."""
    verdict = server.receive(tamper(0, client.begin()))
    if verdict is Status.COMPLETE and server.asks_for_secret:
        proof = client.receive(tamper(1, server.challenge()))
        verdict = server.receive(tamper(2, proof))
        last = server.answer(refusal if verdict is Status.COMPLETE else verdict)
        assert client.receive(tamper(3, last)) == b""
    else:
        last = server.answer(refusal if verdict is Status.COMPLETE else verdict)
        assert client.receive(tamper(1, last)) == b""
    return verdict


def flip(step: int, position: int) -> Callable[[int, bytes], bytes]:
    """A wire that turns one bit of one message."""

    def tamper(at: int, data: bytes) -> bytes:
        if at != step:
            return data
        changed = bytearray(data)
        changed[position] ^= 1
        return bytes(changed)

    return tamper


def test_client_hello_bytes() -> None:
    expected = b"MOONPOOL" + b"\x01\x00" + b"\x02" + b"\x00" + bytes(4) + CLIENT + CLIENT_NONCE + SERVER
    data = client_hello(SERVER, ConnectionKind.LANE).encode()
    assert data == expected
    assert len(data) == CLIENT_HELLO_BYTES == 64
    assert ClientHello.decode(data) == client_hello(SERVER, ConnectionKind.LANE)


def test_server_hello_bytes() -> None:
    hello = ServerHello(Status.STALE_HANDLE, True, SERVER, SERVER_NONCE, 0x01020304)
    head = b"MOONPOOL" + b"\x01\x00" + b"\x06" + b"\x01" + b"\x04\x03\x02\x01"
    assert hello.encode() == head + SERVER + SERVER_NONCE + bytes(16)
    assert len(hello.encode()) == SERVER_HELLO_BYTES == 64
    assert ServerHello.decode(hello.encode()) == hello


def test_proofs_are_hmac_sha256_over_both_hellos() -> None:
    one, two = b"1" * 64, b"2" * 64
    for make, label in ((client_proof, b"moonpool/1 client"), (server_proof, b"moonpool/1 server")):
        assert make(SECRET, one, two) == hmac.new(SECRET, label + one + two, hashlib.sha256).digest()
        assert len(make(SECRET, one, two)) == PROOF_BYTES


def test_verdict_bytes() -> None:
    proof = b"p" * 32
    assert encode_verdict(Status.COMPLETE, proof) == bytes(8) + proof
    assert encode_verdict(Status.ACCESS_DENIED, proof) == b"\x08" + bytes(7) + bytes(32)
    assert decode_verdict(encode_verdict(Status.COMPLETE, proof)) == (Status.COMPLETE, proof)
    assert len(encode_verdict(Status.COMPLETE, proof)) == VERDICT_BYTES == 40


@pytest.mark.parametrize("kind", list(ConnectionKind))
@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("expected", [ANY_INSTANCE, SERVER])
def test_both_halves_agree(kind: ConnectionKind, secret: bytes | None, expected: bytes) -> None:
    client = ClientHandshake(client_hello(expected, kind), secret)
    server = server_handshake(secret, pid=4321)
    assert play(client, server) is Status.COMPLETE
    assert client.needed == 0
    assert server.needed == 0
    assert client.server is not None
    assert client.server.instance == SERVER
    assert client.server.pid == 4321
    assert server.client == client_hello(expected, kind)


def test_wrong_secret_is_refused_by_the_server() -> None:
    client = ClientHandshake(client_hello(), WRONG_SECRET, "10.0.0.9:1")
    with pytest.raises(AccessDenied, match="cluster_secret") as caught:
        play(client, server_handshake(SECRET))
    assert caught.value.peer == "10.0.0.9:1"
    assert caught.value.field == "cluster_secret"


def test_wrong_secret_of_the_server_is_refused_by_the_client() -> None:
    def rob(step: int, data: bytes) -> bytes:
        # A server that lets everybody in, as an impostor would, but cannot make the proof.
        return encode_verdict(Status.COMPLETE, b"?" * 32) if step == 3 else data

    with pytest.raises(AccessDenied, match="does not hold the cluster secret"):
        play(ClientHandshake(client_hello(), SECRET), server_handshake(WRONG_SECRET), tamper=rob)


def test_reflected_proof_is_worth_nothing() -> None:
    client = ClientHandshake(client_hello(), SECRET)
    server = server_handshake(SECRET)
    server.receive(client.begin())
    proof = client.receive(server.challenge())
    with pytest.raises(AccessDenied, match="does not hold"):
        client.receive(encode_verdict(Status.COMPLETE, proof))


def test_client_with_a_secret_refuses_a_server_without() -> None:
    with pytest.raises(AccessDenied, match="does not ask for the cluster secret") as caught:
        play(ClientHandshake(client_hello(), SECRET), server_handshake(None))
    assert caught.value.field == "cluster_secret"


def test_client_without_a_secret_is_told_the_field() -> None:
    with pytest.raises(AccessDenied, match="set the config field cluster_secret"):
        play(ClientHandshake(client_hello(), None), server_handshake(SECRET))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_another_instance_is_stale(secret: bytes | None) -> None:
    with pytest.raises(StaleHandle, match="restarted"):
        play(ClientHandshake(client_hello(OTHER), secret), server_handshake(secret))


def test_client_checks_the_instance_itself() -> None:
    client = ClientHandshake(client_hello(OTHER), None)
    answer = ServerHello(Status.COMPLETE, False, SERVER, SERVER_NONCE).encode()
    with pytest.raises(StaleHandle):
        client.receive(answer)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    ("refusal", "error", "says"),
    [
        (Status.ACCESS_DENIED, AccessDenied, "."),
        (Status.QUEUE_FULL, QueueFull, "connections_max"),
        (Status.STALLED, PeerStalled, "STALLED"),
    ],
)
def test_refusals_come_as_their_errors(
    secret: bytes | None, refusal: Status, error: type[MoonpoolError], says: str
) -> None:
    with pytest.raises(error, match=says):
        play(ClientHandshake(client_hello(), secret), server_handshake(secret), refusal)


@pytest.mark.parametrize("position", range(12, SERVER_HELLO_BYTES))
def test_a_changed_server_hello_ends_the_handshake(position: int) -> None:
    # From byte 12 on (pid, instance, nonce, reserved) only the proofs, or the expected instance, can tell.
    with pytest.raises((AccessDenied, StaleHandle, ProtocolError)):
        play(
            ClientHandshake(client_hello(SERVER), SECRET), server_handshake(SECRET), tamper=flip(1, position)
        )


@pytest.mark.parametrize("position", range(16, CLIENT_HELLO_BYTES))
def test_a_changed_client_hello_ends_the_handshake(position: int) -> None:
    with pytest.raises((AccessDenied, StaleHandle)):
        play(
            ClientHandshake(client_hello(SERVER), SECRET), server_handshake(SECRET), tamper=flip(0, position)
        )


@pytest.mark.parametrize("position", range(8, VERDICT_BYTES))
def test_a_changed_server_proof_ends_the_handshake(position: int) -> None:
    with pytest.raises(AccessDenied, match="does not hold"):
        play(ClientHandshake(client_hello(), SECRET), server_handshake(SECRET), tamper=flip(3, position))


def patched(data: bytes, position: int, value: bytes) -> bytes:
    return data[:position] + value + data[position + len(value) :]


def test_client_names_both_versions() -> None:
    answer = ServerHello(Status.PROTOCOL, False, SERVER, SERVER_NONCE).encode()
    with pytest.raises(ProtocolError, match=r"wire version 7 .* version 1"):
        ClientHandshake(client_hello(), None).receive(patched(answer, 8, struct.pack("<H", 7)))


def test_server_answers_another_version_with_its_own() -> None:
    server = server_handshake(SECRET)
    newer = patched(client_hello().encode(), 8, struct.pack("<H", 7))
    assert server.receive(newer) is Status.PROTOCOL
    answer = server.answer(Status.PROTOCOL)
    assert answer[:11] == b"MOONPOOL\x01\x00" + bytes([Status.PROTOCOL])
    assert server.client is None


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"GET / HT"),
        (10, b"\x00"),  # no kind
        (10, b"\x04"),  # an unknown kind
        (11, b"\x01"),  # a flag
        (12, b"\x01"),  # reserved
        (16, bytes(16)),  # no instance
    ],
)
def test_server_refuses_what_is_no_hello(position: int, value: bytes) -> None:
    with pytest.raises(ProtocolError):
        server_handshake().receive(patched(client_hello().encode(), position, value))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"SSH-2.0-"),
        (10, b"\x01"),  # PENDING answers nothing
        (10, b"\x63"),  # an unknown status
        (11, b"\x02"),  # an unknown kind of authentication
        (16, bytes(16)),  # no instance
        (48, b"\x01"),  # reserved
    ],
)
def test_client_refuses_what_is_no_answer(position: int, value: bytes) -> None:
    answer = ServerHello(Status.COMPLETE, False, SERVER, SERVER_NONCE).encode()
    with pytest.raises(ProtocolError):
        ClientHandshake(client_hello(), None).receive(patched(answer, position, value))


def test_verdict_with_unknown_bytes_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not know"):
        decode_verdict(b"\x00\x01" + bytes(38))


def test_a_driver_cannot_let_in_a_client_that_proved_nothing() -> None:
    unproved = server_handshake(SECRET)
    unproved.receive(client_hello().encode())
    with pytest.raises(InternalError):
        unproved.answer(Status.COMPLETE)

    disproved = server_handshake(SECRET)
    disproved.receive(client_hello().encode())
    disproved.challenge()
    assert disproved.receive(bytes(PROOF_BYTES)) is Status.ACCESS_DENIED
    with pytest.raises(InternalError):
        disproved.answer(Status.COMPLETE)


def test_drivers_are_held_to_the_order() -> None:
    server = server_handshake()
    with pytest.raises(InternalError):
        server.receive(b"short")
    server.receive(client_hello().encode())
    with pytest.raises(InternalError):
        server.receive(client_hello().encode())
    with pytest.raises(InternalError):
        server.challenge()
    server.answer(Status.COMPLETE)
    with pytest.raises(InternalError):
        server.answer(Status.COMPLETE)
    with pytest.raises(InternalError):
        ClientHandshake(client_hello(), None).receive(b"short")


def test_the_secret_is_not_shown() -> None:
    assert "secret of a cluster" not in repr(ServerIdentity(SERVER, SECRET))
