"""What importing costs, and that each module exists once: looked at in fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("numpy", "numba", "cupy", "redis", "asyncio", "msgpack", "click", "rich")
BARE_NAMES = ("kernels", "store", "conductor", "bench", "src")


def run_python(code: str, *options: str, cwd: Path) -> Any:
    """The JSON that `code` prints in a fresh interpreter started in `cwd`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_package_is_light(tree: Any) -> None:
    code = f"import moonpool, json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert run_python(code, "-P", cwd=tree.root) == []


def test_the_command_line_needs_no_array_library(tree: Any) -> None:
    if not any(module.name == "moonpool.cli" for module in tree.modules(".py")):
        pytest.fail("moonpool.cli is missing: pyproject.toml names it as the console script")
    arrays = ("numpy", "numba", "cupy", "redis")
    code = f"import moonpool.cli, json, sys; print(json.dumps([m for m in {arrays!r} if m in sys.modules]))"
    assert run_python(code, "-P", cwd=tree.root) == []


def test_public_names_exist_and_are_typed_as_listed(tree: Any) -> None:
    code = (
        "import moonpool, json; print(json.dumps([n for n in moonpool.__all__ if not hasattr(moonpool, n)]))"
    )
    assert run_python(code, "-P", cwd=tree.root) == []


IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import moonpool
skipped = ("moonpool.bench.workers.",)
for module in pkgutil.walk_packages(moonpool.__path__, "moonpool."):
    if not module.name.startswith(skipped) and not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
print(json.dumps([name for name in %r if name in sys.modules]))
"""


def test_all_modules_import_and_none_by_a_bare_name(tree: Any) -> None:
    # Without -P and from the root, where `import store` would succeed: the cure is absolute imports.
    assert run_python(IMPORT_EVERYTHING % (BARE_NAMES,), cwd=tree.root) == []


def test_each_file_has_one_module_name(tree: Any) -> None:
    code = IMPORT_EVERYTHING.replace(
        "print(json.dumps([name for name in %r if name in sys.modules]))",
        "from os.path import realpath\n"
        "rooms = ('moonpool', 'kernels', 'store', 'conductor', 'bench')\n"
        "files = [realpath(m.__file__) for m in list(sys.modules.values()) if getattr(m, '__file__', None)\n"
        "         and m.__file__.endswith('.py') and m.__name__.split('.')[0] in rooms]\n"
        "print(json.dumps(sorted({f for f in files if files.count(f) > 1})))",
    )
    assert run_python(code, cwd=tree.root) == []


def test_the_root_can_shadow_names_which_is_why_the_safe_path_is_set(tree: Any) -> None:
    """Documents the pitfall: should this fail one day, the precautions in Makefile and here can go."""
    code = "import importlib.util, json; print(json.dumps(importlib.util.find_spec('store') is not None))"
    assert run_python(code, cwd=tree.root) is True
    assert run_python(code, "-P", cwd=tree.root) is False
