"""DAX devices of the lab: offered, mapped by other processes, locked, killed, shared between hosts."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from moonpool import (
    Access,
    AccessDenied,
    Engine,
    MoonpoolError,
    PeerGone,
    ResourceError,
    RevokeIncomplete,
    Segment,
    TransportUnavailable,
    UsageError,
)
from moonpool.topology import DaxDevice, Topology, pool_identity

BLOCK = bytes(range(256)) * 256
WAIT_S = 30.0
FAR = ("cxl",)
BOTH = ("cxl", "tcp")
WAIT = {"revoke_timeout_ms": 2_000, "stall_timeout_ms": 2_000}


def write_until_it_fails(engine: Engine, segment: Segment, region: int) -> None:
    """Bounded: the end of a process on this host is heard of at once."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        engine.write(segment, region, 0, BLOCK)


def numbers(dax: DaxDevice) -> tuple[str, int, int]:
    """Location, size and alignment."""
    assert dax.size_bytes
    assert dax.align_bytes
    return f"dax:/dev/{dax.name}", dax.size_bytes, dax.align_bytes


def test_another_engine_maps_what_is_offered(dax: DaxDevice) -> None:
    location, size, align = numbers(dax)
    with Engine(transports=FAR) as initiator, Engine(transports=("shm", *BOTH)) as owner:
        region = owner.offer(location, 3 * align - 5, offset=align)
        assert (region.size_bytes, region.location) == (3 * align - 5, f"cxl:{dax.target_node}")
        assert region.address % align == 0
        segment = initiator.open(owner.endpoint)
        assert [path.transport for path in segment.paths] == ["cxl"]
        assert segment.unreachable == {}
        initiator.write(segment, region.handle, 2 * align - 7, BLOCK)
        into = bytearray(len(BLOCK))
        initiator.read(segment, region.handle, 2 * align - 7, into)
        assert into == BLOCK
        fd = os.open(location.removeprefix("dax:"), os.O_RDWR)
        with mmap.mmap(fd, size) as device:
            assert device[3 * align - 7 : 3 * align - 7 + len(BLOCK)] == BLOCK
        os.close(fd)
        # The owner itself, and a peer that has no far memory, reach the same bytes.
        into = bytearray(len(BLOCK))
        owner.read(owner.open(owner.endpoint), region.handle, 2 * align - 7, into)
        assert into == BLOCK
        with Engine(transports=("tcp",)) as remote:
            into = bytearray(len(BLOCK))
            remote.read(remote.open(owner.endpoint), region.handle, 2 * align - 7, into)
            assert into == BLOCK


def test_sizes_offsets_and_overlaps(dax: DaxDevice) -> None:
    location, size, align = numbers(dax)
    with Engine(transports=FAR) as engine:
        for how in ({"offset": 1}, {"offset": size}, {"offset": -align}, {"ofset": 0}):
            with pytest.raises(UsageError):
                engine.offer(location, align, **how)
        with pytest.raises(UsageError, match="not inside"):
            engine.offer(location, size + 1)
        for wrong in ("dax:/dev/dax9.9", "dax:/dev/null", "dax:/dev", "dax:"):
            with pytest.raises(UsageError, match=dax.name):
                engine.offer(wrong)
        first = engine.offer(location, 1, offset=align)
        for offset in (0, align):
            with pytest.raises(ResourceError, match="overlap"):
                engine.offer(location, 2 * align, offset=offset)
        with Engine(transports=FAR) as other, pytest.raises(ResourceError, match="overlap"):
            other.offer(location)
        rest = engine.offer(location, offset=2 * align)
        assert rest.size_bytes == size - 2 * align
        engine.revoke(first)
        engine.revoke(rest)
        whole = engine.offer(location, 0)
        assert whole.size_bytes == size
    with Engine(transports=("shm", "tcp")) as near, pytest.raises(TransportUnavailable):
        near.offer(location)


def test_who_may_only_read_cannot_write(dax: DaxDevice) -> None:
    location, _size, align = numbers(dax)
    with Engine(transports=FAR) as initiator, Engine(transports=BOTH) as owner:
        region = owner.offer(location, align, access=Access.READ)
        segment = initiator.open(owner.endpoint)
        into = bytearray(100)
        initiator.read(segment, region.handle, 0, into)
        with pytest.raises(AccessDenied):
            initiator.write(segment, region.handle, 0, b"x")
        assert owner.gate.writers(region.handle, initiator.instance) == set()


def test_software_coherence_is_followed_by_who_opens(dax: DaxDevice) -> None:
    location, _size, align = numbers(dax)
    with Engine(transports=BOTH) as initiator, Engine(transports=BOTH, cxl_coherence="software") as owner:
        region = owner.offer(location, align)
        assert region.address == 0
        segment = initiator.open(owner.endpoint)
        initiator.write(segment, region.handle, 63, BLOCK)
        into = bytearray(len(BLOCK))
        owner.read(owner.open(owner.endpoint), region.handle, 63, into)
        assert into == BLOCK
        with Engine(transports=("tcp",)) as lanes:
            segment = lanes.open(owner.endpoint)
            with pytest.raises(MoonpoolError):  # a lane would read what the owner's cache kept
                lanes.read(segment, region.handle, 63, into)


