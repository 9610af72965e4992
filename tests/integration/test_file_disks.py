"""Real file systems and block devices under the file transport: full, read-only, broken, gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import Access, AccessDenied, Engine, Op, OutOfMemory, PeerGone, Status, UsageError

MIB = 1 << 20
BLOCK = 4096
WAIT_S = 30.0
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists() or shutil.which("losetup") is None,
    reason="needs the lab: mounts and loop devices need root",
)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Path]]]:
    """Loop devices of a size, each with the file behind it."""
    with contextlib.ExitStack() as stack:

        def make(size: int, *options: str) -> tuple[str, Path]:
            behind = tmp_path / f"behind-{time.monotonic_ns()}"
            with behind.open("wb") as file:
                file.truncate(size)
            try:
                device = run("losetup", "--find", "--show", *options, str(behind))
            except subprocess.CalledProcessError as problem:
                pytest.skip(f"needs the lab: no loop device here ({problem.stderr.strip()})")
            stack.callback(run, "losetup", "--detach", device)
            return device, behind

        yield make


@pytest.fixture
def make_mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounted file systems, from what `mount` takes."""
    with contextlib.ExitStack() as stack:

        def make(*words: str) -> Path:
            folder = tmp_path / f"mount-{time.monotonic_ns()}"
            folder.mkdir()
            try:
                run("mount", *words, str(folder))
            except subprocess.CalledProcessError as problem:
                pytest.skip(f"needs the lab: no mounts here ({problem.stderr.strip()})")
            stack.callback(run, "umount", str(folder))
            return folder

        yield make


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transports=("file",), transfer_timeout_ms=20_000) as made:
        yield made


def counter(engine: Engine, name: str) -> int:
    """One of the transport's, by its name there."""
    count: int = engine.metrics()["counters"][f"file_{name}"]
    return count


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(256 * 1024))
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(BLOCK))
    os.sync()
    return path


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_is_said_and_what_was_written_stays(
    engine: Engine, make_mount: Any, make_loop: Any, kind: str
) -> None:
    if kind == "tmpfs":
        folder = make_mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    else:
        device, _ = make_loop(16 * MIB)
        run("mkfs.ext4", "-q", "-m", "0", device)
        folder = make_mount(device)
    with pytest.raises(OutOfMemory, match="no room"):
        engine.offer(f"file:{folder / 'large'}", 64 * MIB)
    assert not (folder / "large").exists()
    region = engine.offer(f"file:{folder / 'sparse'}", 8 * MIB, preallocate=False)
    segment = engine.open(engine.endpoint)
    engine.write(segment, region.handle, 0, b"k" * (BLOCK + 1))
    filler = fill(folder)
    for offset, length in ((4 * MIB, MIB), (5 * MIB + 1, 100 * 1024 + 3)):
        with pytest.raises(OutOfMemory):
            engine.write(segment, region.handle, offset, b"x" * length)
    assert counter(engine, "errors_space") >= 1
    back = bytearray(BLOCK + 1)
    engine.read(segment, region.handle, 0, back)
    assert back == b"k" * (BLOCK + 1)
    filler.unlink()
    os.sync()
    engine.write(segment, region.handle, 4 * MIB, b"y" * MIB)
    target = bytearray(MIB)
    engine.read(segment, region.handle, 4 * MIB, target)
    assert target == b"y" * MIB
    engine.revoke(region)
    engine.close_segment(segment)


