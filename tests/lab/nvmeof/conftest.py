"""Engines over the lab's NVMe target: `--nvmf tcp` or `--nvmf rdma`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from nvme_target import NQN, pull_cable, quick_options, serve, show_namespace, wait_until

from moonpool.transport.nvme_fabrics import Attached, attach, detach
from moonpool.transport.nvme_sysfs import read_subsystems


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs the lab outside of it."""
    if os.environ.get("LAB_GUEST") != "1":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs the lab: an NVMe target (--nvmf)"))


@pytest.fixture(scope="session")
def transport() -> str:
    """The transport of the lab's target."""
    (subsystem,) = [one for one in read_subsystems() if one.nqn == NQN]
    return subsystem.controllers[0].transport


@pytest.fixture
def attached(transport: str) -> Iterator[Attached]:
    """The subsystem attached with quick reactions and no other controller; put right again afterwards."""
    with contextlib.ExitStack() as undo:
        undo.callback(detach, NQN, 30.0)
        undo.callback(show_namespace, True)
        undo.callback(serve, True)
        undo.callback(pull_cable, False)
        detach(NQN, 30.0)
        wait_until(lambda: not any(one.nqn == NQN for one in read_subsystems()), "the old controllers go")
        yield attach(quick_options(transport), 30.0)
