"""Shared libraries that optional transports load at run time, and our own native modules."""

from __future__ import annotations

import ctypes
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.topology import SysfsReader

GROUP: Final = "libraries"


@dataclass(frozen=True, slots=True)
class Library:
    """A library by its run-time name: who uses it, and how to get it."""

    name: str
    soname: str
    used_for: str
    advice: str


LIBRARIES: Final = (
    Library("ibverbs", "libibverbs.so.1", "rdma", "apt-get install libibverbs1 ibverbs-providers"),
    Library("fabric", "libfabric.so.1", "ofi (AWS EFA, Slingshot)", "apt-get install libfabric1"),
    Library("cuda", "libcuda.so.1", "cuda", "install NVIDIA's driver; in a container use --gpus all"),
    Library("uring", "liburing.so.2", "io_uring lanes", "nothing: it is linked into our own modules"),
    Library("xxhash", "libxxhash.so.0", "digests", "nothing: it is compiled into our own modules"),
)

#: Folders of native modules that are left out where their fabric's headers are absent, and what has those.
FABRIC_HEADERS: Final = {"verbs": "libibverbs-dev", "rdma": "libibverbs-dev", "ofi": "libfabric-dev"}


def check_libraries(reader: SysfsReader) -> list[Check]:
    """Every library and native module, by trying to load it."""
    found = [judge_library(library, load(library.soname), reader) for library in LIBRARIES]
    return [*found, check_native_modules()]


def load(soname: str) -> str:
    """Why the loader did not find a library; "" when it did. The library stays loaded: unloading is not safe
    for all.
    """
    try:
        ctypes.CDLL(soname)
    except OSError as exc:
        return str(exc)
    return ""


def judge_library(library: Library, problem: str, reader: SysfsReader) -> Check:
    """``problem`` is what ``load`` gave; the file that was loaded is looked up in our own mappings."""
    if problem:
        detail = f"not found; used for {library.used_for}"
        advice = "" if library.advice.startswith("nothing") else library.advice
        if not advice:
            detail = f"no shared library, and none is needed: {library.advice.partition(': ')[2]}"
        return Check(GROUP, library.name, Level.INFO, detail, advice)
    maps = reader.read("/proc/self/maps") or ""
    path = re.search(
        rf"(/\S*/{re.escape(library.soname.partition('.so')[0])}[^\s]*\.so\S*)$", maps, re.MULTILINE
    )
    return Check(
        GROUP, library.name, Level.OK, f"{path[1] if path else library.soname}; used for {library.used_for}"
    )


def native_module_names() -> list[str]:
    """Full names of the native modules this installation has or should have, sorted.

    In a source tree they are the .pyx files, in an installed package the stubs and the built modules.
    """
    import moonpool.native

    names: set[str] = set()
    for root in map(Path, moonpool.native.__path__):
        for pattern in ("*.pyx", "*.pyi", "*.so"):
            for file in root.rglob(pattern):
                stem = file.name.partition(".")[0]
                if not stem.startswith("_"):
                    names.add(".".join(["moonpool.native", *file.relative_to(root).parent.parts, stem]))
    return sorted(names)


def check_native_modules() -> Check:
    """Imports each native module; names those that cannot be loaded, and why.

    Those of a fabric whose headers were absent at build time are a fact only: the engine works without them.
    """
    names = native_module_names()
    problems = {name: problem for name in names if (problem := import_problem(name))}
    built = f"{len(names) - len(problems)} of {len(names)} built"
    if names and not problems:
        return Check(GROUP, "native modules", Level.OK, built)
    missing = "".join(f"; {name}: {problem}" for name, problem in problems.items())
    folders = {name.split(".")[-2] for name in problems if name.count(".")}
    if names and folders and folders <= FABRIC_HEADERS.keys():
        headers = " ".join(sorted({FABRIC_HEADERS[folder] for folder in folders}))
        advice = f"for that fabric: apt-get install {headers}, then reinstall moonpool"
        return Check(GROUP, "native modules", Level.INFO, built + missing, advice)
    advice = (
        "build them: make build, or pip install -e . (needs gcc, pkg-config, liburing-dev, libxxhash-dev)"
    )
    return Check(GROUP, "native modules", Level.FAIL, built + missing, advice)


def import_problem(name: str) -> str:
    """Why a module cannot be imported; "" when it can."""
    try:
        importlib.import_module(name)
    except ImportError as exc:
        return str(exc)
    return ""
