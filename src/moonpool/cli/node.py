"""`moonpool node`: memory for the pool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.options import ExitCode, Size, json_option, transports_option
from moonpool.cli.pool_options import SECTIONS, config_option
from moonpool.cli.serving import (
    StopSignals,
    http_config,
    http_option,
    log_option,
    say_ready,
    start_logging,
)

if TYPE_CHECKING:
    from moonpool.config_sections import Settings
    from moonpool.store.node_config import NodeConfig

PAGE_BYTES: Final = 4_096
LOOK_S: Final = 0.1
"""How often a node that waits for a master looks for signals."""


@click.command("node")
@json_option
@config_option
@click.option(
    "--master",
    "masters",
    multiple=True,
    metavar="ADDRESS",
    help="host:port, a socket's path or @name; repeatable.  [env var: MOONPOOL_NODE_ADDRESSES]",
)
@click.option("--memory", type=Size(), help="Payload that it holds, such as 4GiB.  [default: 1GiB]")
@click.option("--segments", type=click.IntRange(1, 1_024), help="Parts that it is cut into.  [default: 1]")
@click.option("--huge-pages", is_flag=True, default=None, help="From the system's huge pages.")
@click.option(
    "--on",
    "backing",
    metavar="PLACE",
    help="Keep payload there instead of in memory: file:PATH, nvme:DEVICE or dax:DEVICE.",
)
@click.option("--location", help='Where it lies, such as "cpu:1".')
@click.option("--name", help="What the pool calls this node.  [default: host name and process id]")
@click.option("--bind", "bind_host", metavar="HOST", help="Address that it listens on.  [default: 127.0.0.1]")
@click.option("--advertise", "advertise_host", metavar="HOST", help="Address that others are told.")
@click.option("--port", type=click.IntRange(0, 65_535), help="TCP port of the data; 0: any.")
@transports_option
@http_option
@log_option
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, log_level: str, **options: Any) -> None:
    """Offer memory to a pool.

    Clients write and read it without this process's program being involved. Once a master has taken it in, it
    prints a line with its address (with --json all facts). It goes on serving while the masters are away, and
    joins again when they come back. SIGTERM ends it.
    """
    from moonpool.config_sections import Settings
    from moonpool.store.node import Node

    start_logging(log_level)
    settings = Settings.read(options["config_file"], SECTIONS)
    node = Node(make_config(settings, options))
    with StopSignals() as signals, node:
        while not node.wait_active(LOOK_S):
            if signals.wait(0):
                ctx.exit(ExitCode.OK)
        facts = {"address": node.address, "name": node.name, "http": node.http_address, "pid": os.getpid()}
        say_ready("the node", facts, as_json=as_json)
        signals.wait(None)
    ctx.exit(ExitCode.OK)


def make_config(settings: Settings, options: dict[str, Any]) -> NodeConfig:
    """The whole config: file, environment, options."""
    from moonpool.store.node_config import NodeConfig

    engine = {name: options[name] for name in ("bind_host", "advertise_host", "port", "transports")}
    given = {
        "addresses": options["masters"] or None,
        "engine": settings.engine(engine),
        "http": http_config(settings, options["http"]),
        **{name: options[name] for name in ("segments", "huge_pages", "location", "name", "backing")},
    }
    named = "addresses" in settings.tables.get("node", {}) or "MOONPOOL_NODE_ADDRESSES" in settings.environ
    if given["addresses"] is None and not named:
        raise click.UsageError("no master is named; give --master or set MOONPOOL_NODE_ADDRESSES")
    if options["memory"] is not None:
        segments = options["segments"] or 1
        given["segment_bytes"] = options["memory"] // segments // PAGE_BYTES * PAGE_BYTES
    return settings.build(NodeConfig, "node", given)
