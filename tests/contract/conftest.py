"""The ways that bytes can go, and a pair of engines for each; the tests of this folder run over all of them.

A pair lives in this one process, so that a test can look at both ends of a transfer; `local` pairs an engine
with itself. tests/integration runs the same engines as processes of their own.

MOONPOOL_CONTRACT_WAYS chooses ways by shell patterns, with commas between ("file*,nvmeof"); ways that need
special hardware run only when they are named there, and variants of others too, or with "all" (`make
contract`). A test that needs the target's memory is marked with `memory_only` and why; it is left out for
ways whose regions have no address.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moonpool import Access, Engine, Region, Segment

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from fabric_ways import cuda, cxl, file, nvmeof, ofi, rdma  # noqa: E402
from fabric_ways.far import FarBytes, Place, Way  # noqa: E402

Bytes = npt.NDArray[np.uint8]

_FAILED = pytest.StashKey[bool]()
WAIT_S = 20.0
GUARD_BYTES = 64
GUARD = 0xA5
SECRET = b"a secret of the contract suite"
#: Settings of every engine unless its way says otherwise: bounds that end a broken test soon.
BOUNDS: dict[str, Any] = {"transfer_timeout_ms": 20_000, "stall_timeout_ms": 8_000, "lanes_per_peer_max": 4}


WAYS = [
    Way("local", ("local",), to_itself=True),
    Way("shm-mapped", ("shm",)),
    Way("shm-process_vm", ("shm",), foreign=True),
    Way("tcp-blocking", ("tcp",), {"tcp_io": "blocking"}),
    Way("tcp-epoll", ("tcp",), {"tcp_io": "epoll"}),
    Way("tcp-io_uring", ("tcp",), {"tcp_io": "io_uring"}),
    Way("tcp-ipv6", ("tcp",), {"bind_host": "::1"}, foreign=True),
    Way("tcp-striped", ("tcp",), {"bulk_lanes": 3, "stripe_min_bytes": 64 << 10}),
    Way("shm-secret", ("shm",), {"cluster_secret": SECRET}),
    Way("tcp-secret", ("tcp",), {"cluster_secret": SECRET}),
    *file.WAYS,
    *cxl.WAYS,
    *rdma.WAYS,
    *ofi.WAYS,
    *cuda.WAYS,
    *nvmeof.WAYS,
]


#: Variants of ways that run anyway: `make contract` runs them too.
VARIANTS = frozenset(
    {
        "cuda-hip",
        "cuda-own",
        "cuda-served",
        "cuda-served-shm",
        "file-buffered",
        "file-own",
        "ofi-tcp-foreign",
        "rdma-four-foreign",
        "shm-secret",
        "tcp-ipv6",
        "tcp-secret",
    }
)


def chosen_ways(ways: Sequence[Way], wanted: str | None) -> list[Way]:
    """The ways that a run is over: by patterns, or all that every machine has but variants.

    "all" stands for every way that needs no special hardware.
    """
    if wanted is None:
        return [way for way in ways if not way.on_request and way.name not in VARIANTS]
    if wanted == "all":
        return [way for way in ways if not way.on_request]
    patterns = [pattern.strip() for pattern in wanted.split(",")]
    chosen = [way for way in ways if any(fnmatch.fnmatchcase(way.name, pattern) for pattern in patterns)]
    if not chosen:
        names = ", ".join(way.name for way in ways)
        raise pytest.UsageError(f"MOONPOOL_CONTRACT_WAYS={wanted!r} names no way; there are {names}")
    return chosen


def make_pattern(size: int, seed: int = 0) -> Bytes:
    """Bytes that depend on their position, so that a piece at the wrong place shows: uint8[size]."""
    place = np.arange(size, dtype=np.uint64)
    mixed = (place + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(37)).astype(np.uint8)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread brings about; fails after a generous bound."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.001)


class Guarded:
    """A buffer between two guards, registered or not: `array` is what transfers use."""

    def __init__(self, size: int, fill: int = 0, shift: int = 0) -> None:
        whole = np.full(size + 2 * GUARD_BYTES + shift, GUARD, dtype=np.uint8)
        self._whole = whole
        self._start = GUARD_BYTES + shift
        self._stop = self._start + size
        self.array = whole[self._start : self._stop]
        self.array[:] = fill
        self.address = int(self.array.ctypes.data)
        self.size = size

    def check_guards(self) -> None:
        """Fails when a byte outside the buffer was touched."""
        assert (self._whole[: self._start] == GUARD).all(), "bytes before the buffer were overwritten"
        assert (self._whole[self._stop :] == GUARD).all(), "bytes behind the buffer were overwritten"


@dataclass
class Pair:
    """Two engines, the segment of `target` opened by `initiator`, and memory on both sides."""

    way: Way
    initiator: Engine
    target: Engine
    segment: Segment
    name: str
    place: Place | None = None

    def offer(
        self,
        size: int,
        access: Access = Access.READ_WRITE,
        seed: int = 1,
        *,
        granted: bool = False,
        refresh: bool = True,
    ) -> tuple[Region, Any]:
        """A region of the target filled with a pattern, of the kind the way is for, known to the segment.

        Its bytes come along, as an array or as `FarBytes`.
        """
        content: Any
        if self.place is not None:
            region, store = self.place.offer(self.target, size, access, granted)
            content = FarBytes(store, 0, size)
            content[:] = make_pattern(size, seed)
        elif self.way.foreign:
            content = make_pattern(size, seed)
            region = self.target.register(content, access=access)
        else:
            region = self.target.allocate(size, access=access, granted=granted)
            content = np.frombuffer(region.view, dtype=np.uint8)[:size]
            content[:] = make_pattern(size, seed)
        if refresh and not self.way.to_itself:
            self.initiator.refresh(self.segment)
        return region, content

    def buffer(self, size: int, fill: int = 0, shift: int = 0) -> Guarded:
        """A guarded buffer registered with the initiator."""
        guarded = Guarded(size, fill, shift)
        # Registered with its guards: a transfer that strays into them must be seen, not refused.
        self.initiator.register(guarded._whole, access=Access.NONE)
        return guarded


@contextlib.contextmanager
def open_pair(way: Way, **changes: Any) -> Iterator[Pair]:
    """Makes a pair and closes both ends, then what held the bytes."""
    config = {**BOUNDS, **way.config, **changes}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(way.place()) if way.place is not None else None
        initiator = stack.enter_context(Engine(transports=way.transports, **config))
        if way.to_itself:
            yield Pair(
                way, initiator, initiator, initiator.open(initiator.endpoint), initiator.endpoint, place
            )
            return
        target = stack.enter_context(Engine(transports=way.target_transports, **config))
        segment = initiator.open(target.endpoint)
        assert segment.paths[0].transport == way.transport
        yield Pair(way, initiator, target, segment, target.endpoint, place)


def pytest_configure(config: pytest.Config) -> None:
    """Tells of the marker of this folder."""
    config.addinivalue_line("markers", "memory_only(why): needs memory of the target's process")
    config.addinivalue_line("markers", "grants: needs regions that ask for grants")
    config.addinivalue_line("markers", "refuses_devices: needs an engine without the transport cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs memory for ways whose regions have no address."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        way = getattr(item, "callspec", None) and item.callspec.params.get("way")  # type: ignore[attr-defined]
        far = isinstance(way, Way) and not way.in_memory
        leave = far and item.get_closest_marker("memory_only")
        if isinstance(way, Way) and not way.grants:
            leave = leave or item.get_closest_marker("grants")
        if isinstance(way, Way) and "cuda" in way.transports:
            leave = leave or item.get_closest_marker("refuses_devices")
        (left_out if leave else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(params=chosen_ways(WAYS, os.environ.get("MOONPOOL_CONTRACT_WAYS")), ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    if chosen.prepare is not None:
        chosen.prepare()
    return chosen


@pytest.fixture
def pair(way: Way) -> Iterator[Pair]:
    with open_pair(way) as made:
        yield made


@pytest.fixture
def make_pair(way: Way) -> Iterator[Callable[..., Pair]]:
    """Makes pairs with other settings than the usual ones; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **changes: stack.enter_context(open_pair(way, **changes))


@pytest.fixture(scope="session")
def pattern() -> Callable[..., Bytes]:
    """`pattern(size, seed)`: bytes that depend on their position."""
    return make_pattern


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool], str], None]:
    """`eventually(condition, what)`: waits for it, and fails after a generous bound."""
    return wait_until


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def native_threads() -> list[str]:
    """Names of this process's threads that Moonpool started."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("moonpool")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes on a test whether it failed."""
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Descriptors and threads are as they were before the test."""
    before = fd_count()
    yield
    if request.node.stash.get(_FAILED, False):
        return  # its traceback keeps its regions alive
    wait_until(lambda: not native_threads(), f"threads end: {native_threads()}")
    if fd_count() > before:
        # Each error that the test has caught keeps its regions too, in a cycle of references.
        gc.collect()
    wait_until(lambda: fd_count() <= before, f"{before} descriptors were open before, {fd_count()} after")
