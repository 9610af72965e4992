"""A node's memory: for each segment a region for payload and one for its directory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from moonpool.engine.engine import Engine
from moonpool.engine.region import Region
from moonpool.engine.segment import Segment
from moonpool.operations import Access
from moonpool.store.directory import (
    CHUNK_BYTES,
    SLOTS_MAX,
    WORD_BYTES,
    Directory,
    Header,
    directory_bytes,
    entry_offset,
)
from moonpool.store.node_config import NodeConfig
from moonpool.store.node_segment import CoreSegment

_FIRST_GENERATION: Final = 1


class SegmentMemory(NamedTuple):
    """One segment: what the core knows of it, and the regions."""

    core: CoreSegment
    data: Region
    directory: Region


def allocate_segment(engine: Engine, config: NodeConfig, name: str, number: int) -> SegmentMemory:
    """Room for segment `number`: payload that clients read, and write with grants; its directory in memory.

    Memory is zeroed; a file or device keeps what it held, which nothing of the pool refers to. Raises what
    `Engine.allocate` and `Engine.offer` raise; nothing is left behind then.
    """
    slots = max(1, min(SLOTS_MAX, config.segment_bytes // config.slot_bytes))
    chunk_lists = config.segment_bytes // CHUNK_BYTES * WORD_BYTES
    log_bytes = slots * config.log_bytes_per_slot + chunk_lists
    data = _payload(engine, config, number)
    try:
        directory = engine.allocate(
            directory_bytes(slots, log_bytes), access=Access.READ, location=config.location, huge_pages=False
        )
    except BaseException:
        engine.revoke(data)
        raise
    header = Header(
        segment=0,
        slots=slots,
        generation=_FIRST_GENERATION,
        capacity=config.segment_bytes,
        epoch=0,
        log_offset=entry_offset(slots, slots),
        log_bytes=log_bytes,
        instance=engine.instance,
    )
    about = {
        "name": name,
        "tier": config.segment_tier,
        "kind": config.kind,
        "location": data.location,
        "data": data.handle,
        "directory": directory.handle,
    }
    core = CoreSegment(about=about, directory=Directory(directory.view, header))
    return SegmentMemory(core, data, directory)


def _payload(engine: Engine, config: NodeConfig, number: int) -> Region:
    """The region for the payload of one segment."""
    if config.backing:
        offset = config.backing_offset + number * config.segment_bytes
        return engine.offer(config.backing, config.segment_bytes, granted=True, offset=offset)
    return engine.allocate(
        config.segment_bytes, location=config.location, huge_pages=config.huge_pages, granted=True
    )


class SegmentBytes:
    """The payload of a node's segments as its own process reads it: in place, or by transfers."""

    def __init__(self, engine: Engine, regions: Sequence[Region]) -> None:
        self._engine = engine
        self._regions = list(regions)
        self._lock = threading.Lock()
        self._own: Segment | None = None

    def read(self, segment: int, offset: int, size: int) -> memoryview:
        """Those bytes: a view of the memory, or a copy. Raises the error of a READ that failed."""
        region = self._regions[segment]
        if region.memory is not None:
            return region.view[offset : offset + size]
        copied = bytearray(size)
        self._engine.read(self._segment(), region.handle, offset, copied)
        return memoryview(copied)

    def _segment(self) -> Segment:
        """This engine's own segment, opened when first needed; it goes with the engine."""
        with self._lock:
            if self._own is None:
                self._own = self._engine.open(self._engine.endpoint)
            return self._own
