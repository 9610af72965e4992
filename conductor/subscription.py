"""Live event streams over ZMQ: one task for each registration, all on the service's loop.

A subscription first asks for a replay of everything, so that a service that starts late or again is warm as
soon as the engines have answered. The socket buffers what comes while a replay runs; ZMQ reconnects itself.
Frames are read from the tail, because publishers differ in what they put in front: `[topic, number, payload]`
on a stream, `[client, "", (topic,) number, payload]` in a replay, whose end is the number 2**64 - 1.
Source: vllm/distributed/kv_events.py; SGLang's copy of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from typing import Any, Final, final

from moonpool.conductor.registration import Registration
from moonpool.conductor.service_config import ConductorConfig
from moonpool.conductor.stream_feed import StreamFeed
from moonpool.errors import ResourceError
from moonpool.units import MS_PER_S, U64_MAX

logger: Final = logging.getLogger("moonpool.conductor")

_NUMBER: Final = struct.Struct(">Q")
#: Messages taken in one go before others of the loop have their turn.
_BURST: Final = 64
#: Replays one after the other, for a publisher that restarts meanwhile; then what is missing is lost.
_REPLAYS_MAX: Final = 3
_HEARTBEAT_MS: Final = 5_000


def load_zmq() -> Any:
    """The pyzmq package with its asyncio face; raises `ResourceError` that says how to get it."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError as exc:
        raise ResourceError(
            "event streams need pyzmq, which is not installed; install moonpool[service]"
        ) from exc
    return zmq


def read_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """(number, payload) of a message of a stream or replay; None for what is neither."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER.size:
        return None
    return _NUMBER.unpack(frames[-2])[0], frames[-1]


@final
class Subscription:
    """One stream into its feed, from `start` to `stop`."""

    def __init__(
        self, registration: Registration, feed: StreamFeed, config: ConductorConfig, context: Any
    ) -> None:
        self.registration: Final = registration
        self._feed: Final = feed
        self._config: Final = config
        self._zmq: Final = load_zmq()
        self._context: Final = context
        self._task: asyncio.Task[None] | None = None
        self.frames_refused = 0

    def start(self) -> None:
        """Connects (or binds, where the endpoint is a wildcard) and begins to read.

        Raises `ResourceError` when the endpoint cannot be used.
        """
        sock = self._context.socket(self._zmq.SUB)
        try:
            sock.setsockopt(self._zmq.LINGER, 0)
            sock.setsockopt(self._zmq.RCVHWM, self._config.receive_messages_max)
            sock.setsockopt(self._zmq.MAXMSGSIZE, self._config.body_bytes_max)
            sock.setsockopt(self._zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            sock.setsockopt(self._zmq.SUBSCRIBE, self.registration.topic.encode())
            endpoint = self.registration.endpoint
            if "*" in endpoint:
                sock.bind(endpoint)
            else:
                sock.connect(endpoint)
        except self._zmq.ZMQError as exc:
            sock.close()
            raise ResourceError(f"cannot subscribe to {self.registration.endpoint}: {exc}") from exc
        self._task = asyncio.get_running_loop().create_task(self._run(sock))

    async def stop(self) -> None:
        """Ends the stream; returns when its sockets are closed."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self, sock: Any) -> None:
        try:
            if self.registration.replay_endpoint:
                await self._replay(self._feed.expected)
            while True:
                asked = self._take(await sock.recv_multipart())
                for _ in range(_BURST):
                    if asked is not None or not sock.get(self._zmq.EVENTS) & self._zmq.POLLIN:
                        break
                    asked = self._take(await sock.recv_multipart())
                if asked is not None:
                    await self._replay(asked)
                await asyncio.sleep(0)
        finally:
            sock.close()

    def _take(self, frames: list[bytes]) -> int | None:
        found = read_frames(frames)
        if found is None or found[0] == U64_MAX:
            self.frames_refused += 1
            return None
        return self._feed.live(*found)

    async def _replay(self, start: int) -> None:
        """Asks for everything from `start` and takes it in, and again when that shows another run of it."""
        asked: int | None = start
        for _ in range(_REPLAYS_MAX):
            if asked is not None:
                asked = await self._replay_once(asked)
        self._feed.replay_ended()

    async def _replay_once(self, start: int) -> int | None:
        """One replay; from where another is needed, or None. A silent publisher ends it after a bound."""
        asked: int | None = None
        sock = self._context.socket(self._zmq.DEALER)
        try:
            sock.setsockopt(self._zmq.LINGER, 0)
            sock.setsockopt(self._zmq.RCVHWM, self._config.receive_messages_max)
            sock.setsockopt(self._zmq.MAXMSGSIZE, self._config.body_bytes_max)
            sock.connect(self.registration.replay_endpoint)
            patience_s = self._config.replay_timeout_ms / MS_PER_S
            await asyncio.wait_for(sock.send_multipart([b"", _NUMBER.pack(start)]), patience_s)
            while True:
                frames = await asyncio.wait_for(sock.recv_multipart(), patience_s)
                found = read_frames(frames)
                if found is None:
                    self.frames_refused += 1
                elif found[0] == U64_MAX:
                    break
                else:
                    again = self._feed.replayed(*found)
                    asked = again if again is not None else asked
        except TimeoutError:
            logger.warning("no replay from %s in time", self.registration.replay_endpoint)
        except self._zmq.ZMQError as exc:
            logger.warning("replay from %s failed: %s", self.registration.replay_endpoint, exc)
        finally:
            sock.close()
        return asked
