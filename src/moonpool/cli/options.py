"""What commands share: exit codes, options, and how results are printed."""

from __future__ import annotations

import json
import math
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.errors import UsageError
from moonpool.units import parse_size

if TYPE_CHECKING:
    from rich.console import Console

    _IntegerParam = click.ParamType[int]
else:
    _IntegerParam = click.ParamType

PLAIN_WIDTH: Final = 200
"""Columns when the output is no terminal: wide enough that a line of a table stays one line for grep."""


class ExitCode(IntEnum):
    """What a command's exit code says.

    `FAILURE` is also the answer no: a key that is not there, one that exists already, a pool that is full.
    """

    OK = 0
    FAILURE = 1
    USAGE = 2
    UNAVAILABLE = 3


class Size(_IntegerParam):
    """Bytes, written as "4GiB", "64 KiB", "1.5 GB" or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes as a number; fails as a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except UsageError as exc:
            self.fail(exc.message, param, ctx)


class Seconds(click.FloatRange):
    """A time within bounds; "nan" is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Seconds; fails as a usage error."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no time", param, ctx)
        return seconds


class Names(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names, without white space around them."""
        if isinstance(value, tuple):
            return value
        return tuple(word.strip() for word in str(value).split(",") if word.strip())


transports_option = click.option(
    "--transports",
    type=Names(),
    metavar="NAME,...",
    help="Ways that bytes may go; `moonpool doctor` lists them.  [env var: MOONPOOL_TRANSPORTS]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def print_json(value: Any) -> None:
    """Prints JSON with a line feed, non-ASCII characters escaped, so that any locale can print it."""
    click.echo(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    """Prints JSON on one line, at once, for a program that reads lines."""
    click.echo(json.dumps(value, separators=(",", ":")))
    sys.stdout.flush()


def make_console() -> Console:
    """A rich console on standard output: coloured on a terminal, plain and wide elsewhere."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
