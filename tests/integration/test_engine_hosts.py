"""Peers in two network namespaces, which are two hosts to tcp: it works, and shm does not pretend to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STALL_MS = 500
LATE_S = 4.0
WAIT_S = 30.0
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs the lab: network namespaces need root and iproute2",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)


@dataclass(frozen=True)
class Hosts:
    """Two namespaces with a cable between them."""

    left: str
    right: str
    wire: str
    address: dict[str, tuple[str, str]]

    def on(self, host: str) -> tuple[str, ...]:
        """The command's prefix that runs it there."""
        return ("ip", "netns", "exec", host)

    def pull_cable(self) -> None:
        ip("-n", self.left, "link", "set", self.wire, "down")

    def plug_cable(self) -> None:
        ip("-n", self.left, "link", "set", self.wire, "up")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    tag = secrets.token_hex(3)
    left, right, wire, other = f"mpl{tag}", f"mpr{tag}", f"ma{tag}", f"mb{tag}"
    made = []
    try:
        for name in (left, right):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", left, "link", "add", wire, "type", "veth", "peer", "name", other, "netns", right)
        address = {left: ("10.231.7.1", "fd00:231::1"), right: ("10.231.7.2", "fd00:231::2")}
        for name, end in ((left, wire), (right, other)):
            ip("-n", name, "addr", "add", f"{address[name][0]}/24", "dev", end)
            ip("-n", name, "addr", "add", f"{address[name][1]}/64", "dev", end, "nodad")
            ip("-n", name, "link", "set", end, "up")
        yield Hosts(left, right, wire, address)
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_peers_on_two_hosts_use_tcp(make_peer: Any, hosts: Hosts, family: int) -> None:
    target = make_peer(hosts.on(hosts.right), bind_host=hosts.address[hosts.right][family])
    handle = target.ask("offer", size=20 << 20, seed=1)
    foreign = target.ask("offer", size=1 << 20, seed=2, foreign=True)
    initiator = make_peer(hosts.on(hosts.left), bind_host=hosts.address[hosts.left][family])
    assert initiator.ask("open", endpoint=target.endpoint) == ["tcp"], "shm has no business between hosts"
    assert initiator.ask("read", handle=handle, length=20 << 20, seed=1)
    assert initiator.ask("read", handle=foreign, length=1 << 20, seed=2)
    initiator.ask("notify", text="over the wire")
    assert target.ask("notifications", timeout_s=WAIT_S) == ["over the wire"]
    assert {row["transport"] for row in initiator.ask("rows")} == {"tcp"}
    # A large transfer goes over several lanes when the peer is elsewhere.
    assert target.ask("counters")["lanes_open"] > 1


def test_an_engine_that_listens_everywhere_is_reached_where_it_says(make_peer: Any, hosts: Hosts) -> None:
    address = hosts.address[hosts.right][0]
    target = make_peer(hosts.on(hosts.right), bind_host="0.0.0.0", advertise_host=address)
    assert target.endpoint.startswith(address)
    handle = target.ask("offer", size=4096, seed=1)
    for where in (hosts.left, hosts.right):
        initiator = make_peer(hosts.on(where))
        initiator.ask("open", endpoint=target.endpoint)
        assert initiator.ask("read", handle=handle, length=4096, seed=1)


def test_loopback_is_not_reached_from_elsewhere(make_peer: Any, hosts: Hosts) -> None:
    target = make_peer(hosts.on(hosts.right))
    assert target.endpoint.startswith("127.0.0.1:")
    initiator = make_peer(hosts.on(hosts.left), connect_timeout_ms=500)
    for host in ("127.0.0.1", hosts.address[hosts.right][0]):
        with pytest.raises(Exception, match="PeerRefused"):
            initiator.ask("open", endpoint=f"{host}:{target.port}")


@pytest.mark.parametrize("op", [1, 2], ids=["read", "write"])
def test_a_pulled_cable_is_a_stalled_peer(make_peer: Any, hosts: Hosts, wait_until: Any, op: int) -> None:
    target = make_peer(hosts.on(hosts.right), bind_host=hosts.address[hosts.right][0])
    handle = target.ask("offer", size=64 << 20, seed=1)
    initiator = make_peer(
        hosts.on(hosts.left),
        stall_timeout_ms=STALL_MS,
        connect_timeout_ms=STALL_MS,
        transfer_timeout_ms=20_000,
    )
    initiator.ask("open", endpoint=target.endpoint)
    initiator.ask("work", op=op, handle=handle, length=64 << 20, seed=1)
    wait_until(lambda: initiator.ask("progress")[0] > 0, "bytes flow")
    hosts.pull_cable()
    try:
        began = time.monotonic()
        wait_until(lambda: initiator.ask("progress")[1] != "", "the silence is noticed")
        assert time.monotonic() - began < STALL_MS / 1e3 + LATE_S
        assert initiator.ask("stop")[1] in ("PeerStalled", "PeerGone")
        began = time.monotonic()
        with pytest.raises(Exception, match=r"PeerStalled|PeerGone|TransferTimeout"):
            initiator.ask("read", handle=handle, length=4096, seed=1)
        assert time.monotonic() - began < 2 * STALL_MS / 1e3 + LATE_S
    finally:
        hosts.plug_cable()

    def is_back() -> bool:
        # The peer may have been given up for dead: then it is opened again.
        with contextlib.suppress(Exception):
            initiator.ask("open", endpoint=target.endpoint)
            return bool(initiator.ask("read", handle=handle, length=4096, seed=1))
        return False

    wait_until(is_back, "the peer is reached again")


def test_this_process_could_run_where_the_peers_run(hosts: Hosts) -> None:
    code = "import moonpool, sys; sys.exit(0)"
    done = subprocess.run([*hosts.on(hosts.left), sys.executable, "-P", "-c", code], timeout=60, check=False)
    assert done.returncode == 0
    assert Path("/proc/self/ns/net").exists()
