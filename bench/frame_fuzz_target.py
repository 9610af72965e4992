"""The process under fire: an engine whose regions lie between guards, and the checks of their bytes.

Two regions touch pages that may not be accessed at all, one by its first and one by its last byte: a stray
access there ends the process or fails the transfer. All other edges touch bytes of a known pattern.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from moonpool.bench.frame_fuzz_model import RegionFacts, TargetFacts, pattern
from moonpool.config import EngineConfig
from moonpool.engine.engine import Engine
from moonpool.operations import Access
from moonpool.units import KIB, MIB

HEALTHY_BYTES: Final = MIB
#: Hellos of slow clients end soon, and so do frames that stop half-way.
HANDSHAKE_TIMEOUT_MS: Final = 2_000
STALL_TIMEOUT_MS: Final = 10_000
REGIONS_MAX: Final = 64
#: A short queue and an application that is slow to take from it: fuzzed notifications meet a full one too.
NOTIFICATIONS_MAX: Final = 4
TAKE_EVERY_S: Final = 0.05

_GUARD_SEED: Final = 99
_PAGE: Final = mmap.PAGESIZE
_PROT_NONE: Final = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Of one guarded region: bytes of guard pattern before and behind it, within closed pages."""

    name: str
    size_bytes: int
    access: Access
    lead_bytes: int
    tail_bytes: int
    first_seed: int
    written_seed: int


LAYOUTS: Final = (
    Layout(
        name="read",
        size_bytes=64 * KIB - 129,
        access=Access.READ,
        lead_bytes=129,
        tail_bytes=0,
        first_seed=1,
        written_seed=1,
    ),
    Layout(
        name="write",
        size_bytes=64 * KIB - 77,
        access=Access.WRITE,
        lead_bytes=0,
        tail_bytes=77,
        first_seed=2,
        written_seed=3,
    ),
    Layout(
        name="both",
        size_bytes=32 * KIB - 500,
        access=Access.READ_WRITE,
        lead_bytes=251,
        tail_bytes=249,
        first_seed=4,
        written_seed=4,
    ),
    Layout(
        name="private",
        size_bytes=4 * KIB - 2,
        access=Access.NONE,
        lead_bytes=1,
        tail_bytes=1,
        first_seed=5,
        written_seed=6,
    ),
    Layout(
        name="stale",
        size_bytes=8 * KIB - 64,
        access=Access.READ_WRITE,
        lead_bytes=32,
        tail_bytes=32,
        first_seed=7,
        written_seed=8,
    ),
)


