"""The doctor's RDMA checks: over the fake libibverbs, and every verdict on made-up findings."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import resource
from collections.abc import Iterator

import pytest
from tests.native.fake_verbs.fabric import FakeFabric

from moonpool.cli.checks import Check, Level
from moonpool.cli.checks import rdma as checks
from moonpool.native.verbs import devices
from moonpool.native.verbs.attributes import DeviceAttributes, GidEntry, GidKind, LinkLayer, PortAttributes
from moonpool.topology import MappedTree

EMPTY = MappedTree({})
ATTRIBUTES = DeviceAttributes(
    name="mlx5_0",
    firmware="28.39",
    guid=1,
    vendor_id=0x2C9,
    vendor_part_id=4129,
    ports=1,
    max_mr_bytes=2**64 - 1,
    max_mr=1 << 24,
    max_qp=1 << 18,
    max_qp_wr=32768,
    max_sge=30,
    max_sge_rd=30,
    max_cq=1 << 24,
    max_cqe=1 << 22,
    max_qp_rd_atom=16,
    max_qp_init_rd_atom=16,
    on_demand_paging=True,
)
PORT = PortAttributes(
    number=1,
    state=4,
    link_layer=LinkLayer.ETHERNET,
    active_mtu=5,
    max_mtu=5,
    lid=0,
    lmc=0,
    gids=256,
    pkeys=1,
    max_message_bytes=1 << 30,
    active_width=2,
    active_speed=64,
)
ROUTED = GidEntry(3, bytes(10) + b"\xff\xff\x0a\x00\x00\x07", GidKind.ROCE_2, "eth2")
LOCAL = GidEntry(1, b"\xfe\x80" + bytes(13) + b"\x07", GidKind.ROCE_2, "eth2")
OLD = GidEntry(2, ROUTED.gid, GidKind.ROCE_1, "eth2")
FABRIC = GidEntry(0, LOCAL.gid, GidKind.INFINIBAND)


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    made = FakeFabric()
    made.devices(2)
    made.clear()
    devices.use_library(made.path)
    yield made
    devices.use_library("")
    made.clear()
    assert not any(devices.live_objects().values())


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_devices_that_work_are_shown_with_their_gid(fabric: FakeFabric) -> None:
    found = by_name(checks.check_rdma(EMPTY))
    assert found["devices"].detail == "fake0, fake1"
    assert found["fake1"].level is Level.OK
    assert (
        "ACTIVE, Ethernet, MTU 4096; GID 3: routable RoCE v2 address 10.98.0.2 on lo" in found["fake1"].detail
    )
    assert found["device memory"].level is Level.OK
    assert "pinned memory" in found


def test_a_port_that_is_down_is_a_warning(fabric: FakeFabric) -> None:
    fabric.port(1, False)
    found = by_name(checks.check_rdma(EMPTY))
    assert (found["fake0"].level, found["fake1"].level) == (Level.OK, Level.WARN)
    assert found["fake1"].detail.startswith("DOWN")
    assert "cable" in found["fake1"].advice


def test_memory_that_cannot_be_pinned_is_told(fabric: FakeFabric) -> None:
    fabric.fail("reg_mr", errno.ENOMEM, device=0)
    found = by_name(checks.check_rdma(EMPTY))
    assert found["fake0 memory"].level is Level.WARN
    assert "RLIMIT_MEMLOCK" in found["fake0 memory"].detail
    assert "fake1 memory" not in found


def test_a_device_that_cannot_be_opened_is_told(fabric: FakeFabric) -> None:
    fabric.fail("open_device", errno.EACCES, device=1)
    found = by_name(checks.check_rdma(EMPTY))
    assert found["fake0"].level is Level.OK
    assert "/dev/infiniband/uverbs" in found["fake1"].detail


def test_a_listing_that_fails_is_told(fabric: FakeFabric) -> None:
    fabric.fail("get_device_list", errno.EACCES)
    (found,) = checks.check_rdma(EMPTY)
    assert (found.name, found.level) == ("devices", Level.WARN)


def test_a_library_or_binding_that_is_away_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.use_library("no_such_library.so.1")
    try:
        (found,) = checks.check_rdma(EMPTY)
    finally:
        devices.use_library("")
    assert found.level is Level.INFO
    assert "no_such_library" in found.detail
    assert "libibverbs1" in found.advice
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = checks.check_rdma(EMPTY)
    assert "not built" in found.detail


def test_a_device_that_only_the_kernel_knows_is_a_warning(fabric: FakeFabric) -> None:
    tree = MappedTree({"/sys/class/infiniband/": "fake0 mlx5_9"})
    found = by_name(checks.check_rdma(tree))["devices"]
    assert found.level is Level.WARN
    assert "mlx5_9" in found.detail
    assert "fake0" not in found.detail
    fabric.devices(0)
    (alone,) = checks.check_rdma(EMPTY)
    assert (alone.level, alone.detail) == (Level.INFO, "no RDMA device")


@pytest.mark.parametrize(
    ("port", "gids", "level", "says"),
    [
        ({}, [LOCAL, OLD, ROUTED], Level.OK, "Ethernet 200 Gb/s, MTU 4096; GID 3: routable"),
        ({}, [LOCAL], Level.WARN, "link-local RoCE v2"),
        ({}, [OLD], Level.WARN, "RoCE v1"),
        ({}, [], Level.WARN, "the port has no GID"),
        ({"state": 1}, [ROUTED], Level.WARN, "DOWN"),
        ({"state": 2, "link_layer": LinkLayer.INFINIBAND}, [FABRIC], Level.WARN, "INIT, InfiniBand"),
        ({"link_layer": LinkLayer.INFINIBAND, "lid": 7}, [FABRIC], Level.OK, "LID 7"),
        ({"active_width": 0}, [ROUTED], Level.OK, "ACTIVE, Ethernet, MTU"),
    ],
)
def test_port_verdicts(port: dict[str, object], gids: list[GidEntry], level: Level, says: str) -> None:
    check = checks.judge_port(ATTRIBUTES, dataclasses.replace(PORT, **port), gids)  # type: ignore[arg-type]
    assert check.level is level
    assert says in check.detail
    assert bool(check.advice) == (level is not Level.OK)


def test_devices_of_several_ports_number_them() -> None:
    two = dataclasses.replace(ATTRIBUTES, ports=2, max_mr_bytes=1 << 31, on_demand_paging=False)
    check = checks.judge_port(two, PORT, [ROUTED])
    assert check.name == "mlx5_0:1"
    assert "regions up to 2 GiB, without on-demand paging" in check.detail


@pytest.mark.parametrize(
    ("soft", "unbound", "level"),
    [
        (resource.RLIM_INFINITY, False, Level.OK),
        (64 << 10, True, Level.OK),
        (8 << 20, False, Level.WARN),
        (1 << 30, False, Level.INFO),
    ],
)
def test_pinning_verdicts(soft: int, unbound: bool, level: Level) -> None:
    check = checks.judge_pinning(soft, unbound)
    assert check.level is level
    assert bool(check.advice) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("has_dmabuf", "modules", "level", "says"),
    [
        (True, "", Level.OK, "dma-bufs"),
        (False, "nvidia_peermem 16384 0 - Live 0x0", Level.OK, "nvidia_peermem"),
        (False, "nvidia 16384 0 - Live 0x0", Level.INFO, "cannot be registered"),
    ],
)
def test_device_memory_verdicts(has_dmabuf: bool, modules: str, level: Level, says: str) -> None:
    check = checks.judge_device_memory(has_dmabuf, modules)
    assert check.level is level
    assert says in check.detail
