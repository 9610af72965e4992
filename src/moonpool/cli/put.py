"""`moonpool put`: a file becomes an object."""

from __future__ import annotations

from typing import Any

import click

from moonpool.cli.options import ExitCode, json_option, print_json
from moonpool.cli.pool_options import json_key, key_of, open_pool, pool_options, text_of
from moonpool.cli.streams import STANDARD, progress, read_value
from moonpool.units import format_size

PINS = ("none", "soft", "hard")
SOFT_PIN_MS = 3_600_000


@click.command("put")
@click.argument("key")
@click.argument("file", default=STANDARD)
@json_option
@pool_options
@click.option(
    "--replicas", type=click.IntRange(1, 255), default=1, show_default=True, help="How many copies."
)
@click.option("--replace", is_flag=True, help="Store it in place of the object that has the key.")
@click.option(
    "--pin", type=click.Choice(PINS), default="none", show_default=True, help="Evict it last, never."
)
@click.option(
    "--soft-pin-ms",
    type=click.IntRange(1),
    help=f"How many milliseconds a soft pin lasts.  [default: {SOFT_PIN_MS}]",
)
@click.option(
    "--wait",
    "wait_ms",
    type=click.IntRange(0),
    help="Milliseconds to wait for space.  [env var: MOONPOOL_CLIENT_PUT_WAIT_MS]",
)
@click.pass_context
def command(ctx: click.Context, /, key: str, file: str, as_json: bool, **options: Any) -> None:
    """Store FILE, or standard input, as an object under KEY.

    Exits with 0 when it was stored, and with 1 when the key exists already or the pool has no space.
    """
    from moonpool.store.client_results import PutPolicy, PutStatus
    from moonpool.store.records import Pin

    name = key_of(key)
    pin = Pin(PINS.index(options["pin"]))
    policy = PutPolicy(
        replicas=options["replicas"],
        replace=options["replace"],
        pin=pin,
        soft_pin_ms=options["soft_pin_ms"] or (SOFT_PIN_MS if pin is Pin.SOFT else 0),
    )
    value = read_value(file)
    with open_pool(options) as pool, progress("storing", len(value)):
        result = pool.put(name, value, policy=policy, wait_ms=options["wait_ms"])
        empty = result.status is PutStatus.NO_SPACE and not pool.status()["nodes"]
    if as_json:
        print_json(
            {
                **json_key(name),
                "status": result.status.name.lower(),
                "size": len(value),
                "object_id": result.object_id,
                "replicas": result.replicas,
            }
        )
    elif result.stored:
        copies = "1 copy" if result.replicas == 1 else f"{result.replicas} copies"
        click.echo(f"{text_of(name)}: stored, {format_size(len(value))}, {copies}")
    else:
        full = "the pool has no node yet" if empty else "the pool has no space"
        exists = result.status is PutStatus.EXISTS
        click.echo(f"{text_of(name)}: {'exists already' if exists else full}", err=True)
    ctx.exit(ExitCode.OK if result.stored else ExitCode.FAILURE)
