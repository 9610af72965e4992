"""`moonpool version`."""

from __future__ import annotations

import platform

import click

from moonpool.cli.options import json_option, print_json


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Show versions."""
    from importlib.metadata import version

    facts = {
        "moonpool": version("moonpool"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
    }
    if as_json:
        print_json(facts)
    else:
        click.echo(f"moonpool {facts['moonpool']} ({facts['python']}, {facts['kernel']}, {facts['machine']})")
