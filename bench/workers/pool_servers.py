"""Server processes of a store: started, waited for, and gone with the worker, whatever happens to it."""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

START_S: Final = 30.0
POLL_S: Final = 0.02
SET_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG, sys/prctl.h


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Servers:
    """Processes and a folder for their files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moonpool-bench-"))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts one; what it prints goes to the worker's standard error, unless a pipe is asked for."""
        options.setdefault("stdout", 2)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, preexec_fn=_die_with_parent, **options
        )
        self.processes.append(process)
        return process

    def start_json(self, command: Sequence[str]) -> dict[str, Any]:
        """Starts one that says on its first line, in JSON, that it serves."""
        process = self.start(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{command[-1]} ended with code {process.wait()} before it served")
        ready: dict[str, Any] = json.loads(line)
        return ready

    def start_redis(self) -> tuple[str, int]:
        """A redis-server without a tcp port, with an append-only file; its URL and process id."""
        program = redis_program()
        path = self.folder / "redis.sock"
        words = ["--port", "0", "--unixsocket", str(path), "--dir", str(self.folder), "--save", ""]
        process = self.start(
            [program, *words, "--appendonly", "yes", "--appendfsync", "everysec", "--loglevel", "warning"]
        )
        wait_for(path.exists, "redis-server")
        return f"redis+unix://{path}", process.pid

    def start_redis_tcp(self) -> tuple[str, int]:
        """The same on a tcp port of loopback, for stores that know no unix sockets."""
        program = redis_program()
        (port,) = free_ports(1)
        words = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(self.folder), "--save", ""]
        process = self.start(
            [program, *words, "--appendonly", "yes", "--appendfsync", "everysec", "--loglevel", "warning"]
        )
        wait_for(lambda: listens(port), "redis-server")
        return f"redis://127.0.0.1:{port}", process.pid

    def pids(self) -> list[int]:
        """Those that run."""
        return [process.pid for process in self.processes if process.poll() is None]

    def close(self) -> None:
        """Ends all, the last one first, and removes the folder."""
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def redis_program() -> str:
    """redis-server or valkey-server; raises where neither is installed."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise RuntimeError("redis-server is not installed (Debian: `apt-get install redis-server`)")
    return program


def wait_for(ready: Any, what: str) -> None:
    """Polls until ``ready()`` is true; raises after `START_S`."""
    deadline = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} does not serve after {START_S:.0f} s")
        time.sleep(POLL_S)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now, for stores that cannot choose one themselves."""
    holders = [socket.socket() for _ in range(number)]
    try:
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [int(holder.getsockname()[1]) for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def listens(port: int) -> bool:
    """Whether somebody accepts connections on a port of this host."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True
