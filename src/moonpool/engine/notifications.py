"""Notifications: ordered messages between engines, each acknowledged once it is queued at its receiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.errors import UsageError

#: OP_NOTIFY of the data lane.
NOTIFY: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Notification:
    """A message from a peer: the sender's instance id, its number (growing per sender), and the bytes."""

    sender: bytes
    number: int
    message: bytes


def check_message(message: object, config: EngineConfig) -> bytes:
    """The bytes of a message to send; UsageError when it is no bytes, or longer than the config allows."""
    if not isinstance(message, bytes | bytearray | memoryview):
        raise UsageError(f"a notification is bytes, not {type(message).__name__}")
    raw = bytes(message)
    if len(raw) > config.notification_bytes_max:
        raise UsageError(
            f"a notification has at most {config.notification_bytes_max} bytes, this one {len(raw)}",
            field="notification_bytes_max",
            limit=config.notification_bytes_max,
        )
    return raw
