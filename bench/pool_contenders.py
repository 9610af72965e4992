"""Who takes part in the pool benchmark, and how each one's worker is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.bench import pool_cells
from moonpool.bench.contenders import QUIET
from moonpool.bench.locations import import_directory
from moonpool.bench.peers_setup import load_peer, with_environment
from moonpool.errors import UsageError
from moonpool.units import MIB

# -P: the checkout's own folders must not shadow packages; appended, so that a peer's own numpy comes first.
BOOTSTRAP: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from moonpool.bench.workers.pool_main import main; main()"
)
CAPACITY_BYTES: Final = 512 * MIB
"""Payload of a store at once; every contender has twice as much memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecipe:
    """How a worker is started; contenders with equal recipes share one."""

    driver: str
    peer: str = ""  # name of its environment (peers_setup.py); "" is this interpreter
    options: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, peers: Path | None = None, capacity_bytes: int = CAPACITY_BYTES) -> list[str]:
        """The command line; raises ``UsageError`` when the peer's environment is not there."""
        python, environment = sys.executable, dict(self.environment)
        if self.peer:
            peer = load_peer(self.peer, peers)
            if peer is None:
                raise UsageError(f"not installed; run `python -m moonpool.bench.peers_setup {self.peer}`")
            python, environment = peer.python, environment | peer.environment
        words = [python, "-P", "-c", BOOTSTRAP, str(import_directory()), "--driver", self.driver]
        options = {"imports": str(import_directory()), "capacity": str(capacity_bytes), **dict(self.options)}
        for name, value in options.items():
            words += ["--option", f"{name}={value}"]
        return with_environment(words, environment) if environment else words


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContender:
    """Somebody who is measured: a worker, and which of its clients."""

    name: str
    title: str
    recipe: PoolRecipe
    variant: str = ""


POOL: Final = PoolRecipe(driver="moonpool")
MOONPOOL_LOCAL: Final = PoolRecipe(driver="moonpool", options=(("own", "yes"),))
MOONPOOL_SYNC: Final = PoolRecipe(driver="moonpool", options=(("durability", "sync"),))
RH: Final = PoolRecipe(driver="redhare", peer="redhare-0.6.0")


def _mooncake(kind: str) -> PoolRecipe:
    environment = (*QUIET, ("MC_STORE_CLIENT_METRIC", "0"))
    return PoolRecipe(
        driver="mooncake", peer="mooncake-0.3.13", options=(("kind", kind),), environment=environment
    )


CONTENDERS: Final = (
    PoolContender(name=pool_cells.SHM, title="Moonpool, shared memory", recipe=POOL, variant="shm"),
    PoolContender(name=pool_cells.CACHED, title="Moonpool, location cache", recipe=POOL, variant="cached"),
    PoolContender(name=pool_cells.TCP, title="Moonpool, tcp", recipe=POOL, variant="tcp"),
    PoolContender(name=pool_cells.LOCAL, title="Moonpool, own segment", recipe=MOONPOOL_LOCAL, variant="own"),
    PoolContender(name=pool_cells.SYNC, title="Moonpool, sync", recipe=MOONPOOL_SYNC, variant="shm"),
    PoolContender(name=pool_cells.DUMMY, title="Mooncake 0.3.13, dummy client", recipe=_mooncake("dummy")),
    PoolContender(name=pool_cells.EMBEDDED, title="Mooncake 0.3.13, embedded", recipe=_mooncake("local")),
    PoolContender(name=pool_cells.REMOTE, title="Mooncake 0.3.13, tcp", recipe=_mooncake("remote")),
    PoolContender(name=pool_cells.REDHARE, title="redhare 0.6.0, own memory", recipe=RH, variant="local"),
    PoolContender(name=pool_cells.REDHARE_REMOTE, title="redhare 0.6.0, tcp", recipe=RH, variant="remote"),
)


def select(names: tuple[str, ...]) -> tuple[PoolContender, ...]:
    """The contenders of these names, all for none; raises ``UsageError`` for an unknown name."""
    known = {contender.name for contender in CONTENDERS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise UsageError(f"no contender is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(contender for contender in CONTENDERS if not names or contender.name in names)
