"""What an endurance run does: the kinds of cycles, drawn from a seed, and the bound of each step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, final

from moonpool.units import KIB, MIB

Kind: TypeAlias = Literal["kill target", "kill initiator", "stop target", "pause target", "clean"]
KINDS: Final[tuple[Kind, ...]] = ("kill target", "kill initiator", "stop target", "pause target", "clean")
#: The initiator's ways; each is an engine of its own in the process under observation.
WAYS: Final = ("shm", "tcp", "tcp-io_uring")
WARMUP_CYCLES: Final = 20

#: A region of the cycles' processes: checked bytes at the start, bulk behind them.
REGION_BYTES: Final = 16 * MIB
CHECKED_BYTES: Final = 64 * KIB
BULK_AT: Final = 8 * MIB
#: One batch of a cycle: long enough to be under way when the signal comes.
BULK_COUNT: Final = 32
DELAY_MS_MAX: Final = 8.0
STOP_MS: Final = (10.0, 60.0)

#: Settings of the impatient initiator: the stall comes before the longer deadline, after the shorter.
STALL_MS: Final = 250
DEADLINE_SHORT_MS: Final = 150
DEADLINE_LONG_MS: Final = 20_000

#: Step → the longest it may take, in ms. For "batch ends after stop" beyond its deadline or stall time.
BOUNDS_MS: Final = MappingProxyType(
    {
        "batch ends after kill": 1_000.0,
        "dead segment closes": 1_000.0,
        "batch ends after stop": 1_000.0,
        "paused batch completes": 5_000.0,
        "transfers work again": 3_000.0,
        "target forgets dead initiator": 2_000.0,
        "new initiator transfers": 3_000.0,
        "engine made, used and closed": 3_000.0,
    }
)


@final
@dataclass(frozen=True, slots=True)
class Slack:
    """How much more the processes under observation may have at the end than after warm-up.

    Descriptors, threads and shared memory: none. Python's allocator and libc keep arenas and stacks for
    later, so mappings and private bytes have a little; both are far below one region a cycle.
    """

    mappings: int = 16
    private_bytes: int = 16 * MIB


@final
@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle. `delay_ms` from the batch's start to the signal, `stop_ms` to SIGCONT when it is paused."""

    number: int
    kind: Kind
    way: str
    is_write: bool
    delay_ms: float
    stop_ms: float
    is_stall: bool


def draw_cycle(seed: int, number: int) -> Cycle:
    """The cycle of a seed and a number; the first ones are each kind on each way, in turn."""
    choice = random.Random(f"{seed}:{number}")
    kind, way = choice.choice(KINDS), choice.choice(WAYS)
    if number < len(KINDS) * len(WAYS):
        kind, way = KINDS[number % len(KINDS)], WAYS[number // len(KINDS)]
    return Cycle(
        number=number,
        kind=kind,
        way=way,
        is_write=choice.random() < 0.5,
        delay_ms=choice.uniform(0.0, DELAY_MS_MAX),
        stop_ms=choice.uniform(*STOP_MS),
        is_stall=choice.random() < 0.5,
    )
