"""``tebench``: measures the transfer engine between two processes.

Without --target_seg_name this is a target: it offers memory, prints the command that starts an initiator, and
serves until it is interrupted. With it, this is an initiator that sweeps threads, block sizes and batch
sizes. Flags may be written with underscores or dashes.

\b Exit codes: 0 done, 1 a transfer or the machine failed, 2 wrong usage, 3 bytes were wrong.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from moonpool.bench.classes import INTENTS, Traffic, parse_classes, parse_classes_json
from moonpool.bench.segments import KINDS
from moonpool.bench.workload import OP_TYPES, TRANSPORTS, Options
from moonpool.errors import MetadataUnavailable, MoonpoolError, UsageError
from moonpool.units import GIB, MIB, parse_size

if TYPE_CHECKING:
    from moonpool import Engine

Function = TypeVar("Function", bound=Callable[..., Any])
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_MISMATCH: Final = 3
REDIS_SCHEMES: Final = ("redis://", "rediss://", "redis+unix://")
DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379"


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


def metadata_urls(kind: str, url_list: str) -> tuple[str, ...]:
    """The URLs to try, in order; none for p2p, where a name is an address."""
    urls = tuple(url.strip() for url in url_list.split(",") if url.strip())
    if kind not in ("p2p", "redis"):
        raise UsageError(f"--metadata_type={kind}: names are kept in redis; use redis, or p2p with host:port")
    if kind == "p2p":
        if urls:
            raise UsageError("--metadata_url_list needs --metadata_type=redis")
        return ()
    return tuple(url if url.startswith(REDIS_SCHEMES) else f"redis://{url}" for url in urls) or (
        DEFAULT_REDIS_URL,
    )


def fail(message: str, code: int, program: str = "tebench") -> NoReturn:
    """Ends the command with one line on standard error."""
    click.echo(f"{program}: {message}", err=True)
    sys.exit(code)


@click.command(help=__doc__, context_settings={"help_option_names": ["--help", "-h"], "show_default": True})
@flag("seg_name", default="", help="Name of the local segment.")
@flag(
    "seg_type",
    type=click.Choice(tuple(KINDS), case_sensitive=False),
    default="DRAM",
    help="What the target offers; give it on both sides.",
)
@flag("seg_type_mix", default="", help="Several, as in dram,file: threads go over them in turn.")
@flag(
    "seg_location",
    default="",
    help="Where FILE, NVME and CXL are: file:/path, nvme:/dev/ng0n1, dax:/dev/dax0.0, cxl:2, numa:0.",
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
@flag(
    "metadata_type",
    type=click.Choice(["p2p", "redis", "etcd", "http"]),
    default="p2p",
    help="How names are found.",
)
@flag("metadata_url_list", default="", help="Redis addresses, comma separated, tried in order.")
@flag("rpc_server_port", type=click.IntRange(0, 65535), default=0, help="Port of this engine; 0: any.")
@flag(
    "xport_type",
    default="",
    help=f"The transports allowed, comma separated; empty: the engine's. {', '.join(TRANSPORTS)}.",
)
@flag("backend", default="", help="Accepted for compatibility and ignored.")
@flag("notifi", type=click.BOOL, help="Send a notification with each transfer; a target counts them.")
@flag("timeout", type=float, default=30.0, help="Deadline of each transfer in seconds.")
@flag("seed", type=int, default=0, help="Of the patterns of write_seed, read_verify and checks.")
@flag("qos_classes", default="", help="name:threads:slo_us:weight[:isolated_gbps],... run at once.")
@flag("qos_classes_json", default="", help="The same as a JSON array of objects.")
@flag(
    "workload_classes_json",
    default="",
    help="Classes with block_size, batch_size, intent_type, deadline_us; they replace the sweep.",
)
@flag("qos_link_capacity_gbps", type=float, default=0.0, help="GB/s of the link, for its utilisation.")
@flag("qos_output_jsonl", default="", help="File to which a record of each point is appended.")
@flag("deadline_us", type=float, default=0.0, help="Deadline of the first threads' operations.")
@flag("deadline_tight_threads", type=int, default=0, help="How many threads have that deadline.")
@flag("deadline_bw_arbitration", type=click.BOOL, help="Submitted batches go by earliest deadline.")
@flag("local_gpu_id", type=int, default=0, help="GPU of the initiator's buffer with --seg_type=VRAM.")
@flag("target_gpu_id", type=int, default=0, help="GPU of the target's.")
@flag("tent_transport_hint", default="", help="The transport whose path transfers must take.")
@flag(
    "tent_intent_type",
    type=click.Choice(tuple(INTENTS)),
    default="unspec",
    help="Submit batches with the priority of that intent.",
)
@flag("json", type=click.BOOL, help="One JSON object a line instead of the table.")
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
        run(options, as_json=given["json"], qos_file=given["qos_output_jsonl"])
    except UsageError as wrong:
        fail(f"{type(wrong).__name__}: {wrong}", EXIT_USAGE)
    except MoonpoolError as failure:
        fail(f"{type(failure).__name__}: {failure}", EXIT_FAILED)
    except DataMismatch as wrong_bytes:
        fail(f"DataMismatch: {wrong_bytes}", EXIT_MISMATCH)


def options_of(given: dict[str, Any]) -> Options:
    """The flags as checked options."""
    same = set(Options.__dataclass_fields__) & set(given)
    hint = given["tent_transport_hint"]
    return Options(
        **{name: given[name] for name in same - {"tent_transport_hint"}},
        tent_transport_hint="" if hint == "unspec" else hint,
        classes=classes_of(given),
        is_workload=bool(given["workload_classes_json"]),
        target_seg_names=tuple(name.strip() for name in given["target_seg_name"].split(",") if name.strip()),
        duration_s=given["duration"],
        warmup_s=given["warmup"],
        timeout_s=given["timeout"],
        metadata_urls=metadata_urls(given["metadata_type"], given["metadata_url_list"]),
    )


def classes_of(given: dict[str, Any]) -> tuple[Traffic, ...]:
    """The classes that run at once; UsageError when they are given in more than one way."""
    ways = [name for name in ("qos_classes", "qos_classes_json", "workload_classes_json") if given[name]]
    if len(ways) > 1:
        raise UsageError(f"--{ways[0]} and --{ways[1]} exclude each other")
    if not ways:
        return ()
    text = given[ways[0]]
    if ways[0] == "qos_classes":
        return parse_classes(text)
    return parse_classes_json(text, workload=ways[0] == "workload_classes_json")


def run(options: Options, *, as_json: bool, qos_file: str = "") -> None:
    """Starts the engine and plays the asked role."""
    with start_engine(options) as engine:
        serve(options, engine) if options.is_target else measure(options, engine, as_json, qos_file)


def start_engine(options: Options) -> Engine:
    """The engine; of several metadata services the first that answers is used."""
    from moonpool import Engine
    from moonpool.bench.initiator import engine_config

    services = options.metadata_urls or ("p2p",)
    for service in services[:-1]:
        with contextlib.suppress(MetadataUnavailable):
            return Engine(engine_config(options, service))
    return Engine(engine_config(options, services[-1]))


def measure(options: Options, engine: Any, as_json: bool, qos_file: str = "") -> None:
    """Runs the initiator's sweep and prints each point as it ends."""
    from moonpool.bench import report
    from moonpool.bench.initiator import run_initiator

    capacity = options.qos_link_capacity_gbps

    def tell(result: report.PointResult) -> None:
        if as_json:
            click.echo(report.as_json(result, capacity))
        else:
            click.echo("\n".join((report.row(result), *report.notes(result, capacity))))
        if qos_file and options.classes:
            append_line(qos_file, json.dumps(report.qos_record(result, capacity)))

    if not as_json:
        click.echo(report.header())
    run_initiator(options, engine, tell)


def append_line(file: str, line: str) -> None:
    """Adds a line to a file; UsageError when it cannot be written."""
    try:
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    except OSError as problem:
        raise UsageError(f"--qos_output_jsonl: {problem}") from problem


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
