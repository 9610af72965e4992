"""Who takes part in the paired benchmark, and how each one is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from moonpool.bench.locations import import_directory
from moonpool.bench.peers_setup import load_peer, with_environment
from moonpool.errors import UsageError

Group = Literal["tcp", "shm"]

# -P: the checkout's own folders must not shadow packages; appended, so that a peer's own numpy comes first.
BOOTSTRAP: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from moonpool.bench.workers.main import main; main()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecipe:
    """How a pair of processes is started; contenders with equal recipes share one pair."""

    driver: str
    peer: str = ""  # name of its environment (peers_setup.py); "" is this interpreter
    options: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    cubic: bool = False
    spins_when_idle: bool = False  # its processes are stopped while another contender is measured

    def command(self, buffer_bytes: int, ceiling_directory: Path, peers: Path | None = None) -> list[str]:
        """The command line; raises ``UsageError`` when the peer's environment is not there."""
        python, environment = sys.executable, dict(self.environment)
        if self.peer:
            peer = load_peer(self.peer, peers)
            if peer is None:
                raise UsageError(f"not installed; run `python -m moonpool.bench.peers_setup {self.peer}`")
            python, environment = peer.python, environment | peer.environment
        options = dict(self.options)
        if self.driver == "ceilings":
            options["directory"] = str(ceiling_directory)
        words = [python, "-P", "-c", BOOTSTRAP, str(import_directory())]
        words += ["--driver", self.driver, "--size-bytes", str(buffer_bytes)]
        for name, value in options.items():
            words += ["--option", f"{name}={value}"]
        if self.cubic:
            words.append("--cubic")
        return with_environment(words, environment) if environment else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A column of the result."""

    name: str
    title: str
    group: Group
    recipe: ProcessRecipe
    variant: str = ""
    warmup_s: float = 0.0  # untimed work before each job, for one that is slow at first after a pause
    round_stride: int = (
        1  # takes part in every round_stride-th round: less for a slow one that no floor names
    )


SOCKET: Final = ProcessRecipe(driver="ceilings", options=(("program", "socket"),))
COPY: Final = ProcessRecipe(driver="ceilings", options=(("program", "copy"),))
OURS_TCP: Final = ProcessRecipe(driver="moonpool", options=(("transport", "tcp"),))
OURS_SHM: Final = ProcessRecipe(driver="moonpool", options=(("transport", "shm"),))
# glog's lines about every connection would cost Mooncake time.
QUIET: Final = (("GLOG_minloglevel", "3"),)

CONTENDERS: Final = (
    Contender(name="moonpool-tcp", title="Moonpool tcp", group="tcp", recipe=OURS_TCP),
    Contender(
        name="moonpool-tcp-digest", title="... with digests", group="tcp", recipe=OURS_TCP, variant="digest"
    ),
    Contender(
        name="mooncake13",
        title="Mooncake 0.3.13",
        group="tcp",
        recipe=ProcessRecipe(driver="mooncake", peer="mooncake-0.3.13", environment=QUIET),
    ),
    Contender(
        name="mooncake13-tuned",
        title="Mooncake tuned",
        group="tcp",
        recipe=ProcessRecipe(
            driver="mooncake",
            peer="mooncake-0.3.13",
            environment=(*QUIET, ("MC_TCP_SLICE_SIZE", "4194304"), ("MC_TCP_LANES_PER_PEER", "4")),
            cubic=True,
        ),
    ),
    Contender(
        name="nixl-tcp",
        title="NIXL tcp",
        group="tcp",
        recipe=ProcessRecipe(
            driver="nixl",
            peer="nixl-1.5.1",
            environment=(("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")),
            spins_when_idle=True,
        ),
        # Its spinning threads first share a CPU (8 ms an operation) until the scheduler has moved them apart.
        warmup_s=0.3,
        round_stride=3,
    ),
    Contender(name="c-blocking", title="C, blocking", group="tcp", recipe=SOCKET, variant="blocking"),
    Contender(name="c-spinning", title="C, spinning", group="tcp", recipe=SOCKET, variant="spinning"),
    Contender(name="moonpool-shm", title="Moonpool shm", group="shm", recipe=OURS_SHM),
    Contender(
        name="mooncake14-shm",
        title="Mooncake 0.3.14 shm",
        group="shm",
        recipe=ProcessRecipe(
            driver="mooncake",
            peer="mooncake-0.3.14",
            options=(("transport", "shm"),),
            environment=(*QUIET, ("MC_FORCE_SHM", "1")),
        ),
    ),
    Contender(
        name="nixl-cma",
        title="NIXL CMA",
        group="shm",
        recipe=ProcessRecipe(driver="nixl", peer="nixl-1.5.1", spins_when_idle=True),
    ),
    Contender(name="copy-memcpy", title="C memcpy", group="shm", recipe=COPY, variant="memcpy"),
    Contender(name="copy-avx2-nt", title="C AVX2 NT", group="shm", recipe=COPY, variant="avx2-nt"),
    Contender(name="copy-avx512-nt", title="C AVX-512 NT", group="shm", recipe=COPY, variant="avx512-nt"),
)
COPY_LOOPS: Final = tuple(contender.name for contender in CONTENDERS if contender.recipe == COPY)


def with_small_pages(contenders: tuple[Contender, ...]) -> tuple[Contender, ...]:
    """The same contenders; peers take their buffers as mmap gives them, without asking for huge pages.

    What a program does that calls mmap and hands the memory over. Without it they get the best there is.
    """
    small = ("pages", "4k")
    return tuple(
        replace(one, recipe=replace(one.recipe, options=(*one.recipe.options, small)))
        if one.recipe.peer
        else one
        for one in contenders
    )


def select(names: tuple[str, ...]) -> tuple[Contender, ...]:
    """The contenders of these names, all for none; raises ``UsageError`` for an unknown name."""
    known = {contender.name for contender in CONTENDERS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise UsageError(f"no contender is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(contender for contender in CONTENDERS if not names or contender.name in names)
