"""Files between engines: other hosts by path and tag, owners that lie, processes that die, nothing leaked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import (
    Access,
    Engine,
    EngineConfig,
    Op,
    PeerGone,
    StaleHandle,
    Status,
    UnsupportedOperation,
    UsageError,
)
from moonpool.engine.control import ControlService, Reply, ServiceHooks
from moonpool.ids import new_instance_id
from moonpool.transport.file_attribute import FileAttribute, FileFlag

MIB = 1 << 20
BLOCK = 4096
WAIT_S = 30.0
#: A dead process's sockets are closed by the kernel at once; the rest is ours.
NOTICE_S = 5.0
BOUNDS: dict[str, Any] = {"transfer_timeout_ms": 20_000}
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


def open_files(folder: Path) -> list[str]:
    """Descriptors of this process that are of files below a folder."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(str(folder))]


@pytest.fixture
def another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers do not find each other's unix sockets, as on two hosts; the file system is shared."""
    monkeypatch.setattr("moonpool.engine.opening.unix_name_of", lambda _instance: "@moonpool-nobody")


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:
        yield lambda **config: stack.enter_context(
            Engine(**{"transports": ("file", "tcp"), **BOUNDS, **config})
        )


# ---- other hosts -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("another_host")
def test_a_shared_file_is_reached_by_its_path(make_engine: Any, tmp_path: Path) -> None:
    owner, initiator = make_engine(), make_engine(file_roots=(str(tmp_path),))
    path = tmp_path / "shared"
    region = owner.offer(f"file:{path}", 64 * BLOCK, shared=True)
    content = np.random.default_rng(1).integers(0, 256, 64 * BLOCK, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    segment = initiator.open(owner.endpoint)
    assert not segment.peer.session.is_unix
    back = bytearray(10_000)
    initiator.read(segment, region.handle, 777, back)
    assert back == content[777:10_777].tobytes()
    initiator.write(segment, region.handle, 8 * BLOCK, bytes(2 * BLOCK))
    initiator.flush(segment)
    content[8 * BLOCK : 10 * BLOCK] = 0
    own = owner.open(owner.endpoint)
    # Two hosts would merge an edge into a page each on its own, and one of them would lose bytes.
    for offset, length in ((1, 10), (BLOCK, BLOCK + 1), (100, 3 * BLOCK)):
        for engine, where in ((initiator, segment), (owner, own)):
            with pytest.raises(UnsupportedOperation):
                engine.write(where, region.handle, offset, bytes(length))
    owner.write(own, region.handle, 0, bytes(BLOCK))
    content[:BLOCK] = 0
    assert path.read_bytes() == content.tobytes()
    assert owner.gate.writers(region.handle, initiator.instance) != set()
    owner.revoke(region)  # asks the other host
    with pytest.raises(StaleHandle):
        initiator.write(segment, region.handle, 0, bytes(BLOCK))
    assert open_files(tmp_path) == []
    assert os.listxattr(path) == []


@pytest.mark.usefixtures("another_host")
@pytest.mark.parametrize("case", ["no roots", "other root", "link to outside", "not shared", "another file"])
def test_what_is_not_proved_is_not_opened(make_engine: Any, tmp_path: Path, case: str) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    path = (outside if case in ("other root", "link to outside") else allowed) / "file"
    named = path
    if case == "link to outside":
        named = allowed / "link"
        named.symlink_to(path)
    owner = make_engine()
    initiator = make_engine(file_roots=() if case == "no roots" else (str(allowed),))
    region = owner.offer(f"file:{named}", BLOCK, shared=case != "not shared")
    if case == "another file":
        (allowed / "other").write_bytes(bytes(BLOCK))
        os.rename(allowed / "other", path)
    segment = initiator.open(owner.endpoint)
    before = path.read_bytes()
    with pytest.raises(UnsupportedOperation):
        initiator.read(segment, region.handle, 0, bytearray(BLOCK))
    with pytest.raises(UnsupportedOperation):
        initiator.write(segment, region.handle, 0, b"x" * BLOCK)
    assert path.read_bytes() == before
    if case in ("other root", "link to outside", "another file"):
        assert "AccessDenied" in segment.unreachable[(region.handle, "file")]


# ---- owners that lie ---------------------------------------------------------------------------------------

HANDLE = 1 << 32
ABOUT = FileAttribute(flags=FileFlag.DIRECT, block_bytes=BLOCK, start=0, size_bytes=4 * BLOCK, tag=bytes(16))


class Liar:
    """A control plane that publishes a region in a file, and passes for it what a test wants."""

    def __init__(self, attribute: bytes, answer: Any, fds: list[int]) -> None:
        region = {
            "handle": HANDLE,
            "address": 0,
            "length": 4 * BLOCK,
            "location": "file:/liar",
            "access": 3,
            "read_key": bytes(16),
            "write_key": bytes(16),
            "attributes": {"file": attribute},
        }
        hooks = ServiceHooks(
            handlers={
                "describe": lambda *_: {"name": "liar", "generation": 1, "regions": [region]},
                "file.open": lambda *_: Reply(answer, fds),
                "release": lambda *_: {},
            },
            on_lane=lambda _fd, _info: None,
        )
        self.service = ControlService(EngineConfig(), new_instance_id(), hooks)
        self.service.start()


@pytest.fixture
def make_liar() -> Iterator[Callable[..., Liar]]:
    with contextlib.ExitStack() as stack:

        def make(attribute: bytes, answer: Any, fds: list[int]) -> Liar:
            liar = Liar(attribute, answer, fds)
            stack.callback(liar.service.close)
            return liar

        yield make


def passed(case: str, folder: Path, stack: contextlib.ExitStack) -> list[int]:
    """The descriptors of one lie."""
    good, short = folder / "good", folder / "short"
    good.write_bytes(bytes(4 * BLOCK))
    short.write_bytes(bytes(BLOCK))

    def opened(path: Path, flags: int) -> int:
        fd = os.open(path, flags)
        stack.callback(os.close, fd)
        return fd

    if case == "a pipe":
        ends = os.pipe()
        for fd in ends:
            stack.callback(os.close, fd)
        return [ends[1]]
    if case == "two files":
        return [opened(good, os.O_RDWR | os.O_DIRECT), opened(short, os.O_RDWR)]
    one = {
        "for reading": (good, os.O_RDONLY),
        "for appending": (good, os.O_RDWR | os.O_APPEND),
        "too short": (short, os.O_RDWR),
        "a device": (Path("/dev/null"), os.O_RDWR),
        "own memory": (Path("/proc/self/mem"), os.O_RDWR),
        "a folder": (folder, os.O_RDONLY),
        "whole blocks only": (good, os.O_RDWR | os.O_DIRECT),
    }
    if case in one:
        return [opened(*one[case])]
    return [opened(good, os.O_RDWR) for _ in range({"nothing": 0, "two edges": 2, "three": 3}[case])]


@pytest.mark.parametrize(
    "case",
    [
        "a pipe",
        "two files",
        "for reading",
        "for appending",
        "too short",
        "a device",
        "own memory",
        "a folder",
        "whole blocks only",
        "nothing",
        "two edges",
        "three",
    ],
)
def test_a_descriptor_that_is_not_what_it_should_be_is_not_used(
    make_engine: Any, make_liar: Any, tmp_path: Path, case: str
) -> None:
    initiator = make_engine(transports=("file",))
    with contextlib.ExitStack() as stack:
        fds = passed(case, tmp_path, stack)
        liar = make_liar(ABOUT.encode(), {"writable": True}, fds)
        segment = initiator.open(liar.service.endpoint)
        assert (HANDLE, "file") in segment.unreachable
        with pytest.raises(UnsupportedOperation):
            initiator.write(segment, HANDLE, 0, b"x" * 100)
        initiator.close_segment(segment)
    assert open_files(tmp_path) == []
    assert not any((tmp_path / "good").read_bytes())


@pytest.mark.parametrize("answer", [None, [], {"writable": 1}, {}, "text"])
def test_an_answer_of_another_kind_writes_nothing(
    make_engine: Any, make_liar: Any, tmp_path: Path, answer: Any
) -> None:
    initiator = make_engine(transports=("file",))
    with contextlib.ExitStack() as stack:
        liar = make_liar(ABOUT.encode(), answer, passed("for reading", tmp_path, stack))
        segment = initiator.open(liar.service.endpoint)
        batch = initiator.transfer(Op.WRITE, segment, bytearray(b"x" * 100), HANDLE, 0, check=False)
        assert list(batch.status) == [Status.ACCESS_DENIED]
        initiator.read(segment, HANDLE, 0, bytearray(100))
        initiator.close_segment(segment)
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("attribute", [b"", b"\1", bytes(40), ABOUT.encode() + b"/", os.urandom(300)])
def test_garbage_for_an_attribute_reaches_nothing(make_engine: Any, make_liar: Any, attribute: bytes) -> None:
    initiator = make_engine(transports=("file",))
    segment = initiator.open(make_liar(attribute, {}, []).service.endpoint)
    assert "ProtocolError" in segment.unreachable[(HANDLE, "file")]
    with pytest.raises(UnsupportedOperation):
        initiator.read(segment, HANDLE, 0, bytearray(100))


def test_only_what_a_region_allows_is_passed(make_engine: Any, tmp_path: Path) -> None:
    owner, initiator = make_engine(), make_engine()
    region = owner.offer(f"file:{tmp_path / 'file'}", BLOCK, access=Access.READ)
    memory = owner.allocate(BLOCK)
    segment = initiator.open(owner.endpoint)
    asked = [
        {"handle": region.handle, "access": 3},
        {"handle": region.handle, "access": 2},
        {"handle": region.handle, "access": 0},
        {"handle": region.handle, "access": 7},
        {"handle": region.handle + (1 << 32), "access": 1},
        {"handle": memory.handle, "access": 1},
        {"handle": "text", "access": 1},
        {},
    ]
    for params in asked:
        with pytest.raises((UsageError, OSError)):
            segment.peer.request("file.open", params)
    with segment.peer.request("file.open", {"handle": region.handle, "access": 1}) as answer:
        for fd in answer.fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, bytes(BLOCK), 0)
    before = owner.gate.writers(region.handle, initiator.instance)
    assert before == set(), "who may only read is no writer"


