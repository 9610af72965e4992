"""The shell examples of the store's guide and README run as they stand there, but for ports and folders."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PORT = "127.0.0.1:7420"


def example(page: str) -> str:
    """The page's shell block that starts a master."""
    (found,) = [code for code in BLOCK.findall((ROOT / page).read_text()) if "moonpool master" in code]
    return str(found)


@pytest.mark.parametrize("page", ["docs/guides/operating-the-store.md", "README.md"])
def test_the_shell_example_runs(page: str, tmp_path: Path) -> None:
    code = example(page)
    socket = str(tmp_path / "master.sock")
    listen = f"moonpool master --listen {PORT}"
    if listen not in code:
        code = code.replace("moonpool master", listen)
    code = code.replace(PORT, socket).replace("127.0.0.1:7421", "127.0.0.1:0").replace("4GiB", "64MiB")
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "moonpool"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m moonpool.cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "some.file").write_bytes(b"bytes")
    home = {"HOME": str(tmp_path), "PATH": f"{folder}:{os.environ['PATH']}"}
    # A user types slowly enough; a script must wait until the node has joined.
    joined = f"until moonpool stat --master {socket} --json | grep -q '\"active\"'; do :; done\n"
    code = re.sub(r"^(moonpool node .*\n)", lambda line: line[0] + joined, code, flags=re.MULTILINE)
    output = tmp_path / "output"
    with output.open("w") as shown:
        # -e: each line must succeed; -m: jobs as on a terminal.
        shell = subprocess.Popen(
            ["bash", "-c", f"set -em\n{code}"],
            cwd=tmp_path,
            env={**os.environ, **home},
            stdout=shown,
            stderr=shown,
            start_new_session=True,
        )
        try:
            assert shell.wait(90) == 0, output.read_text()
        finally:
            shell.kill()
            shell.wait()
            end(servers_of(socket))
    assert "stored" in output.read_text(), output.read_text()


def end(processes: list[int]) -> None:
    """SIGTERM, and a bounded wait until they are gone: their folder is removed after the test."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            gone = select.select([descriptor], [], [], 30)[0]
            os.close(descriptor)
            assert gone, "a server does not end"


def servers_of(socket: str) -> list[int]:
    """Processes that were given the socket: those that the example leaves running."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True, timeout=10
    )
    return [
        int(line.split()[0])
        for line in listing.stdout.splitlines()
        if socket in line and "moonpool.cli" in line and "bash" not in line
    ]
