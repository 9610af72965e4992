"""The documents tell the truth: commands exist, links lead somewhere, tables equal the code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moonpool.errors import STATUS_ERRORS, Status

CODE_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE_MAKE = re.compile(r"`make ([a-z][a-z-]*)")
MAKE_COMMAND = re.compile(r"(?:^|&&|;)\s*(?:\$ )?(?:[A-Z_]+=\S+ )*make ((?:[a-z][a-z-]*\s*)+)", re.MULTILINE)
MARKDOWN_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
MAKE_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
ERROR_ROW = re.compile(r"^\| (\d+) \| ([A-Z_]+) \| (?:`(\w+)`)? ?\|", re.MULTILINE)


def markdown(tree: Any) -> list[Path]:
    pages: list[Path] = tree.with_suffix(".md")
    return pages


def make_targets(tree: Any) -> set[str]:
    return set(MAKE_TARGET.findall((tree.root / "Makefile").read_text()))


def commands_of(page: str) -> set[str]:
    """Targets that a page tells its reader to make."""
    named = set(INLINE_MAKE.findall(page))
    for block in CODE_BLOCK.findall(page):
        for targets in MAKE_COMMAND.findall(block):
            named |= set(targets.split())
    return named


def test_every_make_command_in_the_documents_exists(tree: Any) -> None:
    targets = make_targets(tree)
    wrong = [
        f"{page.relative_to(tree.root)}: make {name}"
        for page in markdown(tree)
        for name in sorted(commands_of(page.read_text()) - targets)
    ]
    assert not wrong, "\n".join(wrong)
    assert {"demo", "test"} <= commands_of((tree.root / "README.md").read_text())


def test_every_target_is_in_the_help(tree: Any) -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=tree.root,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    listed = {line.split()[0] for line in shown.splitlines() if line.startswith("  ")}
    assert listed == make_targets(tree)


def test_every_script_parses(tree: Any) -> None:
    wrong = []
    for path in tree.files:
        with path.open("rb") as file:
            first = file.readline(80)
        if re.match(rb"#!.*\b(ba)?sh\b", first):
            done = subprocess.run(
                ["bash", "-n", path], capture_output=True, text=True, check=False, timeout=30
            )
            wrong += [] if done.returncode == 0 else [done.stderr]
    assert not wrong, "\n".join(wrong)


def test_links_between_pages_lead_somewhere(tree: Any) -> None:
    wrong = [
        f"{page.relative_to(tree.root)}: {target}"
        for page in markdown(tree)
        for target in MARKDOWN_LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_every_page_can_be_reached_from_the_index(tree: Any) -> None:
    docs = tree.root / "docs"
    reached: set[Path] = set()
    open_pages = [docs / "index.md"]
    while open_pages:
        page = open_pages.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        for target in MARKDOWN_LINK.findall(page.read_text()):
            linked = (page.parent / target).resolve()
            if "://" not in target and linked.suffix == ".md":
                open_pages.append(linked)
    lost = [
        str(page.relative_to(tree.root))
        for page in markdown(tree)
        if docs in page.parents and page not in reached
    ]
    assert not lost, "link these pages from docs/index.md"


def test_the_error_table_equals_the_code(tree: Any) -> None:
    rows = ERROR_ROW.findall((tree.root / "docs" / "architecture.md").read_text())
    documented = {(int(code), name, error or None) for code, name, error in rows}
    in_code = {
        (int(status), status.name, STATUS_ERRORS[status].__name__ if status in STATUS_ERRORS else None)
        for status in Status
    }
    assert documented == in_code


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name while it is made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, path.stem, module)
        spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_fresh_and_complete(tree: Any) -> None:
    script = load_script(tree.root / ".ci" / "configuration_page.py")
    source = (tree.root / "src" / "moonpool" / "config.py").read_text()
    rows = script.read_rows(source)
    assert [row.name for row in rows if not row.meaning] == [], (
        "document these fields by `#:` lines above them"
    )
    assert (tree.root / "docs" / "configuration.md").read_text() == script.render(source), "run `make docs`"


def test_the_configuration_page_names_every_field_of_the_class(tree: Any) -> None:
    import dataclasses

    from moonpool.config import EngineConfig

    page = (tree.root / "docs" / "configuration.md").read_text()
    missing = [field.name for field in dataclasses.fields(EngineConfig) if f"| `{field.name}` |" not in page]
    assert missing == []


def test_the_page_of_the_stores_settings_is_fresh_and_complete(tree: Any) -> None:
    script = load_script(tree.root / ".ci" / "configuration_page.py")
    rows = script.store_rows()
    undocumented = [f"[{section}] {row.name}" for section in rows for row in rows[section] if not row.meaning]
    assert undocumented == [], "document these fields by `#:` lines above them"
    page = (tree.root / "docs" / "store" / "configuration.md").read_text()
    assert page == script.render_store(), "run `make docs`"


def test_the_page_of_the_stores_settings_names_every_table_that_is_read(tree: Any) -> None:
    from moonpool.cli.pool_options import SECTIONS

    script = load_script(tree.root / ".ci" / "configuration_page.py")
    assert sorted(section for section, *_ in script.STORE_SECTIONS) == sorted(SECTIONS)
