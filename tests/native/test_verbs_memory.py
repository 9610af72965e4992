"""Memory regions over the fake: chunks, several devices, roll-back, and errors that say what to do."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.native.fake_verbs.connections import EVERYTHING, Connection, Memory, fresh_fabric
from tests.native.fake_verbs.fabric import WC_REMOTE_ACCESS, FakeFabric

from moonpool.errors import (
    LimitExceeded,
    MoonpoolError,
    OutOfMemory,
    ResourceError,
    UnsupportedMemory,
    UnsupportedOperation,
    UsageError,
)
from moonpool.native.verbs.attributes import LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, RegistrationPlan
from moonpool.native.verbs.devices import Device, VerbsLibrary, live_objects
from moonpool.native.verbs.memory import chunk_bytes_of, register, register_dmabuf
from moonpool.native.verbs.problems import call_problem, registration_problem

PAGE = 4096


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with fresh_fabric(4) as made:
        yield made


@pytest.fixture
def rails(fabric: FakeFabric) -> Iterator[list[Device]]:
    library = VerbsLibrary(fabric.path)
    opened = [Device(library, f"fake{i}") for i in range(4)]
    yield opened
    for device in opened:
        device.close()


def test_a_range_has_keys_on_every_device(rails: list[Device]) -> None:
    memory = Memory(8 * PAGE)
    made = register(rails, memory.address, memory.size, EVERYTHING)
    assert (made.address, made.length_bytes, made.chunk_bytes) == (memory.address, memory.size, memory.size)
    keys = [made.lkeys(i) + made.rkeys(i) for i in range(4)]
    assert len({key for each in keys for key in each}) == 4
    assert live_objects()["regions"] == 4
    made.close()
    made.close()
    assert made.closed
    with pytest.raises(UsageError, match="there is no 4"):
        made.rkeys(4)


def test_a_range_larger_than_a_region_is_cut(fabric: FakeFabric, rails: list[Device]) -> None:
    fabric.limits(max_mr_bytes=3 * PAGE + 17)
    memory = Memory(8 * PAGE + 5)
    made = register(rails[:2], memory.address, memory.size, EVERYTHING)
    assert made.chunk_bytes == 3 * PAGE
    assert [len(made.rkeys(i)) for i in range(2)] == [3, 3]
    assert fabric.live("regions") == 6
    for at, chunk, room in (
        (0, 0, 3 * PAGE),
        (3 * PAGE - 1, 0, 1),
        (3 * PAGE, 1, 3 * PAGE),
        (6 * PAGE + 5, 2, 2 * PAGE),
        (memory.size - 1, 2, 1),
    ):
        lkey, rkey, left = made.keys_at(1, memory.address + at)
        assert (lkey, rkey, left) == (made.lkeys(1)[chunk], made.rkeys(1)[chunk], room)
    for outside in (memory.address - 1, memory.address + memory.size, 0, 2**64 - 1):
        with pytest.raises(UsageError, match="not inside"):
            made.keys_at(0, outside)
    made.close()


def test_no_request_may_cross_a_chunk(fabric: FakeFabric) -> None:
    connection = Connection(VerbsLibrary(fabric.path), size=4 * PAGE)
    near, far = connection.near, connection.far
    cut = register(
        [far.device], far.memory.address, far.size, EVERYTHING, RegistrationPlan(chunk_bytes_max=2 * PAGE)
    )
    first, second = cut.rkeys(0)
    connection.post(1, length=2 * PAGE, rkey=first)
    near.pair.post(2, True, [(near.memory.address, 16, near.lkey)], far.memory.address + 2 * PAGE, second)
    assert [each.status for each in connection.reap(2)] == [0, 0]
    connection.post(3, length=2 * PAGE + 1, rkey=first)
    assert [each.status for each in connection.reap(1)] == [WC_REMOTE_ACCESS]
    connection.close()


@given(st.integers(1, 1 << 48), st.integers(1, 1 << 42))
def test_chunks_cover_the_range_and_keep_the_bound(length: int, bound: int) -> None:
    chunk = chunk_bytes_of(length, bound)
    assert 1 <= chunk <= min(length, bound)
    assert chunk == length or 2 * chunk > min(bound, length)
    assert chunk == length or bound < PAGE or chunk % PAGE == 0
    assert chunk == length or bound < 2 << 20 or chunk % (2 << 20) == 0


def test_too_many_regions_are_a_bound(fabric: FakeFabric, rails: list[Device]) -> None:
    fabric.limits(max_mr_bytes=1)
    memory = Memory(20_000)
    with pytest.raises(LimitExceeded, match="need 80000 memory regions of 1 bytes; at most 65536"):
        register(rails, memory.address, memory.size, EVERYTHING)


@pytest.mark.parametrize("after", [0, 3, 7])
@pytest.mark.parametrize("threads", [1, 8])
def test_a_failure_undoes_what_succeeded(
    fabric: FakeFabric, rails: list[Device], after: int, threads: int
) -> None:
    memory = Memory(2 * PAGE)
    plan = RegistrationPlan(chunk_bytes_max=PAGE, threads_max=threads)
    fabric.fail("reg_mr", errno.ENOMEM, after=after)
    with pytest.raises(OutOfMemory, match="RLIMIT_MEMLOCK"):
        register(rails, memory.address, memory.size, EVERYTHING, plan)
    assert fabric.live("regions") == 0
    register(rails, memory.address, memory.size, EVERYTHING, plan).close()


def test_many_chunks_are_registered_by_several_threads(fabric: FakeFabric, rails: list[Device]) -> None:
    memory = Memory(64 * PAGE)
    plan = RegistrationPlan(chunk_bytes_max=PAGE, threads_max=32)
    made = register(rails, memory.address, memory.size, EVERYTHING, plan)
    assert len({key for i in range(4) for key in made.rkeys(i)}) == 256
    made.close()


def test_memory_that_is_not_mapped_is_explained(rails: list[Device]) -> None:
    hole = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(PAGE), 0) == 0
    with pytest.raises(
        UnsupportedMemory, match="must be mapped, and Linux pins no pages of an ordinary file"
    ):
        register(rails, address, 2 * PAGE, EVERYTHING)
    assert libc.mprotect(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(PAGE), 3) == 0


@pytest.mark.parametrize(
    ("count", "length", "access", "says"),
    [
        (0, PAGE, EVERYTHING, "1 to 64 devices"),
        (1, 0, EVERYTHING, "at least one byte"),
        (1, PAGE, REMOTE_WRITE, "REMOTE_WRITE needs LOCAL_WRITE"),
    ],
)
def test_wrong_arguments(rails: list[Device], count: int, length: int, access: int, says: str) -> None:
    memory = Memory(PAGE)
    with pytest.raises(UsageError, match=says):
        register(rails[:count], memory.address, length, access)
    with pytest.raises(UsageError, match="at least one byte"):
        register(rails, 2**64 - 8, 16, LOCAL_WRITE)


def test_access_is_kept_to(fabric: FakeFabric) -> None:
    connection = Connection(VerbsLibrary(fabric.path))
    far = connection.far
    readable = register([far.device], far.memory.address, far.size, REMOTE_READ)
    connection.post(1, write=False, rkey=readable.rkeys(0)[0])
    connection.post(2, write=True, rkey=readable.rkeys(0)[0])
    assert [each.status for each in connection.reap(2)] == [0, WC_REMOTE_ACCESS]
    connection.close()


def test_relaxed_ordering_is_asked_for_and_may_be_ignored(fabric: FakeFabric) -> None:
    connection = Connection(VerbsLibrary(fabric.path))
    far = connection.far
    relaxed = register(
        [far.device], far.memory.address, far.size, EVERYTHING, RegistrationPlan(relaxed_ordering=True)
    )
    sent = connection.near.memory.pattern(1)
    connection.post(1, rkey=relaxed.rkeys(0)[0])
    assert [each.status for each in connection.reap(1)] == [0]
    assert far.memory.read() == sent
    connection.close()


# dma-bufs: a memfd stands in for the memory of a device


def test_a_dmabuf_is_addressed_from_where_it_is_said_to_be(fabric: FakeFabric) -> None:
    library = VerbsLibrary(fabric.path)
    assert library.has_dmabuf
    connection = Connection(library)
    near, far = connection.near, connection.far
    fd = os.memfd_create("device memory")
    os.ftruncate(fd, 4 * PAGE)
    plan = RegistrationPlan(chunk_bytes_max=PAGE)
    made = register_dmabuf([far.device], fd, PAGE, 2 * PAGE, EVERYTHING, 0x7000_0000_0000, plan)
    assert (made.address, len(made.rkeys(0))) == (0x7000_0000_0000, 2)
    sent = near.memory.pattern(2)
    near.pair.post(
        1, True, [(near.memory.address, 100, near.lkey)], 0x7000_0000_0000 + PAGE, made.rkeys(0)[1]
    )
    assert [each.status for each in connection.reap(1)] == [0]
    assert os.pread(fd, 100, 2 * PAGE) == sent[:100]
    made.close()
    os.close(fd)
    connection.close()


def test_a_dmabuf_that_is_refused_is_explained(fabric: FakeFabric, rails: list[Device]) -> None:
    with pytest.raises(UsageError, match="by its descriptor"):
        register_dmabuf(rails, -1, 0, PAGE, EVERYTHING)
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        fabric.fail("reg_dmabuf_mr", errno.EOPNOTSUPP)
        with pytest.raises(UnsupportedMemory, match="cannot register a dma-buf"):
            register_dmabuf(rails, file.fileno(), 0, PAGE, EVERYTHING)
        fabric.fail("reg_dmabuf_mr", errno.EBADF, after=2)
        with pytest.raises(ResourceError, match="Bad file descriptor"):
            register_dmabuf(rails, file.fileno(), 0, PAGE, EVERYTHING)
    assert fabric.live("regions") == 0


# What an errno means


def test_a_limit_of_pinned_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    problem = registration_problem(errno.ENOMEM, "mlx5_0", 4096, 1 << 30)
    assert isinstance(problem, OutOfMemory)
    assert "RLIMIT_MEMLOCK allows this user 8 MiB of pinned memory: raise it" in str(problem)
    assert (problem.field, problem.limit) == ("RLIMIT_MEMLOCK", 8 << 20)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    assert "RLIMIT_MEMLOCK is unlimited" in str(registration_problem(errno.ENOMEM, "mlx5_0", 4096, 1 << 30))


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.EINVAL, UnsupportedMemory, "dma-buf or peer memory"),
        (errno.EOPNOTSUPP, UnsupportedMemory, "cannot register this memory"),
        (errno.EIO, ResourceError, "gone or being reset"),
        (errno.EBUSY, ResourceError, "busy"),
    ],
)
def test_registration_problems_say_what_to_do(code: int, kind: type[MoonpoolError], says: str) -> None:
    problem = registration_problem(code, "mlx5_0", 0x1000, 4096)
    assert isinstance(problem, kind)
    assert says in str(problem)
    assert "mlx5_0" in str(problem)


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.ENOMEM, OutOfMemory, "shallower queues"),
        (errno.ENODEV, ResourceError, "gone or being reset"),
        (errno.EPERM, ResourceError, "/dev/infiniband"),
        (errno.EOPNOTSUPP, UnsupportedOperation, "lacks that"),
        (errno.EINVAL, ResourceError, "Invalid argument"),
    ],
)
def test_call_problems_say_what_to_do(code: int, kind: type[MoonpoolError], says: str) -> None:
    problem = call_problem(code, "making a queue pair", "mlx5_0")
    assert isinstance(problem, kind)
    assert says in str(problem)
    assert problem.errno == code or kind is UnsupportedOperation
