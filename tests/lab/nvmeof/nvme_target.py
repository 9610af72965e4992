"""The lab's NVMe target, changed while it runs, through the kernel's configfs (see tests/lab/README.md)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from moonpool.transport.nvme_attribute import Target
from moonpool.transport.nvme_fabrics import AttachOptions

NQN = "nqn.2026-01.lab:ns"
ADDRESS = "10.99.0.2"
OTHER_ADDRESS = "10.99.0.1"
WAIT_S = 60.0

_CONFIG = Path("/sys/kernel/config/nvmet")
_SUBSYSTEM = _CONFIG / "subsystems" / NQN
_NAMESPACE = _SUBSYSTEM / "namespaces" / "1"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Waits for what the kernel or another process brings about; fails after a generous bound."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.05)


def serve(on: bool, port: int = 1) -> None:
    """Serve the subsystem at a port, or no longer: connections are cut at once."""
    link = _CONFIG / "ports" / str(port) / "subsystems" / NQN
    if on and not link.exists():
        link.symlink_to(_SUBSYSTEM)
    elif not on:
        with contextlib.suppress(FileNotFoundError):
            link.unlink()


def show_namespace(on: bool) -> None:
    """Give the namespace to hosts, or take it away; its bytes stay."""
    (_NAMESPACE / "enable").write_text("1" if on else "0")


def add_port(number: int, transport: str, address: str) -> None:
    """A second way into the subsystem."""
    port = _CONFIG / "ports" / str(number)
    if not port.exists():
        port.mkdir()
        (port / "addr_trtype").write_text(transport)
        (port / "addr_adrfam").write_text("ipv4")
        (port / "addr_traddr").write_text(address)
        (port / "addr_trsvcid").write_text("4420")
    serve(True, number)


def pull_cable(pulled: bool) -> None:
    """Cut the target off, or put the cable back."""
    state = "down" if pulled else "up"
    subprocess.run(["ip", "link", "set", "port1", state], check=True, timeout=10)


def fds() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def quick_options(transport: str, address: str = ADDRESS, loss_timeout_s: int = 60) -> AttachOptions:
    """A controller that tries each second."""
    return AttachOptions(
        target=Target(transport, address),
        subsystem_nqn=NQN,
        host_nqn="nqn.2026-01.lab:host",
        host_id="11111111-2222-3333-4444-555555555555",
        host_address=OTHER_ADDRESS if address == ADDRESS else ADDRESS,
        keep_alive_s=3,
        reconnect_delay_s=1,
        loss_timeout_s=loss_timeout_s,
        fail_fast_s=2,
    )


@contextlib.contextmanager
def large_blocks(size_bytes: int) -> Iterator[None]:
    """A second namespace in the subsystem, with blocks of 4,096 bytes."""
    image = Path("/dev/shm/large-blocks")
    folder = _SUBSYSTEM / "namespaces" / "2"
    with contextlib.ExitStack() as undo:
        image.write_bytes(bytes(size_bytes))
        undo.callback(image.unlink)
        subprocess.run(["modprobe", "loop"], check=True, timeout=30)
        made = subprocess.run(
            ["losetup", "--find", "--show", "--sector-size", "4096", str(image)],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        device = made.stdout.strip()
        undo.callback(subprocess.run, ["losetup", "--detach", device], check=True, timeout=30)
        folder.mkdir()
        undo.callback(folder.rmdir)
        (folder / "device_path").write_text(device)
        (folder / "enable").write_text("1")
        undo.callback((folder / "enable").write_text, "0")
        yield
