"""`moonpool ls`: which objects there are."""

from __future__ import annotations

import itertools
from typing import Any

import click

from moonpool.cli.options import json_option, make_console, print_json_line
from moonpool.cli.pool_options import json_key, key_of, open_pool, pool_options, text_of
from moonpool.units import format_size


@click.command("ls")
@click.argument("prefix", default="")
@json_option
@pool_options
@click.option("--limit", type=click.IntRange(1), default=1_000, show_default=True, help="Most objects.")
def command(prefix: str, as_json: bool, limit: int, **options: Any) -> None:
    """List objects whose keys begin with PREFIX.

    With --json each object is a line of its own.
    """
    with open_pool(options) as pool:
        found = itertools.islice(pool.list(key_of(prefix)), limit)
        if as_json:
            for each in found:
                print_json_line(
                    {
                        **json_key(each.key),
                        "size": each.size,
                        "type": int(each.object_type),
                        "pin": each.pin.name.lower(),
                        "places": each.places,
                    }
                )
            return
        rows = sorted(found, key=lambda each: each.key)
    show(rows)
    if len(rows) == limit:
        click.echo(f"there may be more; these are the first {limit:,} (--limit)", err=True)


def show(rows: list[Any]) -> None:
    """The objects as a rich table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("key", overflow="fold")
    for name in ("size", "copies", "pin"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in rows:
        pin = each.pin.name.lower()
        table.add_row(
            Text(text_of(each.key)), format_size(each.size), str(each.places), "" if pin == "none" else pin
        )
    make_console().print(table)
