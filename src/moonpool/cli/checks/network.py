"""Sockets: congestion control, loopback in both families, and descriptors over a unix socket."""

from __future__ import annotations

import os
import socket
from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.config import EngineConfig
from moonpool.topology import SysfsReader

GROUP: Final = "network"
CONNECT_TIMEOUT_S: Final = 2.0


def check_network(reader: SysfsReader) -> list[Check]:
    """Congestion control, loopback and unix sockets."""
    wanted = EngineConfig().congestion_local
    return [
        judge_congestion(
            (reader.read("/proc/sys/net/ipv4/tcp_available_congestion_control") or "").split(),
            reader.read("/proc/sys/net/ipv4/tcp_congestion_control") or "unknown",
            wanted,
            try_congestion(wanted),
        ),
        check_loopback(socket.AF_INET, "127.0.0.1"),
        check_loopback(socket.AF_INET6, "::1"),
        check_unix(),
    ]


def try_congestion(name: str) -> str:
    """Why a socket does not take this congestion control; "" when it does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def judge_congestion(available: list[str], default: str, wanted: str, problem: str) -> Check:
    """``problem`` is why ``wanted`` cannot be set on a socket, "" when it can."""
    detail = f"default {default}; available: {' '.join(available) or 'unknown'}"
    if not problem:
        return Check(
            GROUP, "congestion control", Level.OK, f"{detail}; {wanted} can be set for lanes on this host"
        )
    advice = (
        f"modprobe tcp_{wanted}, and add it to net.ipv4.tcp_allowed_congestion_control"
        f" (paced controls such as bbr are slow over loopback)"
    )
    return Check(
        GROUP, "congestion control", Level.WARN, f"{detail}; {wanted} cannot be set: {problem}", advice
    )


def check_loopback(family: socket.AddressFamily, host: str) -> Check:
    """Connects a socket to a listener of this process."""
    version = "IPv4" if family == socket.AF_INET else "IPv6"
    try:
        with socket.create_server((host, 0), family=family) as listener:
            listener.settimeout(CONNECT_TIMEOUT_S)
            with socket.create_connection(listener.getsockname()[:2], CONNECT_TIMEOUT_S):
                listener.accept()[0].close()
    except OSError as exc:
        level = Level.FAIL if family == socket.AF_INET else Level.INFO
        advice = "bring the loopback interface up: ip link set lo up" if level is Level.FAIL else ""
        return Check(GROUP, f"{version} loopback", level, f"{host}: {exc.strerror or exc}", advice)
    return Check(GROUP, f"{version} loopback", Level.OK, f"{host} connects")


def check_unix() -> Check:
    """Passes a descriptor over an abstract unix socket, and reads the peer's credentials, as shm does."""
    name = "unix sockets"
    address = f"\0moonpool-doctor/{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(1)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(CONNECT_TIMEOUT_S)
                client.connect(address)
                accepted, _ = listener.accept()
                with accepted:
                    return _pass_descriptor(name, client, accepted)
    except OSError as exc:
        return Check(
            GROUP, name, Level.FAIL, f"abstract address: {exc.strerror or exc}", "shm needs unix sockets"
        )


def _pass_descriptor(name: str, client: socket.socket, accepted: socket.socket) -> Check:
    sent = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    received: list[int] = []
    try:
        socket.send_fds(client, [b"x"], [sent])
        accepted.settimeout(CONNECT_TIMEOUT_S)
        _, received, _, _ = socket.recv_fds(accepted, 1, 1)
        if len(received) != 1 or not os.path.sameopenfile(sent, received[0]):
            return Check(GROUP, name, Level.FAIL, "a descriptor sent did not arrive", "shm needs SCM_RIGHTS")
        accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    finally:
        for fd in (sent, *received):
            os.close(fd)
    return Check(GROUP, name, Level.OK, "a descriptor was passed and the peer's credentials read")
