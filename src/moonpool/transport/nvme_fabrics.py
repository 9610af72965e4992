"""Attaching and detaching remote NVMe subsystems through the kernel's own initiator.

The kernel takes a line of options in /dev/nvme-fabrics and answers with the controller that it made; it takes
"1" in the controller's `delete_controller` to let go of it. Both wait in the kernel: a write into either is
made on a thread of its own and waited for with a bound. Source: drivers/nvme/host/fabrics.c of Linux 6.12.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    PeerRefused,
    ResourceError,
    TransferTimeout,
    TransportUnavailable,
    UsageError,
)
from moonpool.topology.sysfs import SysfsReader
from moonpool.transport.nvme_attribute import NQN_BYTES_MAX, Target
from moonpool.transport.nvme_sysfs import Controller, Subsystem, read_subsystems

FABRICS: Final = "/dev/nvme-fabrics"
CONTROLLERS: Final = "/sys/class/nvme"
ANSWER_BYTES_MAX: Final = 256
HOST_NQN_FILE: Final = "/etc/nvme/hostnqn"
HOST_ID_FILE: Final = "/etc/nvme/hostid"
#: How often the state of a new controller is looked at.
LOOK_S: Final = 0.02
#: How long a live controller may take to show its namespaces.
NAMESPACES_S: Final = 2.0

_NQN: Final = re.compile(r"nqn\.[!-+\--~]+\Z")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_INTERFACE: Final = re.compile(r"[0-9A-Za-z._:@-]{1,15}\Z")
_MODULES: Final = {"tcp": "nvme-tcp", "rdma": "nvme-rdma"}
_UNREACHED: Final = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EADDRNOTAVAIL,
    errno.ENETDOWN,
)
#: Inclusive bounds of the options that are numbers of seconds or queues.
_RANGES: Final = {
    "keep_alive_s": (1, 3600),
    "reconnect_delay_s": (1, 3600),
    "loss_timeout_s": (0, 86_400),
    "fail_fast_s": (0, 86_400),
    "io_queues": (1, 1024),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Which subsystem to attach, and how patient its controller is; UsageError names a wrong field.

    A lost controller tries to come back each `reconnect_delay_s`; after `loss_timeout_s` it is given up.
    After `fail_fast_s`, requests on its block devices fail instead of waiting for it.
    """

    target: Target
    subsystem_nqn: str
    host_nqn: str = ""
    host_id: str = ""
    #: Address of this host to come from; "" leaves it to routing.
    host_address: str = ""
    #: Network interface of this host (tcp only); "" leaves it to routing.
    host_interface: str = ""
    keep_alive_s: int = 5
    reconnect_delay_s: int = 2
    loss_timeout_s: int = 600
    fail_fast_s: int = 5
    #: None: as many as the kernel likes, one for each CPU.
    io_queues: int | None = None
    header_digest: bool = False
    data_digest: bool = False

    def __post_init__(self) -> None:
        if not self.target.is_valid:
            at = f"{self.target.transport}://{self.target.address}:{self.target.port}"
            rule = "the transport is tcp or rdma, the address an IP address or host name, the port a number"
            raise UsageError(f"no target {at}: {rule}", field="target")
        for name, value in (("subsystem_nqn", self.subsystem_nqn), ("host_nqn", self.host_nqn)):
            wanted = name == "subsystem_nqn" or value
            if wanted and (len(value) > NQN_BYTES_MAX or not _NQN.match(value)):
                raise UsageError(f"{value!r} is no qualified name: nqn.2026-01.org:name, say", field=name)
        if self.host_id and not _UUID.match(self.host_id):
            raise UsageError(f"the host id {self.host_id!r} is no UUID", field="host_id")
        if self.host_address and not Target(self.target.transport, self.host_address).is_valid:
            raise UsageError(f"{self.host_address!r} is no address", field="host_address")
        if self.host_interface and not _INTERFACE.match(self.host_interface):
            raise UsageError(f"{self.host_interface!r} is no interface", field="host_interface")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name}={value} must be from {low} to {high}", field=name)

    def line(self) -> str:
        """What the kernel is told."""
        words = [
            f"transport={self.target.transport}",
            f"traddr={self.target.address}",
            f"trsvcid={self.target.port}",
            f"nqn={self.subsystem_nqn}",
            f"keep_alive_tmo={self.keep_alive_s}",
            f"reconnect_delay={self.reconnect_delay_s}",
            f"ctrl_loss_tmo={self.loss_timeout_s}",
            f"fast_io_fail_tmo={self.fail_fast_s}",
        ]
        for name, value in (
            ("hostnqn", self.host_nqn),
            ("hostid", self.host_id),
            ("host_traddr", self.host_address),
            ("host_iface", self.host_interface),
            ("nr_io_queues", self.io_queues),
        ):
            if value:
                words.append(f"{name}={value}")
        words += [
            name for name, on in (("hdr_digest", self.header_digest), ("data_digest", self.data_digest)) if on
        ]
        return ",".join(words)


