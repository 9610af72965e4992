"""Far memory, the pure parts: what is published, which node a location binds to, who holds a range."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.config import EngineConfig
from moonpool.engine.memory_room import check_room_of_node
from moonpool.engine.placement import judge, wanted_node
from moonpool.errors import OutOfMemory, ProtocolError, UnsupportedOperation, UsageError
from moonpool.topology import (
    CxlMemory,
    CxlRegion,
    DaxDevice,
    Host,
    NumaNode,
    Topology,
    pool_identity,
    read_far_memory,
    read_topology,
)
from moonpool.transport.cxl_attribute import DaxRange, pack_dax, pack_node, parse
from moonpool.transport.cxl_holders import HolderBook
from moonpool.transport.dax_device import FoundDevice, fit, look, tag_of

HOST = Host(None, None, None, None, False, None)
NODES = (NumaNode(0, (0, 1), 1 << 30), NumaNode(1, (2, 3), 1 << 30), NumaNode(2, (), 1 << 30))
TWO_SOCKETS = Topology(HOST, NODES)
ALIGN = 2 << 20
DAX = DaxDevice("dax1.0", 64 << 20, ALIGN, 3, 0, "device_dax", (), (252, 7), "region0")
UUID = "12345678-1234-1234-1234-123456789abc"
REGION = CxlRegion("region0", 64 << 20, "ram", None, ("mem0", "mem1"), ("dax1.0",))
MEMORIES = (
    CxlMemory("mem0", 32 << 20, 0, 0, serial=0xAB),
    CxlMemory("mem1", 32 << 20, 0, 0, serial=0xCD),
)

ranges = st.integers(12, 40).flatmap(
    lambda order: st.builds(
        lambda device, start, length, software, identity: DaxRange(
            device_bytes=device << order,
            align_bytes=1 << order,
            offset=min(start, (device << order) - 1),
            length=min(length, (device << order) - min(start, (device << order) - 1)),
            software_coherence=software,
            identity=identity,
        ),
        st.integers(1, 1 << 20),
        st.integers(0, 1 << 40),
        st.integers(1, 1 << 40),
        st.booleans(),
        st.text("abc:-0123456789", max_size=60),
    )
)


@given(ranges)
def test_attributes_come_back_as_they_went(about: DaxRange) -> None:
    assert parse(pack_dax(about)) == about
    assert parse(pack_node()) is None


@given(st.binary(max_size=400))
def test_any_attribute_is_a_range_or_a_typed_error(data: bytes) -> None:
    try:
        found = parse(data)
    except ProtocolError:
        return
    assert found is None or 0 < found.length <= found.device_bytes - found.offset


@given(ranges, st.data())
def test_a_changed_attribute_is_never_a_range_outside_its_device(
    about: DaxRange, data: st.DataObject
) -> None:
    packed = bytearray(pack_dax(about))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse(bytes(packed))
    except ProtocolError:
        return
    assert found is None or found.offset + found.length <= found.device_bytes


@pytest.mark.parametrize(
    ("kind", "number", "node"),
    [
        ("cpu", 1, 1),
        ("cpu", 2, None),
        ("cpu", 9, None),
        ("numa", 0, 0),
        ("numa", 2, 2),
        ("cxl", 2, 2),
    ],
)
def test_what_a_location_binds_to(kind: str, number: int, node: int | None) -> None:
    assert judge(kind, number, TWO_SOCKETS) == node


@pytest.mark.parametrize(
    ("kind", "number", "text"), [("numa", 9, "0, 1, 2"), ("cxl", 0, "numa:0"), ("cxl", 9, "2")]
)
def test_nodes_that_cannot_be_are_named(kind: str, number: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        judge(kind, number, TWO_SOCKETS)


def test_one_node_is_no_choice_and_other_texts_are_tags() -> None:
    one = Topology(HOST, NODES[:1])
    assert judge("cpu", 0, one) is None
    assert judge("cpu", 1, one) is None
    for tag in ("gpu:0", "cpu:", "cpu:x", "cpu:00001", "cxl", "file:/a", " cpu:1"):
        assert wanted_node(tag) is None


def test_a_node_has_to_have_room(tmp_path: Path) -> None:
    folder = tmp_path / "node3"
    folder.mkdir()
    (folder / "meminfo").write_text(
        "Node 3 MemTotal:       1000 kB\nNode 3 MemFree:         100 kB\nNode 3 Inactive(file):   20 kB\n"
        "Node 3 Active(file):     18 kB\nNode 3 Dirty:             6 kB\nNode 3 Writeback:         4 kB\n"
        "Node 3 nonsense\n"
    )
    check_room_of_node(128 << 10, 3, tmp_path)
    with pytest.raises(OutOfMemory, match="numa node 3"):
        check_room_of_node((128 << 10) + 1, 3, tmp_path)
    check_room_of_node(1 << 40, 4, tmp_path)  # who does not tell is not believed to have nothing


def test_what_names_memory_on_every_host() -> None:
    assert pool_identity(DAX, (REGION,), MEMORIES) == "serial:ab,cd"
    assert pool_identity(DAX, (dataclasses.replace(REGION, uuid=UUID),), MEMORIES) == f"uuid:{UUID}"
    assert pool_identity(DAX, (REGION,), MEMORIES[:1]) is None
    assert pool_identity(DAX, (), MEMORIES) is None
    nameless = (dataclasses.replace(MEMORIES[0], serial=None), MEMORIES[1])
    assert pool_identity(DAX, (REGION,), nameless) is None
    for name in ("serial:ab,cd", f"uuid:{UUID}"):
        EngineConfig(cxl_shared=(name,))
    for wrong in ("serial:", "uuid:1", "ab", "serial:AB"):
        with pytest.raises(UsageError, match="cxl_shared"):
            EngineConfig(cxl_shared=(wrong,))
    with pytest.raises(UsageError, match="cxl_coherence"):
        EngineConfig(cxl_coherence="none")


def host_with(dax: DaxDevice) -> Topology:
    return Topology(HOST, NODES, dax_devices=(dax,), cxl_regions=(REGION,), cxl_memories=MEMORIES)


def test_a_device_is_found_by_its_number() -> None:
    found = look(host_with(DAX), (252, 7), "/dev/dax1.0")
    assert (found.size_bytes, found.align_bytes, found.identity) == (64 << 20, ALIGN, "serial:ab,cd")
    assert tag_of(found.device) == "cxl:3"
    assert tag_of(dataclasses.replace(DAX, target_node=None)) == "cxl:1"
    with pytest.raises(UsageError, match=r"/dev/dax1\.0"):
        look(host_with(DAX), (252, 8), "/dev/null")
    with pytest.raises(UsageError, match="cxl:3"):
        look(host_with(dataclasses.replace(DAX, driver="kmem")), (252, 7), "/dev/dax1.0")
    for broken in (
        dataclasses.replace(DAX, driver=None),
        dataclasses.replace(DAX, size_bytes=None),
        dataclasses.replace(DAX, align_bytes=None),
    ):
        with pytest.raises(UnsupportedOperation, match="cannot be mapped"):
            look(host_with(broken), (252, 7), "/dev/dax1.0")


FOUND = FoundDevice(DAX, 64 << 20, ALIGN, "")


def test_ranges_fit_their_device() -> None:
    assert fit(FOUND, None, 0) == (0, 64 << 20)
    assert fit(FOUND, 0, ALIGN) == (ALIGN, 62 << 20)
    assert fit(FOUND, 5, 62 << 20) == (62 << 20, 5)
    for size, offset in (
        (None, 64 << 20),
        (ALIGN + 1, 62 << 20),
        (1, 1),
        (1, -1),
        (-1, 0),
        (1, None),
        (1.5, 0),
    ):
        with pytest.raises(UsageError):
            fit(FOUND, size, offset)  # type: ignore[arg-type]


def test_who_leaves_without_a_word_is_waited_for() -> None:
    class Kept:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    book, region = HolderBook(10.0), Kept()
    book.attached(5, 1, b"a", writes=True)
    book.attached(5, 2, b"b", writes=False)
    assert (book.holders(5), book.writers(5, None), book.writers(5, b"b")) == ({1, 2}, {1}, set())
    assert book.of_session(1)
    book.detached(5, 1)
    book.session_ended(1, 100.0)  # it had let go
    assert book.forget(5, region, 100.0)
    book.attached(6, 3, b"c", writes=True)
    book.session_ended(3, 100.0)
    assert book.attached_count == 0
    assert not book.forget(6, region, 105.0)
    assert (book.sweep(109.0), region.closed) == (1, 0)
    assert (book.sweep(110.0), region.closed) == (0, 1)
    book.attached(7, 4, b"d", writes=True)
    book.session_ended(4, 200.0)
    assert book.forget(7, region, 210.0)


def test_far_memory_alone_is_what_the_whole_topology_says() -> None:
    whole, far = read_topology(), read_far_memory()
    assert [dax.name for dax in far.dax_devices] == [dax.name for dax in whole.dax_devices]
    assert far.cxl_regions == whole.cxl_regions
    assert [memory.serial for memory in far.cxl_memories] == [memory.serial for memory in whole.cxl_memories]
