"""What tebench does: its options, the points of the sweep, the windows of its threads, and the patterns it
checks.

Pure values and functions; the engine appears in target.py and initiator.py only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from moonpool.errors import UsageError
from moonpool.units import GIB, MIB

OpType = Literal["read", "write", "mix", "write_seed", "read_verify"]
OP_TYPES: Final[tuple[OpType, ...]] = get_args(OpType)
TRANSPORTS: Final = ("shm", "tcp", "local")
WORD_BYTES: Final = 8
PAGE_BYTES: Final = 4096
THREADS_MAX: Final = 256
OWN_SEGMENT: Final = "self"  # target name under which --xport_type=local opens its own engine
_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One tebench command. Sizes in bytes, times in the named unit. Raises ``UsageError`` naming the flag."""

    seg_name: str = ""
    target_seg_names: tuple[str, ...] = ()
    op_type: OpType = "read"
    check_consistency: bool = False
    total_buffer_size: int = 1 * GIB
    start_block_size: int = 4096
    max_block_size: int = 64 * MIB
    start_batch_size: int = 1
    max_batch_size: int = 1
    start_num_threads: int = 1
    max_num_threads: int = 1
    duration_s: float = 5.0
    warmup_s: float = 1.0
    target_offset: int = 0
    target_range_size: int = 0
    request_interval_us: float = 0.0
    metadata_urls: tuple[str, ...] = ()
    rpc_server_port: int = 0
    xport_type: str = ""
    notifi: bool = False
    timeout_s: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "batch_size", "num_threads"):
            start, most = getattr(self, f"start_{name}"), getattr(self, f"max_{name}")
            if not 1 <= start <= most:
                raise UsageError(
                    f"--start_{name} must be at least 1 and at most --max_{name} ({most}), not {start}"
                )
        if self.max_num_threads > THREADS_MAX:
            raise UsageError(f"--max_num_threads can be at most {THREADS_MAX}, not {self.max_num_threads}")
        share = share_of(self.total_buffer_size, self.start_num_threads)
        if self.start_block_size * self.start_batch_size > share:
            raise UsageError(
                "--total_buffer_size is too small for the first point: it must hold "
                "start_block_size * start_batch_size * start_num_threads bytes"
            )
        if self.verifies and (self.start_block_size % WORD_BYTES or self.target_offset % WORD_BYTES):
            raise UsageError("data checks need --start_block_size and --target_offset to be multiples of 8")
        for name in ("duration_s", "timeout_s"):
            if not 0 < getattr(self, name) <= 86_400:
                raise UsageError(f"--{name.removesuffix('_s')} must be above 0 and at most 86400 s")
        for name in ("warmup_s", "target_offset", "target_range_size", "request_interval_us"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.removesuffix('_s')} cannot be negative")
        if self.xport_type == "local" and self.target_seg_names != (OWN_SEGMENT,):
            raise UsageError(
                f"--xport_type=local stays in one process: use it with --target_seg_name={OWN_SEGMENT}"
            )

    @property
    def is_target(self) -> bool:
        return not self.target_seg_names

    @property
    def verifies(self) -> bool:
        """Whether the bytes are looked at."""
        return self.check_consistency or self.op_type in ("write_seed", "read_verify")


@dataclass(frozen=True, slots=True)
class Point:
    """One row of the result."""

    threads: int
    block_bytes: int
    batch: int

    @property
    def operation_bytes(self) -> int:
        return self.block_bytes * self.batch


def doublings(start: int, most: int) -> Iterator[int]:
    """``start``, twice that, and so on up to ``most``."""
    value = start
    while value <= most:
        yield value
        value *= 2


def share_of(total_bytes: int, threads: int) -> int:
    """One thread's part of a buffer: whole pages when it is large enough, else whole words."""
    share = total_bytes // threads
    return share - share % (PAGE_BYTES if share >= PAGE_BYTES else WORD_BYTES)


def points_of(options: Options, window_bytes: int) -> Iterator[Point]:
    """Threads, then blocks, then batches; points that do not fit into a thread's share are skipped."""
    for threads in doublings(options.start_num_threads, options.max_num_threads):
        share = share_of(window_bytes, threads)
        for block_bytes in doublings(options.start_block_size, options.max_block_size):
            for batch in doublings(options.start_batch_size, options.max_batch_size):
                if block_bytes * batch <= share:
                    yield Point(threads, block_bytes, batch)


@dataclass(frozen=True, slots=True)
class Window:
    """One thread's share: where it begins in the local buffer and in the remote region, and its size."""

    local_offset: int
    remote_offset: int
    size_bytes: int


def window_of(point: Point, thread: int, total_bytes: int, remote_offset: int) -> Window:
    """Windows are of one size and do not overlap."""
    share = share_of(total_bytes, point.threads)
    return Window(thread * share, remote_offset + thread * share, share)


def pattern_words(first_byte: int, size_bytes: int, seed: int, generation: int = 0) -> npt.NDArray[np.uint64]:
    """The words (uint64[size_bytes / 8]) that belong at ``first_byte`` of a region; both must be multiples of
    8.

    They depend on position, seed and generation, so that a block in the wrong place, from another run or from
    before the last write is told from the right one.
    """
    first = first_byte // WORD_BYTES
    words = np.arange(first, first + size_bytes // WORD_BYTES, dtype=np.uint64)
    words += np.uint64((seed & 0xFFFFFFFF) << 32)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(31)
    words += np.uint64(generation & 0xFFFFFFFFFFFFFFFF)
    words *= _MULTIPLIER
    return words


def first_difference(found: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64]) -> int | None:
    """Offset in bytes of the first word that differs; None when all are equal."""
    wrong = np.flatnonzero(found != expected)
    return int(wrong[0]) * WORD_BYTES if wrong.size else None
