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

from moonpool.bench.classes import INTENTS, Traffic
from moonpool.bench.segments import parse_kinds
from moonpool.errors import UsageError
from moonpool.units import GIB, MIB

OpType = Literal["read", "write", "mix", "write_seed", "read_verify"]
OP_TYPES: Final[tuple[OpType, ...]] = get_args(OpType)
TRANSPORTS: Final = ("local", "cuda", "shm", "cxl", "rdma", "ofi", "file", "nvmeof", "tcp", "auto")
#: What Mooncake calls some of them.
ALIASES: Final = {"iouring": "file", "nvmeof_initiator": "nvmeof", "nvlink": "cuda", "efa": "ofi"}
WORD_BYTES: Final = 8
PAGE_BYTES: Final = 4096
THREADS_MAX: Final = 256
TIGHT: Final = "deadline-tight"
OWN_SEGMENT: Final = "self"  # target name under which --xport_type=local opens its own engine
_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One tebench command. Sizes in bytes, times in the named unit. Raises ``UsageError`` naming the flag."""

    seg_name: str = ""
    seg_type: str = "DRAM"
    seg_type_mix: str = ""
    seg_location: str = ""
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
    local_gpu_id: int = 0
    target_gpu_id: int = 0
    tent_transport_hint: str = ""
    tent_intent_type: str = "unspec"
    #: Classes that run at once; those of a workload have sizes of their own and replace the sweep.
    classes: tuple[Traffic, ...] = ()
    is_workload: bool = False
    qos_link_capacity_gbps: float = 0.0
    deadline_us: float = 0.0
    deadline_tight_threads: int = 0
    deadline_bw_arbitration: bool = False
    device_names: tuple[str, ...] = ()

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
        _check_traffic(self)
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown:
            raise UsageError(f"--xport_type: there is no {unknown[0]!r}; there are {', '.join(TRANSPORTS)}")
        if self.transports == ("local",) and self.target_seg_names != (OWN_SEGMENT,):
            raise UsageError(
                f"--xport_type=local stays in one process: use it with --target_seg_name={OWN_SEGMENT}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of bytes that a target offers."""
        return parse_kinds(self.seg_type, self.seg_type_mix)

    @property
    def locations(self) -> tuple[str, ...]:
        """Where they are, for those that need to be told."""
        return tuple(place.strip() for place in self.seg_location.split(",") if place.strip())

    @property
    def transports(self) -> tuple[str, ...]:
        """The only transports allowed; empty: the engine's own choice."""
        names = (name.strip() for name in self.xport_type.split(",") if name.strip())
        return tuple(ALIASES.get(name, name) for name in names)

    @property
    def priority(self) -> str:
        """The priority that threads without one of their own submit with; empty: they do not."""
        return INTENTS[self.tent_intent_type] or ("normal" if self.deadline_bw_arbitration else "")

    @property
    def is_target(self) -> bool:
        return not self.target_seg_names

    @property
    def verifies(self) -> bool:
        """Whether the bytes are looked at."""
        return self.check_consistency or self.op_type in ("write_seed", "read_verify")


def _check_traffic(options: Options) -> None:
    """What classes, deadlines and checks ask for must fit together."""
    if options.tent_intent_type not in INTENTS:
        raise UsageError(f"--tent_intent_type is one of {', '.join(INTENTS)}")
    if options.tent_transport_hint and options.tent_transport_hint not in TRANSPORTS:
        raise UsageError(f"--tent_transport_hint is one of {', '.join(TRANSPORTS)}")
    for name in ("qos_link_capacity_gbps", "deadline_us", "deadline_tight_threads"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name} cannot be negative")
    if bool(options.deadline_us) != bool(options.deadline_tight_threads):
        raise UsageError("a deadline test needs --deadline_us and --deadline_tight_threads")
    if options.deadline_us and options.classes:
        raise UsageError(
            "a deadline test has no classes; give the classes of a workload their own deadline_us"
        )
    if options.deadline_tight_threads > options.start_num_threads:
        raise UsageError("--deadline_tight_threads can be at most --start_num_threads")
    if options.verifies and (options.deadline_us or any(one.deadline_us for one in options.classes)):
        raise UsageError("what misses its deadline has no bytes to check: leave data checks out")
    if options.verifies and "VRAM" in options.kinds and not options.is_target:
        raise UsageError("data checks need the initiator's buffer in host memory: leave out --seg_type=VRAM")


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
    """Threads, then blocks, then batches; points that do not fit into a thread's share are skipped.

    Classes bring their own threads; those of a workload are one point, of its largest block and batch.
    """
    if options.is_workload:
        sizes = [(one.block_size, one.batch_size) for one in options.classes]
        yield Point(sum(one.threads for one in options.classes), *max(sizes))
        return
    total = sum(one.threads for one in options.classes)
    counts = [total] if total else doublings(options.start_num_threads, options.max_num_threads)
    for threads in counts:
        share = share_of(window_bytes, threads)
        for block_bytes in doublings(options.start_block_size, options.max_block_size):
            for batch in doublings(options.start_batch_size, options.max_batch_size):
                if block_bytes * batch <= share:
                    yield Point(threads, block_bytes, batch)


def tasks_of(options: Options, point: Point) -> list[tuple[Traffic, Point]]:
    """For each thread of a point its class and its sizes; the class has no name when there are none."""
    if options.deadline_us:
        tight = options.deadline_tight_threads
        urgent, other = (
            Traffic(name=TIGHT, threads=tight, deadline_us=options.deadline_us),
            Traffic(name="other"),
        )
        return [(urgent if thread < tight else other, point) for thread in range(point.threads)]
    if not options.classes:
        return [(Traffic(), point)] * point.threads
    tasks = []
    for one in options.classes:
        block, batch = one.block_size or point.block_bytes, one.batch_size or point.batch
        tasks += [(one, Point(point.threads, block, batch))] * one.threads
    return tasks


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
