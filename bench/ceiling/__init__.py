"""What the machine itself allows: bare C programs with a transfer's request pattern, compiled on demand."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

COMPILER: Final = "gcc"
COMPILE_TIMEOUT_S: Final = 120
FLAGS: Final = ("-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
HEADER: Final = "job.h"


class CeilingUnavailable(RuntimeError):
    """There is no C compiler, or it refused the source; the message says what to do."""


class JobStructure(ctypes.Structure):
    """``struct job`` of job.h."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint64),
        ("span_bytes", ctypes.c_uint64),
        ("spin_ns", ctypes.c_uint64),
        ("minimum_ns", ctypes.c_uint64),
        ("minimum_operations", ctypes.c_uint64),
        ("maximum_operations", ctypes.c_uint64),
    )


class OutcomeStructure(ctypes.Structure):
    """``struct outcome`` of job.h."""

    _fields_ = (("operations", ctypes.c_uint64), ("elapsed_ns", ctypes.c_uint64))


def compile_ceiling(name: str, directory: Path) -> Path:
    """Compiles ``NAME.c`` of this folder into a shared library in ``directory`` and returns its path.

    A library made before from the same sources and flags is used again. Raises ``CeilingUnavailable``.
    """
    home = Path(__file__).parent
    source = home / f"{name}.c"
    identity = source.read_bytes() + (home / HEADER).read_bytes() + " ".join(FLAGS).encode()
    library = directory / f"{name}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if library.exists():
        return library
    if shutil.which(COMPILER) is None:
        raise CeilingUnavailable(
            f"the {name} ceiling needs {COMPILER} (Debian: `apt-get install gcc libc6-dev`)"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        unfinished = Path(scratch) / library.name
        command = [COMPILER, *FLAGS, "-o", str(unfinished), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise CeilingUnavailable(f"{COMPILER} refused {source.name}:\n{done.stderr.strip()}")
        unfinished.replace(library)  # complete or absent, also when two runs compile at once
    return library
