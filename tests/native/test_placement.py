"""Engine memory where a location asks for it, on a machine with one node; what is said when it cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool import Engine
from moonpool.engine import placement
from moonpool.engine.placement import ANYWHERE, create_placed
from moonpool.errors import OutOfMemory, ResourceError, UnsupportedOperation, UsageError
from moonpool.native.cxl import numa
from moonpool.native.cxl.numa import pages_by_node

SIZE = 4 << 20


@pytest.fixture(autouse=True)
def no_descriptor_stays() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_bound_memory_is_there_and_zeroed() -> None:
    memory = create_placed(SIZE, "numa:0", huge_pages=False, prefault=True)
    assert pages_by_node(memory.address, SIZE) == {0: SIZE // 4096}
    assert bytes(memoryview(memory)[:4096]) == bytes(4096)
    memory.close()


def test_the_default_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not(*_: object) -> Any:
        raise AssertionError("the default location must not look at the machine")

    monkeypatch.setattr(placement, "wanted_node", must_not)
    create_placed(4096, ANYWHERE, huge_pages=False, prefault=True).close()


@pytest.mark.parametrize("location", ["cpu:1", "cpu:77", "gpu:3", "rack 5"])
def test_tags_stay_tags_on_one_node(location: str) -> None:
    with Engine(transports=("local", "shm", "tcp")) as engine:
        assert engine.allocate(4096, location=location).location == location


def test_nodes_that_are_not_there() -> None:
    with Engine() as engine:
        for location in ("numa:77", "cxl:77", "cxl:0"):
            with pytest.raises(UsageError, match="numa node"):
                engine.allocate(4096, location=location)
        assert engine.regions == []


def test_where_binding_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise ResourceError("binding failed: Operation not permitted", errno=errno.EPERM)

    monkeypatch.setattr(numa, "bind_memory", forbidden)
    with pytest.raises(UnsupportedOperation, match="mbind"):
        create_placed(4096, "numa:0", huge_pages=False, prefault=True)


def test_pages_that_came_from_elsewhere_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "pages_by_node", lambda *_: {0: 5, 1: 3})
    with pytest.raises(OutOfMemory, match="elsewhere"):
        create_placed(4096, "numa:0", huge_pages=False, prefault=True)
    create_placed(4096, "numa:0", huge_pages=False, prefault=False).close()


def test_too_much_is_refused_before_anything_is_made() -> None:
    with pytest.raises(OutOfMemory, match="numa node 0"):
        create_placed(1 << 45, "numa:0", huge_pages=False, prefault=True)
