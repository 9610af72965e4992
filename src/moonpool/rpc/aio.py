"""A client of the rpc for asyncio: one connection, calls pipelined, hot methods encoded natively.

It belongs to the event loop in which it was made. As with the client for threads, reconnecting is the
caller's business: after a `PeerError` other than `TransferTimeout` and `RpcError` the connection is over
(`closed_reason`).
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, final

from moonpool.errors import (
    LimitExceeded,
    MoonpoolError,
    PeerGone,
    ProtocolError,
    QueueFull,
    Status,
    TransferTimeout,
    status_of,
)
from moonpool.ids import InstanceId, new_instance_id
from moonpool.native.io import rpc_frames
from moonpool.native.io.rpc_codec import EndReply, LookupReply, PutReply
from moonpool.rpc.client import DEFAULT_TIMEOUT_S, Buffer, Key
from moonpool.rpc.dialing import dial_server
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.wire.rpc import LENGTH_BYTES, RpcFault, pack_value, unpack_fault, unpack_value

_Answer = tuple[bytes | None, bytes]


@final
class AsyncRpcClient:
    """A connection to a server in one event loop. Made by `connect`; tasks may share it."""

    def __init__(
        self, peer: str, limits: ClientLimits, make_error: Callable[[RpcFault], Exception] | None
    ) -> None:
        self.address = peer
        self._limits = limits
        self._make_error = make_error or (lambda fault: RpcError(fault, peer))
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._pushes: deque[tuple[str, bytes]] = deque()
        self._push_bytes = 0
        self._push_came = asyncio.Event()
        self._link = _Link(self)
        self._failure: MoonpoolError | None = None
        #: Answers that came after their calls had given up.
        self.unclaimed = 0

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        instance: InstanceId | None = None,
        secret: bytes | None = None,
        limits: ClientLimits | None = None,
        make_error: Callable[[RpcFault], Exception] | None = None,
    ) -> Self:
        """Connects and greets, in a thread; parameters and errors as those of `RpcClient`."""
        limits = limits or ClientLimits()
        client = cls(address, limits, make_error)
        greeted = await asyncio.to_thread(
            dial_server, address, instance=instance or new_instance_id(), secret=secret, limits=limits
        )
        try:
            await client.attach(greeted.sock)
        except BaseException:
            greeted.close()
            raise
        if greeted.pidfd is not None:
            os.close(greeted.pidfd)
        return client

    async def attach(self, sock: socket.socket) -> None:
        """Takes a socket whose hello is done; `connect` does it."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self._link, sock=sock)

    def fileno(self) -> int:
        """The descriptor, borrowed; -1 once it is closed."""
        return self._link.fileno()

    @property
    def closed_reason(self) -> Status | None:
        """None while calls can be made, else why not."""
        return None if self._failure is None else status_of(self._failure)

    @property
    def frame_bytes_max(self) -> int:
        """Bytes of one frame after its length word."""
        return self._limits.frame_bytes_max

    async def call(
        self, method: str, params: Sequence[Any] = (), timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Any:
        """The result of a method; errors as those of `RpcClient.call`, and `QueueFull` beyond `calls_max`."""
        frame = rpc_frames.call_frame(self._next_id, method, pack_value(list(params)))
        return unpack_value(await self._exchange(frame, method, timeout_s))

    async def exists(
        self, keys: Sequence[Key], lease_ms: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """One byte for each key: 1 when the object is there, 0 when not."""
        frame = rpc_frames.exists_frame(self._next_id, keys, lease_ms)
        return rpc_frames.exists_result(await self._exchange(frame, "exists", timeout_s), len(keys))

    async def lookup(
        self, keys: Sequence[Key], lease_ms: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> LookupReply:
        """Where the objects are: entries in the order of the keys."""
        frame = rpc_frames.lookup_frame(self._next_id, keys, lease_ms)
        return rpc_frames.lookup_result(await self._exchange(frame, "lookup", timeout_s), len(keys))

    async def put_start(
        self,
        keys: Sequence[Key],
        sizes: Sequence[int],
        policy: Mapping[str, Any] | bytes | None = None,
        wait_ms: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutReply:
        """Extents for new objects, with their grants. `timeout_s` is to be longer than `wait_ms`.

        `policy` is the map, or the MessagePack of one.
        """
        packed = policy if isinstance(policy, bytes) else pack_value(dict(policy)) if policy else None
        frame = rpc_frames.put_start_frame(self._next_id, keys, sizes, packed, wait_ms)
        return rpc_frames.put_start_result(await self._exchange(frame, "put_start", timeout_s), len(keys))

    async def put_end(
        self,
        put_id: int,
        indexes: Sequence[int],
        digests: Buffer,
        chunks: Sequence[Buffer] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> EndReply:
        """Ends entries of a put; parameters as those of `RpcClient.put_end`."""
        frame = rpc_frames.put_end_frame(self._next_id, put_id, indexes, digests, chunks)
        return rpc_frames.put_end_result(await self._exchange(frame, "put_end", timeout_s), len(indexes))

    async def next_push(self, timeout_s: float) -> tuple[str, list[Any]] | None:
        """The oldest push as (method, params), or None when none came in time. One task may wait."""
        if not self._pushes and self._failure is None:
            self._push_came.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._push_came.wait()
            except TimeoutError:
                return None
        if not self._pushes:
            raise copy.copy(self._failure or PeerGone(peer=self.address))
        method, packed = self._pushes.popleft()
        self._push_bytes -= len(packed)
        return method, unpack_value(packed)

    async def close(self) -> None:
        """Ends the connection; calls in progress raise `PeerGone`. Idempotent."""
        self.fail(PeerGone("the rpc connection is closed on this end; make a new one", peer=self.address))
        await self._link.closed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _exchange(self, frame: bytes, method: str, timeout_s: float) -> bytes:
        message_id, self._next_id = self._next_id, self._next_id + 1
        if len(frame) - LENGTH_BYTES > self._limits.frame_bytes_max:
            message = "the request is larger than a frame; ask for less at once"
            raise LimitExceeded(message, field="frame_bytes_max", limit=self._limits.frame_bytes_max)
        if self._failure is not None:
            raise copy.copy(self._failure)
        if len(self._waiting) >= self._limits.calls_max:
            message = "too many calls of this client wait for their answers"
            raise QueueFull(message, peer=self.address, field="calls_max", limit=self._limits.calls_max)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._link.send(frame)
                error, body = await answer
        except TimeoutError as exc:
            message = f"the server did not answer {method} in time"
            raise TransferTimeout(message, peer=self.address, timeout_ms=timeout_s * 1e3) from exc
        finally:
            del self._waiting[message_id]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, as far as asyncio is concerned
        if error is not None:
            raise self._make_error(unpack_fault(error))
        return body

    # What the link tells

    def take(self, first: int | None, second: bytes | str | None, body: bytes) -> None:
        """Takes one message of `rpc_frames.take_messages`; raises `ProtocolError` or `QueueFull`."""
        if first is None:
            self._push_bytes += len(body)
            if len(self._pushes) >= self._limits.pushes_max or self._push_bytes > self._limits.push_bytes_max:
                raise QueueFull("pushes came faster than they were taken", peer=self.address)
            self._pushes.append((str(second), body))
            self._push_came.set()
            return
        if not 0 < first < self._next_id:
            raise ProtocolError("a reply came to no request", peer=self.address)
        answer = self._waiting.get(first)
        if answer is None or answer.done():
            self.unclaimed += 1
        else:
            answer.set_result((second if isinstance(second, bytes) else None, body))

    def fail(self, reason: MoonpoolError) -> None:
        """Ends the connection for a reason; the first one stays."""
        if self._failure is None:
            self._failure = reason
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(copy.copy(reason))
            self._push_came.set()
        self._link.abort()


@final
class _Link(asyncio.Protocol):
    """The socket's side: cuts the stream into messages, and waits while the socket takes no more."""

    def __init__(self, client: AsyncRpcClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.closed: Final = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        """Hands a frame to the socket, once it takes some."""
        if not self._has_room.is_set():
            await self._has_room.wait()
        if self._transport is not None:
            self._transport.write(frame)

    def fileno(self) -> int:
        """The socket's descriptor, -1 when there is none."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def abort(self) -> None:
        """Closes the socket at once."""
        self._has_room.set()
        if self._transport is not None:
            self._transport.abort()
        else:
            self.closed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is ours from here on."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self.closed.set()
        told = f" ({exc})" if exc is not None else ""
        self._client.fail(PeerGone(f"the server closed the connection{told}", peer=self._client.address))

    def data_received(self, data: bytes) -> None:
        """Whole messages go to the client; what it cannot take ends the connection."""
        self._unread += data
        try:
            used, messages = rpc_frames.take_messages(self._unread, self._client.frame_bytes_max)
            del self._unread[:used]
            for first, second, body in messages:
                self._client.take(first, second, body)
        except MoonpoolError as exc:
            self._client.fail(exc)

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """It does again."""
        self._has_room.set()
