"""Whose word is enough to use which namespace: what a peer publishes is hostile until it has been checked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    OutOfRange,
    PeerRefused,
    ProtocolError,
    TransportUnavailable,
)
from moonpool.transport import nvme_devices, nvmeof
from moonpool.transport.nvme_attribute import NamespaceRange, Target
from moonpool.transport.nvme_offers import plan_range
from moonpool.transport.nvme_sysfs import Namespace, read_subsystems
from moonpool.transport.nvmeof import NvmeofTransport

sys.path.insert(0, str(Path(__file__).parent))
from nvme_hosts import recorded


class World:
    """This host's namespaces, and what was asked of the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: str | None = "tcp"
        self.attached: list[Target] = []
        self.refusing: set[str] = set()
        #: What this host sees once something is attached.
        self.then: str | None = "tcp"
        monkeypatch.setattr(nvme_devices, "read_subsystems", self.read)
        monkeypatch.setattr(nvmeof, "check_unused", lambda _namespace: None)
        monkeypatch.setattr(nvmeof, "attach", self.attach)
        monkeypatch.setattr(nvmeof, "host_identity", lambda: ("nqn.2026-01.lab:host", ""))

    def read(self, _reader: Any = None) -> Any:
        return () if self.host is None else read_subsystems(recorded(self.host))

    def attach(self, options: Any, _timeout_s: float) -> None:
        self.attached.append(options.target)
        if options.target.address in self.refusing:
            raise PeerRefused("nothing listens")
        self.host = self.then

    def about(self, host: str = "tcp", **changes: Any) -> NamespaceRange:
        (subsystem,) = read_subsystems(recorded(host))
        return replace(plan_range(subsystem.namespaces[0], 1 << 20, {}), **changes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def find(about: NamespaceRange, *, unix: bool = False, own: bool = False, **config: Any) -> Namespace:
    peer: Any = SimpleNamespace(is_self=own, session=SimpleNamespace(is_unix=unix), endpoint="10.0.0.9:1")
    return NvmeofTransport(EngineConfig(**config))._find(peer, about)


def test_a_namespace_over_a_network_is_used_on_any_peers_word(world: World) -> None:
    assert find(world.about()).block_name == "nvme0n1"


def test_a_local_drive_is_not_used_on_the_word_of_another_host(world: World) -> None:
    world.host = "pcie"
    about = world.about("pcie")
    with pytest.raises(AccessDenied, match="local drive"):
        find(about)
    assert find(about, unix=True).block_name == "nvme0n1"
    assert find(about, own=True).block_name == "nvme0n1"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"block_bytes": 4096}, ProtocolError),
        ({"offset": 128 << 20}, OutOfRange),
        ({"size_bytes": (128 << 20) + 1}, OutOfRange),
        ({"offset": 1 << 61}, OutOfRange),
        ({"nsid": 2}, TransportUnavailable),
        ({"wwid": "uuid.00000000-0000-0000-0000-000000000000"}, TransportUnavailable),
        ({"subsystem_nqn": "nqn.2026-01.lab:other"}, TransportUnavailable),
    ],
)
def test_what_does_not_fit_is_refused(
    world: World, change: dict[str, Any], kind: type[MoonpoolError]
) -> None:
    with pytest.raises(kind):
        find(world.about(**change))
    assert world.attached == []


def test_nothing_is_attached_unless_the_config_says_where(world: World) -> None:
    world.host = None
    about = world.about()
    with pytest.raises(TransportUnavailable) as caught:
        find(about)
    assert "moonpool nvmf attach nqn.2026-01.lab:ns --address 10.99.0.2 --transport tcp" in str(caught.value)
    with pytest.raises(TransportUnavailable):
        find(about, nvmeof_attach=("10.98.0.0/16", "fe80::/10"))
    assert world.attached == []
    assert find(about, nvmeof_attach=("10.99.0.0/24",)).is_live
    assert world.attached == [Target("tcp", "10.99.0.2")]


def test_targets_are_tried_in_turn_and_names_never(world: World) -> None:
    world.host = None
    targets = tuple(Target("tcp", address) for address in ("storage.example", "10.1.0.1", "10.1.0.2"))
    world.refusing = {"10.1.0.1"}
    assert find(world.about(targets=targets), nvmeof_attach=("0.0.0.0/0",)).is_live
    assert [target.address for target in world.attached] == ["10.1.0.1", "10.1.0.2"]
    world.host = None
    world.refusing |= {"10.1.0.2"}
    with pytest.raises(PeerRefused):
        find(world.about(targets=targets), nvmeof_attach=("0.0.0.0/0",))


def test_a_target_that_serves_something_else_is_no_namespace(world: World) -> None:
    world.host = None
    world.then = "rdma"
    with pytest.raises(TransportUnavailable):
        find(world.about(), nvmeof_attach=("10.99.0.2",))
