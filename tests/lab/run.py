#!/usr/bin/env python3
"""Runs a command inside an emulated machine that has RDMA, NVMe-oF, CXL or NUMA (see README.md).

    tests/lab/run.py [options] -- COMMAND [ARGUMENT...]

The guest sees the host's / (read-only, changes kept in RAM and thrown away) and, read-write, the current
folder and every --rw FOLDER. Its stdout and stderr are streamed apart. The exit status is the command's own,
124 after --timeout, 125 when the guest itself failed (its kernel log is then shown).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from machine import Machine, Wiring, guest_settings, qemu_command

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("LAB_CACHE", "/var/tmp/lab"))
PASSED_ON = ("PATH", "HOME", "LANG", "TERM", "VIRTUAL_ENV", "CI", "TZ")
PASSED_ON_PREFIXES = ("LC_", "PYTHON", "PYTEST", "LAB_", "PYENV_", "MOONPOOL_")
EXIT_TIMED_OUT, EXIT_GUEST_FAILED, EXIT_INTERRUPTED = 124, 125, 130
NVMF_OPTIONS = "reconnect_delay=1,ctrl_loss_tmo=30,keep_alive_tmo=5"
LOG_CHARACTERS_SHOWN = 4000
RELAY_JOIN_S = 5
RELAY_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run: the machine, the command, and how to run it."""

    machine: Machine
    command: tuple[str, ...]
    shared: tuple[Path, ...]
    environment: Mapping[str, str]
    timeout_s: float
    log: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a guest ended: its command's status (None: it never got that far), and what QEMU and init said."""

    status: int | None
    timed_out: bool
    kernel_log: str
    complaints: str


def parse_order(arguments: Sequence[str]) -> Order:
    """The order of a command line; argparse exits with status 2 when it is not valid."""
    parser = _parser()
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    command = tuple(arguments[cut + 1 :])
    if not command:
        parser.error("no COMMAND after --")
    rdma = max(options.rdma, 2) if options.nvmf == "rdma" else options.rdma
    links = max(options.links, rdma, 2 if options.nvmf != "none" else 0)
    machine = Machine(
        cpus=options.cpus,
        memory_mb=options.mem,
        numa_nodes=options.numa,
        links=links,
        rdma=rdma,
        nvmf=options.nvmf,
        nvmf_mb=options.nvmf_mb,
        nvmf_options=options.nvmf_opts,
        nvme_mb=options.nvme,
        cxl_mb=options.cxl,
        cxl_mode=options.cxl_mode,
        huge_pages=options.huge,
        accelerator=options.accel,
        verbose=options.verbose,
        kernel_arguments=tuple(options.kernel_args.split()),
    )
    folders = [Path.cwd(), *(Path(folder).resolve() for folder in options.rw)]
    return Order(
        machine=machine,
        command=command,
        shared=tuple(folder for folder in dict.fromkeys(folders) if folder != Path("/")),
        environment=_guest_environment(options.env),
        timeout_s=options.timeout,
        log=options.log,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/lab/run.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__
    )
    add = parser.add_argument
    add("--cpus", type=int, default=2)
    add("--mem", type=int, default=2048, metavar="MB")
    add("--numa", type=int, default=1, metavar="N", help="N NUMA nodes sharing CPUs and memory evenly")
    add("--rdma", type=int, default=0, metavar="N", help="N soft-RoCE devices rxe0.. at 10.99.0.1..")
    add("--links", type=int, default=0, metavar="N", help="N veth links lab0.. without RDMA")
    add("--nvmf", choices=("tcp", "rdma", "none"), default="none", help="NVMe-oF: /dev/nvme0n1, /dev/ng0n1")
    add("--nvmf-mb", type=int, default=128, metavar="MB", help="its size (default 128)")
    add("--nvmf-opts", default=NVMF_OPTIONS, metavar="TEXT", help="options of the connect string")
    add("--nvme", type=int, default=0, metavar="MB", help="a local PCIe NVMe drive emulated by QEMU")
    add("--cxl", type=int, default=0, metavar="MB", help="far memory on a CPU-less NUMA node")
    add(
        "--cxl-mode",
        choices=("dax", "node", "type3", "type3-node"),
        default="dax",
        help="dax: /dev/dax0.0 (default); node: online memory; type3: a CXL device emulated in full (slow)",
    )
    add("--huge", type=int, default=0, metavar="N", help="N huge pages of 2 MiB")
    add("--rw", action="append", default=[], metavar="FOLDER", help="another folder to share read-write")
    add("--env", action="append", default=[], metavar="K[=V]", help="pass an environment variable")
    add("--timeout", type=float, default=600, metavar="S", help="boot and command together (default 600)")
    add("--accel", default="tcg", help="tcg (default) or kvm")
    add("--kernel-args", default="", metavar="TEXT", help="more kernel arguments")
    add("--log", type=Path, metavar="FILE", help="keep the guest's kernel log there")
    add("--verbose", action="store_true", help="show QEMU's command line and the kernel log")
    return parser


