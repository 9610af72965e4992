"""Peers that lie about memory of devices, and peers that ask for it in ways that make no sense."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.native.stub_device.device import DeviceArray, the_stub

from moonpool import Access, Engine, EngineConfig
from moonpool.engine.control import ControlService, ServiceHooks
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    ProtocolError,
    StaleHandle,
    UnsupportedOperation,
)
from moonpool.ids import new_instance_id
from moonpool.transport.cuda_attribute import DEVICE, SLOTS, CudaAttribute, encode

HANDLE = 1 << 32
KEY = bytes(range(16))
SIZE = 65536
ON_DEVICE = encode(CudaAttribute(kind=DEVICE, runtime="cuda", device=1, uuid=bytes([0xA1]) * 16))


def settings() -> dict[str, Any]:
    return {
        "device_library": the_stub().path,
        "device_staging_bytes": 1 << 20,
        "transfer_timeout_ms": 500,
        "transports": ("cuda", "shm", "tcp"),
    }


class Liar:
    """An owner's control plane that describes one region, and answers as a test wants."""

    def __init__(self, attribute: bytes, export: object, stage: object = None) -> None:
        about = {
            "handle": HANDLE,
            "address": 0,
            "length": SIZE,
            "location": "cuda:1",
            "access": 3,
            "read_key": KEY,
            "write_key": KEY,
            "attributes": {"cuda": attribute},
        }
        slots = encode(CudaAttribute(kind=SLOTS, runtime="cuda", slot_bytes=SIZE))
        lent = about | {"handle": HANDLE + 1, "length": SIZE, "attributes": {"cuda": slots}, "lent": True}
        regions = [about] if stage is None else [about, lent]
        hooks = ServiceHooks(
            handlers={
                "describe": lambda _s, _p: {"name": "liar", "instance": b"", "regions": regions},
                "cuda.export": lambda _s, _p: export,
                "cuda.open": lambda _s, _p: {"slot_bytes": SIZE},
                "cuda.stage": lambda _s, _p: stage,
                "release": lambda _s, _p: {},
            },
            on_lane=lambda _fd, _info: None,
        )
        self.service = ControlService(EngineConfig(), new_instance_id(), hooks)
        self.service.start()


@contextlib.contextmanager
def lie(attribute: bytes, export: object, stage: object = None) -> Iterator[tuple[Engine, Any]]:
    """An engine, and a liar's segment that it has opened."""
    liar = Liar(attribute, export, stage)
    try:
        with Engine(**settings()) as engine:
            yield engine, engine.open(liar.service.endpoint)
    finally:
        liar.service.close()


@pytest.mark.parametrize(
    "export",
    [
        None,
        [],
        {},
        {"address": "here"},
        {"address": 4096},
        {"address": -1},
        {"ipc": b"short", "offset": 0, "size": SIZE},
        {"ipc": bytes(64), "offset": -1, "size": SIZE},
        {"ipc": bytes(64), "offset": 1, "size": SIZE},
        {"ipc": bytes(64), "offset": 0, "size": SIZE},
        {"ipc": b"\xff" * 64, "offset": 0, "size": 1 << 62},
    ],
)
def test_an_owner_whose_device_memory_is_made_up(export: object) -> None:
    with lie(ON_DEVICE, export) as (engine, segment):
        with pytest.raises(MoonpoolError):
            engine.read(segment, HANDLE, 0, bytearray(16))
        assert any(of == HANDLE for of, _way in segment.unreachable)


@pytest.mark.parametrize("attribute", [b"", b"\1", b"\xff" * 48, ON_DEVICE[:47], bytes(48)])
def test_an_attribute_that_cannot_be_read(attribute: bytes) -> None:
    with lie(attribute, {"address": 4096}) as (engine, segment):
        with pytest.raises(MoonpoolError):
            engine.read(segment, HANDLE, 0, bytearray(16))
        assert "ProtocolError" in str(segment.unreachable)


