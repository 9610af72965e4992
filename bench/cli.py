"""``tebench``: measures the transfer engine between two processes.

Without --target_seg_name this is a target: it offers memory, prints the command that starts an initiator, and
serves until it is interrupted. With it, this is an initiator that sweeps threads, block sizes and batch
sizes. Flags may be written with underscores or dashes.

\b Exit codes: 0 done, 1 a transfer or the machine failed, 2 wrong usage, 3 bytes were wrong.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

import click

from moonpool.bench.workload import OP_TYPES, TRANSPORTS, Options
from moonpool.errors import MetadataUnavailable, MoonpoolError, UsageError
from moonpool.units import GIB, MIB, parse_size

Function = TypeVar("Function", bound=Callable[..., Any])
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_MISMATCH: Final = 3
REDIS_SCHEMES: Final = ("redis://", "rediss://", "redis+unix://")
DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379"

# Flags of Mooncake's tebench that have no meaning here yet, and why; giving one is an error.
UNSUPPORTED: Final = {
    "seg_type_mix": "only host memory can be offered",
    "qos_classes": "there are no service classes",
    "qos_classes_json": "there are no service classes",
    "workload_classes_json": "there are no service classes",
    "qos_link_capacity_gbps": "there are no service classes",
    "qos_output_jsonl": "there are no service classes; --json prints every point",
    "deadline_us": "there is no deadline test; --timeout bounds each transfer",
    "deadline_tight_threads": "there is no deadline test",
    "deadline_bw_arbitration": "there is no deadline test",
    "local_gpu_id": "only host memory can be used",
    "target_gpu_id": "only host memory can be used",
    "tent_transport_hint": "use --xport_type",
    "tent_intent_type": "there are no intents",
}


class SizeType(click.ParamType[int]):
    """A number of bytes, or text such as 64KiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of what the user wrote; fails with the parser's sentence."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except UsageError as wrong:
            self.fail(str(wrong), param, ctx)


SIZE: Final = SizeType()


