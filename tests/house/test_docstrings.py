"""Everything public says what the signature cannot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

CYTHON_PUBLIC = re.compile(
    r"^(\s*)(?:async\s+)?(?:def|cpdef\s[\w\s*]*?|cdef\s+class|class)\s*([a-zA-Z]\w*)\s*[(:]"
)


#: Scripts that peers' own interpreters run: no interface of the package.
NO_INTERFACE = ("moonpool.bench.workers",)


def undocumented(
    scope: ast.Module | ast.ClassDef, declared: frozenset[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[int, str]]:
    """(line, name) of public functions and classes, and of public methods of public classes.

    `declared` names methods of protocols: those are documented where the protocol declares them.
    """
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or is_declared_elsewhere(node):
            continue
        implements = bool(prefix) and node.name in declared
        if ast.get_docstring(node) is None and not is_plain_property(node) and not implements:
            yield node.lineno, prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, declared, f"{prefix}{node.name}.")


def documented_in_protocols(modules: list[ast.Module]) -> frozenset[str]:
    return frozenset(
        method.name
        for module in modules
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split("[")[0].split(".")[-1] == "Protocol" for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    )


def decorator_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}


def is_declared_elsewhere(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """An overload, a setter or an override is documented where the name is declared first."""
    return bool(decorator_names(node) & {"overload", "setter", "deleter", "override"})


def is_plain_property(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """A property of one statement says it all by its name and type."""
    return bool(decorator_names(node) & {"property", "cached_property"}) and len(node.body) == 1


def undocumented_cython(text: str) -> list[tuple[int, str]]:
    """Public `def`s and classes at the top level or one class deep whose first statement is no string."""
    lines = text.splitlines()
    found: list[tuple[int, str]] = []
    for start, line in enumerate(lines):
        match = CYTHON_PUBLIC.match(line)
        if not match or len(match[1]) > 4 or match[2].startswith("_"):
            continue
        head_end = start
        while head_end < len(lines) - 1 and not re.search(r":\s*(#.*)?$", lines[head_end]):
            head_end += 1
        body = next((text_of.strip() for text_of in lines[head_end + 1 :] if text_of.strip()), "")
        decorated_setter = start > 0 and lines[start - 1].strip().endswith(".setter")
        property_of_one = start > 0 and lines[start - 1].strip() == "@property" and body.startswith("return ")
        if not body.startswith(('"""', 'r"""')) and not decorated_setter and not property_of_one:
            found.append((start + 1, match[2]))
    return found


def test_modules_have_docstrings(tree: Any) -> None:
    wrong = [
        module.shown
        for module in tree.modules(".py")
        if module.path.stat().st_size > 0 and ast.get_docstring(module.parse()) is None
    ]
    wrong += [
        module.shown
        for module in tree.modules(".pyx")
        if not module.path.read_text().lstrip().startswith(('"""', "#"))
    ]
    assert not wrong, "\n".join(wrong)


def test_public_names_have_docstrings(tree: Any) -> None:
    parsed = {module: module.parse() for module in tree.modules(".py")}
    declared = documented_in_protocols(list(parsed.values()))
    wrong = [
        f"{module.shown}:{line}: {name}"
        for module, content in parsed.items()
        if not module.name.startswith(NO_INTERFACE)
        for line, name in undocumented(content, declared)
    ]
    wrong += [
        f"{module.shown}:{line}: {name}"
        for module in tree.modules(".pyx")
        for line, name in undocumented_cython(module.path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_a_missing_docstring_is_seen() -> None:
    source = "def documented():\n    '''Yes.'''\ndef bare(a):\n    return a\nclass Thing:\n    '''A.'''\n"
    source += (
        "    def method(self):\n        return 1\n    @property\n    def size(self):\n        return 1\n"
    )
    assert list(undocumented(ast.parse(source))) == [(3, "bare"), (7, "Thing.method")]
    protocol = "class Reader(Protocol):\n    def method(self):\n        '''Reads.'''\n"
    declared = documented_in_protocols([ast.parse(protocol)])
    assert list(undocumented(ast.parse(source), declared)) == [(3, "bare")]


def test_a_missing_docstring_is_seen_in_cython() -> None:
    table = (
        'cdef class Table:\n    """A table."""\n    def get(self,\n            int x):\n        return x\n'
    )
    hidden = "    cdef int hidden(self) noexcept nogil:\n        return 1\n"
    maker = 'def make():\n    """Makes."""\n    return 1\n'
    assert undocumented_cython(table + hidden + maker) == [(3, "get")]
