"""What commands share: exit codes, options, and how results are printed."""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH: Final = 200
"""Columns when the output is no terminal: wide enough that a line of a table stays one line for grep."""


class ExitCode(IntEnum):
    """What a command's exit code says."""

    OK = 0
    FAILURE = 1
    USAGE = 2


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def print_json(value: Any) -> None:
    """Prints JSON with a line feed, non-ASCII characters escaped, so that any locale can print it."""
    click.echo(json.dumps(value, indent=2))


def make_console() -> Console:
    """A rich console on standard output: coloured on a terminal, plain and wide elsewhere."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
