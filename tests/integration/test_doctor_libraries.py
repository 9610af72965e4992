"""The doctor and the registry where libraries are not installed: a loader that does not find them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOADER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
/* dlopen as on a machine without the libraries whose names begin as HIDDEN says, with commas between. */
void *dlopen(const char *name, int flags) {
    static void *(*real)(const char *, int);
    const char *hidden = getenv("HIDDEN");
    if (!real) real = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    if (name && hidden && *hidden) {
        const char *base = strrchr(name, '/');
        char list[512], *word, *rest = list;
        base = base ? base + 1 : name;
        strncpy(list, hidden, sizeof list - 1);
        list[sizeof list - 1] = 0;
        while ((word = strsep(&rest, ",")) != NULL)
            if (*word && strncmp(base, word, strlen(word)) == 0) {
                char nowhere[512] = "/nowhere/";
                strncat(nowhere, base, sizeof nowhere - strlen(nowhere) - 1);
                return real(nowhere, flags);
            }
    }
    return real(name, flags);
}
"""
TIMEOUT_S = 120
#: Transport: the library it is nothing without, and the line of the group "libraries" about it.
OPTIONAL = {"rdma": ("libibverbs.so", "ibverbs"), "ofi": ("libfabric.so", "fabric")}
PLAIN = ("local", "shm", "tcp")


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("loader")
    (folder / "loader.c").write_text(LOADER)
    made = folder / "loader.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(folder / "loader.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return made


def without(loader: Path, hidden: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LD_PRELOAD": str(loader), "HIDDEN": hidden}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def doctor(loader: Path, hidden: str) -> dict[str, Any]:
    ended = without(loader, hidden, "moonpool.cli", "doctor", "--json")
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_a_missing_library_takes_its_transport_and_no_other(loader: Path, name: str) -> None:
    library, line = OPTIONAL[name]
    report = doctor(loader, library)
    everything = doctor(loader, "")
    found, before = by_name(report["transports"]), by_name(everything["transports"])
    assert found[name]["available"] is False
    assert library in found[name]["reason"]
    assert "install" in found[name]["how_to_get_it"]
    assert {key: state for key, state in found.items() if key != name} == {
        key: state for key, state in before.items() if key != name
    }
    checks = by_name([check for check in report["checks"] if check["group"] == "libraries"])
    assert (checks[line]["level"], "not found" in checks[line]["detail"]) == ("info", True)
    assert checks[line]["advice"]


def test_without_any_optional_library_the_engine_works(loader: Path) -> None:
    hidden = "libibverbs,libfabric,libcuda,liburing,libxxhash,librdmacm,libnuma"
    report = doctor(loader, hidden)
    found = by_name(report["transports"])
    assert report["ok"]
    assert all(found[name]["available"] for name in (*PLAIN, "cxl"))
    for name in OPTIONAL:
        assert not found[name]["available"]
        assert found[name]["reason"]
        assert found[name]["how_to_get_it"]
    modules = by_name([check for check in report["checks"] if check["group"] == "libraries"])[
        "native modules"
    ]
    assert modules["level"] == "ok"


def test_asking_for_what_is_missing_is_an_error_that_names_it(loader: Path) -> None:
    script = """
import sys
from moonpool import Engine, TransportUnavailable
for name in ("rdma", "ofi"):
    try:
        Engine(transports=(name, "tcp"))
    except TransportUnavailable as problem:
        assert problem.how_to_get_it, problem
        print(name, problem)
with Engine() as engine:
    print("engine", engine.transports)
"""
    environ = {**os.environ, "LD_PRELOAD": str(loader), "HIDDEN": "libibverbs,libfabric"}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split()[0] for line in ended.stdout.splitlines()]
    assert lines == ["rdma", "ofi", "engine"]
