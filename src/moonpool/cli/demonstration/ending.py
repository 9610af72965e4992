"""The end of the demo: the target is killed while it is being read, and the readers must be told in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moonpool.errors import MoonpoolError, PeerError
from moonpool.operations import Op

if TYPE_CHECKING:
    from moonpool.cli.demonstration.target_process import TargetProcess
    from moonpool.cli.demonstration.traffic import Cell

BOUND_S: Final = 2.0
"""After a kill every transport must have raised a typed error within this time."""

IN_FLIGHT: Final = 32
"""Transfers in the batch that is under way when the target dies."""


@dataclass(frozen=True, slots=True)
class Death:
    """How one transport learned that its peer died: the error's class, its sentence, and how long it took."""

    transport: str
    error: str
    message: str
    seconds: float

    @property
    def ok(self) -> bool:
        """A typed error of the peer's branch, in time."""
        return self.error != "" and self.seconds <= BOUND_S

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "transport": self.transport,
            "error": self.error,
            "message": self.message,
            "seconds": self.seconds,
            "bound_s": BOUND_S,
            "ok": self.ok,
        }


def kill_and_watch(cells: Sequence[Cell], target: TargetProcess) -> list[Death]:
    """Submits a batch for each cell, kills the target, and reads until each has got its error, or the bound
    is over.

    ``cells`` are one a transport. A batch that was quicker than the kill is followed by small reads.
    """
    batches = [
        cell.engine.submit(
            Op.READ,
            cell.segment,
            [cell.memory.address] * IN_FLIGHT,
            cell.handle,
            [0] * IN_FLIGHT,
            cell.memory.size_bytes // 2,
            timeout_s=BOUND_S,
        )
        for cell in cells
    ]
    killed = time.monotonic()
    target.kill()
    deaths = []
    for cell, batch in zip(cells, batches, strict=True):
        error = _first_error(cell, batch, killed + BOUND_S)
        seconds = time.monotonic() - killed
        # Only an error of the peer's branch tells the truth: the caller did nothing wrong, nor did this
        # machine.
        name = type(error).__name__ if isinstance(error, PeerError) else ""
        deaths.append(Death(cell.transport, name, str(error or "no error at all"), seconds))
    return deaths


def _first_error(cell: Cell, batch: Any, deadline: float) -> MoonpoolError | None:
    try:
        batch.result(BOUND_S)
        while (left := deadline - time.monotonic()) > 0:
            cell.engine.read(
                cell.segment, cell.handle, 0, cell.memory.address, cell.block_bytes, timeout_s=left
            )
    except MoonpoolError as error:
        return error
    return None
