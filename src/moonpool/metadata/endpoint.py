""" "host:port" as text: IPv4 addresses, host names, and IPv6 addresses in brackets."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from moonpool.errors import UsageError

ENDPOINT_CHARACTERS_MAX: Final = 512
# A host name is letters, digits, dots, hyphens and (as found in practice) underscores.
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,253}[A-Za-z0-9_.])?\Z", re.ASCII)
_PORT: Final = re.compile(r"\d{1,5}\Z", re.ASCII)


def parse_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6]:port"; raises `UsageError` that shows the right form."""
    if len(text) > ENDPOINT_CHARACTERS_MAX:
        raise UsageError(f"an endpoint has at most {ENDPOINT_CHARACTERS_MAX} characters, not {len(text)}")
    host, colon, port_text = text.rpartition(":")
    if not colon or not host or not _PORT.match(port_text) or not 1 <= int(port_text) <= 65_535:
        raise UsageError(f"{text!r} is not an endpoint; write host:port, or [IPv6 address]:port", value=text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise UsageError(f"{host!r} is not an IPv6 address", value=text)
        return host, int(port_text)
    if ":" in host:
        raise UsageError(f"put the IPv6 address in brackets: [{host}]:{port_text}", value=text)
    if not _HOST_NAME.match(host):
        raise UsageError(f"{host!r} is neither an IPv4 address nor a host name", value=text)
    return host, int(port_text)


def format_endpoint(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
