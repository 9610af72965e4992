"""`moonpool get`: an object becomes a file."""

from __future__ import annotations

from typing import Any

import click

from moonpool.cli.options import ExitCode, json_option, print_json
from moonpool.cli.pool_options import json_key, key_of, open_pool, pool_options, text_of
from moonpool.cli.streams import STANDARD, write_value
from moonpool.units import format_size


@click.command("get")
@click.argument("key")
@click.argument("file", default=STANDARD)
@json_option
@pool_options
@click.pass_context
def command(ctx: click.Context, /, key: str, file: str, as_json: bool, **options: Any) -> None:
    """Write the object under KEY to FILE, or to standard output.

    Its bytes are checked against the digest of the put. Exits with 0 when they were written, and with 1 when
    there is no such object or no copy of it can be read.
    """
    from moonpool.store.errors import DataLost

    if as_json and file == STANDARD:
        raise click.UsageError("--json prints to standard output; name a FILE for the value")
    name = key_of(key)
    with open_pool(options) as pool:
        try:
            value = pool.get(name)
        except DataLost as exc:
            raise click.ClickException(f"{text_of(name)}: {exc}") from exc
        size = 0
        if value is not None:
            with value, memoryview(value) as found:
                size = found.nbytes
                write_value(file, found.cast("B"))
    if as_json:
        print_json({**json_key(name), "hit": value is not None, "size": size})
    elif value is None:
        click.echo(f"{text_of(name)}: no such object", err=True)
    elif file != STANDARD:
        click.echo(f"{text_of(name)}: {format_size(size)}")
    ctx.exit(ExitCode.FAILURE if value is None else ExitCode.OK)
