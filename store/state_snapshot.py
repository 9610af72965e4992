"""A state as chunks for a snapshot ⚑: a first one with everything but the objects, then the objects' table.

A chunk is `MOONSNP1`, index u32, last u32 (0 or 1), payload bytes u64, XXH3-64 of the payload seeded with the
index u64, payload; little-endian. Each checks itself, and a missing, repeated or extra one is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from moonpool.errors import MoonpoolError
from moonpool.native.table.chains import xxh3_64
from moonpool.store.errors import SnapshotDamaged

MAGIC: Final = b"MOONSNP1"
HEADER: Final = struct.Struct("<8sIIQQ")
CHUNK_PAYLOAD_BYTES: Final = 1 << 20


def write_chunks(meta: dict[str, Any], dump: Callable[[], bytes]) -> Iterator[bytes]:
    """The chunks, in order; `dump` is called at the first `next`, together with the packing of `meta`."""
    head: bytes = msgpack.packb(meta, use_bin_type=True)
    body = memoryview(dump())
    cuts = [body[at : at + CHUNK_PAYLOAD_BYTES] for at in range(0, len(body), CHUNK_PAYLOAD_BYTES)]
    for index, payload in enumerate([memoryview(head), *cuts]):
        last = index == len(cuts)
        yield HEADER.pack(MAGIC, index, last, len(payload), xxh3_64(payload, index)) + payload


def read_chunks(
    chunks: Iterable[bytes], load_meta: Callable[[dict[str, Any]], None], load: Callable[[bytes], None]
) -> None:
    """Reads what `write_chunks` wrote; raises `SnapshotDamaged` for anything else."""
    payloads: list[memoryview] = []
    ended = False
    for index, chunk in enumerate(chunks):
        if ended:
            raise SnapshotDamaged(f"the snapshot goes on after its last chunk, {index - 1}")
        payload, ended = _read_chunk(index, chunk)
        payloads.append(payload)
    if not ended:
        raise SnapshotDamaged(f"the snapshot ends after {len(payloads)} chunks, before its last one")
    try:
        load_meta(msgpack.unpackb(payloads[0], raw=False, strict_map_key=True))
        load(b"".join(payloads[1:]))
    except (MoonpoolError, ValueError, TypeError, KeyError, LookupError, AttributeError) as exc:
        raise SnapshotDamaged(f"the snapshot's content does not fit this version: {exc}") from exc


def _read_chunk(index: int, chunk: bytes) -> tuple[memoryview, bool]:
    if len(chunk) < HEADER.size:
        raise SnapshotDamaged(f"chunk {index} of the snapshot is cut off")
    magic, number, last, length, digest = HEADER.unpack_from(chunk)
    payload = memoryview(chunk)[HEADER.size :]
    if magic != MAGIC:
        raise SnapshotDamaged(f"chunk {index} is of no snapshot, or of another version")
    if number != index or last not in (0, 1) or length != len(payload):
        raise SnapshotDamaged(f"chunk {index} of the snapshot is out of order or cut off")
    if xxh3_64(payload, index) != digest:
        raise SnapshotDamaged(f"chunk {index} of the snapshot fails its check")
    return payload, bool(last)