def test_a_read_only_file_system_is_for_reading(engine: Engine, make_mount: Any) -> None:
    folder = make_mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    (folder / "file").write_bytes(b"r" * MIB)
    run("mount", "-o", "remount,ro", str(folder))
    with pytest.raises(UsageError, match="cannot be written here"):
        engine.offer(f"file:{folder / 'file'}")
    with pytest.raises((AccessDenied, UsageError)):
        engine.offer(f"file:{folder / 'new'}", MIB)
    region = engine.offer(f"file:{folder / 'file'}", access=Access.READ)
    segment = engine.open(engine.endpoint)
    target = bytearray(MIB)
    engine.read(segment, region.handle, 0, target)
    assert target == b"r" * MIB
    with pytest.raises(AccessDenied):
        engine.write(segment, region.handle, 0, b"x")
    engine.revoke(region)
    engine.close_segment(segment)


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_block_device_is_a_region(engine: Engine, make_loop: Any, sector: int) -> None:
    device, behind = make_loop(8 * MIB, "--sector-size", str(sector))
    with pytest.raises(UsageError):
        engine.offer(f"file:{device}", 9 * MIB)  # a device does not grow
    region = engine.offer(f"file:{device}", offset=MIB, sync="fua")
    assert region.size_bytes == 7 * MIB
    segment = engine.open(engine.endpoint)
    content = np.random.default_rng(sector).integers(0, 256, 7 * MIB, dtype=np.uint8)
    engine.write(segment, region.handle, 0, content)
    for offset, length in ((0, 1), (4_095, 4_098), (7 * MIB - 700, 700), (123_456, MIB + 17)):
        content[offset : offset + length] = 7
        engine.write(segment, region.handle, offset, b"\7" * length)
    target = np.zeros(7 * MIB, dtype=np.uint8)
    engine.read(segment, region.handle, 0, target)
    assert np.array_equal(target, content)
    engine.revoke(region)
    engine.close_segment(segment)
    os.sync()
    assert behind.read_bytes() == bytes(MIB) + content.tobytes()


def test_a_broken_device_is_a_peer_that_is_gone(engine: Engine, make_loop: Any) -> None:
    """The file behind a loop device is cut off while transfers run: they fail as they reach the hole."""
    device, behind = make_loop(64 * MIB)
    region = engine.offer(f"file:{device}")
    segment = engine.open(engine.endpoint)
    content = np.full(64 * MIB, 0x42, dtype=np.uint8)
    engine.write(segment, region.handle, 0, content)
    mine = engine.allocate(MIB)
    offsets = np.arange(20_000, dtype=np.uint64) % np.uint64(64) * np.uint64(MIB)
    local = np.full(20_000, mine.address, dtype=np.uint64)
    batch = engine.submit(Op.READ, segment, local, region.handle, offsets, MIB)
    deadline = time.monotonic() + WAIT_S
    while Status.COMPLETE not in bytes(batch.status):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.truncate(behind, 8 * MIB)
    run("blockdev", "--flushbufs", device)
    assert batch.wait(WAIT_S)
    assert set(bytes(batch.status)) == {Status.COMPLETE, Status.PEER_GONE}
    with pytest.raises(PeerGone):
        batch.check()
    assert counter(engine, "errors_device") > 0
    target = bytearray(MIB)
    engine.read(segment, region.handle, 0, target)
    assert target == b"\x42" * MIB, "what is there is still read"
    with pytest.raises(PeerGone):
        engine.read(segment, region.handle, 20 * MIB, target)
    engine.revoke(region)
    engine.close_segment(segment)


def test_a_file_that_vanishes_by_name_is_still_the_region(engine: Engine, tmp_path: Path) -> None:
    region = engine.offer(f"file:{tmp_path / 'file'}", MIB)
    segment = engine.open(engine.endpoint)
    (tmp_path / "file").unlink()
    engine.write(segment, region.handle, 5, b"still here")
    second = engine.open(engine.endpoint)  # reached by descriptor, not by name
    target = bytearray(10)
    engine.read(second, region.handle, 5, target)
    assert target == b"still here"
    engine.revoke(region)


def test_many_threads_share_a_device_with_few_rings(make_loop: Any) -> None:
    device, _ = make_loop(32 * MIB)
    with Engine(transports=("file",), disk_rings=2, disk_queue_depth=8) as engine:
        region = engine.offer(f"file:{device}")
        segment = engine.open(engine.endpoint)
        problems: list[BaseException] = []

        def work(which: int) -> None:
            try:
                for turn in range(10):
                    start, length = which * 4 * MIB + turn * 13, 300_000
                    sent = np.full(length, which * 16 + turn, dtype=np.uint8)
                    engine.write(segment, region.handle, start, sent)
                    back = np.zeros(length, dtype=np.uint8)
                    engine.read(segment, region.handle, start, back)
                    assert np.array_equal(back, sent)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(which,)) for which in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not problems
        assert engine.metrics()["gauges"]["file_rings"] <= 2
        engine.revoke(region)
