"""`moonpool demo engine`: two processes move bytes by shared memory and tcp, every byte is checked, then
one is
killed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.options import ExitCode, json_option, make_console, print_json
from moonpool.units import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from moonpool.cli.demonstration.ending import Death
    from moonpool.cli.demonstration.traffic import Cell

TRANSPORTS: Final = ("shm", "tcp")
DEMO_SCHEMA: Final = 1
REDRAW_S: Final = 0.25


@click.command("engine")
@json_option
@click.option(
    "--seconds", type=click.FloatRange(0.1, 3600), default=6.0, show_default=True, help="Time of the traffic."
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    default=TRANSPORTS,
    show_default=True,
    help="May be repeated.",
)
@click.pass_context
def command(ctx: click.Context, as_json: bool, seconds: float, transports: tuple[str, ...]) -> None:
    """Move bytes between two processes, and check them.

    One process offers memory; this one writes and reads it by shared memory and by tcp, with
    position-dependent data, and checks every byte. At the end the other process is killed with SIGKILL, and
    each transport must report that with a typed error in time. Exits with 1 when a byte is wrong or an error
    is late.
    """
    from moonpool.cli.demonstration.ending import kill_and_watch
    from moonpool.cli.demonstration.target_process import TargetProcess
    from moonpool.cli.demonstration.traffic import REGION_BYTES, SHAPES, make_cells
    from moonpool.config import EngineConfig
    from moonpool.engine.engine import Engine

    chosen = tuple(dict.fromkeys(transports))
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(Engine(EngineConfig(transports=(name,)))) for name in chosen]
        target = stack.enter_context(TargetProcess(len(chosen) * len(SHAPES), REGION_BYTES))
        cells = make_cells(engines, target)
        for cell in cells:
            stack.callback(cell.close)
        run_traffic(cells, seconds, live=not as_json)
        for index, cell in enumerate(cells):
            cell.check_last(target, index)
        rows = [cell.to_dict() for cell in cells]
        deaths = kill_and_watch(cells[:: len(SHAPES)], target)
    ok = all(row["wrong_bytes"] == 0 for row in rows) and all(death.ok for death in deaths)
    if as_json:
        print_json(
            {"schema": DEMO_SCHEMA, "ok": ok, "rows": rows, "deaths": [death.to_dict() for death in deaths]}
        )
    else:
        show(rows, deaths)
    ctx.exit(ExitCode.OK if ok else ExitCode.FAILURE)


def run_traffic(cells: Sequence[Cell], seconds: float, *, live: bool) -> None:
    """Steps through the cells in turn until the time is over; each gets at least one step."""
    for cell in cells:
        cell.check_first()
    ends = time.monotonic() + seconds
    with live_table(cells) if live else contextlib.nullcontext():
        while True:
            for cell in cells:
                cell.step()
            if time.monotonic() >= ends:
                return


@contextlib.contextmanager
def live_table(cells: Sequence[Cell]) -> Iterator[None]:
    """Redraws the table while the traffic runs, on a terminal only; it is gone afterwards."""
    console = make_console()
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    with Live(
        console=console,
        get_renderable=lambda: make_table([cell.to_dict() for cell in cells]),
        refresh_per_second=1 / REDRAW_S,
        transient=True,
    ):
        yield


def make_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of all cells as a rich table that fits into 80 columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="two processes, every byte checked", box=None, padding=(0, 2, 0, 0))
    table.add_column("transport", no_wrap=True)
    for name in ("batch", "transfers", "GB/s w / r", "p50 us w / r", "verified", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        wrong = row["wrong_bytes"]
        table.add_row(
            row["transport"],
            f"{row['batch']} x {format_size(row['block_bytes'])}",
            f"{row['transfers']:,}",
            f"{row['write_gb_per_s']:.2f} / {row['read_gb_per_s']:.2f}",
            f"{show_us(row['write_p50_us'])} / {show_us(row['read_p50_us'])}",
            format_size(row["verified_bytes"]),
            Text(str(wrong), "bold red" if wrong else "green"),
        )
    return table


def show_us(latency_us: float | None) -> str:
    """A latency in microseconds for the table; "-" before the first sample."""
    return "-" if latency_us is None else f"{latency_us:,.0f}"


def show(rows: Sequence[dict[str, Any]], deaths: Sequence[Death]) -> None:
    """The final table, what each transport said about the killed process, and the verdict."""
    from rich.text import Text

    console = make_console()
    console.print(make_table(rows))
    console.print("the other process was killed with SIGKILL while it was being read:")
    for death in deaths:
        how = f"{death.error} after {death.seconds * 1e3:.1f} ms"
        if not death.ok:
            how = f"NO PROPER ERROR IN TIME: {death.message} ({death.seconds * 1e3:.1f} ms)"
        console.print(Text(f"  {death.transport}: {how}", "green" if death.ok else "bold red"))
    wrong = sum(row["wrong_bytes"] for row in rows)
    verified = sum(row["verified_bytes"] for row in rows)
    console.print(
        Text(f"{format_size(verified)} verified, {wrong} wrong bytes", "bold red" if wrong else "bold green")
    )
