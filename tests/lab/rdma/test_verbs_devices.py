"""The binding on soft-RoCE: attributes as rdma-core's own binding reads them, and failures for real.

tests/lab/run.py --rdma 2 -- .venv/bin/pytest -q --noconftest tests/lab/rdma/test_verbs_devices.py
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.native.fake_verbs.connections import EVERYTHING, Connection, Memory

from moonpool.cli.checks import Level
from moonpool.cli.checks.rdma import check_rdma
from moonpool.errors import UnsupportedMemory
from moonpool.native.verbs.attributes import EventKind, GidKind, LinkLayer, RegistrationPlan
from moonpool.native.verbs.devices import Device, VerbsLibrary, live_objects
from moonpool.native.verbs.memory import register
from moonpool.topology import LiveSysfs
from moonpool.transport.rdma_gids import choose_gid

pytestmark = pytest.mark.skipif(os.environ.get("LAB_GUEST") != "1", reason="needs the lab: two RDMA devices")

HERE = Path(__file__).resolve().parent
NAMES = ("rxe0", "rxe1")
SIZE = 64 << 10
WAIT_S = 60.0
WC_FLUSH, WC_REMOTE_ACCESS, WC_RETRY = 5, 10, 12
KINDS = (GidKind.INFINIBAND, GidKind.ROCE_1, GidKind.ROCE_2)


@pytest.fixture(scope="module")
def library() -> VerbsLibrary:
    return VerbsLibrary()


@pytest.fixture
def linked(library: VerbsLibrary) -> Iterator[Connection]:
    connection = Connection(library, NAMES, SIZE)
    yield connection
    connection.close()
    assert not any(live_objects().values())


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def statuses(connection: Connection, n: int) -> list[tuple[int, int]]:
    return [(each.id, each.status) for each in connection.reap(n)]


@pytest.fixture
def device(library: VerbsLibrary, request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = Device(library, getattr(request, "param", "rxe1"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run("/usr/bin/python3", str(HERE / "pyverbs_attributes.py")))
    return answer


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_attributes_equal_those_of_pyverbs(oracle: dict[str, Any], device: Device) -> None:
    assert device.library.device_names() == list(oracle)
    own, port, theirs = device.attributes(), device.port(1), oracle[device.name]
    assert {
        "node_guid": own.guid,
        "max_mr_size": own.max_mr_bytes,
        "vendor_id": own.vendor_id,
        "vendor_part_id": own.vendor_part_id,
        "max_qp": own.max_qp,
        "max_qp_wr": own.max_qp_wr,
        "max_sge": own.max_sge,
        "max_sge_rd": own.max_sge_rd,
        "max_cq": own.max_cq,
        "max_cqe": own.max_cqe,
        "max_mr": own.max_mr,
        "max_qp_rd_atom": own.max_qp_rd_atom,
        "max_qp_init_rd_atom": own.max_qp_init_rd_atom,
        "phys_port_cnt": own.ports,
        "fw_version": own.firmware,
    } == {**theirs["device"], "node_guid": swapped(theirs["device"]["node_guid"])}
    assert theirs["port"] == {
        "state": port.state,
        "max_mtu": port.max_mtu,
        "active_mtu": port.active_mtu,
        "gid_tbl_len": port.gids,
        "max_msg_sz": port.max_message_bytes,
        "pkey_tbl_len": port.pkeys,
        "lid": port.lid,
        "lmc": port.lmc,
        "active_width": port.active_width,
        "active_speed": port.active_speed,
        "link_layer": 2,
    }
    assert port.link_layer is LinkLayer.ETHERNET
    entries = [(entry.index, ipaddress.IPv6Address(entry.gid), entry.kind) for entry in device.gids(1)]
    assert entries == [
        (index, ipaddress.IPv6Address(gid), KINDS[kind]) for index, gid, kind, _ in sorted(theirs["gids"])
    ]
    interfaces = [socket.if_indextoname(row[3]) for row in sorted(theirs["gids"])]
    assert [entry.interface for entry in device.gids(1)] == interfaces
    assert device.gids_one_by_one(1) == device.gids(1)


def swapped(guid: int) -> int:
    """A GUID as a number: pyverbs gives the bytes of the wire as this machine reads them."""
    return int.from_bytes(guid.to_bytes(8, sys.byteorder), "big")


def test_the_routed_gid_is_chosen(device: Device) -> None:
    choice = choose_gid(device.gids(1), device.port(1).link_layer)
    assert choice.reason == "routable RoCE v2 address 10.99.0.2 on lab1"


def test_the_doctor_is_content() -> None:
    found = {check.name: check for check in check_rdma(LiveSysfs())}
    assert {name: found[name].level for name in ("devices", *NAMES)} == dict.fromkeys(
        ("devices", *NAMES), Level.OK
    )


def test_bytes_move_both_ways(linked: Connection) -> None:
    sent = linked.near.memory.pattern(1)
    linked.post(1)
    assert statuses(linked, 1) == [(1, 0)]
    assert linked.far.memory.read() == sent
    there = linked.far.memory.pattern(2)
    linked.post(2, write=False)
    assert statuses(linked, 1) == [(2, 0)]
    assert linked.near.memory.read() == there
    parts = [(100, 7), (900, 33), (50, 1)]
    near = linked.near
    pieces = [(near.memory.address + at, n, near.lkey) for at, n in parts]
    near.pair.post(3, True, pieces, linked.far.memory.address, linked.far.rkey)
    assert statuses(linked, 1) == [(3, 0)]
    assert linked.far.memory.read()[:41] == b"".join(there[at : at + n] for at, n in parts)


def test_chunks_of_a_region_have_their_own_keys(linked: Connection) -> None:
    far, half = linked.far, SIZE // 2
    cut = register([far.device], far.memory.address, SIZE, EVERYTHING, RegistrationPlan(chunk_bytes_max=half))
    sent = linked.near.memory.pattern(3)
    for i, key in enumerate(cut.rkeys(0)):
        linked.post(i, offset=i * half, length=half, rkey=key)
    assert statuses(linked, 2) == [(0, 0), (1, 0)]
    assert far.memory.read() == sent
    cut.close()
    linked.post(9, rkey=cut.rkeys(0)[0], length=16)
    assert statuses(linked, 1) == [(9, WC_REMOTE_ACCESS)]


def test_a_wrong_key_and_an_ended_pair(linked: Connection) -> None:
    linked.post(1, rkey=linked.far.rkey ^ 0x5500)
    assert statuses(linked, 1) == [(1, WC_REMOTE_ACCESS)]
    assert linked.near.pair.state == "ERR"
    linked.post(2)
    assert statuses(linked, 1) == [(2, WC_FLUSH)]


def test_pages_of_a_file_are_refused_with_a_reason(device: Device) -> None:
    with tempfile.NamedTemporaryFile(dir=HERE) as file:
        file.truncate(SIZE)
        mapped = mmap.mmap(file.fileno(), SIZE)
        first = ctypes.c_char.from_buffer(mapped)
        with pytest.raises(UnsupportedMemory, match="pins no pages of an ordinary file"):
            register([device], ctypes.addressof(first), SIZE, EVERYTHING)
        del first
        mapped.close()
    memory = Memory(SIZE)
    register([device], memory.address, SIZE, EVERYTHING, RegistrationPlan(relaxed_ordering=True)).close()


def test_a_pulled_cable_is_an_event_and_a_retry_error(linked: Connection) -> None:
    device = linked.far.device
    for end in (linked.near, linked.far):
        end.pair.to_reset()
        end.pair.to_init(1, EVERYTHING)
    linked.connect(retry_count=2)  # soft-RoCE tries for ever when the count is 7
    run("ip", "link", "set", "port1", "down")
    try:
        assert events_until(device, EventKind.PORT_ERROR)
        linked.post(1)
        assert statuses(linked, 1) == [(1, WC_RETRY)]
    finally:
        run("ip", "link", "set", "port1", "up")
    assert events_until(device, EventKind.PORT_ACTIVE)


def events_until(device: Device, wanted: EventKind) -> bool:
    """True once the event came; False after a generous bound."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        select.select([device.async_fd], [], [], 1.0)
        if wanted in [event.kind for event in device.take_events()]:
            return True
    return False


def test_twenty_connections_leak_nothing(library: VerbsLibrary) -> None:
    Connection(library, NAMES, 4096).close()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Connection(library, NAMES, 4096).close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert not any(live_objects().values())
