"""What the harness and a worker say to each other: one JSON object a line on the worker's standard streams.

The worker prints a ``Ready`` when its pair is connected, then answers each request in order: a job with a
``JobReport``, a check with ``{"checked": bytes}``, and either with ``{"error": sentence}`` when it failed. It
ends when its standard input is closed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Operation = Literal["read", "write"]
OPERATIONS: Final[tuple[Operation, ...]] = ("write", "read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One timed run: ``count`` blocks in each operation, until both minima are reached or the maximum is."""

    operation: Operation
    block_bytes: int
    count: int
    minimum_s: float
    minimum_operations: int
    maximum_operations: int
    variant: str = ""  # which of a worker's ways to do it, e.g. "digest"
    warmup_s: float = 0.0  # untimed operations before, at least one

    @property
    def operation_bytes(self) -> int:
        return self.block_bytes * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What one job cost. CPU seconds are those of all threads of both processes, user and system."""

    operations: int
    transferred_bytes: int
    elapsed_s: float
    p50_us: float
    p99_us: float
    initiator_cpu_s: float
    target_cpu_s: float

    @property
    def gigabytes_per_s(self) -> float:
        return self.transferred_bytes / self.elapsed_s / 1e9

    @property
    def cpu_s_per_gigabyte(self) -> float:
        return (self.initiator_cpu_s + self.target_cpu_s) / (self.transferred_bytes / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The pair is connected and its memory is filled."""

    initiator_pid: int
    target_pid: int
    note: str = ""


class WorkerFailed(RuntimeError):
    """A worker ended, did not answer in time, or answered with an error."""


def encode(kind: str, value: Any) -> str:
    """One line: ``{kind: fields}``."""
    return json.dumps({kind: asdict(value) if hasattr(value, "__dataclass_fields__") else value}) + "\n"


def decode(line: str) -> tuple[str, Any]:
    """Kind and fields of one line; raises ``WorkerFailed`` for a line that is not of this protocol."""
    try:
        message = json.loads(line)
        ((kind, value),) = message.items()
    except (ValueError, AttributeError) as broken:
        raise WorkerFailed(f"the worker wrote a line that is not of the protocol: {line[:200]!r}") from broken
    return str(kind), value
