"""A thousand connections, half of them killed in the middle of a transfer, leave nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.fake_verbs.fabric import LIVE, FakeFabric, library_path
from tests.native.rdma_pairs import SETTINGS, fake_fabric, transport_of, wait_until

from moonpool import Engine, MoonpoolError, Op
from moonpool.native.verbs import devices

HERE = Path(__file__).resolve().parent
CYCLES = 1_000
#: What a cycle may leave in the process's memory, in bytes: far less than a queue pair or a region takes.
GROWTH_BYTES_PER_CYCLE = 2_000


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with fake_fabric() as made:
        yield made


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def one_cycle(initiator: Engine, target: Engine, mine: int, turn: int) -> None:
    """Open, transfer, and end: by closing the segment, or by the session's death under a running batch."""
    segment = initiator.open(target.endpoint)
    assert segment.paths[0].transport == "rdma"
    region = segment.regions[0].handle
    if turn % 2:
        initiator.read(segment, region, 0, mine, 4096)
    else:
        batch = initiator.submit(Op.WRITE, segment, mine, region, 0, 65_536)
        segment.peer.session.close()  # as when the owner's process is killed: its sockets close
        assert batch.wait(20)
    initiator.close_segment(segment)


def held(fabric: FakeFabric) -> tuple[dict[str, int], dict[str, int], int]:
    """What the binding and the fabric count, and the descriptors."""
    return (
        devices.live_objects(),
        {kind: fabric.live(kind) for kind in LIVE},
        len(os.listdir("/proc/self/fd")),
    )


def test_a_thousand_connects_and_kills_leave_nothing(fabric: FakeFabric) -> None:
    with (
        Engine(transports=("rdma", "tcp"), **SETTINGS) as target,
        Engine(transports=("rdma",), **SETTINGS) as initiator,
    ):
        target.allocate(1 << 20)
        mine = initiator.allocate(1 << 20).address

        def settled() -> bool:
            links = transport_of(initiator).links()
            return not links and transport_of(target).counters()["peer_queue_pairs"] == 0

        for turn in range(20):
            one_cycle(initiator, target, mine, turn)
        wait_until(settled, "links and queue pairs of the first cycles go")
        gc.collect()
        before, memory = held(fabric), resident_bytes()
        for turn in range(CYCLES):
            one_cycle(initiator, target, mine, turn)
        wait_until(settled, "links and queue pairs go")
        gc.collect()
        wait_until(lambda: held(fabric) == before, f"{before} before, {held(fabric)} after")
        assert transport_of(initiator).counters()["bounce_slots_unused"] == 64
        grown = resident_bytes() - memory
        assert grown < CYCLES * GROWTH_BYTES_PER_CYCLE, f"{grown} bytes more after {CYCLES} cycles"


def test_peers_that_come_back_under_their_name(fabric: FakeFabric) -> None:
    """Owners that end and come back: the initiator's link to each goes with it, and a new one is made."""
    with Engine(transports=("rdma",), **SETTINGS) as initiator:
        mine = initiator.allocate(1 << 20)
        port = 0
        for turn in range(5):
            with Engine(transports=("rdma", "tcp"), port=port, **SETTINGS) as target:
                port = int(target.endpoint.rpartition(":")[2])
                region = target.allocate(4096)
                region.view[:4] = turn.to_bytes(4, "little")
                segment = initiator.open(target.endpoint)
                initiator.read(segment, region.handle, 0, mine.address, 4096)
                assert int.from_bytes(mine.view[:4], "little") == turn
                del region
            with pytest.raises(MoonpoolError):
                initiator.read(segment, segment.regions[0].handle, 0, mine.address, 4096)
        wait_until(lambda: not transport_of(initiator).links(), "all links are gone")
        del mine, segment


def test_owners_that_are_killed_under_transfers(tmp_path: Path) -> None:
    """In processes of their own: batches end with PEER_GONE, and the initiator keeps nothing of the dead."""
    command = [sys.executable, str(HERE / "rdma_two_processes.py"), "initiator", library_path()]
    environment = {**os.environ, "FAKE_VERBS_SHARE": str(tmp_path / "fabric")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
