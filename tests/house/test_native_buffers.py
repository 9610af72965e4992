"""Native classes that hold a buffer keep it through a collection, and so give it back."""

from __future__ import annotations

import re
from typing import Any

CLASS = re.compile(r"^((?:@.*\n)*)cdef class (\w+).*:\n((?:\n|    .*\n)*)", re.MULTILINE)
FIELD = re.compile(r"^    cdef Py_buffer ", re.MULTILINE)


def test_classes_with_a_buffer_are_not_cleared_by_the_collector(tree: Any) -> None:
    """Cython's tp_clear drops the owner out of a Py_buffer; releasing it then does nothing."""
    holding, safe = set(), set()
    for path in tree.with_suffix(".pyx", ".pxd"):
        for decorators, name, body in CLASS.findall(path.read_text()):
            where = (path.stem, name)
            if FIELD.search(body):
                holding.add(where)
            if "@cython.no_gc_clear" in decorators:
                safe.add(where)
    assert holding, "the pattern finds no class"
    assert holding <= safe, f"these need @cython.no_gc_clear: {sorted(holding - safe)}"