@final
@dataclass(frozen=True, slots=True)
class Attached:
    """A controller that leads to a subsystem, and whether this call made it."""

    controller: Controller
    subsystem: Subsystem
    is_new: bool


def attach(options: AttachOptions, timeout_s: float, reader: SysfsReader | None = None) -> Attached:
    """Attach a subsystem and wait until its controller is live; idempotent for one target address.

    TransportUnavailable (no initiator in this kernel), PeerRefused (nothing listens, no route), AccessDenied
    (the target does not let this host in), TransferTimeout (under way still: call again).
    """
    until = time.monotonic() + timeout_s
    known = attached_to(options, reader)
    if known is None:
        answer = _bounded(lambda: _tell_kernel(options), timeout_s, f"attaching {options.subsystem_nqn}")
        name = f"nvme{answer}"
    else:
        name = known.controller.name
    live_since = None
    while True:
        found, now = _controller_of(name, options.subsystem_nqn, reader), time.monotonic()
        if found is not None and found[0].is_live:
            live_since = live_since or now
            # Namespaces are looked for after the controller is live; a subsystem may have none.
            if found[1].namespaces or now >= live_since + NAMESPACES_S:
                return Attached(found[0], found[1], known is None)
        if now >= until:
            state = "not there" if found is None else found[0].state
            raise TransferTimeout(
                f"the controller {name} of {options.subsystem_nqn} is {state} after {timeout_s:g} s; "
                "look again with `moonpool nvmf list`, or give it more time",
                timeout_ms=timeout_s * 1e3,
            )
        time.sleep(LOOK_S)


def attached_to(options: AttachOptions, reader: SysfsReader | None = None) -> Attached | None:
    """The controller that leads from here to that target's subsystem already, live or coming back."""
    wanted = [("traddr", options.target.address), ("trsvcid", options.target.port)]
    if options.host_address:
        wanted.append(("host_traddr", options.host_address))
    for subsystem in read_subsystems(reader):
        for controller in subsystem.controllers if subsystem.nqn == options.subsystem_nqn else ():
            same_way = controller.transport == options.target.transport
            is_same = same_way and all(pair in controller.address for pair in wanted)
            is_ours = not options.host_nqn or controller.host_nqn == options.host_nqn
            if is_same and is_ours and (controller.is_live or controller.may_return):
                return Attached(controller, subsystem, False)
    return None


def detach(name: str, timeout_s: float, reader: SysfsReader | None = None) -> tuple[str, ...]:
    """Let go of a controller ("nvme0"), or of every fabric controller of a subsystem (its NQN); their names.

    Idempotent: nothing to let go of is no error. UsageError for a local drive, which nobody attached.
    """
    gone = []
    for subsystem in read_subsystems(reader):
        for controller in subsystem.controllers:
            if name not in (controller.name, f"/dev/{controller.name}", subsystem.nqn):
                continue
            if not controller.is_fabric:
                raise UsageError(
                    f"{controller.name} is a local {controller.transport} drive", name=controller.name
                )
            _bounded(_deleting(controller.name), timeout_s, f"detaching {controller.name}")
            gone.append(controller.name)
    return tuple(gone)


def host_identity() -> tuple[str, str]:
    """This host's NQN and id as the distribution keeps them; "" for each that is not set."""
    return _first_line(HOST_NQN_FILE), _first_line(HOST_ID_FILE)


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline(NQN_BYTES_MAX + 1).strip()
    except OSError:
        return ""


