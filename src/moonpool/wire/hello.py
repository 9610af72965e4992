"""The hello that opens every connection of wire version 1: a sans-I/O codec and both ends' handshakes.

Theory of operation
-------------------
Messages, all little endian and of fixed size (docs/architecture.md, "Wire")::

    client -> server   ClientHello, 64 bytes: who I am, what the connection is for, whom I expect
    server -> client   ServerHello, 64 bytes: go on or a status, and whether the cluster secret is asked for
    client -> server   proof, 32 bytes         only when the server asks for the secret
    server -> client   verdict, 40 bytes       likewise; carries the server's own proof

A proof is HMAC-SHA256 over both hellos under a label of its own direction, so a recorded proof fits no other
connection and a reflected one fits no direction. A client that holds a secret refuses a server that does
not ask for it: otherwise whoever takes over a port would simply not ask.

`ClientHandshake` and `ServerHandshake` read no socket, clock or random source. A driver sends what they hand
out, reads exactly `needed` bytes and feeds them back, until `needed` is 0. It must not read more: what
follows belongs to the control or data protocol. A refusal by the server is its last message; then it closes.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, final

from moonpool.errors import (
    AccessDenied,
    InternalError,
    MoonpoolError,
    ProtocolError,
    StaleHandle,
    Status,
    error_from_status,
)
from moonpool.ids import ANY_INSTANCE, InstanceId

MAGIC: Final = b"MOONPOOL"
VERSION: Final = 1
NONCE_BYTES: Final = 16
CLIENT_HELLO_BYTES: Final = 64
SERVER_HELLO_BYTES: Final = 64
PROOF_BYTES: Final = 32
VERDICT_BYTES: Final = 40

_CLIENT_HELLO: Final = struct.Struct("<8sHBBI16s16s16s")
_SERVER_HELLO: Final = struct.Struct("<8sHBBI16s16s16s")
_VERSION: Final = struct.Struct("<8sH")
_VERDICT: Final = struct.Struct("<B7s32s")
_CLIENT_LABEL: Final = b"moonpool/1 client"
_SERVER_LABEL: Final = b"moonpool/1 server"
_NO_RESERVED: Final = bytes(16)
_NO_PROOF: Final = bytes(PROOF_BYTES)


class ConnectionKind(IntEnum):
    """What a connection is for."""

    CONTROL = 1
    LANE = 2
    RPC = 3


@final
@dataclass(frozen=True, slots=True)
class ClientHello:
    """The initiator's first message."""

    kind: ConnectionKind
    instance: bytes
    nonce: bytes
    expected_instance: bytes = ANY_INSTANCE

    def encode(self) -> bytes:
        """The 64 bytes of this hello."""
        return _CLIENT_HELLO.pack(
            MAGIC, VERSION, self.kind, 0, 0, self.instance, self.nonce, self.expected_instance
        )

    @classmethod
    def decode(cls, data: bytes) -> ClientHello:
        """Reads 64 bytes; raises `ProtocolError` for another protocol, version, kind or flag."""
        _check_version(data, CLIENT_HELLO_BYTES)
        _, _, kind, flags, reserved, instance, nonce, expected = _CLIENT_HELLO.unpack(data)
        if kind not in ConnectionKind.__members__.values():
            raise ProtocolError(f"the hello asks for the unknown connection kind {kind}")
        if flags or reserved:
            raise ProtocolError("the hello sets flags or reserved bytes that version 1 does not know")
        if instance == ANY_INSTANCE:
            raise ProtocolError("the hello names no instance of its sender")
        return cls(ConnectionKind(kind), instance, nonce, expected)


@final
@dataclass(frozen=True, slots=True)
class ServerHello:
    """The target's answer. `pid` is its process id on unix sockets and 0 elsewhere."""

    status: Status
    asks_for_secret: bool
    instance: bytes
    nonce: bytes
    pid: int = 0

    def encode(self) -> bytes:
        """The 64 bytes of this hello."""
        auth = 1 if self.asks_for_secret else 0
        return _SERVER_HELLO.pack(
            MAGIC, VERSION, self.status, auth, self.pid, self.instance, self.nonce, _NO_RESERVED
        )

    @classmethod
    def decode(cls, data: bytes) -> ServerHello:
        """Reads 64 bytes; raises `ProtocolError` for another protocol, version, status or flag."""
        _check_version(data, SERVER_HELLO_BYTES)
        _, _, status, auth, pid, instance, nonce, reserved = _SERVER_HELLO.unpack(data)
        if auth > 1 or reserved != _NO_RESERVED:
            raise ProtocolError("the hello sets flags or reserved bytes that version 1 does not know")
        if instance == ANY_INSTANCE:
            raise ProtocolError("the hello names no instance of its sender")
        return cls(_status_from_wire(status), bool(auth), instance, nonce, pid)


