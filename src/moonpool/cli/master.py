"""`moonpool master`: who has what."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moonpool.cli.options import ExitCode, json_option
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
    from moonpool.store.event_publisher import EventPublisherConfig
    from moonpool.store.journal_config import JournalConfig
    from moonpool.store.master_service_config import MasterServiceConfig


@click.command("master")
@json_option
@config_option
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    help="host:port, @name or a socket's path; repeatable.  [default: 127.0.0.1:7420]",
)
@click.option("--advertise", multiple=True, metavar="ADDRESS", help="What others are told, if not that.")
@click.option("--name", help="What others call this master.")
@click.option("--redis", metavar="URL", help="Where facts are kept; without it the master runs its own.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Of its own Redis.  [default: ~/.local/state/moonpool]",
)
@click.option("--prefix", help="Of all keys in Redis: pools that share one need different ones.")
@click.option("--durability", type=click.Choice(("async", "sync")), help="Whether puts wait for Redis.")
@click.option("--policy", type=click.Choice(("lru", "s3fifo")), help="What is evicted first.")
@click.option("--evict-high", type=click.FloatRange(0.01, 1.0), help="Share in use that starts eviction.")
@click.option("--evict-low", type=click.FloatRange(0.0, 1.0), help="Share in use at which it ends.")
@http_option
@click.option("--events", metavar="ENDPOINT", help="Publish store events, such as tcp://127.0.0.1:5557.")
@click.option("--events-replay", metavar="ENDPOINT", help="Where readers ask for events that they missed.")
@log_option
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, log_level: str, **options: Any) -> None:
    """Run a master.

    It knows which node holds which object, and keeps that in Redis. Of several masters with one Redis one
    leads and the others stand by. Once it serves it prints a line with its address (with --json all facts).
    SIGTERM ends it cleanly. Every setting can also stand in a file (--config) or in the environment.
    """
    from moonpool.config_sections import Settings
    from moonpool.store.master import Master

    start_logging(log_level)
    settings = Settings.read(options["config_file"], SECTIONS)
    master = Master(make_config(settings, options))
    with StopSignals(master.stop), master:
        facts = {
            "address": master.address,
            "addresses": master.addresses,
            "name": master.name,
            "http": master.http_address,
            "events": master.events_endpoint,
            "pid": os.getpid(),
        }
        say_ready("the master", facts, as_json=as_json)
        master.serve_forever()
    ctx.exit(ExitCode.OK)


def make_config(settings: Settings, options: dict[str, Any]) -> MasterServiceConfig:
    """The whole config: file, environment, options."""
    from moonpool.rpc.limits import ServerLimits
    from moonpool.store.master_config import MasterConfig
    from moonpool.store.master_service_config import MasterServiceConfig
    from moonpool.store.table_factory import TableConfig

    events = events_config(settings, options)
    rules = {name: options[name] for name in ("durability", "evict_high", "evict_low")}
    seed = int.from_bytes(os.urandom(8), "little")
    given = {
        "journal": journal_config(settings, options),
        "name": options["name"],
        "endpoints": options["listen"] or None,
        "advertised": options["advertise"] or None,
        "secret": settings.engine().cluster_secret,
        "rules": settings.build(MasterConfig, "rules", {**rules, "events": events is not None or None}),
        "tables": settings.build(TableConfig, "tables", {"policy": options["policy"], "hash_seed": seed}),
        "rpc": settings.build(ServerLimits, "rpc"),
        "http": http_config(settings, options["http"]),
        "events": events,
    }
    return settings.build(MasterServiceConfig, "master", given)


def journal_config(settings: Settings, options: dict[str, Any]) -> JournalConfig:
    """Where facts are kept; a private Redis has a folder in the home directory unless another is named."""
    from moonpool.store.journal_config import JournalConfig

    folder = options["data_dir"]
    named = (
        "data_dir" in settings.tables.get("journal", {}) or "MOONPOOL_JOURNAL_DATA_DIR" in settings.environ
    )
    if folder is None and not named:
        folder = Path.home() / ".local" / "state" / "moonpool"
    given = {
        "address": options["redis"],
        "prefix": options["prefix"],
        "data_dir": None if folder is None else str(folder.absolute()),
    }
    return settings.build(JournalConfig, "journal", given)


def events_config(settings: Settings, options: dict[str, Any]) -> EventPublisherConfig | None:
    """Where events are published; None when neither an option nor the settings name an endpoint."""
    from moonpool.store.event_publisher import EventPublisherConfig

    given = {"endpoint": options["events"], "replay_endpoint": options["events_replay"]}
    named = "events" in settings.tables or "MOONPOOL_EVENTS_ENDPOINT" in settings.environ
    if options["events"] is None and not named:
        if options["events_replay"] is not None:
            raise click.UsageError("--events-replay needs --events")
        return None
    return settings.build(EventPublisherConfig, "events", given)
