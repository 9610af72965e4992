"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    """A fact, or something absent that only some uses need."""
    WARN = "warn"
    """Moonpool works, but slower or with less than this machine could give."""
    FAIL = "FAIL"
    """The engine cannot work here as it is configured by default."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding: what was looked at, what was found, and what to do about it ("" where there is nothing to
    do).
    """

    group: str
    name: str
    level: Level
    detail: str
    advice: str = ""
