"""Names in Redis: a killed engine comes back under its name, and one name is one living engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import Engine, MoonpoolError, NameInUse, NoSuchSegment, PeerGone, PeerRefused

SERVER = shutil.which("redis-server")
pytestmark = pytest.mark.skipif(
    SERVER is None and os.environ.get("MOONPOOL_NATIVE") != "require",
    reason="redis-server is not installed (apt-get install redis-server)",
)
LEASE_MS = 1_000


@pytest.fixture(scope="module")
def metadata() -> Iterator[str]:
    """The URL of a redis-server of our own."""
    assert SERVER is not None, "redis-server is missing: apt-get install redis-server"
    # Not tmp_path: a unix socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="moonpool-names-"))
    command = [SERVER, "--port", "0", "--unixsocket", str(folder / "redis.sock"), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any("ready to accept connections" in line.lower() for line in server.stdout)
            yield f"redis+unix://{folder / 'redis.sock'}"
        finally:
            server.kill()
            shutil.rmtree(folder)


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
def test_a_killed_engine_is_replaced_under_its_name_at_once(
    make_peer: Any, wait_until: Any, metadata: str, transports: tuple[str, ...]
) -> None:
    config = {"metadata": metadata, "lease_ms": LEASE_MS}
    name = f"replaced-{transports[0]}"
    with Engine(transports=transports, **config) as engine:
        instances = set()
        for turn in range(3):
            # The dead one's lease has not run out: its successor proves that it is dead.
            target = make_peer(name=name, **config)
            handle = target.ask("offer", size=1 << 20, seed=turn)
            segment = engine.open(name)
            assert segment.instance.hex() == target.instance
            instances.add(target.instance)
            back = bytearray(1 << 20)
            engine.read(segment, handle, 0, back)
            assert target.ask("holds", handle=handle, seed=turn)
            target.kill()
            wait_until(lambda one=segment: not one.peer.alive, "the death is known")
            with pytest.raises(PeerGone):
                engine.read(segment, handle, 0, back)
            with pytest.raises((PeerRefused, NoSuchSegment)):
                engine.open(name)
            engine.close_segment(segment)
        assert len(instances) == 3


def test_a_name_belongs_to_one_living_engine(make_peer: Any, metadata: str) -> None:
    config = {"metadata": metadata, "lease_ms": LEASE_MS}
    target = make_peer(name="taken", **config)
    for _ in range(3):
        with pytest.raises(NameInUse, match="taken"):
            Engine(name="taken", transports=("tcp",), **config)
    handle = target.ask("offer", size=4096, seed=1)
    with Engine(transports=("tcp",), **config) as engine:
        engine.read(engine.open("taken"), handle, 0, bytearray(4096))


def test_a_name_of_the_dead_runs_out(make_peer: Any, wait_until: Any, metadata: str) -> None:
    config = {"metadata": metadata, "lease_ms": LEASE_MS}
    target = make_peer(name="mortal", **config)
    with Engine(transports=("tcp",), **config) as engine:
        engine.close_segment(engine.open("mortal"))
        target.kill()

        def has_run_out() -> bool:
            try:
                engine.open("mortal")
            except MoonpoolError as problem:
                return isinstance(problem, NoSuchSegment)
            raise AssertionError("a dead engine was opened")

        wait_until(has_run_out, "the lease runs out")


def test_a_closed_engine_gives_its_name_back(metadata: str) -> None:
    config = {"metadata": metadata, "transports": ("shm", "tcp"), "lease_ms": 60_000}
    for _ in range(3):
        with Engine(name="given-back", **config) as engine:
            assert engine.name == "given-back"
    with Engine(**config) as engine, pytest.raises(NoSuchSegment):
        engine.open("given-back")
