"""`moonpool top`: what moves now, by transport, path and peer, from metrics pages of running processes."""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.options import ExitCode, Seconds, json_option, make_console, print_json
from moonpool.cli.top_samples import ORDERS, SERVED_TO, Page, Rate, parse_page, rates
from moonpool.units import format_size

if TYPE_CHECKING:
    from rich.table import Table

PAGE_BYTES_MAX: Final = 64 << 20
FETCH_TIMEOUT_S: Final = 2.0
FETCHES_MAX: Final = 16
SOURCES_MAX: Final = 256


@click.command("top")
@click.argument("addresses", nargs=-1, required=True, metavar="HOST:PORT...")
@json_option
@click.option(
    "--once", is_flag=True, help="Print one table and end; always so when the output is no terminal."
)
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(0.05, 3_600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--sort",
    type=click.Choice(sorted(ORDERS)),
    default="bandwidth",
    show_default=True,
    help="What is on top.",
)
@click.option("--rows", "rows_max", type=click.IntRange(1, 10_000), default=40, show_default=True)
@click.option("--count", type=click.IntRange(1), help="End after so many looks.  [default: never]")
@click.option("--idle", is_flag=True, help="Also show paths on which nothing moves.")
@click.pass_context
def command(
    ctx: click.Context, /, addresses: tuple[str, ...], as_json: bool, once: bool, **options: Any
) -> None:
    """Show what moves now: bandwidth, transfers, errors and latency by transport, path and peer.

    HOST:PORT is where a process shows /metrics: an engine's metrics_address, a node's --http. Several may be
    given. A process that is away is shown as such and looked for again; one that was restarted counts anew.
    Exits with 3 when none of them answers.
    """
    if len(addresses) > SOURCES_MAX:
        raise click.UsageError(f"at most {SOURCES_MAX} addresses can be watched at once")
    watched = [Source(split_address(address)) for address in dict.fromkeys(addresses)]
    view = View(options["sort"], options["rows_max"], idle=options["idle"])
    console = make_console()
    if once or as_json or not console.is_terminal:
        look(watched)
        time.sleep(options["interval_s"])
        look(watched)
        if as_json:
            print_json(as_dict(watched, view))
        else:
            console.print(draw(watched, view))
        ctx.exit(exit_code(watched))
    from rich.live import Live

    looks = itertools.count() if options["count"] is None else range(options["count"])
    with Live(draw(watched, view), console=console, screen=True, auto_refresh=False) as live:
        for number in looks:  # or until the user interrupts
            if number:
                time.sleep(options["interval_s"])
            look(watched)
            live.update(draw(watched, view), refresh=True)
    ctx.exit(exit_code(watched))


def exit_code(watched: Sequence[Source]) -> ExitCode:
    """UNAVAILABLE when none has ever answered."""
    reached = any(source.page is not None for source in watched)
    return ExitCode.OK if reached else ExitCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class View:
    """What of the rates is shown, and in which order."""

    sort: str
    rows_max: int
    idle: bool = False

    def choose(self, found: Sequence[Rate]) -> list[Rate]:
        """The rates to show."""
        moving = [
            rate
            for rate in found
            if self.idle or rate.bytes_per_s or rate.transfers_per_s or rate.errors_per_s
        ]
        return sorted(moving, key=ORDERS[self.sort])[: self.rows_max]


@dataclass(slots=True)
class Source:
    """One process: its address, its last two pages, and why there is no newer one."""

    address: tuple[str, int]
    before: Page | None = None
    page: Page | None = None
    problem: str = "not looked at yet"
    rates: list[Rate] = field(default_factory=list)

    @property
    def name(self) -> str:
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def take(self, page: Page | None, problem: str) -> None:
        """A new look's outcome."""
        self.problem = problem
        if page is None:
            self.rates = []
            return
        self.before, self.page = self.page, page
        self.rates = rates(self.name, self.before, page)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "http://host:port/metrics"."""
    bare = text.removeprefix("http://").removesuffix("/").removesuffix("/metrics")
    host, colon, port = bare.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise click.UsageError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def look(watched: Sequence[Source]) -> None:
    """Reads every source's page, at most `FETCHES_MAX` at once, each within a bound."""
    with concurrent.futures.ThreadPoolExecutor(min(FETCHES_MAX, len(watched))) as pool:
        outcomes = list(pool.map(lambda source: fetch(source.address), watched))
    for source, (page, problem) in zip(watched, outcomes, strict=True):
        source.take(page, problem)


