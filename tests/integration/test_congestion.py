"""Lanes that stay on the host: congestion control is set before the connection is made, at both ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from moonpool import Engine


def congestion_of_lanes(ports: set[int]) -> list[str]:
    """The algorithm of each established tcp socket of this process with one of these ports at an end."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            fd = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        with sock:
            if sock.family != socket.AF_INET or sock.type != socket.SOCK_STREAM:
                continue
            try:
                ends = {sock.getsockname()[1], sock.getpeername()[1]}
            except OSError:
                continue  # a listener
            if ends & ports:
                name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                found.append(name.rstrip(b"\0").decode())
    return found


@pytest.mark.parametrize("wanted", ["reno", "cubic"])
def test_both_ends_of_a_lane_use_the_local_algorithm(wanted: str) -> None:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    expected = wanted if wanted in available else "reno"
    with (
        Engine(transports=("tcp",), congestion_local=wanted) as owner,
        Engine(transports=("tcp",), congestion_local=wanted) as user,
    ):
        owner.allocate(4096)
        segment = user.open(owner.endpoint)
        user.read(segment, segment.regions[0].handle, 0, bytearray(64))
        port = int(owner.endpoint.rpartition(":")[2])
        names = congestion_of_lanes({port})
    # Two ends of the control session and two of the lane.
    assert len(names) >= 4
    assert set(names) == {expected}
