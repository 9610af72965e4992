"""`moonpool doctor`: what this machine can do, what it cannot, and how to change that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from moonpool.cli.options import ExitCode, json_option, make_console, print_json

if TYPE_CHECKING:
    from moonpool.cli.checks import Report


@click.command("doctor")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check what this machine can do.

    Looks at transports, kernel features, memory, network and libraries, and says what would help.
    Exits with 1 when the engine in its default configuration would not work here.
    """
    from moonpool.cli.checks import examine
    from moonpool.cli.transports import transport_states

    report = examine(transport_states())
    if as_json:
        print_json(report.to_dict())
    else:
        show(report)
    ctx.exit(ExitCode.OK if report.ok else ExitCode.FAILURE)


def show(report: Report) -> None:
    """Prints the report as one table a group, with advice under the line it belongs to."""
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    styles = {"ok": "green", "info": "cyan", "warn": "yellow", "FAIL": "bold red"}
    for group in dict.fromkeys(check.group for check in report.checks):
        table = Table(title=group, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for check in report.checks:
            if check.group == group:
                table.add_row(Text(check.level, styles[check.level]), Text(check.name), Text(check.detail))
                if check.advice and check.level != "ok":
                    table.add_row("", "", Text(f"-> {check.advice}", "dim"))
        console.print(table)
        console.print()
    failed = sum(check.level == "FAIL" for check in report.checks)
    verdict = (
        "the engine works here" if report.ok else f"{failed} checks failed: the engine does not work here"
    )
    console.print(Text(verdict, "green" if report.ok else "bold red"))
