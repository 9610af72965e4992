"""`moonpool demo`: real request traffic through a pool of processes, every byte checked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.engine_demo import command as engine_command
from moonpool.cli.options import ExitCode, Size, json_option, make_console, print_json
from moonpool.units import KIB, format_size

if TYPE_CHECKING:
    from rich.table import Table

    from moonpool.cli.demonstration.replay_tally import ReplayFacts, ReplayTally
    from moonpool.cli.demonstration.request_stream import RequestStream

REDRAW_S: Final = 0.25
TRANSPORTS: Final = ("shm", "tcp")
BLOCK_UNIT_BYTES: Final = 4 * KIB
"""Smaller ones would share pages, and the pool's capacity in blocks would not be exact."""
NODE_BYTES_MIN: Final = 64 * KIB


@click.group("demo", invoke_without_command=True)
@json_option
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    envvar="MOONPOOL_TRACES",
    show_envvar=True,
    help="A trace with hash_ids, or a folder of them; without it requests are generated.",
)
@click.option("--requests", type=click.IntRange(1), default=2_000, show_default=True, help="How many.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Asking processes.")
@click.option("--nodes", type=click.IntRange(1, 16), default=2, show_default=True, help="Holding processes.")
@click.option("--block", type=Size(), default="64KiB", show_default=True, help="Size of a block.")
@click.option(
    "--share",
    type=click.FloatRange(0.01, 1.0),
    default=0.25,
    show_default=True,
    help="Size of the pool, as a share of all distinct blocks.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    default=TRANSPORTS,
    show_default=True,
    help="How workers reach the nodes, one after another; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of generated requests and all bytes.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, trace: Path | None, **options: Any) -> None:
    """Replay request traffic through a pool.

    Starts a master and nodes, and worker processes that serve requests as an inference engine would: each
    looks up the blocks of its prompt, reads what the pool has, makes and stores the rest, and checks every
    byte that it read. The hit ratio stands beside those of an exact LRU cache of the same size and of an
    unlimited one. Exits with 1 when a byte is wrong.
    """
    if ctx.invoked_subcommand is not None:
        return
    from moonpool.cli.demonstration.request_stream import generate_stream, read_stream

    if trace is not None:
        stream = read_stream(trace, options["requests"])
    else:
        stream = generate_stream(options["requests"], options["seed"])
    result = run(stream, options, live=not as_json)
    if as_json:
        print_json(result)
    else:
        show(result)
    ctx.exit(ExitCode.OK if result["ok"] else ExitCode.FAILURE)


command.add_command(engine_command)


def run(stream: RequestStream, options: dict[str, Any], *, live: bool) -> dict[str, Any]:
    """Starts everything, replays the stream, and gives the demo's JSON."""
    from moonpool.cli.demonstration.pool_processes import PoolProcesses
    from moonpool.cli.demonstration.replay import ask_transports, replay, started_workers
    from moonpool.cli.demonstration.replay_tally import ReplayTally, replay_result
    from moonpool.cli.demonstration.replay_worker import WorkerSettings

    facts = facts_of(stream, options)
    tally = ReplayTally(facts.block_bytes)
    named = options["transports"]
    allowed = [(named[number % len(named)],) for number in range(facts.workers)]
    with PoolProcesses(facts.nodes, facts.pool_bytes // facts.nodes) as pool:
        settings = WorkerSettings(pool.address, (), facts.block_bytes, options["seed"])
        with started_workers(settings, allowed) as workers:
            started = time.monotonic()
            with live_table(facts, tally, len(stream.chains)) if live else contextlib.nullcontext():
                replay(workers, stream.chains, tally)
            seconds = time.monotonic() - started
            moved = ask_transports(workers)
    return replay_result(facts, tally, seconds, moved)


def facts_of(stream: RequestStream, options: dict[str, Any]) -> ReplayFacts:
    """Sizes of the run, and what ideal caches find."""
    from moonpool.cli.demonstration.cache_model import lru_hits
    from moonpool.cli.demonstration.replay_tally import ReplayFacts

    block_bytes = options["block"]
    if block_bytes < 1 or block_bytes % BLOCK_UNIT_BYTES:
        raise click.UsageError(f"--block takes a multiple of {format_size(BLOCK_UNIT_BYTES)}")
    least = -(-NODE_BYTES_MIN // block_bytes)
    blocks_of_node = max(int(stream.distinct * options["share"]) // options["nodes"], least)
    blocks = blocks_of_node * options["nodes"]
    return ReplayFacts(
        source=stream.source,
        block_bytes=block_bytes,
        distinct_blocks=stream.distinct,
        pool_bytes=blocks * block_bytes,
        nodes=options["nodes"],
        workers=options["workers"],
        unlimited=lru_hits(stream.chains, None),
        lru=lru_hits(stream.chains, blocks),
    )


@contextlib.contextmanager
def live_table(facts: ReplayFacts, tally: ReplayTally, requests: int) -> Iterator[None]:
    """Redraws the table while the replay runs, on a terminal only; it is gone afterwards."""
    console = make_console()
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    from moonpool.cli.demonstration.replay_tally import replay_result

    started = time.monotonic()

    def render() -> Table:
        result = replay_result(facts, tally, time.monotonic() - started, {})
        return make_table(result, f"{tally.requests:,} of {requests:,} requests")

    with Live(console=console, get_renderable=render, refresh_per_second=1 / REDRAW_S, transient=True):
        yield


def make_table(result: dict[str, Any], title: str) -> Table:
    """The result as a rich table that fits into 80 columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    pool = f"{result['nodes']} nodes, {result['capacity_blocks']:,} blocks of {result['distinct_blocks']:,}"
    seconds = max(result["seconds"], 1e-9)
    wrong = result["verify_errors"]
    table.add_row("pool", format_size(result["pool_bytes"]), pool)
    table.add_row("requests/s", f"{result['requests'] / seconds:,.0f}", f"{result['workers']} workers")
    table.add_row("hit ratio", f"{result['hit_ratio']:.4f}", "leading blocks of prompts found")
    table.add_row("  exact LRU", f"{result['lru_hit_ratio']:.4f}", "of the same size, after all requests")
    table.add_row("  unlimited", f"{result['max_hit_ratio']:.4f}", "after all requests")
    for name, verb in (("get", "read"), ("put", "stored")):
        moved = result["verified_bytes" if name == "get" else "stored_bytes"]
        latency = (
            f"p50 {show_us(result[f'{name}_p50_us'])}, p99 {show_us(result[f'{name}_p99_us'])} us a call"
        )
        table.add_row(verb, f"{moved / seconds / 1e9:.2f} GB/s", latency)
    for transport, moved in result["bytes_by_transport"].items():
        table.add_row(f"  {transport}", format_size(moved["get"]), f"and {format_size(moved['put'])} written")
    puts = result["puts"]
    table.add_row(
        "puts", f"{puts['stored']:,}", f"stored; {puts['exists']:,} exist, {puts['no_space']:,} no space"
    )
    table.add_row("verified", format_size(result["verified_bytes"]), "every byte that was read")
    table.add_row("wrong blocks", Text(str(wrong), "bold red" if wrong else "green"), "")
    return table


def show_us(latency_us: float | None) -> str:
    """A latency in microseconds for the table; "-" before the first sample."""
    return "-" if latency_us is None else f"{latency_us:,.0f}"


def show(result: dict[str, Any]) -> None:
    """The final table and the verdict."""
    from rich.text import Text

    console = make_console()
    console.print(make_table(result, f"{result['source']}: {result['requests']:,} requests"))
    wrong = result["verify_errors"]
    verdict = f"{format_size(result['verified_bytes'])} verified, {wrong} wrong blocks"
    console.print(Text(verdict, "bold red" if wrong else "bold green"))
