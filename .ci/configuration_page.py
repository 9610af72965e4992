"""Writes the pages of settings from the fields of config classes and the `#:` comments above them.

    .ci/configuration_page.py FILE              docs/configuration.md: `EngineConfig`
    .ci/configuration_page.py --store FILE      docs/store/configuration.md: all parts of the store
                                                ("-" for standard output)

A test renders the pages anew and compares, so that they cannot go stale.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "moonpool" / "config.py"
CLASS_NAME = "EngineConfig"
#: Section, file, class, what it is about: in the order of the page.
STORE_SECTIONS = (
    ("master", "store/master_service_config.py", "MasterServiceConfig", "Where a master serves."),
    ("rules", "store/master_config.py", "MasterConfig", "How a master decides."),
    (
        "tables",
        "store/table_factory.py",
        "TableConfig",
        "What a master's tables hold, and what is evicted first.",
    ),
    ("journal", "store/journal_config.py", "JournalConfig", "Where a master keeps its facts."),
    ("rpc", "src/moonpool/rpc/limits.py", "ServerLimits", "Bounds of a master's port."),
    ("events", "store/event_publisher.py", "EventPublisherConfig", "Where a master publishes store events."),
    ("http", "src/moonpool/http_status.py", "HttpStatusConfig", "Status pages of a master or a node."),
    ("node", "store/node_config.py", "NodeConfig", "The memory that a node offers."),
    ("client", "store/client_config.py", "ClientConfig", "How a client finds, reads and writes."),
)

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

"""
STORE_OPENING = """\
# Configuration of the store

<!-- Generated from the config classes by `make docs`; change the comments there, not this page. -->

One TOML file (`--config FILE`, or `MOONPOOL_CONFIG`) can hold the settings of all parts, each in a table of
its own. The variable of a field is `MOONPOOL_`, the table's name and the field's in capitals: `evict_high` in
`[rules]` is `MOONPOOL_RULES_EVICT_HIGH`. An option of the command line wins over a variable, and that over
the file. The engine under it all has the table `[engine]` and variables without a table's name
([its page](../configuration.md)); its `cluster_secret` guards the master's port as well.

In text, a field of bytes accepts `"8 MiB"`, one of milliseconds `"3 s"`. Fields whose type is another class
are filled from that class's table.
"""
TABLE = """\
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


def read_rows(source: str, class_name: str = CLASS_NAME) -> list[Row]:
    """The fields of the class in their order. Raises `LookupError` when the source has no such class."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return [_row(field, lines) for field in node.body if isinstance(field, ast.AnnAssign)]
    raise LookupError(f"the source has no class {class_name}")


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
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = named.get("default_factory")
        return f"{ast.unparse(factory)}()" if factory is not None else _default(named.get("default"))
    text = ast.unparse(value).replace("'", '"')
    for unit in ("KIB", "MIB", "GIB"):
        text = text.replace(f" * {unit}", f" {unit[0]}iB")
    return text


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    return TABLE + "".join(
        f"| `{row.name}` | `{row.annotation.replace('|', 'or')}` | `{row.default}` "
        f"| {row.meaning.replace('|', '&#124;')} |\n"
        for row in rows
    )


def render(source: str) -> str:
    """The whole page for the text of config.py."""
    return OPENING + table(read_rows(source))


def store_rows() -> dict[str, list[Row]]:
    """The fields of each section of the store."""
    return {
        section: read_rows((ROOT / file).read_text(), class_name)
        for section, file, class_name, _ in STORE_SECTIONS
    }


def render_store() -> str:
    """The page of the store's settings."""
    rows = store_rows()
    parts = [
        f"\n## [{section}]\n\n{about}\n\n{table(rows[section])}" for section, _, _, about in STORE_SECTIONS
    ]
    return STORE_OPENING + "".join(parts)


def main() -> int:
    """Writes the page; 2 when called with anything but one path."""
    words = sys.argv[1:]
    of_the_store = words[:1] == ["--store"]
    paths = words[1:] if of_the_store else words
    if len(paths) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    page = render_store() if of_the_store else render(SOURCE.read_text())
    if paths[0] == "-":
        sys.stdout.write(page)
    else:
        Path(paths[0]).write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
