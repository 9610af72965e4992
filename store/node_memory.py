"""A node's memory: for each segment a region for payload and one for its directory."""

from __future__ import annotations

from typing import Final, NamedTuple

from moonpool.engine.engine import Engine
from moonpool.engine.region import Region
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


def allocate_segment(engine: Engine, config: NodeConfig, name: str) -> SegmentMemory:
    """Memory for one segment, zeroed: payload that clients read, and write with grants; its directory.

    Raises what `Engine.allocate` raises; nothing is left behind then.
    """
    slots = max(1, min(SLOTS_MAX, config.segment_bytes // config.slot_bytes))
    chunk_lists = config.segment_bytes // CHUNK_BYTES * WORD_BYTES
    log_bytes = slots * config.log_bytes_per_slot + chunk_lists
    data = engine.allocate(
        config.segment_bytes, location=config.location, huge_pages=config.huge_pages, granted=True
    )
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
        "tier": config.tier,
        "kind": config.kind,
        "location": config.location,
        "data": data.handle,
        "directory": directory.handle,
    }
    core = CoreSegment(about=about, directory=Directory(directory.view, header))
    return SegmentMemory(core, data, directory)
