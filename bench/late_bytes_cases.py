"""What a late-bytes case does, drawn from its seed alone, and the ledger that notices a changed buffer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, final

from moonpool.bench.fault_proxy import Fault, random_fault
from moonpool.native.io.copying import chunk_digests
from moonpool.units import KIB, MIB

#: How a READ is ended: by `cancel`, by the bound of a wait, or by its own deadline, in each form of call.
Ending: TypeAlias = Literal["cancel", "result", "deadline", "transfer", "read"]
ENDINGS: Final[tuple[Ending, ...]] = ("cancel", "result", "deadline", "transfer", "read")
#: What a destination holds before its READ.
FILL: Final = 0xEE
VIOLATIONS_KEPT: Final = 20
_HEADER_BYTES: Final = 32
_ENTRY_BYTES: Final = 64
_COMPANION_SHARE: Final = 0.3
_WARM_SHARE: Final = 0.8
#: Small READs are over before anything can go wrong, so few of them are enough.
_SMALL_SHARE: Final = 0.2


@final
@dataclass(frozen=True, slots=True)
class WayPlan:
    """A way to move bytes and the sizes that suit it. `slot_bytes` is one case's part of the destination."""

    name: str
    transport: Literal["tcp", "shm"]
    tcp_io: str = "auto"
    foreign: bool = False
    slot_bytes: int = 512 * KIB
    group_cases: int = 16
    wait_ms_max: float = 25.0

    @property
    def bytes_max(self) -> int:
        """Most bytes of one case, with room for the gaps between its transfers."""
        return self.slot_bytes * 3 // 4


WAYS: Final[tuple[WayPlan, ...]] = (
    WayPlan("tcp-blocking", "tcp", "blocking"),
    WayPlan("tcp-epoll", "tcp", "epoll"),
    WayPlan("tcp-io_uring", "tcp", "io_uring"),
    WayPlan("shm-mapped", "shm", slot_bytes=24 * MIB, group_cases=4, wait_ms_max=4.0),
    WayPlan("shm-process_vm", "shm", foreign=True, slot_bytes=24 * MIB, group_cases=4, wait_ms_max=6.0),
)
#: Of 20 cases so many go each way, in the order of `WAYS`.
SHARES: Final = (6, 6, 6, 1, 1)


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer: bytes from the slot's start, bytes from the remote region's start, length."""

    at: int
    offset: int
    length: int


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One READ, how and when it is ended, and what the network does meanwhile."""

    ending: Ending
    pieces: tuple[Piece, ...]
    wait_ms: float
    fault: Fault
    has_companion: bool
    #: Whether a lane is there before the fault, so that it hits the payload and not the hello.
    is_warm: bool

    @property
    def total_bytes(self) -> int:
        """Bytes asked for."""
        return sum(piece.length for piece in self.pieces)


def draw_case(seed: str, way: WayPlan) -> Case:
    """The case of a seed; same seed and way, same case."""
    choice = random.Random(seed)
    ending = choice.choice(ENDINGS)
    low = 1 if choice.random() < _SMALL_SHARE else way.bytes_max // 32
    total = min(way.bytes_max, int(low * (way.bytes_max / low) ** choice.random()) + 1)
    count = 1 if ending == "read" else min(total, choice.choice((1, 1, 2, 5, 16)))
    fault = random_fault(choice, _ENTRY_BYTES + total)
    if fault.direction == "up":
        # A request is short: a fault that begins behind its end would be none.
        fault = replace(fault, after_bytes=choice.randrange(_HEADER_BYTES + _ENTRY_BYTES * count))
    companion = choice.random() < _COMPANION_SHARE and fault.action != "swallow" and way.transport == "tcp"
    return Case(
        ending=ending,
        pieces=_draw_pieces(choice, total, count, way.slot_bytes),
        # From at once to the longest, each power of ten as likely as another.
        wait_ms=0.05 * (way.wait_ms_max / 0.05) ** choice.random(),
        fault=fault,
        has_companion=companion,
        is_warm=choice.random() < _WARM_SHARE,
    )


def _draw_pieces(choice: random.Random, total: int, count: int, slot_bytes: int) -> tuple[Piece, ...]:
    cuts = sorted(choice.sample(range(1, total), count - 1)) if count > 1 else []
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    spare = slot_bytes - total
    pieces, at = [], 0
    for length in lengths:
        gap = choice.randrange(spare // count + 1)
        pieces.append(Piece(at + gap, choice.randrange(slot_bytes - length + 1), length))
        at += gap + length
    return tuple(pieces)


def gaps_of(case: Case, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what lies between and around the pieces: no byte of it may ever change."""
    at = 0
    for piece in case.pieces:
        yield at, piece.at
        at = piece.at + piece.length
    yield at, slot_bytes


@final
@dataclass(slots=True)
class Tally:
    """What happened, in numbers that add up over stations and processes."""

    cases: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    #: Cases in which bytes had begun to land when the READ ended early: where a late byte could follow.
    torn: int = 0
    #: Cases in which the proxy still held bytes of a lane when the READ had ended.
    held: int = 0
    companions: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    reopened: int = 0
    end_late_ms_max: float = 0.0
    violation_count: int = 0
    violations: list[str] = field(default_factory=list)

    def violate(self, sentence: str) -> None:
        """Count a violation; the first few are kept in words."""
        self.violation_count += 1
        if len(self.violations) < VIOLATIONS_KEPT:
            self.violations.append(sentence)

    def add(self, other: Tally) -> None:
        """Take in what another station or process counted."""
        self.cases += other.cases
        self.ended += other.ended
        self.companions += other.companions
        self.torn += other.torn
        self.held += other.held
        self.checks += other.checks
        self.reopened += other.reopened
        self.end_late_ms_max = max(self.end_late_ms_max, other.end_late_ms_max)
        self.violation_count += other.violation_count
        self.violations = [*self.violations, *other.violations][:VIOLATIONS_KEPT]


@final
class Ledger:
    """Remembers what each slot of a destination held when its READ ended; tells which have changed since.

    `view` is the destination, uint8, borrowed for the ledger's life.
    """

    def __init__(self, view: memoryview, slot_bytes: int) -> None:
        self._view = view
        self._slot_bytes = slot_bytes
        self._sums: dict[int, list[int]] = {}

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot."""
        return self._view[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def remember(self, number: int) -> None:
        """Take the checksum of a slot now: it must stay so."""
        self._sums[number] = chunk_digests(self.slot(number))

    def is_unchanged(self, number: int) -> bool:
        """Whether a remembered slot is as it was."""
        return chunk_digests(self.slot(number)) == self._sums[number]

    def changed(self) -> list[int]:
        """The remembered slots that are not as they were."""
        return [number for number in self._sums if not self.is_unchanged(number)]

    def forget(self) -> None:
        """Begin a new group: slots may be used again."""
        self._sums.clear()