# ---- ends --------------------------------------------------------------------------------------------------


@both_ops
def test_an_owner_that_is_killed_ends_the_batch(
    make_engine: Any, make_peer: Any, tmp_path: Path, op: Op
) -> None:
    initiator = make_engine()
    owner = make_peer(transports=["file", "tcp"])
    handle = owner.ask("offer_at", location=f"file:{tmp_path / 'file'}", size=64 * MIB)
    segment = initiator.open(owner.endpoint)
    mine = np.full(MIB, 0x55, dtype=np.uint8)
    initiator.register(mine, access=Access.NONE)
    local = np.full(32_768, mine.ctypes.data, dtype=np.uint64)
    offsets = np.arange(32_768, dtype=np.uint64) % np.uint64(64) * np.uint64(MIB)
    batch = initiator.submit(op, segment, local, handle, offsets, MIB)
    deadline = time.monotonic() + WAIT_S
    while Status.COMPLETE not in bytes(batch.status):
        assert time.monotonic() < deadline, "the batch runs"
        time.sleep(0.001)
    owner.kill()
    killed = time.monotonic()
    assert batch.wait(WAIT_S)
    assert time.monotonic() - killed < NOTICE_S
    assert set(bytes(batch.status)) == {Status.COMPLETE, Status.PEER_GONE}
    with pytest.raises(PeerGone):
        batch.check()
    mine[:] = 0xEE
    done = int(np.count_nonzero(np.asarray(batch.status) == Status.COMPLETE))
    initiator.close_segment(segment)
    assert open_files(tmp_path) == []
    assert (mine == 0xEE).all()
    if op is Op.WRITE:
        written = np.frombuffer((tmp_path / "file").read_bytes(), dtype=np.uint8)
        assert (written[: min(done, 64) * MIB] == 0x55).all(), "what was complete is in the file"


