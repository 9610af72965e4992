"""`moonpool rm`: objects go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moonpool.cli.options import ExitCode, json_option, print_json
from moonpool.cli.pool_options import json_key, key_of, open_pool, pool_options, text_of

if TYPE_CHECKING:
    from moonpool.store.client import Pool


@click.command("rm")
@click.argument("keys", nargs=-1)
@json_option
@pool_options
@click.option("--prefix", is_flag=True, help="Each KEY is the beginning of the keys to remove.")
@click.option("--all", "everything", is_flag=True, help="Remove every object of the tenant.")
@click.option("--force", is_flag=True, help="Hard-pinned ones too.")
@click.option(
    "--if-leased",
    type=click.Choice(("defer", "refuse")),
    default="defer",
    show_default=True,
    help="Free the memory when readers are done, or leave the object.",
)
@click.pass_context
def command(ctx: click.Context, /, keys: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Remove the objects under KEYS.

    When it returns nobody can get them any more. Exits with 1 when one of them was not removed: it is not
    there, it is pinned, or readers hold leases on it.
    """
    if bool(keys) == options["everything"]:
        raise click.UsageError("name KEYS, or --all for every object")
    how = {"force": options["force"], "if_leased": options["if_leased"]}
    with open_pool(options) as pool:
        if options["everything"] or options["prefix"]:
            ctx.exit(remove_many(pool, None if options["everything"] else keys, how, as_json))
        names = [key_of(key) for key in keys]
        codes = [code.name.lower() for code in pool.remove_many(names, **how)]
    if as_json:
        print_json([{**json_key(name), "status": code} for name, code in zip(names, codes, strict=True)])
    else:
        for name, code in zip(names, codes, strict=True):
            click.echo(f"{text_of(name)}: {code}", err=code != "removed")
    ctx.exit(ExitCode.OK if set(codes) == {"removed"} else ExitCode.FAILURE)


def remove_many(pool: Pool, prefixes: tuple[str, ...] | None, how: dict[str, Any], as_json: bool) -> int:
    """Removes by prefixes, or with None everything; prints how many there were."""
    if prefixes is None:
        removed = pool.remove_all(**how)
    else:
        removed = sum(pool.remove_prefix(key_of(prefix), **how) for prefix in prefixes)
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo(f"{removed:,} removed")
    return ExitCode.OK
