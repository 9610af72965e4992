"""`moonpool conductor`: the service that knows who caches what, and places requests."""

from __future__ import annotations

import contextlib
import importlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.options import Size, json_option, print_json_line
from moonpool.errors import ResourceError

if TYPE_CHECKING:
    from moonpool.conductor.service_config import ConductorConfig

#: Bytes of a token file that are read; more is no token.
_TOKEN_FILE_BYTES: Final = 4_096


@click.command("conductor")
@json_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=13_333, show_default=True, help="Port to listen on; 0: any.")
@click.option("--token", default="", envvar="MOONPOOL_CONDUCTOR_TOKEN", help="Bearer token to ask for.")
@click.option("--token-file", type=click.Path(dir_okay=False, path_type=Path), help="A file with the token.")
@click.option(
    "--state",
    "state_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep registrations and instances here for a warm restart.",
)
@click.option("--policy", default="affinity", show_default=True, help="How requests are placed.")
@click.option("--admission", default="none", show_default=True, help="How requests are rejected.")
@click.option("--block-tokens", type=int, default=16, show_default=True, help="Where nobody says otherwise.")
@click.option("--ttft-limit-s", type=float, default=30.0, show_default=True, help="Promised first token.")
@click.option("--tbt-limit-s", type=float, default=0.1, show_default=True, help="Promised token interval.")
@click.option("--blocks-max", type=int, default=1 << 24, show_default=True, help="Most distinct blocks.")
@click.option("--body-max", type=Size(), default="64MiB", show_default=True, help="Largest request body.")
@click.option("--hash-seed", type=int, default=0, show_default=True, help="Seed of the service's own hashes.")
def command(as_json: bool, **options: Any) -> None:
    """Serve the conductor over HTTP.

    Engines (or whoever starts them) register their event streams at /register; routers ask /query, or let
    /schedule choose. With --json the address is printed as one line of JSON once the service listens.
    Stops on SIGINT and SIGTERM.
    """
    config = make_config(options)

    def ready(address: tuple[str, int]) -> None:
        if as_json:
            print_json_line({"host": address[0], "port": address[1]})
        else:
            click.echo(f"conductor: http://{address[0]}:{address[1]}")

    import asyncio

    run: Callable[[Any], object] = asyncio.run
    with contextlib.suppress(ImportError):
        run = importlib.import_module("uvloop").run
    run(_main(config, ready))


def make_config(options: dict[str, Any]) -> ConductorConfig:
    """The options as the service's settings; raises `UsageError` for wrong ones."""
    from moonpool.conductor.index_config import IndexConfig
    from moonpool.conductor.scheduler_config import SchedulerConfig
    from moonpool.conductor.service_config import ConductorConfig

    token = options["token"]
    if options["token_file"] is not None:
        token = _read_token(options["token_file"])
    return ConductorConfig(
        host=options["host"],
        port=options["port"],
        token=token,
        state_path=options["state_path"],
        policy=options["policy"],
        admission=options["admission"],
        hash_seed=options["hash_seed"],
        body_bytes_max=options["body_max"],
        index=IndexConfig(blocks_max=options["blocks_max"]),
        scheduler=SchedulerConfig(
            block_tokens=options["block_tokens"],
            ttft_limit_s=options["ttft_limit_s"],
            tbt_limit_s=options["tbt_limit_s"],
        ),
    )


def _read_token(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_TOKEN_FILE_BYTES).strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ResourceError(f"cannot read the token in {path}: {exc}") from exc


async def _main(config: ConductorConfig, ready: Any) -> None:
    import asyncio

    from moonpool.conductor.service import serve

    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serve(config, ready)
