"""A namespace that goes away and comes back in every way that the lab can make: bytes are right afterwards.

Times are bounds that the transport states, with room for the emulated machine; none is a claim of speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from nvme_target import (
    ADDRESS,
    NQN,
    OTHER_ADDRESS,
    add_port,
    fds,
    pull_cable,
    quick_options,
    serve,
    show_namespace,
    wait_until,
)

from moonpool import Access, Engine, Region, Segment
from moonpool.errors import MoonpoolError, PeerGone, PeerStalled, TransferTimeout
from moonpool.transport.nvme_fabrics import Attached, attach, detach
from moonpool.transport.nvme_sysfs import find_namespace, read_subsystems

SIZE = 2 << 20
#: Kernel timers tick in whole seconds, and the machine is slow.
ROOM_S = 20.0


@dataclass
class Pool:
    """An owner and an initiator in this process, and a region of the namespace between them."""

    owner: Engine
    initiator: Engine
    region: Region
    segment: Segment

    def counters(self) -> dict[str, int]:
        return dict(self.initiator._by_name["nvmeof"].counters())


@contextlib.contextmanager
def open_pool(**config: Any) -> Iterator[Pool]:
    config = {"nvmeof_command_timeout_ms": 6_000, "nvmeof_reconnect_ms": 60_000} | config
    (namespace,) = next(one for one in read_subsystems() if one.nqn == NQN).namespaces
    with (
        Engine(transports=("nvmeof",), **config) as initiator,
        Engine(transports=("nvmeof", "tcp"), **config) as owner,
    ):
        region = owner.offer(f"nvme:{namespace.wwid}", SIZE, offset=1 << 20)
        yield Pool(owner, initiator, region, initiator.open(owner.endpoint))


class Traffic:
    """Writes and reads back random bytes on a thread until told to stop; remembers the first problem."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._chance = random.Random(7)
        self._stop = threading.Event()
        self.problem: BaseException | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        pool, out = self._pool, bytearray(SIZE)
        try:
            while not self._stop.is_set():
                size = self._chance.choice([4096, 70_000, SIZE])
                offset = self._chance.randrange((SIZE - size) // 512 + 1) * 512
                data = self._chance.randbytes(size)
                pool.initiator.write(pool.segment, pool.region.handle, offset, data, timeout_s=120)
                view = memoryview(out)[:size]
                pool.initiator.read(pool.segment, pool.region.handle, offset, view, timeout_s=120)
                assert view == data, f"round {self.rounds}: other bytes came back"
                self.rounds += 1
        except BaseException as problem:
            self.problem = problem

    def __enter__(self) -> Traffic:
        self._thread.start()
        self.more(2)
        return self

    def more(self, rounds: int) -> None:
        """Waits until so many more rounds went well."""
        wanted = self.rounds + rounds
        wait_until(lambda: self.rounds >= wanted or self.problem is not None, f"{rounds} rounds", 150)
        assert self.problem is None, repr(self.problem)

    def __exit__(self, *_problem: object) -> None:
        self._stop.set()
        self._thread.join(150)
        assert not self._thread.is_alive()
        assert self.problem is None, repr(self.problem)


WAYS = pytest.mark.parametrize("passthrough", ["yes", "no"])


@WAYS
def test_the_target_goes_and_comes_back(attached: Attached, passthrough: str) -> None:
    """Connections are cut under a batch, the controller reconnects, and the caller sees no error."""
    assert attached.is_new
    with open_pool(nvmeof_passthrough=passthrough) as pool, Traffic(pool) as traffic:
        serve(False)
        wait_until(lambda: not is_live(), "the controller notices")
        serve(True)
        wait_until(is_live, "the controller reconnects")
        traffic.more(3)
        if passthrough == "yes":
            assert pool.counters()["ways_found"] >= 1


@WAYS
def test_the_namespace_is_taken_away_and_given_back(attached: Attached, passthrough: str) -> None:
    """The device itself goes, and another appears: it is found by what it is."""
    (before,) = attached.subsystem.namespaces
    with open_pool(nvmeof_passthrough=passthrough) as pool, Traffic(pool) as traffic:
        show_namespace(False)
        wait_until(lambda: namespace_now(before) is None, "the device goes")
        show_namespace(True)
        wait_until(lambda: namespace_now(before) is not None, "a device comes")
        traffic.more(3)
        assert pool.counters()["ways_found"] >= 1
        assert namespace_now(before).appearance != before.appearance


@WAYS
def test_a_controller_lost_for_good_ends_batches_and_another_is_found(
    attached: Attached, transport: str, passthrough: str
) -> None:
    with open_pool(nvmeof_passthrough=passthrough, nvmeof_reconnect_ms=2_000) as pool:
        data = os.urandom(100_000)
        pool.initiator.write(pool.segment, pool.region.handle, 512, data)
        detach(NQN, 30.0)
        started = time.monotonic()
        with pytest.raises(PeerGone):
            pool.initiator.read(pool.segment, pool.region.handle, 512, bytearray(100_000), timeout_s=100)
        assert time.monotonic() - started < 2.0 + ROOM_S
        attach(quick_options(transport), 30.0)
        out = bytearray(100_000)
        pool.initiator.read(pool.segment, pool.region.handle, 512, out, timeout_s=60)
        assert out == data
    assert not attached.controller.may_return


@WAYS
def test_a_pulled_cable_ends_batches_by_their_deadline(attached: Attached, passthrough: str) -> None:
    """Nothing answers: commands come back when their timeout, set from the deadline, is over."""
    assert attached.controller.is_live
    with open_pool(nvmeof_passthrough=passthrough, nvmeof_reconnect_ms=5_000) as pool:
        data = os.urandom(SIZE)
        pool.initiator.write(pool.segment, pool.region.handle, 0, data)
        pull_cable(True)
        target = bytearray(SIZE)
        started = time.monotonic()
        with pytest.raises((TransferTimeout, PeerStalled, PeerGone)):
            pool.initiator.read(pool.segment, pool.region.handle, 0, target, timeout_s=4.0)
        took_s = time.monotonic() - started
        # The deadline, the shortest timeout of a command, and two ticks of the kernel's timers; the block
        # device has the controller's fail-fast time in place of a timeout of ours.
        assert took_s < 4.0 + 2.0 + 2.0 + ROOM_S
        after = bytes(target)
        pull_cable(False)
        wait_until(is_live, "the controller reconnects")
        assert bytes(target) == after, "bytes landed after the batch had ended"
        out = bytearray(SIZE)
        pool.initiator.read(pool.segment, pool.region.handle, 0, out, timeout_s=60)
        assert out == data


def test_one_of_two_ways_goes(attached: Attached, transport: str) -> None:
    """With a second controller the same commands go by the other way at once."""
    assert len(attached.subsystem.controllers) == 1
    add_port(2, transport, OTHER_ADDRESS)
    try:
        attach(quick_options(transport, OTHER_ADDRESS), 30.0)
        with open_pool() as pool, Traffic(pool) as traffic:
            for port in (1, 2):
                serve(False, port)
                wait_until(lambda: len(live_controllers()) == 1, "one controller notices")
                traffic.more(3)
                serve(True, port)
                wait_until(lambda: len(live_controllers()) == 2, "it comes back")
    finally:
        serve(False, 2)


def test_a_peer_attaches_what_its_config_allows(attached: Attached) -> None:
    assert attached.controller.is_live
    with Engine(transports=("nvmeof", "tcp")) as owner:
        (namespace,) = attached.subsystem.namespaces
        region = owner.offer(f"nvme:{namespace.wwid}", 4096)
        detach(NQN, 30.0)
        wait_until(lambda: namespace_now(namespace) is None, "the controller goes")
        with Engine(transports=("nvmeof",)) as careful:
            segment = careful.open(owner.endpoint)
            (why,) = {text for (_handle, name), text in segment.unreachable.items() if name == "nvmeof"}
            assert f"moonpool nvmf attach {NQN} --address {ADDRESS}" in why
        allowed: dict[str, Any] = {"nvmeof_attach": ("10.99.0.0/24",), "connect_timeout_ms": 30_000}
        with Engine(transports=("nvmeof",), **allowed) as initiator:
            segment = initiator.open(owner.endpoint)
            assert segment.unreachable == {}
            initiator.write(segment, region.handle, 0, b"attached" * 512, timeout_s=60)
            own = owner.open(owner.endpoint)
            out = bytearray(4096)
            owner.read(own, region.handle, 0, out, timeout_s=60)
            assert out == b"attached" * 512
            assert initiator._by_name["nvmeof"].counters()["attached"] == 1


OWNER = """
import sys
from moonpool import Engine
with Engine(transports=("nvmeof", "tcp")) as owner:
    region = owner.offer("nvme:" + sys.argv[1], 1 << 20)
    print(owner.endpoint, region.handle, flush=True)
    sys.stdin.read()
"""


def test_an_owner_killed_under_a_batch(attached: Attached) -> None:
    """The device lives on, but who guards the region does not: batches end with PEER_GONE, nothing leaks."""
    (namespace,) = attached.subsystem.namespaces
    with Engine(transports=("nvmeof",), nvmeof_command_timeout_ms=6_000) as initiator:
        counts = []
        for _ in range(2):
            owner = subprocess.Popen(
                [sys.executable, "-c", OWNER, namespace.wwid],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert owner.stdout is not None
            assert owner.stdin is not None
            endpoint, handle = owner.stdout.readline().split()
            segment = initiator.open(endpoint)
            data = os.urandom(1 << 20)
            problems: list[MoonpoolError] = []

            def write(
                segment: Segment = segment,
                handle: int = int(handle),
                data: bytes = data,
                problems: list[MoonpoolError] = problems,
            ) -> None:
                try:
                    while True:
                        initiator.write(segment, handle, 0, data, timeout_s=60)
                except MoonpoolError as problem:
                    problems.append(problem)

            thread = threading.Thread(target=write)
            thread.start()
            owner.send_signal(signal.SIGKILL)
            owner.wait(30)
            thread.join(60)
            assert not thread.is_alive()
            assert list(map(type, problems)) == [PeerGone]
            initiator.close_segment(segment)
            owner.stdin.close()
            owner.stdout.close()
            counts.append(fds())
        assert counts[0] == counts[1]


def test_the_command_line_tells_what_is_there(attached: Attached) -> None:
    """`moonpool nvmf list` before and after; attaching twice and detaching twice are no errors."""
    moonpool = str(Path(sys.executable).with_name("moonpool"))

    def run(*arguments: str) -> tuple[int, Any]:
        done = subprocess.run(
            [moonpool, "nvmf", *arguments, "--json"], capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else None

    code, listed = run("list")
    (subsystem,) = listed
    (namespace,) = attached.subsystem.namespaces
    assert code == 0
    assert subsystem["nqn"] == NQN
    assert subsystem["controllers"][0]["state"] == "live"
    assert subsystem["namespaces"][0]["wwid"] == namespace.wwid
    target = ("--address", ADDRESS, "--transport", attached.controller.transport)
    code, again = run("attach", NQN, *target, "--host-nqn", "nqn.2026-01.lab:host")
    assert code == 0
    assert not again["attached"]
    assert run("detach", NQN) == (0, {"detached": [attached.controller.name]})
    assert run("detach", NQN) == (1, {"detached": []})
    code, listed = run("list")
    assert code == 0
    assert listed == []


def test_what_a_host_uses_itself_is_not_offered(attached: Attached, tmp_path: Path) -> None:
    (namespace,) = attached.subsystem.namespaces
    fd = os.open(f"/dev/{namespace.block_name}", os.O_RDONLY | os.O_EXCL)
    try:
        with (
            Engine(transports=("nvmeof",)) as owner,
            pytest.raises(OSError, match="in use on this host"),
        ):
            owner.offer(f"nvme:{namespace.block_name}", 4096, access=Access.READ)
    finally:
        os.close(fd)


def is_live() -> bool:
    return bool(live_controllers())


def live_controllers() -> list[str]:
    return [
        controller.name
        for subsystem in read_subsystems()
        for controller in subsystem.controllers
        if subsystem.nqn == NQN and controller.is_live
    ]


def namespace_now(before: Any) -> Any:
    return find_namespace(read_subsystems(), before.subsystem_nqn, before.nsid, before.wwid)
