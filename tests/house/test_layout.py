"""The four links, the build's refusals, and that one version and one list of dependencies are true."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

LINKS = ("kernels", "store", "conductor", "bench")
#: Imported only where the user has installed an extra of pyproject.toml, or on other interpreters.
OPTIONAL = frozenset({"cupy", "zmq", "aiohttp", "httptools", "msgspec", "uvloop", "_typeshed"})


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_relative_and_leads_to_the_room(tree: Any, name: str) -> None:
    link = tree.root / "src" / "moonpool" / name
    assert link.is_symlink(), f"restore it with: ln -s ../../{name} src/moonpool/{name}"
    assert os.readlink(link) == f"../../{name}"
    assert (link / "__init__.py").is_file()


def copy_of_the_build(root: Path, target: Path) -> None:
    """setup.py, pyproject.toml and the rooms' __init__ files: what `python setup.py` looks at first."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, target / name)
    package = target / "src" / "moonpool"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in LINKS:
        (target / name).mkdir()
        (target / name / "__init__.py").touch()
        (package / name).symlink_to(f"../../{name}")


def run_setup(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_missing_link_stops_the_build_with_its_name(tree: Any, tmp_path: Path) -> None:
    copy_of_the_build(tree.root, tmp_path)
    whole = run_setup(tmp_path, "--version")
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "src" / "moonpool" / "kernels").unlink()
    broken = run_setup(tmp_path, "--version")
    assert broken.returncode != 0
    assert "the link src/moonpool/kernels -> ../../kernels is missing" in broken.stderr


def test_a_missing_library_stops_the_build_only_where_it_is_required(tree: Any, tmp_path: Path) -> None:
    copy_of_the_build(tree.root, tmp_path)
    folder = tmp_path / "src" / "moonpool" / "native" / "io"
    folder.mkdir(parents=True)
    (folder / "ring.pyx").write_text('"""A module that needs liburing."""\n')
    # An empty search path: pkg-config then knows no library at all.
    nowhere = {"PKG_CONFIG_LIBDIR": str(tmp_path / "none"), "PKG_CONFIG_PATH": ""}
    required = run_setup(tmp_path, "-q", "build_ext", "--inplace", MOONPOOL_NATIVE="require", **nowhere)
    assert required.returncode != 0
    assert "moonpool.native.io.ring needs liburing" in required.stderr
    assert "apt-get install" in required.stderr
    skipped = run_setup(tmp_path, "-q", "build_ext", "--inplace", MOONPOOL_NATIVE="skip", **nowhere)
    assert skipped.returncode == 0, skipped.stderr


def test_an_unknown_mode_is_refused(tree: Any, tmp_path: Path) -> None:
    copy_of_the_build(tree.root, tmp_path)
    done = run_setup(tmp_path, "--version", MOONPOOL_NATIVE="maybe")
    assert done.returncode != 0
    assert "MOONPOOL_NATIVE='maybe' is not one of auto, require, skip" in done.stderr


def project(tree: Any) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((tree.root / "pyproject.toml").read_text())
    return table


def test_one_version(tree: Any) -> None:
    import moonpool

    version = project(tree)["project"]["version"]
    assert moonpool.__version__ == version
    assert f"## [{version}]" in (tree.root / "CHANGELOG.md").read_text()


def test_every_third_party_import_is_a_dependency(tree: Any) -> None:
    declared = {text.split(">")[0].split("=")[0].strip() for text in project(tree)["project"]["dependencies"]}
    wrong = []
    for module in tree.modules(".py"):
        if module.name.startswith("moonpool.bench.workers"):
            continue  # run by the peers' own interpreters
        for node in ast.walk(module.parse()):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names | declared | OPTIONAL | {"moonpool"}:
                    wrong.append(f"{module.shown}:{node.lineno}: {top}")
    assert not wrong, "add it to [project.dependencies] or do without:\n" + "\n".join(wrong)


def test_every_native_module_has_a_stub(tree: Any) -> None:
    """Without it the type checker sees nothing of the module; `make check` compares the two."""
    missing = [
        module.shown for module in tree.modules(".pyx") if not module.path.with_suffix(".pyi").is_file()
    ]
    assert not missing, "\n".join(missing)