def flag(name: str, **settings: Any) -> Callable[[Function], Function]:
    """An option under both spellings. A boolean one is on alone, and takes =true or =false too."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    if settings.get("type") is click.BOOL:
        settings |= {"is_flag": False, "flag_value": "true", "default": "false", "metavar": "[=true|false]"}
    elif "default" in settings:
        settings.setdefault("show_default", True)
    return click.option(*spellings, name, **settings)


def refuse_unsupported(function: Function) -> Function:
    """Adds the flags of UNSUPPORTED, hidden; giving one ends the command with the reason."""

    def refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"--{param.name} is not supported: {UNSUPPORTED[str(param.name)]}", ctx)

    for name in UNSUPPORTED:
        function = flag(name, hidden=True, expose_value=False, callback=refuse, default=None)(function)
    return function


def metadata_urls(kind: str, url_list: str) -> tuple[str, ...]:
    """The URLs to try, in order; none for p2p, where a name is an address."""
    urls = tuple(url.strip() for url in url_list.split(",") if url.strip())
    if kind == "p2p":
        if urls:
            raise UsageError("--metadata_url_list needs --metadata_type=redis")
        return ()
    return tuple(url if url.startswith(REDIS_SCHEMES) else f"redis://{url}" for url in urls) or (
        DEFAULT_REDIS_URL,
    )


def fail(message: str, code: int) -> NoReturn:
    """Ends the command with one line on standard error."""
    click.echo(f"tebench: {message}", err=True)
    sys.exit(code)


@click.command(help=__doc__, context_settings={"help_option_names": ["--help", "-h"], "show_default": True})
@flag("seg_name", default="", help="Name of the local segment.")
@flag(
    "seg_type",
    type=click.Choice(["DRAM"], case_sensitive=False),
    default="DRAM",
    help="Memory of the target.",
)
@flag(
    "target_seg_name",
    default="",
    help="Comma list of host:port, or of names. Empty: be a target.",
)
@flag("op_type", type=click.Choice(OP_TYPES), default="read", help="What an initiator does.")
@flag("check_consistency", type=click.BOOL, help="Fill and compare the bytes of every transfer.")
@flag("total_buffer_size", type=SIZE, default=1 * GIB, help="Buffer of this process.")
@flag("start_block_size", type=SIZE, default=4096, help="First block size; it doubles.")
@flag("max_block_size", type=SIZE, default=64 * MIB, help="Largest block size.")
@flag("start_batch_size", type=int, default=1, help="First batch size; it doubles.")
@flag("max_batch_size", type=int, default=1, help="Largest batch size.")
@flag("start_num_threads", type=int, default=1, help="First number of threads; it doubles.")
@flag("max_num_threads", type=int, default=1, help="Largest number of threads.")
@flag("duration", type=float, default=5.0, help="Seconds a point is measured.")
@flag("warmup", type=float, default=1.0, help="Seconds a point runs before it is measured.")
@flag("target_offset", type=SIZE, default=0, help="Where this initiator's window of the target begins.")
@flag("target_range_size", type=SIZE, default=0, help="Size of that window; 0: to the end.")
@flag("request_interval_us", type=float, default=0.0, help="Pacing of each thread, from start to start.")
@flag("metadata_type", type=click.Choice(["p2p", "redis"]), default="p2p", help="How names are found.")
@flag("metadata_url_list", default="", help="Redis addresses, comma separated, tried in order.")
@flag("rpc_server_port", type=click.IntRange(0, 65535), default=0, help="Port of this engine; 0: any.")
@flag(
    "xport_type",
    type=click.Choice(["", *TRANSPORTS]),
    default="",
    help="The one transport allowed; empty: any.",
)
@flag("backend", default="", help="Accepted for compatibility and ignored.")
@flag("notifi", type=click.BOOL, help="Send a notification with each transfer; a target counts them.")
@flag("timeout", type=float, default=30.0, help="Deadline of each transfer in seconds.")
@flag("seed", type=int, default=0, help="Of the patterns of write_seed, read_verify and checks.")
@flag("json", type=click.BOOL, help="One JSON object a line instead of the table.")
@refuse_unsupported
def command(**given: Any) -> None:
    """The command; its help is this module's own docstring."""
    if given["backend"]:
        click.echo(f"tebench: note: --backend={given['backend']} is ignored; there is one engine", err=True)
    try:
        options = options_of(given)
    except UsageError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    from moonpool.bench.initiator import DataMismatch

    try:
        run(options, as_json=given["json"])
    except UsageError as wrong:
        fail(f"{type(wrong).__name__}: {wrong}", EXIT_USAGE)
    except MoonpoolError as failure:
        fail(f"{type(failure).__name__}: {failure}", EXIT_FAILED)
    except DataMismatch as wrong_bytes:
        fail(f"DataMismatch: {wrong_bytes}", EXIT_MISMATCH)


def options_of(given: dict[str, Any]) -> Options:
    """The flags as checked options."""
    same = set(Options.__dataclass_fields__) & set(given)
    return Options(
        **{name: given[name] for name in same},
        target_seg_names=tuple(name.strip() for name in given["target_seg_name"].split(",") if name.strip()),
        duration_s=given["duration"],
        warmup_s=given["warmup"],
        timeout_s=given["timeout"],
        metadata_urls=metadata_urls(given["metadata_type"], given["metadata_url_list"]),
    )


def run(options: Options, *, as_json: bool) -> None:
    """Starts the engine in the asked role; of several metadata services the first that answers is used."""
    from moonpool import Engine
    from moonpool.bench.initiator import engine_config

    services = options.metadata_urls or ("p2p",)
    for number, service in enumerate(services):
        try:
            engine = Engine(engine_config(options, service))
        except MetadataUnavailable:
            if number == len(services) - 1:
                raise
        else:
            with engine:
                serve(options, engine) if options.is_target else measure(options, engine, as_json)
            return


def measure(options: Options, engine: Any, as_json: bool) -> None:
    """Runs the initiator's sweep and prints each point as it ends."""
    from moonpool.bench import report
    from moonpool.bench.initiator import run_initiator

    if not as_json:
        click.echo(report.header())
    shape = report.as_json if as_json else report.row
    run_initiator(options, engine, lambda result: click.echo(shape(result)))


def serve(options: Options, engine: Any) -> None:
    """Runs the target until SIGINT or SIGTERM."""
    from moonpool.bench.target import run_target

    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    received = run_target(options, engine, stop, lambda line: click.echo(line))
    if options.notifi:
        click.echo(f"{received} notifications received")


def main(arguments: list[str] | None = None) -> None:
    """Entry of the console script."""
    command.main(arguments, prog_name="tebench")


if __name__ == "__main__":
    main()
