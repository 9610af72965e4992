"""The values that a world's clients put: each attempt has bytes of its own, told apart by their digest."""

from __future__ import annotations

import random

from moonpool.bench.chaos_history import content_digest


class Values:
    """Gives out tags and the bytes that belong to them."""

    def __init__(self) -> None:
        self._next = 1

    def new(self, size: int) -> tuple[int, bytes, bytes]:
        """A tag, its content of that size, and the content's digest."""
        tag = self._next
        self._next += 1
        content = random.Random(tag).randbytes(size)
        return tag, content, content_digest(content)
