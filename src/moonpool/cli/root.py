"""The group that finds commands, and the one place where an error becomes an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import click

from moonpool.cli.options import ExitCode
from moonpool.errors import MoonpoolError, PeerError, UsageError

COMMANDS: Final[Mapping[str, str]] = {
    "bench": "moonpool.bench.commands",
    "conductor": "moonpool.cli.conductor",
    "demo": "moonpool.cli.demo",
    "doctor": "moonpool.cli.doctor",
    "get": "moonpool.cli.get",
    "ls": "moonpool.cli.ls",
    "master": "moonpool.cli.master",
    "node": "moonpool.cli.node",
    "nvmf": "moonpool.cli.nvmf",
    "put": "moonpool.cli.put",
    "rm": "moonpool.cli.rm",
    "simulate": "moonpool.cli.simulate",
    "stat": "moonpool.cli.stat",
    "top": "moonpool.cli.top",
    "topology": "moonpool.cli.topology",
    "version": "moonpool.cli.version",
}
"""Command to the module that defines it under the name ``command``; loaded when its name or the help is asked
for.
"""


class LazyGroup(click.Group):
    """A group that imports a command's module when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, for the help."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now; None for an unknown one."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command), f"{COMMANDS[cmd_name]}.command is no command"
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def root() -> None:
    """Moonpool: move and pool KV cache between machines.

    Exit codes of every command: 0 done, 1 failed or not there, 2 wrong usage, 3 the other side cannot be
    reached.
    """


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and leaves through ``SystemExit`` with one of the documented codes."""
    try:
        code = root.main(args=arguments, prog_name="moonpool", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("moonpool: interrupted", err=True)
        sys.exit(ExitCode.FAILURE)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; a second failure at interpreter exit must not be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILURE)
    except MoonpoolError as exc:
        click.echo(f"moonpool: {exc}", err=True)
        sys.exit(code_of(exc))
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


def code_of(error: MoonpoolError) -> ExitCode:
    """Who must act decides: the caller, the other side, or someone who looks at this machine."""
    if isinstance(error, UsageError) and not error.retryable:
        return ExitCode.USAGE
    return ExitCode.UNAVAILABLE if isinstance(error, PeerError) else ExitCode.FAILURE
