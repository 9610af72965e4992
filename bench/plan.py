"""What a paired run measures: cells (operation, block size, batch), rounds, and the bounds of each job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from moonpool.bench.workers.protocol import OPERATIONS, Job, Operation
from moonpool.errors import UsageError
from moonpool.units import KIB, MIB, parse_size

BLOCK_SIZES: Final = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)
BATCH_SIZES: Final = (1, 16, 128)
LARGEST_OPERATION_BYTES: Final = 128 * MIB
LARGE_OPERATION_BYTES: Final = 64 * MIB  # from here two operations make a job, else a round takes too long
BUFFER_BYTES: Final = 256 * MIB
OPERATIONS_MAXIMUM: Final = 200_000
JOB_S: Final = 0.1


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Size of the blocks and how many one operation moves."""

    block_bytes: int
    count: int

    @property
    def operation_bytes(self) -> int:
        return self.block_bytes * self.count

    def __str__(self) -> str:
        size = self.block_bytes
        text = f"{size // MIB}M" if size % MIB == 0 else f"{size // KIB}K" if size % KIB == 0 else f"{size}"
        return text if self.count == 1 else f"{text} x{self.count}"


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One thing that is measured."""

    shape: Shape
    operation: Operation

    def __str__(self) -> str:
        return f"{self.operation} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run. Jobs last ``job_s`` or, for large blocks, as long as their fewest operations take."""

    shapes: tuple[Shape, ...]
    operations: tuple[Operation, ...] = OPERATIONS
    rounds: int = 15
    job_s: float = JOB_S
    job_timeout_s: float = 60.0
    start_timeout_s: float = 60.0
    buffer_bytes: int = BUFFER_BYTES
    rounds_per_start: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= 1000:
            raise UsageError(f"rounds must be between 1 and 1000, not {self.rounds}")
        if self.rounds_per_start < 1:
            raise UsageError(f"rounds_per_start must be at least 1, not {self.rounds_per_start}")
        if not 0.001 <= self.job_s <= 60:
            raise UsageError(f"a job must last between 0.001 and 60 s, not {self.job_s}")
        for shape in self.shapes:
            if shape.operation_bytes > self.buffer_bytes:
                raise UsageError(f"{shape} does not fit into buffers of {self.buffer_bytes} bytes")

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(shape, operation) for shape in self.shapes for operation in self.operations)

    def job(self, cell: Cell, variant: str, warmup_s: float = 0.0) -> Job:
        """The request that measures a cell once."""
        return Job(
            operation=cell.operation,
            block_bytes=cell.shape.block_bytes,
            count=cell.shape.count,
            minimum_s=self.job_s,
            minimum_operations=2 if cell.shape.operation_bytes >= LARGE_OPERATION_BYTES else 3,
            maximum_operations=OPERATIONS_MAXIMUM,
            variant=variant,
            warmup_s=warmup_s,
        )


def default_shapes() -> tuple[Shape, ...]:
    """Every size with every batch that is not larger than 128 MiB."""
    every = (Shape(size, batch) for size in BLOCK_SIZES for batch in BATCH_SIZES)
    return tuple(shape for shape in every if shape.operation_bytes <= LARGEST_OPERATION_BYTES)


def parse_shapes(texts: Iterable[str]) -> tuple[Shape, ...]:
    """Shapes from words like ``4K``, ``64K:16`` or ``1MiBx128``; raises ``UsageError`` for anything else."""
    shapes = []
    for text in texts:
        size, _, batch = text.strip().replace("x", ":").partition(":")
        if batch and not batch.isdecimal():
            raise UsageError(f"{text!r} is not a cell; write a size and a batch, as in 64K:16", value=text)
        shape = Shape(parse_size(size), int(batch or 1))
        if shape.block_bytes <= 0 or shape.count <= 0 or shape.block_bytes % 256:
            raise UsageError(
                f"{text!r}: the block must be a multiple of 256 bytes and the batch at least 1", value=text
            )
        shapes.append(shape)
    return tuple(dict.fromkeys(shapes))
