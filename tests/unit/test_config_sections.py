"""Settings of several parts: a file, the environment and the caller, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool.config import EngineConfig
from moonpool.config_sections import Settings
from moonpool.errors import UsageError


@dataclass(frozen=True)
class Part:
    name: str = ""
    share: float = 0.5
    room_bytes: int = 1
    batch_bytes_max: int = 1
    wait_ms: int = 1
    whole: bool = False
    token: bytes = b""
    peers: tuple[str, ...] = ()
    engine: EngineConfig | None = None


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pool.toml"
    file.write_text(text)
    return file


def test_defaults_without_anything() -> None:
    settings = Settings.read(None, ("part",), {})
    assert settings.build(Part, "part") == Part()
    assert settings.engine() == EngineConfig()


def test_the_caller_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[part]\nname = "file"\nshare = 0.25\nroom_bytes = "2 KiB"\nwait_ms = 5\npeers = ["a", "b"]\n'
        "[engine]\nport = 1\nspin_us = 7\n",
    )
    environ = {
        "MOONPOOL_PART_SHARE": "0.75",
        "MOONPOOL_PART_WAIT_MS": "3 s",
        "MOONPOOL_PART_BATCH_BYTES_MAX": "1 MiB",
        "MOONPOOL_PART_WHOLE": "yes",
        "MOONPOOL_PART_TOKEN": "t",
        "MOONPOOL_PORT": "2",
    }
    settings = Settings.read(file, ("part",), environ)
    assert settings.build(Part, "part", {"wait_ms": 9, "name": None}) == Part(
        name="file",
        share=0.75,
        room_bytes=2048,
        batch_bytes_max=1 << 20,
        wait_ms=9,
        whole=True,
        token=b"t",
        peers=("a", "b"),
    )
    engine = settings.engine({"name": "n", "bind_host": None})
    assert (engine.port, engine.spin_us, engine.name, engine.bind_host) == (2, 7, "n", "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[other]\n", r"unknown table \[other\]"),
        ("part = 3\n", "must be a table"),
        ("[part]\nnope = 1\n", "unknown key 'nope'"),
        ("[part]\nengine = 1\n", "unknown key 'engine'"),
        ("[part\n", "not valid TOML"),
        ('[part]\nwait_ms = "3 parsecs"\n', "wait_ms: '3 parsecs' is not a duration"),
        ('[part]\nroom_bytes = "8 floops"\n', "room_bytes: '8 floops' is not a size"),
        ('[part]\nshare = "half"\n', "field share must be a number"),
        ('[part]\nwhole = "maybe"\n', "field whole must be one of"),
    ],
)
def test_a_wrong_file_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings.read(written(tmp_path, text), ("part",), {}).build(Part, "part")


@pytest.mark.parametrize(
    ("variable", "text"),
    [("SHARE", "half"), ("SHARE", "-1"), ("WAIT_MS", "soon"), ("ROOM_BYTES", "x"), ("WHOLE", "maybe")],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    settings = Settings.read(None, ("part",), {f"MOONPOOL_PART_{variable}": text})
    with pytest.raises(UsageError, match=f"MOONPOOL_PART_{variable}"):
        settings.build(Part, "part")


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Settings.read(tmp_path / "none.toml", ("part",), {})


def test_every_part_of_the_store_can_be_built() -> None:
    from moonpool.store.client_config import ClientConfig
    from moonpool.store.master_config import MasterConfig

    environ: dict[str, Any] = {
        "MOONPOOL_MASTER_EVICT_HIGH": "0.99",
        "MOONPOOL_CLIENT_TRANSFER_TIMEOUT_MS": "1 s",
    }
    settings = Settings.read(None, ("master", "client"), environ)
    assert settings.build(MasterConfig, "master").evict_high == 0.99
    assert settings.build(ClientConfig, "client", {"addresses": ("a:1",)}).transfer_timeout_ms == 1000