def _guest_environment(named: Sequence[str]) -> dict[str, str]:
    chosen = {
        name: value
        for name, value in os.environ.items()
        if name.isidentifier() and (name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES))
    }
    chosen.setdefault("PYTHONUNBUFFERED", "1")
    chosen["LAB_GUEST"] = "1"
    for entry in named:
        name, given, value = entry.partition("=")
        chosen[name] = value if given else os.environ.get(name, "")
    return chosen


def run_guest(order: Order) -> Outcome:
    """Boots the guest, streams its output, and waits until it is off or the deadline passed."""
    run_folder = Path(tempfile.mkdtemp(prefix="lab."))
    try:
        with _output_pipes() as (stdout_fd, stderr_fd, relays):
            wiring = Wiring(
                cache=CACHE,
                run_folder=run_folder,
                shared=order.shared,
                stdout_fd=stdout_fd,
                stderr_fd=stderr_fd,
            )
            _write_orders(order, wiring)
            command = qemu_command(order.machine, wiring)
            if order.machine.verbose:
                print("lab:", shlex.join(command), file=sys.stderr)
            timed_out = _run_qemu(command, wiring, relays, order.timeout_s)
        return _read_outcome(run_folder, timed_out)
    finally:
        shutil.rmtree(run_folder, ignore_errors=True)


@contextmanager
def _output_pipes() -> Iterator[tuple[int, int, list[threading.Thread]]]:
    """Write ends for the guest's stdout and stderr, and threads that relay the read ends to ours."""
    ends = [os.pipe(), os.pipe()]
    targets = (sys.stdout.buffer, sys.stderr.buffer)
    relays = [
        threading.Thread(target=_relay, args=(read_fd, target), daemon=True)
        for (read_fd, _), target in zip(ends, targets, strict=True)
    ]
    for thread in relays:
        thread.start()
    try:
        yield ends[0][1], ends[1][1], relays
    finally:
        for thread in relays:
            thread.join(RELAY_JOIN_S)


def _relay(read_fd: int, target: BinaryIO) -> None:
    """Copies until end of file; a closed target swallows the rest, so that the guest never blocks on us."""
    with os.fdopen(read_fd, "rb", buffering=0) as source:
        while data := source.read(RELAY_BYTES):
            try:
                target.write(data)
                target.flush()
            except (BrokenPipeError, ValueError):
                continue


def _write_orders(order: Order, wiring: Wiring) -> None:
    kernel = (CACHE / "kernel/version").read_text().strip()
    settings = guest_settings(order.machine, wiring, kernel)
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in settings.items()]
    (wiring.run_folder / "conf").write_text("".join(lines))
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in order.environment.items()]
    folder = shlex.quote(str(Path.cwd()))
    enter = f"cd {folder} || exit {EXIT_GUEST_FAILED}\nexec {shlex.join(order.command)}\n"
    (wiring.run_folder / "cmd").write_text("".join(exports) + enter)


def _run_qemu(command: list[str], wiring: Wiring, relays: list[threading.Thread], timeout_s: float) -> bool:
    """True when the deadline passed. QEMU is dead and its output relayed when this returns or raises."""
    outputs = (wiring.stdout_fd, wiring.stderr_fd)
    with (wiring.run_folder / "qemu").open("w") as complaints:
        try:
            qemu = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=outputs,
                start_new_session=True,
            )
        finally:
            for fd in outputs:
                os.close(fd)  # else the relays never see the end
    try:
        qemu.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return True
    finally:
        if qemu.poll() is None:
            qemu.kill()
            qemu.wait()
        for thread in relays:
            thread.join(RELAY_JOIN_S)
    return False


def _read_outcome(run_folder: Path, timed_out: bool) -> Outcome:
    def text(name: str) -> str:
        path = run_folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    status = text("rc").strip()
    return Outcome(
        status=int(status) if status.isdigit() else None,
        timed_out=timed_out,
        kernel_log=text("console"),
        complaints=" ".join(filter(None, (text("err").strip(), text("qemu").strip()))),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs one order and returns the exit status described at the top."""
    order = parse_order(arguments)
    for name in ("kernel/vmlinux", "kernel/version", "initrd"):
        if not (CACHE / name).exists():
            sys.exit(f"lab: {CACHE / name} is missing: run {HERE / 'setup'} first")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    started = time.monotonic()
    try:
        outcome = run_guest(order)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if order.log:
        order.log.write_text(outcome.kernel_log)
    if order.machine.verbose:
        sys.stderr.write(outcome.kernel_log)
        print(f"lab: {time.monotonic() - started:.1f} s in all", file=sys.stderr)
    if outcome.timed_out:
        print(f"lab: timed out after {order.timeout_s:g} s", file=sys.stderr)
        return EXIT_TIMED_OUT
    if outcome.status is None:
        if not order.machine.verbose:
            sys.stderr.write(outcome.kernel_log[-LOG_CHARACTERS_SHOWN:])
        print("lab: the guest failed:", outcome.complaints, file=sys.stderr)
        return EXIT_GUEST_FAILED
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