def test_a_revoked_range_is_free_at_once(dax: DaxDevice) -> None:
    location, _size, align = numbers(dax)
    with Engine(transports=FAR) as initiator, Engine(transports=BOTH) as owner:
        for _ in range(3):
            region = owner.offer(location, align)
            segment = initiator.open(owner.endpoint)
            initiator.write(segment, region.handle, 0, BLOCK)
            owner.revoke(region)
            with pytest.raises(MoonpoolError):
                initiator.write(segment, region.handle, 0, BLOCK)
            initiator.close_segment(segment)


def test_the_range_stays_locked_while_a_process_maps_it(dax: DaxDevice, peers: Callable[..., Any]) -> None:
    location, _size, align = numbers(dax)
    owner = peers("offer", location, str(align), "0", "transports=cxl+tcp")
    writer = peers("hold", *owner.said, "transports=cxl")
    assert writer.said == ["cxl"]
    owner.kill()
    with Engine(transports=FAR) as engine:
        # The writer's mapping outlives the owner: nobody may take the range before the writer is gone.
        with pytest.raises(ResourceError, match="overlap"):
            engine.offer(location, align)
        writer.kill()
        region = engine.offer(location, align)
        assert region.size_bytes == align


def test_a_silent_writer_is_waited_for(dax: DaxDevice, peers: Callable[..., Any]) -> None:
    location, _size, align = numbers(dax)
    with Engine(transports=BOTH, **WAIT) as owner:
        region = owner.offer(location, align)
        writer = peers("hold", owner.endpoint, str(region.handle), "transports=cxl")
        os.kill(writer.process.pid, 19)  # SIGSTOP: it can confirm nothing
        with pytest.raises(RevokeIncomplete):
            owner.revoke(region)
        with pytest.raises(ResourceError, match="overlap"):
            owner.offer(location, align)
        writer.kill()
        assert owner.offer(location, align).size_bytes == align


def test_a_killed_owner_is_told_and_its_range_is_free(dax: DaxDevice, peers: Callable[..., Any]) -> None:
    location, _size, align = numbers(dax)
    owner = peers("offer", location, str(align), "0", "transports=cxl+tcp")
    endpoint, handle = owner.said
    with Engine(transports=FAR, **WAIT) as engine:
        segment = engine.open(endpoint)
        engine.write(segment, int(handle), 0, BLOCK)
        owner.kill()
        with pytest.raises(PeerGone):
            write_until_it_fails(engine, segment, int(handle))
        engine.close_segment(segment)
        engine.offer(location, align)


@pytest.fixture
def other_host() -> Any:
    """Words that run a command where this network namespace's unix sockets are not: as on another host."""
    script = (
        "ip netns add other && ip link add far0 type veth peer name far1 netns other && "
        "ip addr add 10.98.0.1/24 dev far0 && ip link set far0 up && "
        "ip -n other addr add 10.98.0.2/24 dev far1 && ip -n other link set far1 up && "
        "ip -n other link set lo up"
    )
    subprocess.run(["sh", "-c", script], check=True, timeout=60)
    yield ("ip", "netns", "exec", "other")
    subprocess.run(["ip", "netns", "del", "other"], check=True, timeout=60)


def test_a_host_attached_to_the_same_memory_maps_its_own_device(
    dax: DaxDevice, topology: Topology, peers: Callable[..., Any], other_host: tuple[str, ...]
) -> None:
    identity = pool_identity(dax, topology.cxl_regions, topology.cxl_memories)
    if identity is None:
        pytest.skip("needs the lab: tests/lab/run.py --cxl 256 --cxl-mode type3")
    location, _size, align = numbers(dax)
    shared = (f"cxl_shared={identity}", "transports=cxl+tcp", "cxl_coherence=software")
    config = {"cxl_shared": (identity,), "cxl_coherence": "software", "bind_host": "10.98.0.1", **WAIT}
    with Engine(transports=BOTH, **config) as owner:
        region = owner.offer(location, align)
        writer = peers("hold", owner.endpoint, str(region.handle), *shared, before=other_host)
        assert writer.said == ["cxl"]
        into = bytearray(15)
        owner.read(owner.open(owner.endpoint), region.handle, 0, into)
        assert into == b"held by another"
        assert owner.metrics()["gauges"]["cxl_attached_open"] == 1
        assert owner.gate.writers(region.handle, None) - {0}
        writer.kill()  # without a word: its range is in quarantine
        with pytest.raises(RevokeIncomplete):
            owner.revoke(region)
        for number, goodbye in ((1, False), (2, True)):
            again = owner.offer(location, align, offset=number * align)
            writer = peers("hold", owner.endpoint, str(again.handle), *shared, before=other_host)
            if goodbye:  # it closes its engine: it has let go
                writer.say()
                writer.close()
            owner.revoke(again)  # who lives is asked, and lets go
            assert owner.offer(location, align, offset=number * align).size_bytes == align
        refused = Engine(transports=BOTH, bind_host="10.98.0.1")
        with refused:
            third = refused.offer(location, align, offset=3 * align)
            holder = peers("hold", refused.endpoint, str(third.handle), "transports=tcp", before=other_host)
            assert holder.said == ["tcp"]
