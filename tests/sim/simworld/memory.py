"""The memory of segments, and the two ways to reach it.

Through a lane that the node's engine serves, or mapped.

Reads and writes happen in pieces with time between them, so they can be torn, stopped and overtaken. A
write over a lane is let in by its grant as a whole and then lands piece by piece as long as its connection
and the node live; a mapped write is done by the writer's own process, which may stop in mid-write and go on
much later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simworld.claims import Claims
from simworld.loop import Future
from simworld.network import End, Network
from simworld.process import Process

PIECE_BYTES = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How long pieces take; now and then a whole copy is slow."""

    piece_us_min: int = 5
    piece_us_max: int = 60
    slow_share: float = 0.15
    slow_piece_us_max: int = 8_000


class SegmentMemory:
    """One generation of one segment's data, and the claims on it. `directory` is the node's to write."""

    def __init__(self, name: str, capacity: int, directory: bytearray) -> None:
        self.name = name
        self.data = bytearray(capacity)
        self.directory = directory
        self.claims = Claims(name)

    def write(self, offset: int, content: bytes, put_id: int) -> None:
        """A piece lands."""
        self.claims.check_write(offset, len(content), put_id)
        self.data[offset : offset + len(content)] = content


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A range of a segment's data, or of its directory."""

    segment: int
    offset: int
    length: int
    in_directory: bool = False


@dataclass(slots=True)
class LandingWrite:
    """A write that was let in; `is_over` when no byte of it can come any more."""

    memory: SegmentMemory
    offset: int
    length: int
    is_over: bool = False

    def touches(self, offset: int, length: int) -> bool:
        """Whether it writes into a range."""
        return self.offset < offset + length and offset < self.offset + self.length


@dataclass(slots=True)
class MappedWriter:
    """A process that has the memory mapped, and the copies into it that it is at now."""

    process: Process
    copying: list[Future[None]] = field(default_factory=list)
    #: Told before each piece: a fault may strike in the middle of a copy.
    on_piece: Callable[[], None] = lambda: None


GrantCheck = Callable[[int, int, int, bytes], bool]


class Engine:
    """The data plane of one node process: its segments' memory, its lanes, and who has it mapped."""

    def __init__(self, process: Process, network: Network, address: str, options: CopyOptions) -> None:
        self.process = process
        self.endpoint = address
        self._options = options
        #: By every id that a segment ever had.
        self.segments: dict[int, SegmentMemory] = {}
        self.landing: list[LandingWrite] = []
        #: Processes that mapped this node's memory for writing, by the instance of their engine.
        self.mapped: dict[bytes, MappedWriter] = {}
        self.check_grant: GrantCheck = lambda segment, offset, length, grant: True
        self.refused = 0
        network.listen(process, address, self._accept)

    def piece_us(self) -> int:
        """How long each piece of one copy takes."""
        chance, options = self.process.loop.chance, self._options
        if chance.random() < options.slow_share:
            return chance.randint(options.piece_us_max, options.slow_piece_us_max)
        return chance.randint(options.piece_us_min, options.piece_us_max)

    def map_for_writing(self, instance: bytes, writer: MappedWriter) -> None:
        """Gives a process of this host the memory; it keeps it as long as it lives."""
        self.mapped[instance] = writer

    def _accept(self, end: End) -> None:
        def arrived(message: tuple[str, int, list[ReadPart] | tuple[int, int, bytes, bytes, int]]) -> None:
            kind, number, body = message
            if kind == "read":
                assert isinstance(body, list)
                self.process.spawn(self._serve_read(end, number, body))
            else:
                assert isinstance(body, tuple)
                self.process.spawn(self._serve_write(end, number, body))

        end.on_message = arrived

    async def _serve_read(self, end: End, number: int, parts: list[ReadPart]) -> None:
        results: list[bytes] = []
        for part in parts:
            memory = self.segments.get(part.segment)
            if memory is None:
                end.send((number, None))
                return
            results.append(await copy_out(self.process, memory, part, self.piece_us()))
        end.send((number, results))

    async def _serve_write(self, end: End, number: int, body: tuple[int, int, bytes, bytes, int]) -> None:
        segment, offset, content, grant, put_id = body
        memory = self.segments.get(segment)
        if memory is None or not self.check_grant(segment, offset, len(content), grant):
            self.refused += 1
            end.send((number, False))
            return
        under_way = LandingWrite(memory, offset, len(content))
        self.landing.append(under_way)
        piece_us = self.piece_us()
        for at in range(0, len(content), PIECE_BYTES):
            await self.process.sleep(piece_us)
            if not end.is_open:
                break  # the rest of the payload never arrives
            memory.write(offset + at, content[at : at + PIECE_BYTES], put_id)
        else:
            end.send((number, True))
        under_way.is_over = True
        self.landing.remove(under_way)


async def copy_out(process: Process, memory: SegmentMemory, part: ReadPart, piece_us: int) -> bytes:
    """Reads a range in pieces, as the process that does it goes."""
    source = memory.directory if part.in_directory else memory.data
    read = bytearray()
    for at in range(0, part.length, PIECE_BYTES):
        await process.sleep(piece_us)
        read += source[part.offset + at : part.offset + min(at + PIECE_BYTES, part.length)]
    return bytes(read)


async def copy_in(
    writer: MappedWriter, memory: SegmentMemory, write: tuple[int, bytes, int], piece_us: int
) -> None:
    """Writes mapped memory in pieces, as the writer's process goes, whatever the node does meanwhile."""
    offset, content, put_id = write
    copy: Future[None] = Future()
    writer.copying.append(copy)
    for at in range(0, len(content), PIECE_BYTES):
        writer.on_piece()
        await writer.process.sleep(piece_us)
        memory.write(offset + at, content[at : at + PIECE_BYTES], put_id)
    writer.copying.remove(copy)
    copy.set(None)


class Lane:
    """A client's connection to a node's engine."""

    def __init__(self, process: Process, end: End) -> None:
        self._process = process
        self._end = end
        self._waiting: dict[int, Future[list[bytes] | bool | None]] = {}
        self._next = 1
        end.on_message = lambda message: self._settle(*message)
        end.on_close = self._closed

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def read(self, parts: list[ReadPart], timeout_us: int) -> Future[list[bytes] | bool | None]:
        """The parts, each read after the one before it; None when that failed."""
        return self._ask("read", parts, timeout_us)

    def write(
        self, body: tuple[int, int, bytes, bytes, int], timeout_us: int
    ) -> Future[list[bytes] | bool | None]:
        """True when it landed, False when it was refused, None when nobody knows."""
        return self._ask("write", body, timeout_us)

    def close(self) -> None:
        self._end.close()
        self._closed()

    def _ask(self, kind: str, body: object, timeout_us: int) -> Future[list[bytes] | bool | None]:
        future: Future[list[bytes] | bool | None] = Future()
        number = self._next
        self._next += 1
        if not self._end.is_open:
            future.set(None)
            return future
        self._waiting[number] = future
        self._end.send((kind, number, body))
        # A transfer that timed out tears its lane down first: nothing of it may arrive later.
        self._process.after(timeout_us, lambda: self.close() if number in self._waiting else None)
        return future

    def _settle(self, number: int, value: list[bytes] | bool | None) -> None:
        future = self._waiting.pop(number, None)
        if future is not None:
            future.set(value)

    def _closed(self) -> None:
        for number in list(self._waiting):
            self._settle(number, None)
