"""One connection to Redis that can pipeline: RESP2 over tcp, TLS or a unix socket, with a bound on each wait.

The journal sends group after group without waiting for the answers; so this class shows its descriptor,
sends packed commands, gives the answers that have come, and waits for nothing in any of these. It is also
a plain blocking client (`call`) for everything else that the journal does. Not thread-safe.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final
from urllib.parse import parse_qs, unquote, urlsplit

from moonpool.errors import AccessDenied, InternalError, ProtocolError, UsageError
from moonpool.store.errors import JournalUnavailable
from moonpool.store.redis_resp import Answer, AnswerParser, RedisRefusal, Script, pack_command, pack_script
from moonpool.units import KIB, MS_PER_S

REDIS_SCHEMES: Final = ("redis", "rediss", "redis+unix", "unix")
_PORT: Final = 6379
_READ_BYTES: Final = 256 * KIB
_UNIX_PATH_MAX: Final = 108
_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@final
@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a Redis is: `path` of a unix socket, or host and port; `shown` may stand in logs."""

    shown: str
    path: str = ""
    host: str = ""
    port: int = _PORT
    tls: bool = False
    user: str = ""
    password: str = ""
    database: int = 0

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Reads redis://[user:password@]host[:port][/database], rediss://…, redis+unix:///path[?db=n]."""
        parts = urlsplit(url)
        if parts.scheme not in REDIS_SCHEMES:
            raise UsageError(
                f"{url!r} is no Redis URL: use redis://host:port, rediss://host:port or redis+unix:///path",
                field="journal",
            )
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        query = parse_qs(parts.query)
        unix = parts.scheme in ("unix", "redis+unix")
        text = (query.get("db") or [""])[0] if unix else parts.path.strip("/")
        if text and not (text.isdecimal() and len(text) <= 5):
            raise UsageError(f"{shown} names the database {text!r}, which is no number", field="journal")
        try:
            port = parts.port or _PORT
        except ValueError as exc:
            raise UsageError(f"{shown} has no valid port", field="journal") from exc
        place = {"path": unquote(parts.path)} if unix else {"host": parts.hostname or "127.0.0.1"}
        if unix and not parts.path:
            raise UsageError(
                f"{shown} names no socket: use redis+unix:///path/to/redis.sock", field="journal"
            )
        return cls(
            shown=shown,
            port=port,
            tls=parts.scheme == "rediss",
            user=user,
            password=password,
            database=int(text or "0"),
            **place,
        )


