"""Keys of objects: bytes, 1 to 1,024 of them; text counts as its UTF-8."""

from __future__ import annotations

from typing import Final

from moonpool.errors import UsageError
from moonpool.native.table.stored import KEY_BYTES_MAX

#: Longest name of a group, a tenant, a node or a segment.
NAME_BYTES_MAX: Final = 255


def as_key(key: str | bytes | bytearray | memoryview) -> bytes:
    """The key as bytes. Raises `UsageError` for another type, an empty key, or one over 1,024 bytes."""
    if isinstance(key, bytes):
        raw = key
    elif isinstance(key, str):
        try:
            raw = key.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(
                "a key of text must be valid Unicode; use bytes for others", field="key"
            ) from exc
    elif isinstance(key, bytearray | memoryview):
        raw = bytes(key)
    else:
        raise UsageError(f"a key is text or bytes; got {type(key).__name__}", field="key")
    if not 1 <= len(raw) <= KEY_BYTES_MAX:
        raise UsageError(
            f"a key has 1 to {KEY_BYTES_MAX} bytes; this one has {len(raw)}", field="key", limit=KEY_BYTES_MAX
        )
    return raw


def is_name(name: object) -> bool:
    """True for a text of 1 to 255 bytes of UTF-8, printable: what groups, tenants and nodes may be called."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    try:
        return 1 <= len(name.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False
