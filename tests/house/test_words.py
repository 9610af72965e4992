"""No names that say nothing, no unfinished work, no reading of the environment past the configuration."""

from __future__ import annotations

import ast
import re
from typing import Any

EMPTY_NAMES = frozenset({"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc", "v2"})
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
TEXT_SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".sh", ".md", ".toml", ".yaml", "")
#: The one module that may read the process environment: one config, built at the edge and passed down.
ENVIRONMENT_READER = "moonpool.config"


def test_file_names_say_what_is_inside(tree: Any) -> None:
    wrong = [
        str(path.relative_to(tree.root))
        for path in tree.files
        for part in path.relative_to(tree.root).with_suffix("").parts
        if EMPTY_NAMES & set(re.split(r"[_\-.]", part.lower()))
    ]
    assert not wrong, "a file or folder needs a noun that says what it holds"


def test_nothing_is_left_for_later(tree: Any) -> None:
    wrong = [
        f"{path.relative_to(tree.root)}:{number}: {line.strip()}"
        for path in tree.with_suffix(*TEXT_SUFFIXES)
        if path.relative_to(tree.root).parts[:2] != ("tests", "house")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_configuration_reads_the_environment(tree: Any) -> None:
    wrong = [
        f"{module.shown}:{node.lineno}"
        for module in tree.modules(".py")
        if module.name != ENVIRONMENT_READER and not module.name.startswith("moonpool.bench")
        for node in ast.walk(module.parse())
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("environ", "getenv", "environb")
    ]
    assert not wrong, "pass a config instead of reading the environment"
