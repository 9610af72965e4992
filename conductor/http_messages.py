"""Requests and answers of the HTTP port as values, its bounds, and an answer's form on the wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, NamedTuple, TypeAlias, final

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one port; times are seconds."""

    body_bytes_max: int
    connections_max: int = 1_024
    #: From the first byte of a request to its last, and from an answer to the client's having taken it.
    request_s: float = 30.0
    #: Between an answer and the next request.
    idle_s: float = 75.0

    @property
    def held_bytes_max(self) -> int:
        """Most bytes of bodies that all connections together may wait with."""
        return 4 * self.body_bytes_max


@final
@dataclass(slots=True)
class HttpRequest:
    """One request, whole. `path` is as it was sent, without the query; header names are in small letters."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def content_type(self) -> str:
        """The media type in small letters, without parameters; "" when there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class HttpResponse(NamedTuple):
    """An answer."""

    body: bytes
    content_type: str
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Outcome: TypeAlias = HttpResponse | Awaitable[HttpResponse]
#: Must not raise; what takes long returns an awaitable. An error in it is answered with 500 and logged.
Handler: TypeAlias = Callable[[HttpRequest], Outcome]


def response_bytes(response: HttpResponse, *, keep: bool, head_only: bool = False) -> bytes:
    """The answer on the wire."""
    status, body = response.status, response.body
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Unknown')}\r\nContent-Type: {response.content_type}"]
    lines += [f"{name}: {value}" for name, value in response.headers]
    lines.append(f"Content-Length: {len(body)}" + ("" if keep else "\r\nConnection: close"))
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode("latin-1") + (b"" if head_only else body)


def refusal(status: int, text: str) -> HttpResponse:
    """An answer of the port's own."""
    return HttpResponse(b'{"error": "%s"}' % text.encode(), "application/json", status)


def origin_path(target: str) -> str:
    """The path of a request's target: without a query, and without scheme and authority (RFC 9112, 3.2.2)."""
    if not target.startswith("/"):
        scheme, found, rest = target.partition("://")
        if found and scheme.lower() in ("http", "https"):
            target = "/" + rest.partition("/")[2]
    return target.partition("?")[0]
