"""RDMA over the fake libibverbs of the native tests on every machine, and over real devices in the lab."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from tests.native.fake_verbs.fabric import FakeFabric

from fabric_ways.far import Way

#: Queue pairs of an emulated machine need time: 0.5 s between tries.
PATIENT: dict[str, Any] = {
    "rdma_timeout": 17,
    "transfer_timeout_ms": 60_000,
    "connect_timeout_ms": 20_000,
    "handshake_timeout_ms": 20_000,
}
LAB = "needs the lab"


@functools.cache
def fake_fabric() -> FakeFabric:
    """The one fake of this process: four devices, seen by its children too."""
    fabric = FakeFabric()
    # Named and not a file of its own: children find it by the environment of their parent.
    fabric.share(str(Path(tempfile.mkdtemp(prefix="moonpool-fabric-")) / "world"))
    fabric.devices(4)
    return fabric


def use_fake() -> None:
    """Let engines of this process use the fake."""
    from moonpool.native.verbs.devices import use_library

    fabric = fake_fabric()
    fabric.clear()
    use_library(fabric.path)


def use_real() -> None:
    """Let engines of this process use the devices of this machine."""
    from moonpool.native.verbs.devices import use_library

    use_library("")


WAYS = [
    Way(
        "rdma",
        ("rdma",),
        {"rdma_devices": ("fake0", "fake1")},
        target_transports=("rdma", "tcp"),
        prepare=use_fake,
    ),
    Way(
        "rdma-four-foreign",
        ("rdma", "tcp"),
        {"rdma_queue_depth": 32},
        foreign=True,
        target_transports=("rdma", "tcp"),
        prepare=use_fake,
    ),
    Way(
        "rdma-rxe",
        ("rdma",),
        PATIENT,
        target_transports=("rdma", "tcp"),
        on_request=LAB,
        prepare=use_real,
    ),
    Way(
        "rdma-rxe-foreign",
        ("rdma", "tcp"),
        PATIENT,
        foreign=True,
        target_transports=("rdma", "tcp"),
        on_request=LAB,
        prepare=use_real,
    ),
]
