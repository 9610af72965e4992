"""What a service must know again after a restart: registrations and instances, in one small file.

Blocks are not in it: the engines' replays bring those. The file is replaced as a whole, so a crash leaves the
old one or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from moonpool.errors import ResourceError, UsageError

VERSION: Final = 1
STATE_BYTES_MAX: Final = 256 << 20


class SavedState(NamedTuple):
    """Bodies as `/register` and `/instances` took them."""

    registrations: list[dict[str, Any]]
    instances: list[dict[str, Any]]


def save_state(path: Path, registrations: Iterable[Mapping[str, Any]], instances: Iterable[Any]) -> None:
    """Writes the file anew; raises `ResourceError` when that fails, and the old one stays."""
    text = json.dumps({"version": VERSION, "registrations": [*registrations], "instances": [*instances]})
    fresh = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as exc:
        raise ResourceError(f"cannot keep the state in {path}: {exc.strerror}", errno=exc.errno or 0) from exc


def load_state(path: Path) -> SavedState:
    """What was saved; nothing when there is no file. Raises `UsageError` for a file of another kind."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(STATE_BYTES_MAX + 1)
    except FileNotFoundError:
        return SavedState([], [])
    except (OSError, UnicodeDecodeError) as exc:
        raise ResourceError(f"cannot read the state in {path}: {exc}") from exc
    try:
        found = json.loads(text)
        if found["version"] != VERSION:
            raise UsageError(f"{path} has version {found['version']!r}; this program reads {VERSION}")
        saved = SavedState(found["registrations"], found["instances"])
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        if isinstance(exc, UsageError):
            raise
        raise UsageError(f"{path} is not a state file of the conductor; move it away: {exc}") from exc
    if not all(isinstance(part, list) and all(isinstance(b, dict) for b in part) for part in saved):
        raise UsageError(f"{path} is not a state file of the conductor; move it away")
    return saved
