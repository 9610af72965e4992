"""``transfer_engine_bench``: one point of tebench by the flags of Mooncake's older program of that name.

With --mode=target it offers memory until it is interrupted; with --mode=initiator (the default) it moves
blocks for --duration seconds and prints one line with what that came to.

\b Exit codes: as tebench's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import click

from moonpool.bench.cli import EXIT_FAILED, EXIT_USAGE, SIZE, fail, flag, metadata_urls, start_engine
from moonpool.bench.report import PointResult
from moonpool.bench.workload import Options
from moonpool.errors import MoonpoolError, UsageError
from moonpool.units import GIB

#: What a byte a second is divided by for each unit; bits for those with a small b.
UNITS: Final = {
    "GB": 1e9,
    "GiB": 2.0**30,
    "Gb": 1e9 / 8,
    "MB": 1e6,
    "MiB": 2.0**20,
    "Mb": 1e6 / 8,
    "KB": 1e3,
    "KiB": 2.0**10,
    "Kb": 1e3 / 8,
}
PROGRAM: Final = "transfer_engine_bench"
#: Flags that have no meaning here and do no harm.
IGNORED: Final = ("nic_priority_matrix", "auto_discovery", "backend", "init_mem")


@dataclass(frozen=True, slots=True)
class Shown:
    """How the result is printed."""

    unit: str
    precision: int

    def line(self, result: PointResult) -> str:
        """The one line of the result: seconds, batches, throughput."""
        rate = result.transferred_bytes / result.wall_s / UNITS[self.unit] if result.wall_s else 0.0
        return (
            f"Test completed: duration {result.wall_s:.2f}, batch count {result.latencies.operations}, "
            f"throughput {rate:.{self.precision}f} {self.unit}/s"
        )


@click.command(help=__doc__, context_settings={"help_option_names": ["--help", "-h"]})
@flag("local_server_name", default="", help="Name of the local segment, where names are kept in Redis.")
@flag("metadata_server", default="P2PHANDSHAKE", help="P2PHANDSHAKE, or a redis:// URL.")
@flag("mode", type=click.Choice(["initiator", "target"]), default="initiator", help="Which side this is.")
@flag("operation", type=click.Choice(["read", "write"]), default="read", help="What an initiator does.")
@flag("protocol", default="", help="The transport; empty: the engine's own choice.")
@flag("device_name", default="", help="RDMA devices, comma separated; empty: all.")
@flag("nic_priority_matrix", default="", help="Ignored: paths are chosen by the engine.")
@flag("segment_id", default="", help="host:port or name of the target.")
@flag("buffer_size", type=SIZE, default=1 * GIB, help="Buffer of this process.")
@flag("batch_size", type=click.IntRange(1, 1 << 20), default=128, help="Blocks in one transfer.")
@flag("block_size", type=SIZE, default=65536, help="Bytes of a block.")
@flag("duration", type=float, default=10.0, help="Seconds that are measured.")
@flag("threads", type=click.IntRange(1, 256), default=12, help="Threads of an initiator.")
@flag("auto_discovery", type=click.BOOL, help="Ignored: devices are always looked for.")
@flag("report_unit", type=click.Choice(tuple(UNITS)), default="GB", help="Unit of the throughput.")
@flag("report_precision", type=click.IntRange(0, 9), default=2, help="Its decimals.")
@flag("use_vram", type=click.BOOL, help="Move memory of GPUs.")
@flag("init_mem", type=click.BOOL, help="Ignored: memory is always zeroed.")
@flag("gpu_id", type=click.IntRange(0, 63), default=0, help="Which GPU.")
@flag("backend", default="", help="Ignored: there is one engine.")
def command(**given: Any) -> None:
    """The command; its help is this module's own docstring."""
    for name in IGNORED:
        if given[name]:
            click.echo(f"{PROGRAM}: note: --{name} is ignored", err=True)
    try:
        options = options_of(given)
    except UsageError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    shown = Shown(given["report_unit"], given["report_precision"])
    try:
        run(options, shown)
    except UsageError as wrong:
        fail(f"{type(wrong).__name__}: {wrong}", EXIT_USAGE, PROGRAM)
    except MoonpoolError as failure:
        fail(f"{type(failure).__name__}: {failure}", EXIT_FAILED, PROGRAM)


def options_of(given: dict[str, Any]) -> Options:
    """The flags as tebench's options: one point."""
    target = given["mode"] == "target"
    if not target and not given["segment_id"]:
        raise UsageError("an initiator needs --segment_id, which the target prints")
    peer_to_peer = given["metadata_server"].upper() == "P2PHANDSHAKE"
    # A target moves nothing, so no size of a transfer is held against its buffer.
    sizes = [1, 1, 1] if target else [given[name] for name in ("block_size", "batch_size", "threads")]
    block, batch, threads = sizes
    return Options(
        seg_name="" if peer_to_peer else given["local_server_name"],
        seg_type="VRAM" if given["use_vram"] else "DRAM",
        target_seg_names=() if target else (given["segment_id"],),
        op_type=given["operation"],
        total_buffer_size=given["buffer_size"],
        start_block_size=block,
        max_block_size=block,
        start_batch_size=batch,
        max_batch_size=batch,
        start_num_threads=threads,
        max_num_threads=threads,
        duration_s=given["duration"],
        warmup_s=0.0,
        metadata_urls=() if peer_to_peer else metadata_urls("redis", given["metadata_server"]),
        xport_type=given["protocol"],
        local_gpu_id=given["gpu_id"],
        target_gpu_id=given["gpu_id"],
        device_names=tuple(name.strip() for name in given["device_name"].split(",") if name.strip()),
    )


def run(options: Options, shown: Shown) -> None:
    """Serves as a target, or measures one point."""
    from moonpool.bench.cli import serve
    from moonpool.bench.initiator import run_initiator

    with start_engine(options) as engine:
        if options.is_target:
            serve(options, engine)
        else:
            run_initiator(options, engine, lambda result: click.echo(shown.line(result)))


def main(arguments: list[str] | None = None) -> None:
    """Entry of the console script."""
    command.main(arguments, prog_name=PROGRAM)


if __name__ == "__main__":
    main()