@final
class GuardedMemory:
    """Memory of one layout; lives as long as the process."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        inner = layout.lead_bytes + layout.size_bytes + layout.tail_bytes
        inner += -inner % _PAGE
        whole = np.frombuffer(mmap.mmap(-1, inner + 2 * _PAGE), dtype=np.uint8)
        start = _PAGE + layout.lead_bytes
        if not layout.tail_bytes:
            start = _PAGE + inner - layout.size_bytes
        stop = start + layout.size_bytes
        self.array: npt.NDArray[np.uint8] = whole[start:stop]
        self._before = whole[_PAGE:start]
        self._behind = whole[stop : _PAGE + inner]
        for guard in (self._before, self._behind):
            guard[:] = pattern(_GUARD_SEED, guard.size)
        self.array[:] = pattern(layout.first_seed, layout.size_bytes)
        for page in (0, _PAGE + inner):
            _close_page(whole.ctypes.data + page)

    def problems(self, may_be_written: bool) -> list[str]:
        """What is wrong with its bytes; empty when all is well."""
        found = []
        name, size = self.layout.name, self.layout.size_bytes
        for where, guard in (("before", self._before), ("behind", self._behind)):
            wrong = int((guard != pattern(_GUARD_SEED, guard.size)).sum())
            if wrong:
                found.append(f"{wrong} guard bytes {where} the region {name!r} changed")
        good = self.array == pattern(self.layout.first_seed, size)
        if may_be_written:
            good |= self.array == pattern(self.layout.written_seed, size)
        if not good.all():
            found.append(f"{int((~good).sum())} bytes of the region {name!r} are neither old nor written")
        return found

    def written_bytes(self) -> int:
        """How many bytes differ from the first pattern."""
        return int((self.array != pattern(self.layout.first_seed, self.layout.size_bytes)).sum())


def _close_page(address: int) -> None:
    # Python's mmap can make a page read-only at most, and only from the start: mprotect(2).
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect of a guard page failed")


@final
class FuzzedTarget:
    """The engine and its memory."""

    def __init__(self) -> None:
        self.engine = Engine(
            EngineConfig(
                handshake_timeout_ms=HANDSHAKE_TIMEOUT_MS,
                stall_timeout_ms=STALL_TIMEOUT_MS,
                regions_max=REGIONS_MAX,
                notifications_max=NOTIFICATIONS_MAX,
            )
        )
        self.memories = [GuardedMemory(layout) for layout in LAYOUTS]
        self.regions = [
            self.engine.register(memory.array, access=memory.layout.access) for memory in self.memories
        ]
        self.mapped = self.engine.allocate(64 * KIB, access=Access.READ)
        self._mapped_bytes = np.frombuffer(self.mapped.view, dtype=np.uint8)
        self._mapped_bytes[:] = pattern(9, self._mapped_bytes.size)
        self.healthy = self.engine.allocate(HEALTHY_BYTES)
        stale = self.regions[-1]
        self.engine.revoke(stale)
        self.notices = 0

    def facts(self) -> TargetFacts:
        """What the fuzzers are told: all of it."""
        known = [
            RegionFacts(
                name=memory.layout.name,
                handle=region.handle,
                size_bytes=region.size_bytes,
                access=region.access,
                read_key=region.read_key,
                write_key=region.write_key,
                first_seed=memory.layout.first_seed,
                written_seed=memory.layout.written_seed,
            )
            for memory, region in zip(self.memories[:-1], self.regions[:-1], strict=True)
        ]
        known.append(
            RegionFacts(
                name="mapped",
                handle=self.mapped.handle,
                size_bytes=self.mapped.size_bytes,
                access=self.mapped.access,
                read_key=self.mapped.read_key,
                write_key=self.mapped.write_key,
                first_seed=9,
                written_seed=9,
            )
        )
        known.append(
            RegionFacts(
                name="healthy",
                handle=self.healthy.handle,
                size_bytes=self.healthy.size_bytes,
                access=self.healthy.access,
            )
        )
        return TargetFacts(
            pid=os.getpid(),
            port=int(self.engine.endpoint.rpartition(":")[2]),
            unix_name=f"@moonpool/{self.engine.instance.hex()}",
            instance=bytes(self.engine.instance),
            regions_max=REGIONS_MAX,
            regions=tuple(known),
            stale_handle=self.regions[-1].handle,
        )

    def check(self) -> dict[str, Any]:
        """The verdict on all memory."""
        problems = [
            problem
            for memory in self.memories
            for problem in memory.problems(memory.layout.name in ("write", "both"))
        ]
        if not (self._mapped_bytes == pattern(9, self._mapped_bytes.size)).all():
            problems.append("the region 'mapped', which nobody may write, changed")
        written = {memory.layout.name: memory.written_bytes() for memory in self.memories}
        return {"problems": problems, "written": written["write"], "notices": self.notices}

    @contextmanager
    def taking_notices(self) -> Iterator[None]:
        """Takes notifications in a thread, as an application would."""
        ending = threading.Event()

        def take() -> None:
            while not ending.wait(TAKE_EVERY_S):
                self.notices += len(self.engine.notifications(NOTIFICATIONS_MAX))

        thread = threading.Thread(target=take, name="notices")
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()


def serve(pipe: Connection) -> None:
    """Body of the target process: sends its facts, then answers "metrics", "check" and "stop"."""
    target = FuzzedTarget()
    with target.engine, target.taking_notices():
        pipe.send(target.facts())
        while (question := pipe.recv()) != "stop":
            pipe.send(target.engine.metrics() if question == "metrics" else target.check())
    pipe.send("stopped")