def client_proof(secret: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    """32 bytes that only a client with the secret can make for this pair of hellos (RFC 2104, SHA-256)."""
    return hmac.digest(secret, _CLIENT_LABEL + client_hello + server_hello, "sha256")


def server_proof(secret: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    """32 bytes that only a server with the secret can make for this pair of hellos."""
    return hmac.digest(secret, _SERVER_LABEL + client_hello + server_hello, "sha256")


def encode_verdict(status: Status, proof: bytes) -> bytes:
    """The server's 40 closing bytes; the proof is sent only with COMPLETE."""
    return _VERDICT.pack(status, bytes(7), proof if status is Status.COMPLETE else _NO_PROOF)


def decode_verdict(data: bytes) -> tuple[Status, bytes]:
    """(status, proof) of 40 bytes; raises `ProtocolError` for what version 1 does not allow."""
    if len(data) != VERDICT_BYTES:
        raise InternalError(f"a verdict is {VERDICT_BYTES} bytes, not {len(data)}")
    status, zeros, proof = _VERDICT.unpack(data)
    if any(zeros):
        raise ProtocolError("the verdict sets bytes that version 1 does not know")
    return _status_from_wire(status), proof


@final
class ClientHandshake:
    """The initiator's half of a hello, fed by a driver (see the module's text).

    After the last `receive`, `server` holds the target's hello and its instance is the expected one.
    """

    __slots__ = ("_hello", "_hello_bytes", "_peer", "_secret", "_server_bytes", "needed", "server")

    def __init__(self, hello: ClientHello, secret: bytes | None, peer: str = "") -> None:
        self._hello = hello
        self._hello_bytes = hello.encode()
        self._secret = secret
        self._peer = peer
        self._server_bytes = b""
        #: Bytes that the driver must read next; 0 when the hello is done.
        self.needed = SERVER_HELLO_BYTES
        #: The target's hello, None until it came.
        self.server: ServerHello | None = None

    def begin(self) -> bytes:
        """What the driver sends first."""
        return self._hello_bytes

    def receive(self, data: bytes) -> bytes:
        """Takes exactly `needed` bytes and returns what to send next, perhaps nothing.

        Raises `ProtocolError` (another protocol or version: both are named), `AccessDenied` (secret or
        user), `StaleHandle` (another instance lives there) or the error of the status the server gave. The
        driver closes the connection then.
        """
        if not self.needed or len(data) != self.needed:
            raise InternalError(f"the handshake needs {self.needed} bytes and was given {len(data)}")
        if self.server is None:
            return self._receive_hello(data)
        self._receive_verdict(data)
        return b""

    def _receive_hello(self, data: bytes) -> bytes:
        server = ServerHello.decode(data)
        if server.status is not Status.COMPLETE:
            raise self._refusal(server.status)
        self._check_secret_use(server.asks_for_secret)
        expected = self._hello.expected_instance
        if expected not in (ANY_INSTANCE, server.instance):
            raise self._other_instance()
        self.server = server
        self._server_bytes = data
        if self._secret is None:
            self.needed = 0
            return b""
        self.needed = VERDICT_BYTES
        return client_proof(self._secret, self._hello_bytes, data)

    def _check_secret_use(self, asked_for: bool) -> None:
        if asked_for and self._secret is None:
            message = (
                "the peer asks for the cluster secret and none is set; set the config field cluster_secret"
            )
            raise AccessDenied(message, peer=self._peer, field="cluster_secret")
        if self._secret is not None and not asked_for:
            message = (
                "the peer does not ask for the cluster secret, so it cannot be trusted; "
                "set the same cluster_secret on both ends"
            )
            raise AccessDenied(message, peer=self._peer, field="cluster_secret")

    def _receive_verdict(self, data: bytes) -> None:
        status, proof = decode_verdict(data)
        if status is Status.ACCESS_DENIED:
            message = (
                "the peer refused this engine's cluster secret; set the same cluster_secret on both ends"
            )
            raise AccessDenied(message, peer=self._peer, field="cluster_secret")
        if status is not Status.COMPLETE:
            raise self._refusal(status)
        if self._secret is None:
            raise InternalError("a verdict was read on a connection without a secret")
        if not hmac.compare_digest(proof, server_proof(self._secret, self._hello_bytes, self._server_bytes)):
            message = "the peer does not hold the cluster secret; set the same cluster_secret on both ends"
            raise AccessDenied(message, peer=self._peer, field="cluster_secret")
        self.needed = 0

    def _refusal(self, status: Status) -> MoonpoolError:
        if status is Status.STALE_HANDLE:
            return self._other_instance()
        messages = {
            Status.ACCESS_DENIED: "the peer refuses this connection: a unix socket serves its own user only",
            Status.PROTOCOL: "the peer did not understand the hello; run compatible releases on both ends",
            Status.QUEUE_FULL: "the peer has reached its connections_max; try again, or raise it there",
        }
        message = messages.get(status, f"the peer refused the connection with status {status.name}")
        return error_from_status(status, message, peer=self._peer)

    def _other_instance(self) -> StaleHandle:
        message = "another instance lives at the peer's address, so it was restarted; open the segment again"
        return StaleHandle(message, peer=self._peer)


@final
@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server says of itself in its hellos; `pid` is 0 but on unix sockets."""

    instance: InstanceId
    secret: bytes | None = field(default=None, repr=False)
    pid: int = 0


class _Stage(Enum):
    HELLO = 0
    PROOF = 1
    ANSWERED = 2


@final
class ServerHandshake:
    """The target's half of a hello. A driver's steps::

        verdict = handshake.receive(read(handshake.needed))
        if verdict is COMPLETE and handshake.asks_for_secret:
            send(handshake.challenge())
            verdict = handshake.receive(read(handshake.needed))
        send(handshake.answer(verdict or a refusal of the driver's own))

    Nothing the client says may be believed before the last `receive` returned COMPLETE.
    """

    __slots__ = (
        "_admissible",
        "_answer_hello",
        "_identity",
        "_nonce",
        "_raw_client",
        "_stage",
        "client",
        "needed",
    )

    def __init__(self, identity: ServerIdentity, nonce: bytes) -> None:
        self._identity = identity
        self._nonce = nonce
        self._stage = _Stage.HELLO
        self._admissible = False
        self._raw_client = b""
        self._answer_hello = b""
        #: Bytes that the driver must read next; 0 when nothing more is to come.
        self.needed = CLIENT_HELLO_BYTES
        #: The initiator's hello, None until a readable one came.
        self.client: ClientHello | None = None

    @property
    def asks_for_secret(self) -> bool:
        """True when a proof is needed: the server holds a secret."""
        return self._identity.secret is not None

    def receive(self, data: bytes) -> Status:
        """Takes exactly `needed` bytes and returns the verdict on them.

        COMPLETE: go on. PROTOCOL: the client speaks another version, which `answer` tells it. STALE_HANDLE:
        it expects another instance. ACCESS_DENIED: wrong proof. Raises `ProtocolError` when the bytes are no
        hello at all: the driver closes without an answer.
        """
        if not self.needed or len(data) != self.needed:
            raise InternalError(f"the handshake needs {self.needed} bytes and was given {len(data)}")
        self.needed = 0
        if self._stage is _Stage.PROOF:
            return self._check_proof(data)
        if data[: len(MAGIC)] != MAGIC:
            raise ProtocolError("the connection did not begin with a Moonpool hello")
        if _VERSION.unpack_from(data)[1] != VERSION:
            return Status.PROTOCOL
        self._raw_client = data
        self.client = ClientHello.decode(data)
        if self.client.expected_instance not in (ANY_INSTANCE, self._identity.instance):
            return Status.STALE_HANDLE
        self._admissible = not self.asks_for_secret
        return Status.COMPLETE

    def challenge(self) -> bytes:
        """The hello that asks for the client's proof; `needed` is 32 after it."""
        if self._stage is not _Stage.HELLO or not self.asks_for_secret:
            raise InternalError("a challenge is sent once, and only by a server that holds a secret")
        self._stage = _Stage.PROOF
        self.needed = PROOF_BYTES
        self._answer_hello = self._hello(Status.COMPLETE)
        return self._answer_hello

    def answer(self, status: Status) -> bytes:
        """The server's last bytes: COMPLETE lets the client in, anything else turns it away."""
        stage, self._stage = self._stage, _Stage.ANSWERED
        self.needed = 0
        # Letting in a client that proved nothing must be impossible whatever a driver does.
        if stage is _Stage.ANSWERED or (status is Status.COMPLETE and not self._admissible):
            raise InternalError("the handshake cannot be answered so at this stage")
        secret = self._identity.secret
        if stage is _Stage.PROOF and secret is not None:
            return encode_verdict(status, server_proof(secret, self._raw_client, self._answer_hello))
        return self._hello(status)

    def _hello(self, status: Status) -> bytes:
        identity = self._identity
        return ServerHello(
            status, self.asks_for_secret, identity.instance, self._nonce, identity.pid
        ).encode()

    def _check_proof(self, data: bytes) -> Status:
        secret = self._identity.secret
        if secret is None:
            raise InternalError("a proof was read on a connection without a secret")
        expected = client_proof(secret, self._raw_client, self._answer_hello)
        self._admissible = hmac.compare_digest(data, expected)
        return Status.COMPLETE if self._admissible else Status.ACCESS_DENIED


def _check_version(data: bytes, size_bytes: int) -> None:
    if len(data) != size_bytes:
        raise InternalError(f"a hello is {size_bytes} bytes, not {len(data)}")
    magic, version = _VERSION.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("the peer did not send a Moonpool hello; check the address and port")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks wire version {version} and this engine version {VERSION}; "
            "run compatible releases on both ends"
        )


def _status_from_wire(number: int) -> Status:
    try:
        status = Status(number)
    except ValueError:
        raise ProtocolError(f"the hello carries the unknown status {number}") from None
    if status is Status.PENDING:
        raise ProtocolError("the hello carries the status PENDING, which answers nothing")
    return status