@final
class RedisLink:
    """An open connection; any failure of it raises `JournalUnavailable`, after which it must be closed."""

    def __init__(self, address: RedisAddress, timeout_ms: int, scripts: Sequence[Script] = ()) -> None:
        self.address = address
        self.timeout_ms = timeout_ms
        self._parser = AnswerParser()
        self._out = bytearray()
        #: Answers that commands already sent still owe.
        self.owed = 0
        try:
            self._socket = _dial(address, timeout_ms)
        except OSError as exc:
            raise self._away(f"cannot connect: {exc}") from exc
        try:
            self._socket.setblocking(False)
            self._greet(scripts)
        except BaseException:
            self.close()
            raise

    def _greet(self, scripts: Sequence[Script]) -> None:
        if self.address.password:
            who = [self.address.user] if self.address.user else []
            self._must(b"AUTH", *who, self.address.password)
        if self.address.database:
            self._must(b"SELECT", self.address.database)
        info = self._must(b"INFO", b"server")
        fields = dict(
            line.split(b":", 1)
            for line in (info.split(b"\r\n") if isinstance(info, bytes) else [])
            if b":" in line
        )
        #: Names this life of the server: another one after a reconnect means that it was started anew.
        self.run_id = fields.get(b"run_id", b"").decode("ascii", "replace")
        self.version = fields.get(b"redis_version", b"").decode("ascii", "replace")
        process = fields.get(b"process_id", b"")
        self.process_id = int(process) if process.isdigit() else 0
        for script in scripts:
            self._must(b"SCRIPT", b"LOAD", script.text)

    def _must(self, *words: bytes | str | int) -> Answer:
        try:
            return self.call(*words)
        except RedisRefusal as exc:
            if exc.code in ("WRONGPASS", "NOAUTH", "NOPERM", "ERR") and words[0] in (
                b"AUTH",
                b"INFO",
                b"SELECT",
            ):
                raise AccessDenied(
                    f"Redis at {self.address.shown} refuses this master: {exc.text}; check the user, "
                    "password and database in its address",
                    peer=self.address.shown,
                ) from exc
            raise self._away(exc.text) from exc

    def fileno(self) -> int:
        """The socket, to wait for answers with poll."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket; idempotent."""
        self._socket.close()

    @property
    def unsent(self) -> bool:
        """Some of what was sent waits here, since the socket took no more: wait for POLLOUT, then `flush`."""
        return bool(self._out)

    def send(self, packed: bytes, answers: int = 1) -> None:
        """Sends packed commands that will get so many answers; never waits (see `unsent`)."""
        self.owed += answers
        self._out += packed
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except _NOT_NOW:
            pass
        except OSError as exc:
            raise self._away(f"cannot send: {exc}") from exc

    def receive(self) -> list[Answer]:
        """The answers that have come; never waits."""
        answers: list[Answer] = []
        try:
            while True:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise self._away("it closed the connection")
                answers += self._parser.feed(data)
                if len(data) < _READ_BYTES and not self._pending_tls():
                    break
        except _NOT_NOW:
            pass
        except ProtocolError as exc:
            raise self._away(exc.message) from exc
        except OSError as exc:
            if isinstance(exc, JournalUnavailable):
                raise
            raise self._away(f"cannot receive: {exc}") from exc
        self.owed -= len(answers)
        return answers

    def _pending_tls(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def call(self, *words: bytes | str | int, timeout_ms: int = 0) -> Answer:
        """One command and its answer; raises `RedisRefusal` when Redis refuses it."""
        return self.exchange(pack_command(*words), 1, timeout_ms)[0]

    def run(self, script: Script, keys: Sequence[bytes], *arguments: bytes | str | int) -> Answer:
        """Runs a script by its digest, loading it first where Redis does not know it."""
        try:
            return self.exchange(pack_script(script, keys, *arguments), 1)[0]
        except RedisRefusal as exc:
            if exc.code != "NOSCRIPT":
                raise
        return self.call(b"EVAL", script.text, len(keys), *keys, *arguments)

    def exchange(self, packed: bytes, count: int, timeout_ms: int = 0) -> list[Answer]:
        """Sends a pipeline and waits for its answers; the first refusal is raised after all have come."""
        if self.owed:
            raise InternalError("a blocking call amid a pipeline would take its answers; please report this")
        self.send(packed, count)
        end = time.monotonic() + (timeout_ms or self.timeout_ms) / MS_PER_S
        answers: list[Answer] = []
        poller = select.poll()
        while len(answers) < count:
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            left = end - time.monotonic()
            if left <= 0 or not (self._pending_tls() or poller.poll(left * MS_PER_S)):
                raise self._away(f"no answer within {timeout_ms or self.timeout_ms} ms")
            self.flush()
            answers += self.receive()
        for answer in answers:
            if isinstance(answer, RedisRefusal):
                raise answer
        return answers

    def _away(self, reason: str) -> JournalUnavailable:
        return JournalUnavailable(
            f"Redis at {self.address.shown} does not answer as it should: {reason}",
            peer=self.address.shown,
            reason=reason,
            timeout_ms=self.timeout_ms,
        )


def _dial_unix(path: str, timeout_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        made.settimeout(timeout_s)
        if len(os.fsencode(path)) >= _UNIX_PATH_MAX:
            # The kernel takes 107 bytes of path; a descriptor of the folder stands for the rest.
            folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        made.connect(path)
    except BaseException:
        made.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return made


def _dial(address: RedisAddress, timeout_ms: int) -> socket.socket:
    timeout_s = timeout_ms / MS_PER_S
    if address.path:
        return _dial_unix(address.path, timeout_s)
    made = socket.create_connection((address.host, address.port), timeout_s)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            made = ssl.create_default_context().wrap_socket(made, server_hostname=address.host)
    except BaseException:
        made.close()
        raise
    return made