def test_a_writer_that_is_killed_leaves_the_owner_free(
    make_engine: Any, make_peer: Any, wait_until: Any, tmp_path: Path
) -> None:
    owner = make_engine()
    path = tmp_path / "file"
    path.write_bytes(b"n" * (66 * MIB))
    region = owner.offer(f"file:{path}", 64 * MIB, offset=MIB)
    writer = make_peer(transports=["file", "tcp"])
    writer.ask("open", endpoint=owner.endpoint)
    writer.ask("work", op=int(Op.WRITE), handle=region.handle, length=64 * MIB, seed=3)
    wait_until(lambda: writer.ask("progress")[0] > 0, "it writes")
    assert owner.gate.writers(region.handle, None) != set()
    writer.kill()
    wait_until(lambda: owner.gate.writers(region.handle, None) == {0}, "the kernel says that it has ended")
    owner.revoke(region)
    assert open_files(tmp_path) == []
    data = path.read_bytes()
    assert data[:MIB] == data[65 * MIB :] == b"n" * MIB, "bytes beside the region were written"


def test_a_revoked_file_is_let_go_of_by_its_peers(make_engine: Any, tmp_path: Path) -> None:
    owner, initiator = make_engine(), make_engine()
    region = owner.offer(f"file:{tmp_path / 'file'}", MIB)
    segment = initiator.open(owner.endpoint)
    initiator.read(segment, region.handle, 0, bytearray(MIB))
    assert len(open_files(tmp_path)) > 0
    owner.revoke(region)
    assert open_files(tmp_path) == []


def test_a_thousand_openings_leave_nothing(make_engine: Any, tmp_path: Path) -> None:
    owner, initiator = make_engine(), make_engine()
    region = owner.offer(f"file:{tmp_path / 'file'}", MIB)
    initiator.write(initiator.open(owner.endpoint), region.handle, 0, b"x" * MIB)
    before = len(os.listdir("/proc/self/fd"))
    files = len(open_files(tmp_path))
    target = bytearray(5_000)
    for turn in range(1_000):
        segment = initiator.open(owner.endpoint)
        initiator.read(segment, region.handle, turn, target)
        assert target == b"x" * 5_000
        initiator.close_segment(segment)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(open_files(tmp_path)) == files


def test_a_hundred_engines_leave_no_ring(tmp_path: Path) -> None:
    with Engine(transports=("file",)):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(100):
        with Engine(transports=("file",)) as engine:
            region = engine.offer(f"file:{tmp_path / 'file'}", MIB)
            segment = engine.open(engine.endpoint)
            engine.write(segment, region.handle, turn, b"y" * 9_000)
            engine.flush(segment)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert open_files(Path("anon_inode:[io_uring]")) == []
