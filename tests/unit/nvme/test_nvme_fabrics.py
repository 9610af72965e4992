"""What the kernel is told for an attach, and what its answers mean."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    PeerRefused,
    ResourceError,
    TransportUnavailable,
    UsageError,
)
from moonpool.transport.nvme_attribute import Target
from moonpool.transport.nvme_fabrics import AttachOptions, attach, attach_problem, attached_to, detach

sys.path.insert(0, str(Path(__file__).parent))
from nvme_hosts import recorded, two_controllers

OPTIONS = AttachOptions(target=Target("tcp", "10.99.0.2"), subsystem_nqn="nqn.2026-01.lab:ns")


def test_the_line_for_the_kernel() -> None:
    assert OPTIONS.line() == (
        "transport=tcp,traddr=10.99.0.2,trsvcid=4420,nqn=nqn.2026-01.lab:ns,"
        "keep_alive_tmo=5,reconnect_delay=2,ctrl_loss_tmo=600,fast_io_fail_tmo=5"
    )
    more = replace(
        OPTIONS,
        host_nqn="nqn.2014-08.org.nvmexpress:uuid:28a0f1c9-2ca1-468d-b415-4c89db4ecf3b",
        host_id="11111111-2222-3333-4444-555555555555",
        host_address="10.99.0.1",
        host_interface="lab0",
        io_queues=3,
        data_digest=True,
    )
    assert more.line() == OPTIONS.line() + (
        ",hostnqn=nqn.2014-08.org.nvmexpress:uuid:28a0f1c9-2ca1-468d-b415-4c89db4ecf3b"
        ",hostid=11111111-2222-3333-4444-555555555555,host_traddr=10.99.0.1,host_iface=lab0"
        ",nr_io_queues=3,data_digest"
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"subsystem_nqn": "nqn.a,hostnqn=nqn.b"}, "subsystem_nqn"),
        ({"subsystem_nqn": "lab"}, "subsystem_nqn"),
        ({"subsystem_nqn": "nqn." + "x" * 220}, "subsystem_nqn"),
        ({"host_nqn": "nqn.a\nb"}, "host_nqn"),
        ({"host_id": "1234"}, "host_id"),
        ({"host_address": "10.0.0.1,tls"}, "host_address"),
        ({"host_interface": "a b"}, "host_interface"),
        ({"target": Target("fc", "10.0.0.1")}, "target"),
        ({"keep_alive_s": 0}, "keep_alive_s"),
        ({"loss_timeout_s": -1}, "loss_timeout_s"),
        ({"io_queues": 0}, "io_queues"),
    ],
)
def test_a_wrong_option_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(OPTIONS, **change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("number", "kind", "word"),
    [
        (errno.ECONNREFUSED, PeerRefused, "nothing listens"),
        (errno.ENETUNREACH, PeerRefused, "route"),
        (errno.ETIMEDOUT, PeerRefused, "firewall"),
        (errno.ECONNRESET, PeerRefused, "port"),
        (errno.EIO, AccessDenied, "allowed hosts"),
        (errno.EINVAL, TransportUnavailable, "modprobe nvme-tcp"),
        (errno.EALREADY, UsageError, "moonpool nvmf list"),
        (errno.ENOMEM, ResourceError, "dmesg"),
    ],
)
def test_each_refusal_says_what_to_do(number: int, kind: type[MoonpoolError], word: str) -> None:
    problem = attach_problem(OSError(number, os.strerror(number)), OPTIONS)
    assert type(problem) is kind
    assert word in str(problem)


def test_what_is_attached_already_is_found() -> None:
    found = attached_to(OPTIONS, recorded("tcp"))
    assert found is not None
    assert found.controller.name == "nvme0"
    assert not found.is_new
    assert attach(OPTIONS, 1.0, recorded("tcp")).controller.name == "nvme0", (
        "idempotent: the kernel is not asked"
    )
    for other in (
        replace(OPTIONS, target=Target("tcp", "10.99.0.3")),
        replace(OPTIONS, target=Target("tcp", "10.99.0.2", "4421")),
        replace(OPTIONS, target=Target("rdma", "10.99.0.2")),
        replace(OPTIONS, host_address="10.99.0.9"),
        replace(OPTIONS, host_nqn="nqn.2026-01.lab:other"),
        replace(OPTIONS, subsystem_nqn="nqn.2026-01.lab:other"),
    ):
        assert attached_to(other, recorded("tcp")) is None


def test_a_controller_that_is_being_deleted_is_not_attached() -> None:
    second = replace(OPTIONS, target=Target("tcp", "10.99.0.3"))
    assert attached_to(second, two_controllers("connecting")) is not None
    assert attached_to(second, two_controllers("deleting")) is None


def test_a_local_drive_is_not_detached() -> None:
    with pytest.raises(UsageError, match="local pcie drive"):
        detach("nvme0", 1.0, recorded("pcie"))
    assert detach("nvme7", 1.0, recorded("pcie")) == ()
