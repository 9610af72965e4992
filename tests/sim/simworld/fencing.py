"""What a node's core asks of its engine when it fences: who could still write here, and have they settled."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.store.node_holds import LANES_ONLY
from simworld.loop import Future
from simworld.memory import Engine, LandingWrite, MappedWriter, SegmentMemory
from simworld.process import Process

ANYBODY = bytes(16)
SETTLE_US_MAX = 2_000


@dataclass(slots=True)
class Ticket:
    """Those who could write a range when it was fenced."""

    writes: list[LandingWrite]
    writers: list[MappedWriter]
    until_ms: int
    asked: bool = False


class EngineFencing:
    """`Fencing` over a modelled engine. Segments are numbered as the node's core numbers them."""

    def __init__(self, process: Process, engine: Engine, memories: list[SegmentMemory]) -> None:
        self._process = process
        self._engine = engine
        self._memories = memories
        self._tickets: dict[int, Ticket] = {}
        self._next = 1
        self._denied: dict[tuple[int, int, int], int] = {}

    def deny(self, segment: int, start: int, tag: int, until_ms: int) -> None:
        """Refuse grants that show the tag for an extent that starts there."""
        key = (segment, start, tag)
        self._denied[key] = max(until_ms, self._denied.get(key, 0))

    def is_denied(self, segment: int, start: int, tag: int, now_ms: int) -> bool:
        """Whether such a grant is refused now."""
        return now_ms < self._denied.get((segment, start, tag), 0)

    def begin(self, segment: int, offset: int, length: int, instance: bytes, until_ms: int) -> int:
        """Watch those who could write the range at this moment."""
        memory = self._memories[segment]
        writes = [one for one in self._engine.landing if one.memory is memory and one.touches(offset, length)]
        writers: list[MappedWriter] = []
        if instance != LANES_ONLY:
            writers = [
                writer
                for name, writer in self._engine.mapped.items()
                if writer.process.is_alive and instance in (name, ANYBODY)
            ]
        if not writes and not writers:
            return 0
        number = self._next
        self._next += 1
        self._tickets[number] = Ticket(writes, writers, until_ms)
        return number

    def over(self, ticket: int, now_ms: int) -> bool:
        """True when none of them can write any more."""
        found = self._tickets[ticket]
        if found.writers and now_ms >= found.until_ms and not found.asked:
            found.asked = True
            for writer in found.writers:
                self._ask_to_settle(found, writer)
        found.writers = [writer for writer in found.writers if writer.process.is_alive]
        if found.writers or not all(write.is_over for write in found.writes):
            return False
        del self._tickets[ticket]
        return True

    def drop(self, ticket: int) -> None:
        """Not needed any more."""
        self._tickets.pop(ticket, None)

    def _ask_to_settle(self, ticket: Ticket, writer: MappedWriter) -> None:
        """Answered by the writer's process when no copy that runs as it hears of this runs any more."""

        async def settle() -> None:
            running: list[Future[None]] = list(writer.copying)
            for copy in running:
                await copy
            writer.process.after(chance.randint(10, SETTLE_US_MAX), settled)

        def asked() -> None:
            writer.process.spawn(settle())

        def settled() -> None:
            if writer in ticket.writers:
                ticket.writers.remove(writer)

        chance = self._process.loop.chance
        writer.process.after(chance.randint(10, SETTLE_US_MAX), asked)
