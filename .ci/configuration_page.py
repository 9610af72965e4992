"""Writes docs/configuration.md from the fields of `EngineConfig` and the `#:` comments above them.

    .ci/configuration_page.py FILE      ("-" for standard output)

A test renders the page anew and compares, so that the page cannot go stale.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "moonpool" / "config.py"
CLASS_NAME = "EngineConfig"

OPENING = """\
# Configuration

<!-- Generated from src/moonpool/config.py by `make docs`; change the comments there, not this page. -->

An engine takes one `EngineConfig`. Build it in Python, from the environment (`EngineConfig.from_env()`), or
from the table `[engine]` of a TOML file (`load_config(path)`). A wrong value raises `UsageError`, which names
the field.

- The environment variable of a field is `MOONPOOL_` and its name in capitals: `MOONPOOL_BIND_HOST`.
- In text, a field that ends in `_bytes` accepts `"8 MiB"`, one in `_ms` accepts `"3 s"` and one in `_us`
  accepts `"50 us"`; a plain number is in the field's own unit.
- `MOONPOOL_CLUSTER_SECRET_FILE` (in TOML: `cluster_secret_file`) names a file that holds the secret.

| field | type | default | meaning |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One field: its name, type and default as written, and the sentences above it ("" without any)."""

    name: str
    annotation: str
    default: str
    meaning: str


def read_rows(source: str) -> list[Row]:
    """The fields of the class in their order. Raises `LookupError` when the source has no such class."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == CLASS_NAME:
            return [_row(field, lines) for field in node.body if isinstance(field, ast.AnnAssign)]
    raise LookupError(f"no class {CLASS_NAME} in {SOURCE}")


def _row(field: ast.AnnAssign, lines: list[str]) -> Row:
    comment: list[str] = []
    above = field.lineno - 2
    while above >= 0 and lines[above].strip().startswith("#:"):
        comment.insert(0, lines[above].strip().removeprefix("#:").strip())
        above -= 1
    name = field.target.id if isinstance(field.target, ast.Name) else ast.unparse(field.target)
    return Row(name, ast.unparse(field.annotation), _default(field.value), " ".join(comment))


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Call):  # field(default=..., repr=False)
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        return _default(named.get("default"))
    text = ast.unparse(value).replace("'", '"')
    for unit in ("KIB", "MIB", "GIB"):
        text = text.replace(f" * {unit}", f" {unit[0]}iB")
    return text


def render(source: str) -> str:
    """The whole page for the text of config.py."""
    rows = [
        f"| `{row.name}` | `{row.annotation.replace('|', 'or')}` | `{row.default}` "
        f"| {row.meaning.replace('|', '&#124;')} |\n"
        for row in read_rows(source)
    ]
    return OPENING + "".join(rows)


def main() -> int:
    """Writes the page; 2 when called with anything but one path."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    page = render(SOURCE.read_text())
    if sys.argv[1] == "-":
        sys.stdout.write(page)
    else:
        Path(sys.argv[1]).write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
