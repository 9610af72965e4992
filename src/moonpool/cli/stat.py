"""`moonpool stat`: what the master knows of objects, or of the pool."""

from __future__ import annotations

from typing import Any

import click

from moonpool.cli.options import ExitCode, json_option, make_console, print_json
from moonpool.cli.pool_options import json_key, key_of, open_pool, pool_options, text_of
from moonpool.units import format_size


@click.command("stat")
@click.argument("keys", nargs=-1)
@json_option
@pool_options
@click.pass_context
def command(ctx: click.Context, /, keys: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show objects, or without KEYS the pool.

    Exits with 1 when one of the objects is not there.
    """
    names = [key_of(key) for key in keys]
    with open_pool(options) as pool:
        if not names:
            facts = plain(pool.status())
            if as_json:
                print_json(facts)
            else:
                show("", facts)
            return
        found = [pool.stat(name) for name in names]
    if as_json:
        print_json(
            [
                {**json_key(name), "found": each is not None, **plain(each or {})}
                for name, each in zip(names, found, strict=True)
            ]
        )
    else:
        for name, each in zip(names, found, strict=True):
            if each is None:
                click.echo(f"{text_of(name)}: no such object", err=True)
            else:
                show(text_of(name), plain(each))
    ctx.exit(ExitCode.FAILURE if None in found else ExitCode.OK)


def plain(value: Any) -> Any:
    """What the master said, for JSON: bytes as text where they are UTF-8, else as hexadecimal."""
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        return text if text.isprintable() else value.hex()
    if isinstance(value, dict):
        return {str(plain(name)): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def show(title: str, facts: dict[str, Any]) -> None:
    """Facts as rich tables: plain ones as rows, lists of maps as a table each."""
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    table = Table(
        title=title or None, box=None, padding=(0, 2, 0, 0), show_header=False, title_justify="left"
    )
    nested: list[tuple[str, list[dict[str, Any]]]] = []
    for name, value in facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            nested.append((name, value))
        else:
            table.add_row(name, Text(shown(name, value)))
    console.print(table)
    for name, rows in nested:
        inner = Table(title=name, box=None, padding=(0, 2, 0, 0), title_justify="left")
        for column in rows[0]:
            inner.add_column(column)
        for row in rows:
            inner.add_row(*(Text(shown(column, row.get(column, ""))) for column in rows[0]))
        console.print(inner)


def shown(name: str, value: Any) -> str:
    """A value for the eye: sizes with units, maps on one line."""
    if isinstance(value, int) and not isinstance(value, bool):
        of_bytes = name in ("size", "capacity") or name.endswith("bytes")
        return format_size(value) if of_bytes else f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{inner} {shown(inner, each)}" for inner, each in value.items())
    if isinstance(value, list):
        return ", ".join(shown(name, each) for each in value)
    return str(value)
