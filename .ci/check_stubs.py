"""Checks each hand-written ``.pyi`` of ``moonpool.native`` against the built module (mypy's stubtest)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWLIST = ROOT / ".ci" / "stubtest-allowlist.txt"


def stubbed_modules() -> list[str]:
    """Dotted names of the native modules that have both a source and a stub."""
    sources = sorted((ROOT / "src" / "moonpool" / "native").rglob("*.pyx"))
    return [
        ".".join(pyx.relative_to(ROOT / "src").with_suffix("").parts)
        for pyx in sources
        if pyx.with_suffix(".pyi").is_file()
    ]


def main() -> int:
    """Exit status 0 when every stub agrees; a module that is not built is an error, never a silent pass."""
    modules = stubbed_modules()
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        print(f"not built: {', '.join(absent)}; run `make build`", file=sys.stderr)
        return 1
    if not modules:
        print("no native module has a stub")
        return 0
    allow = ["--allowlist", str(ALLOWLIST), "--ignore-unused-allowlist"]
    return subprocess.run([sys.executable, "-m", "mypy.stubtest", *modules, *allow], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
