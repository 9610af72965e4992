"""Imports point down only. The table below is the architecture: who may import whom."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

VOCABULARY = frozenset(
    {
        "errors",
        "config",
        "config_checks",
        "config_text",
        "config_ranges",
        "config_sections",
        "units",
        "ids",
        "clock",
        "operations",
        "events",
        "buffer",
    }
)
CORE = frozenset({"vocabulary", "native", "wire", "metadata", "topology", "metrics", "transport", "engine"})
#: room: the rooms it may import besides itself. A new room is a new line, with a reason to be there.
ARROWS: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    "vocabulary": frozenset(),
    "native": frozenset({"vocabulary"}),
    "wire": frozenset({"vocabulary"}),
    "topology": frozenset({"vocabulary"}),
    "metrics": frozenset({"vocabulary"}),
    # Pages over HTTP for who watches a process: the store's master and nodes, the conductor's service.
    "http_status": frozenset({"vocabulary", "metrics"}),
    "metadata": frozenset({"vocabulary", "wire"}),
    "transport": frozenset({"vocabulary", "native", "wire", "kernels", "topology"}),
    "engine": (CORE - {"engine"}) | {"kernels", "http_status"},
    "cli": CORE | {"http_status", "kernels", "rpc", "store", "conductor", "facade"},
    "store": CORE | {"http_status", "kernels", "rpc"},
    "conductor": CORE | {"kernels"},
    "bench": CORE | {"kernels", "rpc", "store", "conductor", "facade"},
    # The store's rpc connects and greets as the engine does; the engine knows nothing of it.
    "rpc": frozenset({"vocabulary", "native", "wire", "metadata", "metrics", "engine"}),
    # Kernels for devices; they run where the arrays are, and know nothing of how these move.
    "device_blocks": frozenset({"vocabulary"}),
    # The public names of `moonpool` itself, each loaded when first used.
    "facade": CORE | {"rpc", "store", "conductor"},
}
CYTHON_IMPORT = re.compile(r"^\s*(?:from\s+(moonpool[\w.]*)\s+c?import\s+(.*)|c?import\s+(moonpool[\w.]*))")


def room_of(dotted: str) -> str:
    parts = dotted.split(".")
    if len(parts) == 1:
        return "facade"
    return "vocabulary" if parts[1] in VOCABULARY else parts[1]


def target_of(module: str, name: str) -> str:
    """What `from module import name` needs: `from moonpool import engine` needs the room engine."""
    if module == "moonpool" and (name in ARROWS or name in VOCABULARY):
        return f"moonpool.{name}"
    return module


def python_imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of each import of ours, in functions and under TYPE_CHECKING too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, target_of(node.module, alias.name)) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "import_module" and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return [(line, name) for line, name in found if name.split(".")[0] == "moonpool"]


def cython_imports(text: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = CYTHON_IMPORT.match(line)
        if match and match[1]:
            names = [name.strip(" ()\\").split(" ")[0] for name in match[2].split(",")]
            found += [(number, target_of(match[1], name)) for name in names]
        elif match:
            found.append((number, match[3]))
    return found


def violations(name: str, shown: str, imports: list[tuple[int, str]]) -> list[str]:
    room = room_of(name)
    allowed = ARROWS[room] | {room}
    return [
        f"{shown}:{line}: {room} imports {target}"
        for line, target in imports
        if room_of(target) not in allowed
    ]


def test_every_room_is_in_the_table(tree: Any) -> None:
    rooms = {room_of(module.name): module.shown for module in tree.modules(".py", ".pyx", ".pxd")}
    unknown = {room: shown for room, shown in rooms.items() if room not in ARROWS}
    assert not unknown, "rooms without a line in ARROWS"
    assert {"kernels", "vocabulary", "native", "wire", "transport", "engine"} <= rooms.keys()


def test_python_imports_point_down(tree: Any) -> None:
    wrong: list[str] = []
    for module in tree.modules(".py"):
        wrong += violations(module.name, module.shown, python_imports(module.parse()))
    assert not wrong, "\n".join(wrong)


def test_cython_imports_point_down(tree: Any) -> None:
    wrong: list[str] = []
    for module in tree.modules(".pyx", ".pxd"):
        wrong += violations(module.name, module.shown, cython_imports(module.path.read_text()))
    assert not wrong, "\n".join(wrong)


def test_imports_are_absolute(tree: Any) -> None:
    wrong = [
        f"{module.shown}:{node.lineno}"
        for module in tree.modules(".py")
        for node in ast.walk(module.parse())
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not wrong, "relative imports"


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("moonpool.kernels.striping", "from moonpool.errors import UsageError"),
        ("moonpool.native.io.lanes", "import moonpool.transport.tcp"),
        ("moonpool.wire.hello", "from moonpool import engine"),
        ("moonpool.transport.tcp", "def f():\n    from moonpool.engine.plan import Plan"),
        ("moonpool.store.master", "from moonpool.conductor import index"),
        ("moonpool.conductor.index", "import moonpool.store"),
        ("moonpool.engine.plan", "from moonpool import Engine"),
        ("moonpool.engine.plan", "import importlib\nimportlib.import_module('moonpool.bench.cli')"),
    ],
)
def test_an_import_upwards_is_seen(importer: str, source: str) -> None:
    assert violations(importer, importer, python_imports(ast.parse(source)))


@pytest.mark.parametrize(
    "line",
    [
        "from moonpool.engine.plan cimport Plan",
        "cimport moonpool.engine.plan",
        "from moonpool import engine",
        "    from moonpool.transport.tcp import thing  # inside a function",
    ],
)
def test_a_cython_import_upwards_is_seen(line: str) -> None:
    assert violations("moonpool.native.io.lanes", "lanes.pyx", cython_imports(line))


def test_no_room_can_reach_itself_through_others() -> None:
    """The table itself has no cycle, apart from the facade, which only forwards names."""
    arrows = {room: targets - {"facade"} for room, targets in ARROWS.items() if room != "facade"}
    settled: set[str] = set()
    while len(settled) < len(arrows):
        ready = {room for room, targets in arrows.items() if room not in settled and targets <= settled}
        assert ready, f"a cycle among {sorted(arrows.keys() - settled)}"
        settled |= ready
