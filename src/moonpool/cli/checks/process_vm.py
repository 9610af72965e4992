"""Whether processes of one user may copy each other's memory (process_vm_readv(2)), tried both ways with a
child.

A parent may always read its child under Yama's default; what peers need is the other way, where the target is
no descendant of the reader. So the child reads the parent too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, Final

from moonpool.cli.checks.check import Check, Level
from moonpool.topology import SysfsReader

GROUP: Final = "kernel"
CHILD_TIMEOUT_S: Final = 20.0
"""Longest wait for each answer of the child, which has to start a Python interpreter."""

PATTERN: Final = bytes(range(1, 65))
REPLY: Final = bytes(range(65, 129))

# Reads len bytes at argv[2] of process argv[1]; prints its own buffer's address and what it read, or the
# errno; then waits to be written to and prints what its buffer holds.
CHILD: Final = """
import ctypes, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
pid, address, length = map(int, sys.argv[1:4])
own = ctypes.create_string_buffer(bytes.fromhex(sys.argv[4]), length)
read = ctypes.create_string_buffer(length)
here, there = Piece(ctypes.addressof(read), length), Piece(address, length)
got = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
answer = read.raw.hex() if got == length else "errno=%d" % ctypes.get_errno()
print(ctypes.addressof(own), answer, flush=True)
sys.stdin.readline()
print(own.raw.hex(), flush=True)
"""


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class Trial:
    """Errno of each way, 0 where the right bytes arrived; ``problem`` when the trial itself did not work."""

    parent_reads_child: int = 0
    parent_writes_child: int = 0
    child_reads_parent: int = 0
    problem: str = ""


def check_process_vm(reader: SysfsReader) -> Check:
    """The trial and its verdict."""
    return judge(try_with_child(), reader.read("/proc/sys/kernel/yama/ptrace_scope"))


def judge(trial: Trial, ptrace_scope: str | None) -> Check:
    """``ptrace_scope`` is Yama's sysctl, None without Yama."""
    if trial.problem:
        return Check(GROUP, "process_vm", Level.WARN, f"could not be tried: {trial.problem}")
    ways = (trial.parent_reads_child, trial.parent_writes_child, trial.child_reads_parent)
    if not any(ways):
        return Check(GROUP, "process_vm", Level.OK, "a child was read and written, and read its parent")
    failed = next(error for error in ways if error)
    if failed == errno.ENOSYS:
        advice = "use a kernel with CONFIG_CROSS_MEMORY_ATTACH"
    elif ptrace_scope not in (None, "0"):
        advice = (
            f"kernel.yama.ptrace_scope is {ptrace_scope}: set it to 0 with sysctl, or grant CAP_SYS_PTRACE"
        )
    else:
        advice = "run the container with --cap-add=SYS_PTRACE, or allow process_vm_* in its seccomp profile"
    return Check(
        GROUP,
        "process_vm",
        Level.WARN,
        f"refused: {os.strerror(failed)}; shm then carries only memory that the engine allocated",
        advice,
    )


def try_with_child() -> Trial:
    """Starts a Python child, lets both read each other, and writes into it. Bounded; leaves no process."""
    own = ctypes.create_string_buffer(PATTERN, len(PATTERN))
    arguments = [str(os.getpid()), str(ctypes.addressof(own)), str(len(PATTERN)), PATTERN.hex()]
    command = [sys.executable, "-I", "-S", "-c", CHILD, *arguments]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
    except OSError as exc:
        return Trial(problem=f"no child process: {exc.strerror}")
    with child:
        try:
            return _talk(child)
        except OSError as exc:  # a pipe broke: the child died
            return Trial(problem=f"the child ended early: {exc.strerror}")
        finally:
            child.kill()


def _talk(child: subprocess.Popen[bytes]) -> Trial:
    assert child.stdin is not None
    assert child.stdout is not None
    hello = _read_line(child.stdout).split()
    if len(hello) != 2:
        return Trial(problem="the child did not answer")
    address, seen = int(hello[0]), hello[1]
    buffer = ctypes.create_string_buffer(len(PATTERN))
    read = _copy("process_vm_readv", child.pid, ctypes.addressof(buffer), address)
    read = read or _mismatch(buffer.raw == PATTERN)
    reply = ctypes.create_string_buffer(REPLY, len(REPLY))
    written = _copy("process_vm_writev", child.pid, ctypes.addressof(reply), address)
    child.stdin.write(b"\n")
    if not written:
        written = _mismatch(_read_line(child.stdout).strip() == REPLY.hex())
    upward = (
        int(seen.removeprefix("errno=")) if seen.startswith("errno=") else _mismatch(seen == PATTERN.hex())
    )
    return Trial(read, written, upward)


def _mismatch(right: bool) -> int:
    """Wrong bytes are as good as no bytes."""
    return 0 if right else errno.EBADMSG


def _copy(call: str, pid: int, here: int, there: int) -> int:
    """Errno of one process_vm call over the pattern's length, 0 when all of it was copied."""
    libc = ctypes.CDLL(None, use_errno=True)
    local, remote = _Piece(here, len(PATTERN)), _Piece(there, len(PATTERN))
    function = getattr(libc, call)
    function.restype = ctypes.c_ssize_t
    copied = function(
        ctypes.c_int(pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    if copied < 0:
        return ctypes.get_errno()
    return 0 if copied == len(PATTERN) else errno.EIO


def _read_line(stream: IO[bytes]) -> str:
    """One line, or "" when none came in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline().decode("ascii", "replace") if selector.select(CHILD_TIMEOUT_S) else ""
