"""What the commands that serve share: logging, stop signals, addresses, and the line that says ready."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

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


class StopSignals:
    """While open, SIGTERM and SIGINT do not end the process but are waited for. Only for the main thread.

    `also` is called at each of them, and must be safe in a signal handler.
    """

    def __init__(self, also: Callable[[], None] | None = None) -> None:
        self._also = also
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._fd)

    def _handle(self, *_: object) -> None:
        os.eventfd_write(self._fd, 1)
        if self._also is not None:
            self._also()

    def wait(self, timeout_s: float | None) -> bool:
        """True once a signal came; False after the timeout."""
        return bool(select.select([self._fd], [], [], timeout_s)[0])


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
