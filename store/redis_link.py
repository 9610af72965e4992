"""One connection to Redis that can pipeline: RESP2 over tcp, TLS or a unix socket, with a bound on each wait.

The journal sends group after group without waiting for the answers, from one thread that also listens to
its queue; so this class shows its descriptor, sends packed commands, and gives the answers that have come.
It is also a plain blocking client (`call`) for everything else that the journal does. Not thread-safe.

Source of the format: redis.io/docs/latest/develop/reference/protocol-spec (RESP2).
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import ssl
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final
from urllib.parse import parse_qs, unquote, urlsplit

from moonpool.errors import AccessDenied, UsageError
from moonpool.store.errors import JournalUnavailable
from moonpool.units import KIB, MIB, MS_PER_S

REDIS_SCHEMES: Final = ("redis", "rediss", "redis+unix", "unix")
_PORT: Final = 6379
_READ_BYTES: Final = 256 * KIB
#: Largest bulk string and longest array that an answer may hold; Redis itself would allow 512 MiB.
BULK_BYTES_MAX: Final = 64 * MIB
ARRAY_ITEMS_MAX: Final = 1_048_576
_DEPTH_MAX: Final = 8
_UNIX_PATH_MAX: Final = 108
_LINE_BYTES_MAX: Final = 64 * KIB

#: What Redis answers: a `RedisRefusal` stands where a command of a pipeline failed.
Answer: TypeAlias = "bytes | int | None | list[Any] | RedisRefusal"


@final
class RedisRefusal(Exception):
    """Redis answered a command with an error; `code` is its first word (OOM, NOSCRIPT, READONLY, …)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.code = text.split(" ", 1)[0]


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
class Script:
    """A Lua script and the digest by which Redis knows it."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


def pack_command(*words: bytes | str | int) -> bytes:
    """One command as RESP bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n" % len(data))
        parts.append(data)
        parts.append(b"\r\n")
    return b"".join(parts)


def pack_script(script: Script, keys: Sequence[bytes], *arguments: bytes | str | int) -> bytes:
    """EVALSHA of a script that was loaded when the connection was made."""
    return pack_command(b"EVALSHA", script.digest, len(keys), *keys, *arguments)


@final
class RedisLink:
    """An open connection; any failure of it raises `JournalUnavailable`, after which it must be closed."""

    def __init__(self, address: RedisAddress, timeout_ms: int, scripts: Sequence[Script] = ()) -> None:
        self.address = address
        self.timeout_ms = timeout_ms
        self._buffer = bytearray()
        self._at = 0
        self._parser: Generator[None, None, Answer] | None = None
        self._answers: list[Answer] = []
        #: Answers that commands already sent still owe.
        self.owed = 0
        try:
            self._socket = _dial(address, timeout_ms)
        except OSError as exc:
            raise self._away(f"cannot connect: {exc}") from exc
        try:
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

    def send(self, packed: bytes, answers: int = 1) -> None:
        """Sends packed commands that will get so many answers; waits only while the socket takes nothing."""
        self.owed += answers
        try:
            self._socket.sendall(packed)
        except OSError as exc:
            raise self._away(f"cannot send: {exc}") from exc

    def receive(self) -> list[Answer]:
        """The answers that have come, without waiting; call when the descriptor is readable."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT if not self.address.tls else 0)
            except BlockingIOError:
                break
            except (ssl.SSLWantReadError, OSError) as exc:
                raise self._away(f"cannot receive: {exc}") from exc
            if not data:
                raise self._away("it closed the connection")
            self._buffer += data
            self._parse()
            if len(data) < _READ_BYTES and not self._pending_tls():
                break
        answers, self._answers = self._answers, []
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
        assert self.owed == 0, "a blocking call amid a pipeline would take its answers"
        self.send(packed, count)
        end = time.monotonic() + (timeout_ms or self.timeout_ms) / MS_PER_S
        answers: list[Answer] = []
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while len(answers) < count:
            left = end - time.monotonic()
            if left <= 0 or not (self._pending_tls() or poller.poll(left * MS_PER_S)):
                raise self._away(f"no answer within {timeout_ms or self.timeout_ms} ms")
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

    def _parse(self) -> None:
        """Turns whole answers at the front of the buffer into values; keeps a partial one for later."""
        while True:
            if self._parser is None:
                if self._at == len(self._buffer):
                    break
                self._parser = self._one(0)
            try:
                next(self._parser)
            except StopIteration as done:
                self._answers.append(done.value)
                self._parser = None
                continue
            break
        if self._at:
            del self._buffer[: self._at]
            self._at = 0

    def _line(self) -> Generator[None, None, bytes]:
        while True:
            end = self._buffer.find(b"\r\n", self._at)
            if end >= 0:
                line = bytes(self._buffer[self._at : end])
                self._at = end + 2
                return line
            if len(self._buffer) - self._at > _LINE_BYTES_MAX:
                raise self._away("a line of its answer has no end")
            yield

    def _one(self, depth: int) -> Generator[None, None, Answer]:
        line = yield from self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RedisRefusal(rest.decode("utf-8", "replace"))
        if kind not in (b":", b"$", b"*"):
            raise self._away(f"its answer starts with {kind!r}, which is not RESP2")
        number = self._number(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$":
            return (yield from self._bulk(number))
        if number > ARRAY_ITEMS_MAX or depth >= _DEPTH_MAX:
            raise self._away(f"its answer holds an array of {number} at depth {depth}, over the bound")
        items: list[Answer] = [None] * number
        for index in range(number):
            items[index] = yield from self._one(depth + 1)
        return items

    def _bulk(self, size: int) -> Generator[None, None, bytes]:
        if not 0 <= size <= BULK_BYTES_MAX:
            raise self._away(f"its answer holds a string of {size} bytes, over the bound")
        while len(self._buffer) - self._at < size + 2:
            yield
        data = bytes(self._buffer[self._at : self._at + size])
        self._at += size + 2
        return data

    def _number(self, text: bytes) -> int:
        if not text.lstrip(b"-").isdigit() or len(text) > 20:
            raise self._away(f"its answer has {text[:20]!r} for a number")
        return int(text)


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
