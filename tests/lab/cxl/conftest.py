"""Far memory of the lab's machine, and processes that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.topology import DaxDevice, Topology, read_topology

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60


@pytest.fixture(scope="session")
def topology() -> Topology:
    if "LAB_GUEST" not in os.environ:
        pytest.skip("needs the lab: tests/lab/run.py --cxl 256")
    return read_topology()


@pytest.fixture(scope="session")
def dax(topology: Topology) -> DaxDevice:
    """The device that can be mapped."""
    found = [one for one in topology.dax_devices if one.mappable]
    if not found:
        pytest.skip("needs the lab: tests/lab/run.py --cxl 256 (mode dax or type3)")
    return found[0]


class Peer:
    """A `far_peer.py` process; `said` is its first line."""

    def __init__(self, *words: str, before: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, str(HERE / "far_peer.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().split()
        if not self.said:
            self.close()
            pytest.fail(f"{words[0]} ended with {self.process.returncode}: see its error output")

    def say(self) -> None:
        """The line that ends it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """As kill -9."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Let it end by itself, and wait."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(TIMEOUT_S)


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Makes peers; those that still run at the end are killed."""
    made: list[Peer] = []

    def make(*words: str, before: tuple[str, ...] = ()) -> Peer:
        made.append(Peer(*words, before=before))
        return made[-1]

    yield make
    for peer in made:
        if peer.process.poll() is None:
            peer.kill()