def fetch(address: tuple[str, int]) -> tuple[Page | None, str]:
    """A process's page, or why there is none."""
    connection = http.client.HTTPConnection(*address, timeout=FETCH_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read(PAGE_BYTES_MAX + 1)
        at_s = time.monotonic()
    except (OSError, http.client.HTTPException) as problem:
        return None, str(problem) or type(problem).__name__
    finally:
        connection.close()
    if answer.status != http.client.OK:
        return None, f"it answers {answer.status}: does it show /metrics there?"
    if len(body) > PAGE_BYTES_MAX:
        return None, f"its page is longer than {format_size(PAGE_BYTES_MAX)}"
    return parse_page(body.decode("utf-8", "replace"), at_s), ""


def as_dict(watched: Sequence[Source], view: View) -> dict[str, Any]:
    """What is shown, ready for JSON."""
    every = [rate for source in watched for rate in source.rates]
    chosen = view.choose(every)
    return {
        "schema": 1,
        "sources": [
            {"address": source.name, "ok": not source.problem, "problem": source.problem}
            for source in watched
        ],
        "seconds": seconds_of(watched),
        "bytes_per_s": round(total(every, served=False), 3),
        "served_bytes_per_s": round(total(every, served=True), 3),
        "paths": [rate.to_dict() for rate in chosen],
    }


def total(every: Sequence[Rate], *, served: bool) -> float:
    """Bytes a second of own transfers, or of those served to peers: both ends may be watched."""
    return sum(rate.bytes_per_s for rate in every if (rate.key.peer == SERVED_TO) == served)


def seconds_of(watched: Sequence[Source]) -> float:
    """The time between the two looks, of the source for which it was longest."""
    spans = [source.page.at_s - source.before.at_s for source in watched if source.page and source.before]
    return round(max(spans, default=0.0), 3)


def draw(watched: Sequence[Source], view: View) -> Table:
    """The table of what moves, with a line for each process that is away."""
    from rich.table import Table
    from rich.text import Text

    every = [rate for source in watched for rate in source.rates]
    chosen = view.choose(every)
    moved, served = (format_rate(total(every, served=which)) for which in (False, True))
    table = Table(
        title=f"{moved} moved, {served} served in {seconds_of(watched):g} s; "
        f"{len(chosen)} of {len(every)} paths",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for heading in ("process", "transport", "peer", "path", "op"):
        table.add_column(heading, overflow="fold")
    for heading in ("bandwidth", "transfers/s", "errors/s", "p50", "p99", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rate in chosen:
        table.add_row(*(Text(cell) for cell in cells(rate)))
    for source in watched:
        if source.problem:
            table.add_row(Text(source.name), Text(source.problem, "yellow"))
    return table


def cells(rate: Rate) -> list[str]:
    """One line of the table."""
    key = rate.key
    return [
        *map(shown, (key.engine or rate.source, key.transport, key.peer, key.path, key.op)),
        format_rate(rate.bytes_per_s),
        f"{rate.transfers_per_s:,.0f}",
        f"{rate.errors_per_s:,.0f}",
        format_us(rate.p50_us),
        format_us(rate.p99_us),
        format_size(int(rate.bytes_total)),
    ]


def shown(text: str) -> str:
    """What somebody's page said, without what would move a terminal's cursor."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def format_rate(bytes_per_s: float) -> str:
    """Decimal units, as links are sold."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_us(latency_us: float | None) -> str:
    """A latency in the unit that suits it."""
    if latency_us is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if latency_us >= size:
            return f"{latency_us / size:.2f} {unit}"
    return f"{latency_us:.1f} us"
