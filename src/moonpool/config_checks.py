"""Checks of single settings of an engine: types, names, hosts, metadata, secrets. Each names the field."""

from __future__ import annotations

import ipaddress
from typing import Final

from moonpool.errors import UsageError
from moonpool.units import KIB

METADATA_SCHEMES: Final = ("redis://", "rediss://", "redis+unix://")
#: A shorter secret could be guessed offline from one recorded handshake.
SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4 * KIB
NAME_BYTES_MAX: Final = 255


def wrong(name: str, value: object, rule: str) -> UsageError:
    """The error for a field that has a value it cannot have; a secret is not shown."""
    shown = "<hidden>" if name == "cluster_secret" else repr(value)
    return UsageError(f"config field {name} {rule}; it is {shown}", field=name, value=shown)


def check_type(name: str, declared: object, value: object) -> None:
    """A value that is not of a field's declared type is a UsageError."""
    # The annotations are strings: this module postpones their evaluation.
    if declared == "int" and type(value) is not int:
        raise wrong(name, value, "must be a whole number")
    if declared == "bool" and type(value) is not bool:
        raise wrong(name, value, "must be true or false")
    if declared == "str" and not isinstance(value, str):
        raise wrong(name, value, "must be text")
    if declared == "bytes | None" and not isinstance(value, bytes | None):
        raise wrong(name, value, "must be bytes or None")
    if declared == "tuple[str, ...]" and not (
        isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    ):
        raise wrong(name, value, "must be a tuple of texts")


def is_segment_name(name: str) -> bool:
    """True for what a segment may be called: 1 to 255 bytes of UTF-8, printable, no white space."""
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 1 <= size_bytes <= NAME_BYTES_MAX and name.isprintable() and not any(c.isspace() for c in name)


def check_name(name: str) -> None:
    """A segment's name, or nothing."""
    if name and not is_segment_name(name):
        raise wrong("name", name, f"must be 1 to {NAME_BYTES_MAX} printable bytes without white space")


def check_hosts(bind_host: str, advertise_host: str) -> None:
    """Where to listen, and what peers are told."""
    for name, host in (("bind_host", bind_host), ("advertise_host", advertise_host)):
        if host and (not is_segment_name(host) or "/" in host):
            raise wrong(name, host, "must be an address or a host name")
    if not bind_host:
        raise wrong("bind_host", bind_host, "must not be empty; use 0.0.0.0 or :: to listen everywhere")
    if _listens_everywhere(bind_host) and not advertise_host:
        rule = f"must be set when bind_host is {bind_host}: peers need one address to connect to"
        raise wrong("advertise_host", advertise_host, rule)
    if advertise_host and _listens_everywhere(advertise_host):
        raise wrong("advertise_host", advertise_host, "must be one address, not all of them")


def _listens_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_metadata(metadata: str) -> None:
    """Where names are looked up."""
    rest = next((metadata[len(s) :] for s in METADATA_SCHEMES if metadata.startswith(s)), "")
    if metadata != "p2p" and not rest:
        raise wrong("metadata", metadata, f"must be 'p2p' or a URL with {', '.join(METADATA_SCHEMES)}")


def check_secret(secret: bytes | None) -> None:
    """A cluster secret, or None."""
    if secret is not None and not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        rule = (
            f"must be {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes (make one with `openssl rand -hex 32`)"
        )
        raise wrong("cluster_secret", secret, rule)
