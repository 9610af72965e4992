"""What the commands that serve share: logging, stop signals, addresses, and the line that says ready."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from moonpool.cli.options import print_json_line

if TYPE_CHECKING:
    from moonpool.config_sections import Settings
    from moonpool.http_status import HttpStatusConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

log_option = click.option(
    "--log",
    "log_level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    help="What goes to standard error.",
)
http_option = click.option(
    "--http",
    metavar="HOST:PORT",
    help="Where /metrics and /healthz are; port 0: any.  [env var: MOONPOOL_HTTP_PORT]",
)


def start_logging(level: str) -> None:
    """Lines on standard error with time, level and who speaks."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`, which must be safe in a signal handler; the old handlers come back."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def http_config(settings: Settings, address: str | None) -> HttpStatusConfig | None:
    """Where status pages are served; None when neither an option nor the settings name a port."""
    from moonpool.http_status import HttpStatusConfig

    if address is None:
        named = "http" in settings.tables or "MOONPOOL_HTTP_PORT" in settings.environ
        return settings.build(HttpStatusConfig, "http") if named else None
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise click.UsageError(f"--http takes HOST:PORT, not {address!r}")
    given = {"bind_host": host.strip("[]") or None, "port": int(port)}
    return settings.build(HttpStatusConfig, "http", given)


def say_ready(what: str, facts: dict[str, Any], *, as_json: bool) -> None:
    """One line on standard output, at once: JSON with all facts, or a sentence with those that are set."""
    if as_json:
        print_json_line(facts)
        return
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if value and name != "address")
    click.echo(f"{what} serves at {facts['address']}" + (f" ({told})" if told else ""))
