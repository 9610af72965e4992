"""Which world a seed stands for, how it is run, and what is said when it fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simworld.core import CoreOptions
from simworld.faults import FAULTS
from simworld.loop import SECOND
from simworld.workloads import WORKLOADS
from simworld.world import World, WorldOptions

ACTIVE_US = 3 * SECOND
#: Faults when the kept seeds were found: what a seed means beside workload and fault must not change.
_FAULTS_THEN = 12
SEEDS_FILE = Path(__file__).resolve().parents[1] / "seeds.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of one seed came to."""

    seed: int
    name: str
    steps: int
    trace: tuple[int, ...]
    notes: dict[str, int]
    active_s: float
    #: The kind of error and its text; empty when everything held.
    broken: str

    @property
    def command(self) -> str:
        """How to see it again."""
        workload, fault = self.name.split()
        where = f"--seed {self.seed} --workload {workload} --fault {fault} --seconds {self.active_s:g}"
        return f".venv/bin/python tests/sim/run.py {where}"

    def told(self) -> str:
        """One line about a failure, with the command."""
        return f"seed={self.seed} ({self.name}) step {self.steps}: {self.broken}\n    {self.command}"


def world_of(
    seed: int, *, native: bool | None = None, active_us: int = ACTIVE_US, names: tuple[str, str] | None = None
) -> World:
    """The world that a seed stands for: workload and fault take turns unless they are named."""
    workload = WORKLOADS[seed % len(WORKLOADS)]
    fault = FAULTS[seed // len(WORKLOADS) % len(FAULTS)]
    if names is not None:
        workload = next(one for one in WORKLOADS if one.name == names[0])
        fault = next(one for one in FAULTS if one.name == names[1])
    turn = seed // (len(WORKLOADS) * _FAULTS_THEN)
    core = CoreOptions(
        native=turn % 2 == 1 if native is None else native, policy=("lru", "s3fifo")[turn // 2 % 2]
    )
    return World(WorldOptions(seed=seed, workload=workload, fault=fault, core=core, active_us=active_us))


def run_seed(
    seed: int, *, native: bool | None = None, active_us: int = ACTIVE_US, names: tuple[str, str] | None = None
) -> Outcome:
    """Runs one seed to its end; an error is an outcome too."""
    world = world_of(seed, native=native, active_us=active_us, names=names)
    name = f"{world.options.workload.name} {world.options.fault.name}"
    broken = ""
    try:
        world.run()
    except Exception as error:  # whatever goes wrong in a world is a finding
        broken = f"{type(error).__name__}: {error}"
    finally:
        world.close()
    return Outcome(
        seed, name, world.loop.steps, tuple(world.watch.trace), dict(world.notes), active_us / SECOND, broken
    )


def kept_seeds() -> list[tuple[int, str, str]]:
    """What failed once: seed, workload and fault."""
    rows = [line.split("#")[0].split() for line in SEEDS_FILE.read_text().splitlines()]
    return [(int(row[0]), row[1], row[2]) for row in rows if row]
