"""What the clients of a chaos run did, written down as it happens, and judged afterwards.

A client appends a line before each call and one after it, straight to a file, so that a kill loses nothing
that was begun. Times are CLOCK_MONOTONIC in ns, one clock for all processes of a host.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from moonpool.bench.chaos_history import History, HistoryBroken

BROKEN_MAX: Final = 20
TRAILS_MAX: Final = 3
TRAIL_LINES: Final = 4_000


@final
class Recorder:
    """One client's file. Each line is `[time ns, what, who, ...]`."""

    def __init__(self, path: Path, who: str) -> None:
        self._who = who
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, *fields: Any) -> int:
        """Writes a line; returns its time."""
        now_ns = time.monotonic_ns()
        os.write(self._fd, json.dumps([now_ns, what, self._who, *fields]).encode() + b"\n")
        return now_ns

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def is_within(path: Path, what: str) -> bool:
    """Whether the last thing that a living client wrote down is this one: it is at that call now."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 512))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return False
    return len(lines) > 1 and f'"{what}"'.encode() in lines[-2]


def read_lines(paths: Iterable[Path]) -> list[list[Any]]:
    """The lines of all files, in the order of their times. A half line of a killed client is left out."""
    lines: list[list[Any]] = []
    for path in paths:
        lines += [json.loads(raw) for raw in path.read_bytes().split(b"\n")[:-1]]
    lines.sort(key=lambda line: line[0])
    return lines


@final
@dataclass(slots=True)
class Verdict:
    """What a history came to."""

    counts: Counter[str] = field(default_factory=Counter)
    #: Gets and views that returned what they must not, the first of them.
    broken: list[str] = field(default_factory=list)
    #: What was done to the keys of the first broken ones.
    trails: list[list[list[Any]]] = field(default_factory=list)
    #: An example of each kind of failure.
    errors: dict[str, str] = field(default_factory=dict)
    #: Calls that had begun when their client was killed.
    in_mid_put: int = 0
    in_mid_view: int = 0
    #: The longest call, in seconds, and what it was.
    longest: tuple[float, str] = (0.0, "")


@final
class _Judge:
    """Goes through lines in order."""

    def __init__(self) -> None:
        self.history = History()
        self.verdict = Verdict()
        self._open_puts: set[int] = set()
        self._open_views: set[str] = set()
        self._removes: dict[str, tuple[str, int]] = {}

    def take(self, line: list[Any]) -> None:
        """One line."""
        at, what, _who, *fields = line
        getattr(self, f"_{what}")(at, *fields)

    def _put_began(self, at: int, tag: int, key: str, digest: str) -> None:
        self._open_puts.add(tag)
        self.history.put_began(tag, key, bytes.fromhex(digest), at)
        # The call ends the put somewhere within: it may be complete from now on.
        self.history.put_ending(tag, at)

    def _put_ended(self, at: int, tag: int, outcome: str, replaces: bool) -> None:
        self._open_puts.discard(tag)
        self.verdict.counts[f"put {outcome}"] += 1
        if outcome != "unknown":
            self.history.put_ended(tag, at, is_stored=outcome == "stored", replaces=replaces)

    def _remove_began(self, at: int, number: str, key: str) -> None:
        self._removes[number] = (key, self.history.remove_began(key, at))

    def _remove_ended(self, at: int, number: str, outcome: str) -> None:
        self.verdict.counts[f"remove {outcome}"] += 1
        key, ours = self._removes.pop(number)
        if outcome != "unknown":
            self.history.remove_ended(key, ours, at, is_gone=outcome == "gone")

    def _got(self, at: int, key: str, began: int, outcome: str, digest: str, _how: str = "") -> None:
        self.verdict.counts[f"get {outcome}"] += 1
        if outcome == "hit":
            self._judge(key, began, at, digest)

    def _view_began(self, _at: int, number: str) -> None:
        self._open_views.add(number)

    def _viewed(self, at: int, number: str, key: str, began: int, digest: str) -> None:
        self.verdict.counts["view hit"] += 1
        self._judge(key, began, at, digest)

    def _view_ended(self, at: int, number: str, outcome: str) -> None:
        self._open_views.discard(number)
        self.verdict.counts[f"view {outcome}"] += 1
        if outcome == "changed":
            self._broken(f"bytes changed under a view, at {at}")

    def _lasted(self, _at: int, what: str, seconds: float) -> None:
        self.verdict.longest = max(self.verdict.longest, (seconds, what))

    def _failed(self, _at: int, what: str, error: str, text: str) -> None:
        self.verdict.counts[f"{what} failed: {error}"] += 1
        self.verdict.errors.setdefault(f"{what} {error}", text)

    def _judge(self, key: str, began: int, at: int, digest: str) -> None:
        try:
            self.history.judge_get(key, began, at, bytes.fromhex(digest))
        except HistoryBroken as broken:
            self._broken(str(broken))

    def _broken(self, text: str) -> None:
        self.verdict.counts["BROKEN"] += 1
        if len(self.verdict.broken) < BROKEN_MAX:
            self.verdict.broken.append(text)

    def end(self) -> Verdict:
        """What was begun and not ended belongs to clients that were killed."""
        self.verdict.in_mid_put = len(self._open_puts)
        self.verdict.in_mid_view = len(self._open_views)
        return self.verdict


def judge(lines: Sequence[list[Any]]) -> Verdict:
    """Judges a whole history against invariant 1. What was done to a key that broke it is told."""
    running = _Judge()
    for number, line in enumerate(lines):
        before = running.verdict.counts["BROKEN"]
        running.take(line)
        if running.verdict.counts["BROKEN"] > before and len(running.verdict.trails) < TRAILS_MAX:
            running.verdict.trails.append(_trail(lines, number))
    return running.end()


def _trail(lines: Sequence[list[Any]], number: int) -> list[list[Any]]:
    """The line that broke, and what came before it and after that its key stands in."""
    key = next((field for field in lines[number][3:] if str(field).startswith("key")), None)
    around = lines[max(0, number - TRAIL_LINES) : number + TRAIL_LINES // 10]
    return [line for line in around if key in line or line is lines[number]]
