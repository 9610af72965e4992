"""Options of the commands that use a pool, the pool that they open, and keys as text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from moonpool.cli.options import transports_option

if TYPE_CHECKING:
    from moonpool.store.client import Pool

_Function = TypeVar("_Function", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="MOONPOOL_CONFIG",
    show_envvar=True,
    help="A TOML file of settings.",
)

#: Tables that a file of settings may have, whichever command reads it.
SECTIONS: Final = ("client", "events", "http", "journal", "master", "node", "rpc", "rules", "tables")


def pool_options(function: _Function) -> _Function:
    """Adds --master, --transports, --tenant, --config: give what they bring to `open_pool`."""
    options = (
        click.option(
            "--master",
            "masters",
            multiple=True,
            metavar="ADDRESS",
            help="host:port, a socket's path, or @name; repeatable.  [env var: MOONPOOL_CLIENT_ADDRESSES]",
        ),
        transports_option,
        click.option("--tenant", help="Whose keys.  [env var: MOONPOOL_CLIENT_TENANT]"),
        config_option,
    )
    for option in reversed(options):
        function = option(function)
    return function


def open_pool(options: dict[str, Any]) -> Pool:
    """The pool that `pool_options` name. Raises `click.UsageError` without any address of a master."""
    from moonpool.config_sections import Settings
    from moonpool.store.client import connect
    from moonpool.store.client_config import ClientConfig

    settings = Settings.read(options["config_file"], SECTIONS)
    given = {
        "addresses": options["masters"] or None,
        "tenant": options["tenant"],
        "engine": settings.engine({"transports": options["transports"]}),
    }
    config = settings.build(ClientConfig, "client", given)
    if not config.addresses:
        raise click.UsageError("no master is named; give --master or set MOONPOOL_CLIENT_ADDRESSES")
    return connect(config=config)


def key_of(text: str) -> bytes:
    """The key that an argument stands for: its bytes, whatever they are."""
    return os.fsencode(text)


def text_of(key: bytes) -> str:
    """A key for the eye: UTF-8 where it is, else with escapes."""
    return key.decode("utf-8", "backslashreplace")


def json_key(key: bytes) -> dict[str, str]:
    """A key for a program: `key`, and `key_hex` as well when it is no UTF-8."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key": text_of(key), "key_hex": key.hex()}
