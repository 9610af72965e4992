"""The kinds of bytes that a tebench target offers, and what an initiator moves them from or to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moonpool import Engine, Region
from moonpool.errors import UsageError

#: Kinds of segments: what else than the default transports each needs, and how its locations begin.
KINDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "DRAM": ("", ()),
    "VRAM": ("cuda", ()),
    "FILE": ("file", ("file:",)),
    "NVME": ("nvmeof", ("nvme:",)),
    "CXL": ("cxl", ("dax:", "cxl:", "numa:")),
}


def parse_kinds(seg_type: str, mix: str) -> tuple[str, ...]:
    """The kinds that a target offers, in order: those of the mix, or the one type. UsageError for others."""
    kinds = tuple(kind.strip().upper() for kind in mix.split(",") if kind.strip()) or (seg_type.upper(),)
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"--seg_type_mix holds {kind!r}; there are {', '.join(KINDS)}")
    return kinds


def needed_transports(kinds: Sequence[str], configured: Sequence[str]) -> tuple[str, ...]:
    """The configured transports, and those that these kinds need, before tcp."""
    needed = [KINDS[kind][0] for kind in kinds if KINDS[kind][0] not in ("", *configured)]
    before = [name for name in configured if name != "tcp"]
    return (*before, *dict.fromkeys(needed), *(["tcp"] if "tcp" in configured else []))


def location_for(kind: str, locations: Sequence[str]) -> str:
    """Where the bytes of a kind are, of the places given; UsageError when none is of that kind."""
    for location in locations:
        if location.startswith(KINDS[kind][1]):
            return location
    raise UsageError(
        f"a segment of type {kind} needs --seg_location={KINDS[kind][1][0]}..., for one: "
        "a place as Engine.offer or Engine.allocate take it"
    )


def offer(engine: Engine, kind: str, size_bytes: int, how: tuple[Sequence[str], int]) -> Region:
    """A region of the target: `how` are the locations given and the GPU."""
    locations, gpu = how
    if kind == "DRAM":
        return engine.allocate(size_bytes)
    if kind == "VRAM":
        return engine.register(device_buffer(gpu, size_bytes), location=f"cuda:{gpu}")
    location = location_for(kind, locations)
    if location.startswith(("cxl:", "numa:")):
        return engine.allocate(size_bytes, location=location)
    return engine.offer(location, size_bytes)


def device_buffer(gpu: int, size_bytes: int) -> Any:
    """Zeroed memory of a GPU as a CuPy array; UsageError without CuPy."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as problem:
        raise UsageError("memory of a GPU needs CuPy: pip install cupy-cuda12x") from problem
    with cupy.cuda.Device(gpu):
        return cupy.zeros(size_bytes, dtype=cupy.uint8)


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The initiator's buffer: where it is, and its bytes where the CPU may look at them."""

    address: int
    view: Any


def local_memory(engine: Engine, size_bytes: int, gpu: int | None) -> LocalMemory:
    """The initiator's buffer in host memory, or of a GPU."""
    region = (
        engine.allocate(size_bytes)
        if gpu is None
        else engine.register(device_buffer(gpu, size_bytes), location=f"cuda:{gpu}")
    )
    return LocalMemory(region.address, region.view if gpu is None else None)
