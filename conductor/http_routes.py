"""From a method and a path to a name: literal paths by look-up, those with parts in braces one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final
from urllib.parse import unquote


@final
class Routes:
    """A fixed table. Parts in braces take one segment of a path each, percent-decoded after the cut."""

    def __init__(self, table: Iterable[tuple[str, str, str]]) -> None:
        self._literal: Final[dict[tuple[str, str], str]] = {}
        self._patterns: Final[list[tuple[str, list[str], str]]] = []
        self._methods: Final[dict[str, list[str]]] = {}
        for method, path, name in table:
            if "{" in path:
                self._patterns.append((method.upper(), path.split("/"), name))
            else:
                self._literal[method.upper(), path] = name
                self._methods.setdefault(path, []).append(method.upper())

    def find(self, method: str, path: str) -> tuple[str | None, tuple[str, ...]]:
        """The name and the parts in braces; without a name, the methods that the path has: none for no path.

        HEAD is served by what serves GET.
        """
        method = "GET" if method == "HEAD" else method
        name = self._literal.get((method, path)) or self._literal.get((method, unquote(path)))
        if name is not None:
            return name, ()
        allowed = list(self._methods.get(path, ()))
        cut = path.split("/")
        for one, parts, found in self._patterns:
            if len(parts) != len(cut) or not all(
                known == given or (known.startswith("{") and given)
                for known, given in zip(parts, cut, strict=True)
            ):
                continue
            if one == method:
                taken = zip(parts, cut, strict=True)
                return found, tuple(unquote(given) for known, given in taken if known.startswith("{"))
            allowed.append(one)
        return None, tuple(allowed)
