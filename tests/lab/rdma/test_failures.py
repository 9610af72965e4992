"""Rails, peers and packets that go, on soft-RoCE: bytes verified after each, times in pings of the lab.

tests/lab/run.py --rdma 4 -- .venv/bin/pytest -q -s --noconftest tests/lab/rdma/test_failures.py

A ping is a READ of 64 bytes. Both engines live in one guest. With four devices each has two of its own; a
cable pulled at our end brings an event, one at the far end shows only by retries that are exhausted. With two
devices each engine has both, crossed, so that every rail goes over the wire: a cable is then of both rails.
soft-RoCE never exhausts 7 retries, so only the run with lost packets asks for so many.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from moonpool import Engine, Op, PeerGone, Region, Segment

pytestmark = pytest.mark.skipif(os.environ.get("LAB_GUEST") != "1", reason="needs the lab (--rdma 4)")

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20
WAIT_S: Final = 60.0
PATIENT: Final[dict[str, Any]] = {
    "rdma_timeout": 17,
    "rdma_retries": 3,
    "transfer_timeout_ms": 150_000,
    "stall_timeout_ms": 60_000,
    "connect_timeout_ms": 20_000,
    "handshake_timeout_ms": 20_000,
}
DEVICES: Final = sorted(path.name for path in Path("/sys/class/infiniband").glob("rxe*"))


def pattern(size: int, seed: int) -> bytes:
    """Bytes that depend on their position in 64 KiB and on the seed."""
    unit = b"".join(
        ((k * 2_654_435_761 + seed * 40_503) & 0xFFFFFFFF).to_bytes(4, "little") for k in range(16_384)
    )
    whole = bytearray()
    for block in range(-(-size // len(unit))):
        shift = (block * 251 + seed) % len(unit)
        whole += unit[shift:] + unit[:shift]
    return bytes(whole[:size])


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.005)


@dataclass
class Ends:
    """Two engines, a region of each, and the segment between them."""

    initiator: Engine
    target: Engine
    segment: Segment
    region: Region
    mine: Region
    ping_s: float = 0.0

    def rails(self) -> list[Any]:
        (link,) = self.initiator._by_name["rdma"].links()  # type: ignore[attr-defined]
        return list(link.rails())

    def states(self) -> list[str]:
        return [rail.state for rail in self.rails()]

    def carried(self) -> list[int]:
        return [rail.bytes_read + rail.bytes_written for rail in self.rails()]

    def by_tcp(self) -> int:
        (path,) = (path for path in self.segment.paths if path.transport == "tcp")
        stats = self.segment.native.path_stats(path.id)
        return int(stats["READ"]["bytes"] + stats["WRITE"]["bytes"])

    def tell(self, what: str, seconds: float) -> None:
        print(f"lab rdma: {what}: {seconds / self.ping_s:.0f} pings ({seconds:.2f} s)", flush=True)

    def move(
        self, op: Op, seed: int, meanwhile: Callable[[], None] | None = None, *, rounds: int = 1
    ) -> float:
        """The whole region so many times, verified at both ends; `meanwhile` happens under it."""
        size = self.region.size_bytes
        source, sink = (self.region, self.mine) if op is Op.READ else (self.mine, self.region)
        expected = pattern(size, seed)
        source.view[:] = expected
        sink.view[:] = bytes(size)
        before, started = sum(self.carried()), time.monotonic()
        batch = self.initiator.submit(
            op, self.segment, [self.mine.address] * rounds, self.region.handle, 0, size, timeout_s=WAIT_S * 2
        )
        if meanwhile is not None:
            wait_until(lambda: batch.done or sum(self.carried()) > before, "the batch runs")
            assert not batch.done, "it was too quick: nothing was pulled under it"
            meanwhile()
            assert not batch.done, "it was over before everything was pulled"
        assert batch.wait(WAIT_S * 2)
        batch.check()
        took_s = time.monotonic() - started
        assert bytes(sink.view) == expected
        assert bytes(source.view) == expected
        return took_s


@contextlib.contextmanager
def two_ends(size: int = 8 * MIB, **changes: Any) -> Iterator[Ends]:
    """Both engines over both devices, crossed, or over halves of four."""
    ours, theirs = (DEVICES, DEVICES[::-1]) if len(DEVICES) < 4 else (DEVICES[:2], DEVICES[2:4])
    config = {**PATIENT, **changes}
    with (
        Engine(transports=("rdma", "tcp"), rdma_devices=tuple(theirs), **config) as target,
        Engine(transports=("rdma", "tcp"), rdma_devices=tuple(ours), **config) as initiator,
    ):
        ends = Ends(
            initiator,
            target,
            initiator.open(target.endpoint),
            target.allocate(size),
            initiator.allocate(size),
        )
        assert ends.segment.paths[0].transport == "rdma"
        initiator.refresh(ends.segment)
        wait_until(lambda: ends.states()[:2] == ["up", "up"], "both rails are up")
        started = time.monotonic()
        for _ in range(20):
            initiator.read(ends.segment, ends.region.handle, 0, ends.mine.address, 64)
        ends.ping_s = (time.monotonic() - started) / 20
        yield ends


def cable(number: int, up: bool) -> None:
    """Plug the far end of labN in, or pull it."""
    subprocess.run(["ip", "link", "set", f"port{number}", "up" if up else "down"], check=True, timeout=20)


@pytest.fixture(autouse=True)
def _cables() -> Iterator[None]:
    yield
    for number in range(len(DEVICES)):
        cable(number, True)
        subprocess.run(
            ["tc", "qdisc", "del", "dev", f"port{number}", "root"],
            check=False,
            timeout=20,
            capture_output=True,
        )


def test_bytes_go_over_all_rails() -> None:
    with two_ends() as ends:
        for op in (Op.READ, Op.WRITE):
            ends.tell(f"8 MiB {op.name}", ends.move(op, int(op)))
        assert all(rail.bytes_read and rail.bytes_written for rail in ends.rails())
        assert ends.by_tcp() == 0
        print("lab rdma: bytes by rail", ends.carried(), flush=True)


four_devices = pytest.mark.skipif(len(DEVICES) < 4, reason="needs the lab (--rdma 4)")


@four_devices
def test_one_of_two_rails_is_pulled_and_comes_back() -> None:
    with two_ends(16 * MIB) as ends:
        assert {(rail.local_nic, rail.remote_nic) for rail in ends.rails()} == {(0, 0), (1, 1)}
        ends.tell("96 MiB over two rails", ends.move(Op.WRITE, 1, rounds=6))
        took = ends.move(Op.WRITE, 2, lambda: cable(1, False), rounds=6)
        ends.tell("96 MiB, one of two rails pulled at our end under it", took)
        assert ends.by_tcp() == 0, "the other rail carried the rest"
        assert ends.states() == ["up", "broken"]
        alone = ends.carried()[1]
        ends.move(Op.READ, 3)
        assert ends.carried()[1] == alone
        started = time.monotonic()
        cable(1, True)
        wait_until(lambda: ends.states()[:2] == ["up", "up"], "the rail is back")
        ends.tell("a rail is used again after its cable is back", time.monotonic() - started)
        ends.move(Op.READ, 4)
        assert ends.carried()[1] > alone


@four_devices
def test_the_far_end_of_a_rail_is_pulled() -> None:
    with two_ends(16 * MIB) as ends:
        took = ends.move(Op.WRITE, 7, lambda: cable(3, False), rounds=6)
        ends.tell("96 MiB, a rail pulled at the far end under it: found out by retries (0.5 s x 4)", took)
        assert ends.by_tcp() == 0
        assert ends.states()[0] == "up"
        assert ends.rails()[1].breaks >= 1
        started = time.monotonic()
        cable(3, True)
        wait_until(lambda: ends.states()[:2] == ["up", "up"], "the rail is back")
        ends.tell("it is used again, with no event to tell of it", time.monotonic() - started)
        alone = ends.carried()[1]
        ends.move(Op.READ, 8)
        assert ends.carried()[1] > alone


@four_devices
def test_both_rails_are_pulled_and_tcp_takes_over() -> None:
    with two_ends(16 * MIB) as ends:

        def pull_both() -> None:
            cable(0, False)
            cable(1, False)

        took = ends.move(Op.WRITE, 5, pull_both, rounds=8)
        ends.tell("128 MiB, both rails pulled under it, the rest by tcp", took)
        assert ends.by_tcp() > 0
        cable(0, True)
        cable(1, True)
        wait_until(lambda: ends.states()[:2] == ["up", "up"], "both rails are back")
        before = ends.by_tcp()
        ends.move(Op.READ, 6)
        assert ends.by_tcp() == before


def test_five_percent_of_packets_are_lost() -> None:
    with two_ends(rdma_retries=7) as ends:
        for number in range(len(DEVICES)):
            subprocess.run(
                ["tc", "qdisc", "add", "dev", f"port{number}", "root", "netem", "loss", "5%"],
                check=True,
                timeout=20,
            )
        ends.tell("8 MiB with 5 % of packets lost", ends.move(Op.WRITE, 9))


def test_a_killed_peer_ends_batches_and_leaves_nothing() -> None:
    command = [sys.executable, str(HERE / "peer.py"), str(16 * MIB), *DEVICES]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    alarm = threading.Timer(WAIT_S, child.kill)
    alarm.start()
    try:
        endpoint, handle = child.stdout.readline().split()
        with Engine(transports=("rdma", "tcp"), **PATIENT) as engine:
            mine = engine.allocate(16 * MIB)
            segment = engine.open(endpoint)
            started = time.monotonic()
            for _ in range(20):
                engine.read(segment, int(handle), 0, mine.address, 64)
            ping_s = (time.monotonic() - started) / 20
            batch = engine.submit(
                Op.WRITE, segment, [mine.address] * 64, int(handle), 0, 16 * MIB, timeout_s=WAIT_S
            )
            transport: Any = engine._by_name["rdma"]
            wait_until(lambda: transport.counters()["bounce_slots_unused"] == 64, "the transport answers")
            time.sleep(20 * ping_s)
            assert not batch.done
            started = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            child.wait(20)
            assert batch.wait(WAIT_S)
            took = time.monotonic() - started
            print(f"lab rdma: PEER_GONE {took / ping_s:.0f} pings after the kill ({took:.2f} s)", flush=True)
            with pytest.raises(PeerGone):
                batch.check()
            mine.view[:] = bytes(16 * MIB)
            wait_until(lambda: not transport.links(), "its link is gone")
            counters = transport.counters()
            assert counters["rails"] == 0
            assert counters["bounce_slots_unused"] == 64
            from moonpool.native.verbs.devices import live_objects

            assert live_objects()["queue_pairs"] == 0
    finally:
        alarm.cancel()
        child.kill()
        child.wait(20)
        child.stdin.close()
        child.stdout.close()


def kernel_objects() -> dict[str, int]:
    """Queue pairs, regions, completion queues and contexts that the kernel holds, over all devices."""
    shown = subprocess.run(
        ["rdma", "resource", "show"], check=True, timeout=20, capture_output=True, text=True
    )
    words = shown.stdout.split()
    found = dict.fromkeys(("pd", "cq", "qp", "mr", "ctx"), 0)
    for name, count in itertools.pairwise(words):
        if name in found:
            found[name] += int(count)
    return found


def test_connections_come_and_go_and_leave_nothing() -> None:
    """Opened, used, and cut off by the death of their session; nothing stays, as the kernel counts."""
    with two_ends(MIB) as ends:
        ends.initiator.close_segment(ends.segment)
        transport: Any = ends.initiator._by_name["rdma"]
        wait_until(lambda: not transport.links(), "the first link is gone")
        before, mine = kernel_objects(), ends.mine.address
        for turn in range(16):
            segment = ends.initiator.open(ends.target.endpoint)
            assert segment.paths[0].transport == "rdma"
            batch = ends.initiator.submit(Op.READ, segment, mine, ends.region.handle, 0, MIB)
            if turn % 2:
                segment.peer.session.close()  # as when its process is killed
            assert batch.wait(WAIT_S)
            ends.initiator.close_segment(segment)
        wait_until(lambda: not transport.links(), "all links are gone")
        wait_until(lambda: kernel_objects() == before, f"{before} before, {kernel_objects()} after")
        print("lab rdma: the kernel holds what it held before 16 connections:", before, flush=True)
