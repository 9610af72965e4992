"""How deep a decoded message nests: one bound for what both control protocols take in."""

from __future__ import annotations

from typing import Any

from moonpool.errors import ProtocolError


def check_depth(value: Any, depth_max: int) -> None:
    """Raises `ProtocolError` when lists and maps nest more than `depth_max` deep. Never recurses."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(depth_max):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, list | dict)
        ]
        if not level:
            return
    raise ProtocolError(f"a message nests more than {depth_max} lists and maps")
