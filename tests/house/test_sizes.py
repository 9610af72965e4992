"""Files and functions stay small enough to read in one sitting, and the repository small enough to clone."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

FILE_LINES_MAX = {".py": 400, ".pyi": 400, ".pyx": 600, ".pxd": 400, ".c": 600, ".h": 600, ".sh": 200}
TEST_FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
PLOT_BYTES_MAX = 128 * 1024
FILE_BYTES_MAX = 1_000_000
#: Recorded bytes are binary by nature: these folders may hold small ones.
BINARY_FOLDERS = (("tests", "golden"),)
CYTHON_FUNCTION = re.compile(r"^(\s*)(?:async\s+)?(?:def|cdef(?!\s+class\b)|cpdef)\s[^=]*\(")


def long_python_functions(tree: ast.AST) -> list[tuple[int, str, int]]:
    """(line, name, length) of each function over the limit; decorators do not count."""
    return [
        (node.lineno, node.name, length)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def long_cython_functions(text: str) -> list[tuple[int, str, int]]:
    """The same for Cython, where a function lasts as long as its lines are indented deeper than its head."""
    lines = text.splitlines()
    found: list[tuple[int, str, int]] = []
    for start, line in enumerate(lines):
        match = CYTHON_FUNCTION.match(line)
        if not match or line.rstrip().endswith(")"):  # a declaration without a body
            continue
        last = start
        for number in range(start + 1, len(lines)):
            text_of = lines[number].strip()
            indent = len(lines[number]) - len(lines[number].lstrip())
            if text_of and indent <= len(match[1]) and not text_of.startswith((")", "#")):
                break
            last = number if text_of else last
        if last - start + 1 > FUNCTION_LINES_MAX:
            found.append((start + 1, line.strip(), last - start + 1))
    return found


def test_files_are_short(tree: Any) -> None:
    wrong = []
    for path in tree.with_suffix(*FILE_LINES_MAX):
        relative = path.relative_to(tree.root)
        limit = TEST_FILE_LINES_MAX if relative.parts[0] == "tests" else FILE_LINES_MAX[path.suffix]
        lines = len(path.read_text().splitlines())
        if lines > limit:
            wrong.append(f"{relative}: {lines} lines, at most {limit}")
    assert not wrong, "\n".join(wrong)


def test_functions_are_short(tree: Any) -> None:
    wrong = []
    for path in tree.with_suffix(".py", ".pyx"):
        relative = path.relative_to(tree.root)
        if relative.parts[0] == "tests" and relative.parts[1] != "lab":
            continue
        text = path.read_text()
        long = long_python_functions(ast.parse(text)) if path.suffix == ".py" else long_cython_functions(text)
        wrong += [f"{relative}:{line}: {name}: {length} lines" for line, name, length in long]
    assert not wrong, f"over {FUNCTION_LINES_MAX} lines:\n" + "\n".join(wrong)


def is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(8192)


def test_no_binary_and_no_large_file(tree: Any) -> None:
    wrong = []
    for path in tree.files:
        relative = path.relative_to(tree.root)
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            wrong.append(f"{relative}: {size} bytes, at most {FILE_BYTES_MAX}")
        plot = relative.parts[0] == "docs" and relative.suffix == ".png" and size <= PLOT_BYTES_MAX
        if relative.parts[:2] not in BINARY_FOLDERS and not plot and is_binary(path):
            wrong.append(f"{relative}: binary")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("body_lines", [FUNCTION_LINES_MAX - 1, FUNCTION_LINES_MAX])
def test_the_measure_counts_heads_and_bodies(body_lines: int) -> None:
    body = "".join(
        f"    x = {number}\n\n" if number % 9 == 0 else f"    x = {number}\n" for number in range(200)
    )
    lines = body.splitlines()[:body_lines]
    while not lines[-1]:
        lines[-1] = "    x = 0"
    text = "\n".join(["def measured(a, b):", *lines, "", "other = 1", ""])
    expected = [] if body_lines < FUNCTION_LINES_MAX else [(1, FUNCTION_LINES_MAX + 1)]
    assert [(line, length) for line, _, length in long_python_functions(ast.parse(text))] == expected
    assert [(line, length) for line, _, length in long_cython_functions(text)] == expected
