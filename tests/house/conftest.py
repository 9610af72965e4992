"""The source tree as values, for the tests of the house."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Folders at the root that enter the package through a link.
LINKED_ROOMS = ("kernels", "store", "conductor", "bench")


@dataclass(frozen=True, slots=True)
class Module:
    """One Python or Cython source of the package: where it lies, and its dotted name."""

    path: Path
    name: str

    @property
    def shown(self) -> str:
        return str(self.path.relative_to(ROOT))

    def parse(self) -> ast.Module:
        return ast.parse(self.path.read_text(), filename=str(self.path))


@dataclass(frozen=True)
class SourceTree:
    """What git knows, plus what is new and not ignored; links are left out, so each file comes once."""

    root: Path = ROOT
    links: tuple[str, ...] = field(default=LINKED_ROOMS)

    @cached_property
    def files(self) -> list[Path]:
        # The command-line setting admits a checkout that another user owns, such as a mounted one.
        command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(
            [*command, "-z"], cwd=self.root, capture_output=True, text=True, check=True, timeout=30
        )
        paths = [self.root / name for name in sorted(set(listing.stdout.split("\0"))) if name]
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    def with_suffix(self, *suffixes: str) -> list[Path]:
        return [path for path in self.files if path.suffix in suffixes]

    def modules(self, *suffixes: str) -> list[Module]:
        """The sources of the package with those suffixes, by dotted name."""
        found = []
        for path in self.with_suffix(*suffixes):
            relative = path.relative_to(self.root)
            if relative.parts[:2] == ("src", "moonpool"):
                parts = relative.parts[1:]
            elif relative.parts[0] in self.links:
                parts = ("moonpool", *relative.parts)
            else:
                continue
            dotted = ".".join(Path(*parts).with_suffix("").parts).removesuffix(".__init__")
            found.append(Module(path, dotted))
        return found


@pytest.fixture(scope="session")
def tree() -> SourceTree:
    return SourceTree()
