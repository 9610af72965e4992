"""`moonpool bench`: the paired benchmarks as sub-commands of the one command line."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

import click

BENCHMARKS: Final[Mapping[str, str]] = {
    "engine": "moonpool.bench.engine",
    "pool": "moonpool.bench.pool",
}
"""Name to the module that has the command under the name ``main``; loaded when it is used."""


class Benchmarks(click.Group):
    """A group that imports a benchmark when its name or the help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all benchmarks."""
        return sorted(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The benchmark of that name; None for an unknown one."""
        if cmd_name not in BENCHMARKS:
            return None
        benchmark = importlib.import_module(BENCHMARKS[cmd_name]).main
        assert isinstance(benchmark, click.Command), f"{BENCHMARKS[cmd_name]}.main is no command"
        return benchmark


@click.command("bench", cls=Benchmarks)
def command() -> None:
    """Measure beside other systems.

    Each benchmark prints tables, or with --json one object. Systems that are not installed (`python -m
    moonpool.bench.peers_setup`) are left out.
    """
