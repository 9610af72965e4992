"""Effects for one node: numbered from 1 in each join, kept until acknowledged, sent again after a silence.

An effect may leave when the fact that caused it is durable, so each waits for a sequence number (0: none).
Effects are kept as their bytes, in Python and from the native core alike.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]

ADD: Final = 1
RETIRE: Final = 2
FENCE: Final = 3
REHASH: Final = 4
RESET: Final = 5

# Kept, since making one costs as much as packing an effect; `pack` holds the GIL from start to end.
_pack: Final = msgpack.Packer(use_bin_type=True).pack


def encode_effect(effect: tuple[Any, ...]) -> bytes:
    """The bytes of one effect."""
    packed: bytes = _pack(effect)
    return packed


def encode_push(epoch: int, first: int, effects: list[bytes]) -> bytes:
    """The params of a push `effects`: epoch, the first one's number, the effects."""
    head = b"\x93" + msgpack.packb(epoch) + msgpack.packb(first)
    return b"".join((head, msgpack.Packer().pack_array_header(len(effects)), *effects))


@final
class EffectQueue:
    """The effects of one join. `acked` is the highest number the node acknowledged."""

    __slots__ = ("_sent", "_sent_ms", "_waiting", "acked", "open")

    def __init__(self) -> None:
        #: (sequence to wait for, bytes): sent and not acknowledged, the first has number `acked` + 1.
        self._sent: deque[tuple[int, bytes]] = deque()
        #: The same, to be sent after those.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._sent_ms = 0
        self.acked = 0
        #: False while the node reports: nothing is sent then.
        self.open = False

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    @property
    def waiting(self) -> bool:
        """True when an effect waits to be sent."""
        return bool(self._waiting)

    @property
    def last(self) -> int:
        """The number of the last effect that was added; 0 for none."""
        return self.acked + len(self)

    def add(self, sequence: int, effect: bytes) -> int:
        """Adds an effect that waits for a fact; returns its number."""
        self._waiting.append((sequence, effect))
        return self.acked + len(self._sent) + len(self._waiting)

    def ack(self, number: int, now_ms: int) -> bool:
        """The node has done everything up to a number; False for a number that was never sent."""
        if number > self.acked + len(self._sent):
            # After a silence everything counts as not sent, so the node may know more than we think.
            if number > self.last:
                return False
            for _ in range(number - self.acked - len(self._sent)):
                self._sent.append(self._waiting.popleft())
        for _ in range(number - self.acked):
            self._sent.popleft()
        if number > self.acked:
            self.acked, self._sent_ms = number, now_ms
        return True

    def take(self, durable: int, now_ms: int, count_max: int, bytes_max: int) -> tuple[int, list[bytes]]:
        """The next effects to send, and the number of the first; empty when none may leave."""
        first, size = self.acked + len(self._sent) + 1, 0
        taken: list[bytes] = []
        if not self._sent:
            self._sent_ms = now_ms
        while self.open and self._waiting and len(taken) < count_max:
            sequence, effect = self._waiting[0]
            size += len(effect)
            if sequence > durable or (taken and size > bytes_max):
                break
            taken.append(effect)
            self._sent.append(self._waiting.popleft())
        return first, taken

    def resend_after(self, now_ms: int, resend_ms: int) -> bool:
        """Goes back to the first effect that is not acknowledged when the node was silent that long."""
        if not self._sent or now_ms - self._sent_ms < resend_ms:
            return False
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        return True