def test_slots_that_are_larger_than_their_region_are_not_used() -> None:
    with lie(ON_DEVICE, None, {"statuses": b"\0"}) as (engine, segment):
        assert "larger" in str(segment.unreachable)
        with pytest.raises(MoonpoolError):
            engine.read(segment, HANDLE, 0, bytearray(16))


# ---- initiators --------------------------------------------------------------------------------------------


@pytest.fixture
def owner() -> Iterator[tuple[Engine, Any, Any]]:
    """An owner of a device region, and a session with it."""
    array = DeviceArray(SIZE, device=1)
    with Engine(**settings()) as engine, Engine(transports=("tcp",)) as peer:
        region = engine.register(array)
        session = peer._control.connect(engine.endpoint)
        yield engine, region, session
        session.close()
    array.free()


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("cuda.export", {}),
        ("cuda.export", {"handle": "x"}),
        ("cuda.stage", {}),
        ("cuda.stage", {"slot": 2, "write": False, "entries": b""}),
        ("cuda.stage", {"slot": True, "write": 0, "entries": b""}),
        ("cuda.stage", {"slot": 0, "write": True, "entries": "text"}),
        ("cuda.stage", {"slot": 0, "write": True, "entries": bytes(47)}),
        ("cuda.stage", {"slot": 0, "write": True, "entries": bytes(48 * 1025)}),
    ],
)
def test_requests_that_make_no_sense(owner: tuple[Engine, Any, Any], method: str, params: Any) -> None:
    _engine, _region, session = owner
    with pytest.raises((ProtocolError, MoonpoolError)):
        session.request(method, params, 5.0).close()
    session.request("probe", {}, 5.0).close()


def test_a_window_without_slots_is_refused(owner: tuple[Engine, Any, Any]) -> None:
    _engine, _region, session = owner
    with pytest.raises(MoonpoolError, match=r"cuda\.open"):
        session.request("cuda.stage", {"slot": 0, "write": False, "entries": b""}, 5.0).close()


def test_memory_is_not_exported_over_tcp(owner: tuple[Engine, Any, Any]) -> None:
    _engine, region, session = owner
    with pytest.raises(UnsupportedOperation, match="this host"):
        session.request("cuda.export", {"handle": region.handle}, 5.0).close()


def test_only_regions_of_both_kinds_of_access_are_exported() -> None:
    array = DeviceArray(SIZE)
    with Engine(**settings()) as engine, Engine(**settings()) as peer:
        region = engine.register(array, access=Access.READ)
        plain = engine.allocate(4096)
        session = peer._control.connect(engine._control.unix_name)
        with pytest.raises(AccessDenied):
            session.request("cuda.export", {"handle": region.handle}, 5.0).close()
        with pytest.raises(UnsupportedOperation, match="not on a device"):
            session.request("cuda.export", {"handle": plain.handle}, 5.0).close()
        with pytest.raises(StaleHandle):
            session.request("cuda.export", {"handle": 12345}, 5.0).close()
        session.close()
    array.free()


def test_slots_are_told_to_nobody_else(owner: tuple[Engine, Any, Any]) -> None:
    engine, region, session = owner
    session.request("cuda.open", {}, 5.0).close()
    with session.request("describe", {}, 5.0) as answer:
        mine = [one["handle"] for one in answer.value["regions"]]
    assert len(mine) == 2
    assert mine[0] == region.handle
    with Engine(transports=("tcp",)) as other:
        stranger = other._control.connect(engine.endpoint)
        with stranger.request("describe", {}, 5.0) as answer:
            assert [one["handle"] for one in answer.value["regions"]] == [region.handle]
        stranger.close()
        near = other._control.connect(engine._control.unix_name)
        with pytest.raises(StaleHandle):
            near.request("map", {"handle": mine[1], "access": 3}, 5.0).close()
        near.close()
    assert [one.handle for one in engine.regions] == [region.handle]