def _controller_of(name: str, nqn: str, reader: SysfsReader | None) -> tuple[Controller, Subsystem] | None:
    for subsystem in read_subsystems(reader):
        for controller in subsystem.controllers:
            if controller.name == name and subsystem.nqn == nqn:
                return controller, subsystem
    return None


def _tell_kernel(options: AttachOptions) -> int:
    """The number of the controller that the kernel made."""
    try:
        fd = os.open(FABRICS, os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        raise _no_initiator(problem, options) from problem
    try:
        os.write(fd, options.line().encode())
        answer = os.read(fd, ANSWER_BYTES_MAX).decode("ascii", "replace")
    except OSError as problem:
        raise attach_problem(problem, options) from problem
    finally:
        os.close(fd)
    found = re.match(r"instance=(\d{1,9}),", answer)
    if found is None:
        raise ResourceError(f"the kernel answered {answer.strip()!r} to an attach")
    return int(found[1])


def _no_initiator(problem: OSError, options: AttachOptions) -> MoonpoolError:
    if problem.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(
            f"only root may write {FABRICS}: attach with sudo, or let the engine run as root",
            errno=problem.errno,
        )
    return TransportUnavailable(
        f"this kernel has no NVMe over fabrics initiator ({FABRICS}: {problem.strerror})",
        f"load it with `modprobe {_MODULES[options.target.transport]}`",
        transport="nvmeof",
        errno=problem.errno or 0,
    )


def attach_problem(problem: OSError, options: AttachOptions) -> MoonpoolError:
    """What an errno of the kernel means here, and what to do about it."""
    target = f"{options.target.transport} target {options.target.address}:{options.target.port}"
    number, module = problem.errno or 0, _MODULES[options.target.transport]
    if number == errno.ECONNREFUSED:
        return PeerRefused(
            f"nothing listens at the {target}: check the address, and that nvmet has that port"
        )
    if number in _UNREACHED:
        return PeerRefused(f"no way to the {target} ({problem.strerror}): check address, route and firewall")
    if number == errno.ECONNRESET:
        return PeerRefused(f"the {target} refused: it knows no such way in; check transport and port")
    if number in (errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT):
        return AccessDenied(
            f"the {target} does not let this host in: check the subsystem's NQN ({options.subsystem_nqn}), "
            "and that its list of allowed hosts has this host's NQN (or attr_allow_any_host is 1)",
            errno=number,
        )
    if number in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
        return TransportUnavailable(
            f"the kernel refused to attach over {options.target.transport} ({problem.strerror})",
            f"load its module with `modprobe {module}`, and check the options: `dmesg` says more",
            transport="nvmeof",
            errno=number,
        )
    if number in (errno.EALREADY, errno.EEXIST, errno.EBUSY):
        return UsageError(
            f"{options.subsystem_nqn} at that address is being attached or detached by somebody: see "
            "`moonpool nvmf list`",
            errno=number,
        )
    return ResourceError(
        f"attaching the {target} failed: {problem.strerror}; `dmesg` says more", errno=number
    )


def _deleting(name: str) -> Callable[[], None]:
    def delete() -> None:
        path = Path(CONTROLLERS) / name / "delete_controller"
        try:
            path.write_text("1")
        except FileNotFoundError:
            return  # gone by itself
        except PermissionError as problem:
            raise ResourceError(f"only root may detach {name}", errno=problem.errno or 0) from problem
        except OSError as problem:
            if problem.errno != errno.ENODEV:
                raise ResourceError(
                    f"detaching {name} failed: {problem.strerror}", errno=problem.errno or 0
                ) from problem

    return delete


def _bounded(work: Callable[[], int | None], timeout_s: float, what: str) -> int:
    """Run what may wait in the kernel, for at most so long; it goes on by itself when that is over."""
    outcome: list[int | None] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="moonpool-nvmf", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if problems:
        raise problems[0]
    if not outcome:
        raise TransferTimeout(
            f"{what} takes longer than {timeout_s:g} s; it goes on in the kernel", timeout_ms=timeout_s * 1e3
        )
    return outcome[0] or 0
