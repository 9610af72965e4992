"""The face of a batch that users hold: wait, await, cancel, and per-transfer status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, final

from moonpool.errors import MoonpoolError, Status, TransferTimeout, error_from_status

if TYPE_CHECKING:
    from moonpool.engine.segment import Segment
    from moonpool.native.io.batch import Batch as NativeBatch

#: After a cancel or a deadline a batch has ended within this time: its socket is shut down, and a copy stops
#: at its next piece.
END_BOUND_S = 5.0


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


@final
class Batch:
    """Transfers submitted together. Once `done`, nothing touches their memory any more.

    Keep it or drop it: the engine holds the batch, and the buffers given to it, until it has ended.
    """

    __slots__ = ("__weakref__", "_native", "_segment")

    def __init__(self, native: NativeBatch, segment: Segment) -> None:
        self._native = native
        self._segment = segment

    @property
    def native(self) -> NativeBatch:
        """The native batch, for the engine."""
        return self._native

    @property
    def done(self) -> bool:
        """True once the batch has ended, in whatever way."""
        return self._native.done

    @property
    def status(self) -> memoryview:
        """uint8[n]: one `Status` number per transfer; `numpy.asarray` takes it without a copy."""
        return memoryview(self._native.statuses())

    @property
    def ok(self) -> bool:
        """True when the batch has ended and every transfer is COMPLETE."""
        return self._native.done and self._native.worst == Status.COMPLETE

    @property
    def bytes_done(self) -> int:
        """Bytes of the transfers that completed; meaningful once done."""
        return self._native.bytes_done

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds from submission to end; 0 until then."""
        return self._native.elapsed_ns

    @property
    def digests(self) -> list[list[int]] | None:
        """Per transfer, XXH3-64 of each 64 KiB chunk of what was moved; None when not asked for."""
        return self._native.digests()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`. Returns `done`; failed transfers raise nothing."""
        ended = self._native.wait(timeout_s)
        if ended:
            self._native.let_go()
        return ended

    def result(self, timeout_s: float | None = None) -> Batch:
        """Wait for the end, then raise the first failed transfer's error, if any.

        When `timeout_s` comes first the batch is ended (as by `cancel`), then TransferTimeout is raised.
        """
        if not self.wait(timeout_s):
            self.cancel()
            raise TransferTimeout("the wait ran out, so the batch was ended", **self._about(None))
        self.check()
        return self

    def cancel(self) -> bool:
        """End the batch as CANCELLED unless it ended before; returns when it has. True when `done`."""
        self._native.cancel()
        return self.wait(END_BOUND_S)

    def check(self) -> None:
        """Raise the error of the first failed transfer of an ended batch; see `status` for the others."""
        if self._native.worst != Status.COMPLETE:
            raise self.error()

    def error(self) -> MoonpoolError:
        """The error of the first failed transfer (made, not raised)."""
        return error_from_status(self._native.worst, "", **self._about(self._native.first_failure()))

    def _about(self, index: int | None) -> Any:
        fields: dict[str, Any] = {
            "peer": self._segment.endpoint,
            "segment": self._segment.name,
            "operation": self._native.operation,
            "elapsed_ms": self._native.elapsed_ns / 1e6,
        }
        if index is not None:
            fields["index"] = index
        return fields

    def __await__(self) -> Generator[Any, None, Batch]:
        """Wait in an asyncio loop; raises like `result`.

        Cancelling the awaiting task cancels the batch, and the task ends once the batch has.
        """
        return self._ended().__await__()

    async def _ended(self) -> Batch:
        if not self._native.done:
            loop = asyncio.get_running_loop()
            # A descriptor of its own: a loop keeps one reader for each, and a batch may have many waiters.
            fd = os.dup(self._native.event())
            woken = loop.create_future()
            loop.add_reader(fd, _wake, woken)
            try:
                await asyncio.shield(woken)
            except asyncio.CancelledError:
                self._native.cancel()
                await woken  # the batch ends first: whoever cancels may use its memory again
                raise
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        self._native.let_go()
        self.check()
        return self

    def __len__(self) -> int:
        return self._native.n

    def __repr__(self) -> str:
        state = Status(self._native.worst).name if self._native.done else "running"
        return f"<Batch of {self._native.n} {self._native.operation}, {state}>"
