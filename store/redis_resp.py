"""RESP2, the protocol of Redis: commands as bytes, bytes as answers. Pure, bounded, resumable.

Source of the format: redis.io/docs/latest/develop/reference/protocol-spec (RESP2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, Final, TypeAlias, final

from moonpool.errors import ProtocolError
from moonpool.units import KIB, MIB

#: Largest bulk string and longest array that an answer may hold; Redis itself would allow 512 MiB.
BULK_BYTES_MAX: Final = 64 * MIB
ARRAY_ITEMS_MAX: Final = 1_048_576
DEPTH_MAX: Final = 8
LINE_BYTES_MAX: Final = 64 * KIB


@final
class RedisRefusal(Exception):
    """Redis answered a command with an error; `code` is its first word (OOM, NOSCRIPT, READONLY, …)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.code = text.split(" ", 1)[0]


#: What Redis answers: a `RedisRefusal` stands where a command of a pipeline failed.
Answer: TypeAlias = "bytes | int | None | list[Any] | RedisRefusal"


@final
class Script:
    """A Lua script and the digest by which Redis knows it."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


def pack_command(*words: bytes | str | int) -> bytes:
    """One command as bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


def pack_script(script: Script, keys: Sequence[bytes], *arguments: bytes | str | int) -> bytes:
    """EVALSHA of a script that Redis knows."""
    return pack_command(b"EVALSHA", script.digest, len(keys), *keys, *arguments)


@final
class AnswerParser:
    """Turns the bytes of a connection into answers; `feed` gives those that are whole.

    Raises `ProtocolError` for what is not RESP2 or passes a bound; the connection is of no more use then.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0
        self._partial: Generator[None, None, Answer] | None = None

    def feed(self, data: bytes) -> list[Answer]:
        """The answers that end in these bytes, in order; what is not whole yet is kept."""
        self._buffer += data
        answers: list[Answer] = []
        while True:
            if self._partial is None:
                if self._at == len(self._buffer):
                    break
                self._partial = self._one(0)
            try:
                next(self._partial)
            except StopIteration as done:
                answers.append(done.value)
                self._partial = None
                continue
            break
        del self._buffer[: self._at]
        self._at = 0
        return answers

    def _line(self) -> Generator[None, None, bytes]:
        while True:
            end = self._buffer.find(b"\r\n", self._at)
            if end >= 0:
                line = bytes(self._buffer[self._at : end])
                self._at = end + 2
                return line
            if len(self._buffer) - self._at > LINE_BYTES_MAX:
                raise ProtocolError("a line of an answer has no end")
            yield

    def _one(self, depth: int) -> Generator[None, None, Answer]:
        line = yield from self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RedisRefusal(rest.decode("utf-8", "replace"))
        if kind not in (b":", b"$", b"*"):
            raise ProtocolError(f"an answer starts with {kind!r}, which is not RESP2")
        number = _number(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$":
            return (yield from self._bulk(number))
        if not 0 <= number <= ARRAY_ITEMS_MAX or depth >= DEPTH_MAX:
            raise ProtocolError(f"an answer holds an array of {number} at depth {depth}, over the bound")
        items: list[Answer] = []
        while len(items) < number:
            item = yield from self._one(depth + 1)
            items.append(item)
        return items

    def _bulk(self, size: int) -> Generator[None, None, bytes]:
        if not 0 <= size <= BULK_BYTES_MAX:
            raise ProtocolError(f"an answer holds a string of {size} bytes, over the bound")
        while len(self._buffer) - self._at < size + 2:
            yield
        data = bytes(self._buffer[self._at : self._at + size])
        if self._buffer[self._at + size : self._at + size + 2] != b"\r\n":
            raise ProtocolError("a string of an answer is longer than it says")
        self._at += size + 2
        return data


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise ProtocolError(f"an answer has {text[:20]!r} for a number")
    return int(text)
