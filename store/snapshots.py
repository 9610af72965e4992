"""Snapshots: the whole state at one sequence, compressed, in pieces of equal size under keys of their own.

A snapshot is written beside the journal and changes nothing until one script makes it current: that script
checks the epoch, that every piece is there and that the journal holds the facts up to it; then it drops the
old snapshot and the groups that the new one covers. Pieces written by a leader that died on the way expire.

The state's chunks, each behind its length (u32, little-endian), go through one zlib stream that is cut into
pieces of exactly `snapshot_piece_bytes`: equal pieces below a power of two waste no memory in Redis.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, final

from moonpool.store.errors import SnapshotDamaged
from moonpool.store.redis_link import RedisLink
from moonpool.store.redis_resp import pack_command
from moonpool.store.redis_scripts import Keys
from moonpool.store.state import State
from moonpool.store.tables import ObjectTable

SNAPSHOT_VERSION: Final = 1
#: Pieces sent or read in one exchange.
_PIECES_AT_ONCE: Final = 8
_LENGTH: Final = struct.Struct("<I")
_CHUNK_BYTES_MAX: Final = 1 << 31
#: Fast, and the digests, which are most of a snapshot, do not compress further anyway.
_LEVEL: Final = 1
_PIECES_MAX: Final = 1 << 20


class SnapshotAbout(NamedTuple):
    """What a snapshot's head says."""

    sequence: int
    pieces: int
    size: int
    checksum: int


@final
class SnapshotPlace(NamedTuple):
    """Where a snapshot is written: its number, the bytes of a piece, and how long unfinished ones stay."""

    keys: Keys
    number: int
    piece_bytes: int
    timeout_ms: int


def write_snapshot(
    link: RedisLink, place: SnapshotPlace, state_at: SnapshotAbout, chunks: Iterable[bytes]
) -> SnapshotAbout:
    """Writes the pieces and the head, which expire unless they are made current; returns what it wrote."""
    count = size = checksum = 0
    batch: list[bytes] = []
    life_ms = 2 * place.timeout_ms

    def flush() -> None:
        if batch:
            link.exchange(b"".join(batch), len(batch))
            batch.clear()

    for piece in compressed(chunks, place.piece_bytes):
        key = place.keys.snapshot_piece(place.number, count)
        batch.append(pack_command(b"SET", key, piece, b"PX", life_ms))
        count, size, checksum = count + 1, size + len(piece), zlib.crc32(piece, checksum)
        if len(batch) == _PIECES_AT_ONCE:
            flush()
    flush()
    written = state_at._replace(pieces=count, size=size, checksum=checksum)
    head = place.keys.snapshot_head(place.number)
    fields: list[bytes | str | int] = [b"version", SNAPSHOT_VERSION]
    for name, value in written._asdict().items():
        fields += [name, value]
    packed = pack_command(b"DEL", head) + pack_command(b"HSET", head, *fields)
    link.exchange(packed + pack_command(b"PEXPIRE", head, life_ms), 3)
    return written


def snapshot_keys(keys: Keys, number: int, pieces: int) -> list[bytes]:
    """All keys of a snapshot, its head first; none for number 0."""
    if number == 0:
        return []
    return [keys.snapshot_head(number), *(keys.snapshot_piece(number, piece) for piece in range(pieces))]


def read_snapshot(
    link: RedisLink, keys: Keys, number: int, objects: ObjectTable, breathe: Callable[[], None]
) -> tuple[State, SnapshotAbout] | None:
    """A state from the snapshot; None when it was replaced meanwhile. Raises `SnapshotDamaged`."""
    about = _read_head(link, keys, number)
    if about is None:
        return None
    pieces = _Pieces(link, keys, number, about, breathe)
    try:
        state = State.restore(restored_chunks(pieces), objects)
    except _PieceMissing:
        if _read_head(link, keys, number) is None:
            return None
        raise SnapshotDamaged(f"snapshot {number} lacks a piece") from None
    if pieces.checksum != about.checksum or pieces.size != about.size:
        raise SnapshotDamaged(f"snapshot {number} does not have the size or the checksum that its head names")
    if state.sequence != about.sequence:
        raise SnapshotDamaged(f"snapshot {number} names fact {about.sequence} and holds {state.sequence}")
    return state, about


def compressed(chunks: Iterable[bytes], piece_bytes: int) -> Iterator[bytes]:
    """Pieces of exactly `piece_bytes` but the last, of one zlib stream of chunks behind their lengths."""
    stream = zlib.compressobj(_LEVEL)
    ready = bytearray()
    for chunk in chunks:
        ready += stream.compress(_LENGTH.pack(len(chunk)))
        view = memoryview(chunk)
        for start in range(0, len(chunk), piece_bytes):
            ready += stream.compress(view[start : start + piece_bytes])
            while len(ready) >= piece_bytes:
                yield bytes(ready[:piece_bytes])
                del ready[:piece_bytes]
    ready += stream.flush()
    for start in range(0, len(ready), piece_bytes):
        yield bytes(ready[start : start + piece_bytes])


def restored_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks that `compressed` was given; raises `SnapshotDamaged` for a stream that is not whole."""
    stream = zlib.decompressobj()
    plain = bytearray()
    try:
        for piece in pieces:
            plain += stream.decompress(piece)
            yield from _whole_chunks(plain)
        plain += stream.flush()
    except zlib.error as exc:
        raise SnapshotDamaged(f"the snapshot cannot be decompressed: {exc}") from exc
    yield from _whole_chunks(plain)
    if plain or not stream.eof or stream.unused_data:
        raise SnapshotDamaged("the snapshot ends in the middle of a chunk")


def _whole_chunks(plain: bytearray) -> Iterator[bytes]:
    at = 0
    while len(plain) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(plain, at)
        if length > _CHUNK_BYTES_MAX:
            raise SnapshotDamaged(f"the snapshot has a chunk of {length} bytes")
        if len(plain) - at - _LENGTH.size < length:
            break
        at += _LENGTH.size
        yield bytes(plain[at : at + length])
        at += length
    del plain[:at]


class _PieceMissing(Exception):
    """A piece is not there: the snapshot was replaced, or is damaged."""


@final
class _Pieces:
    """Reads pieces in order and keeps their checksum."""

    def __init__(
        self, link: RedisLink, keys: Keys, number: int, about: SnapshotAbout, breathe: Callable[[], None]
    ) -> None:
        self._link = link
        self._keys = keys
        self._number = number
        self._about = about
        self._breathe = breathe
        self.size = 0
        self.checksum = 0

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, self._about.pieces, _PIECES_AT_ONCE):
            self._breathe()
            wanted = range(start, min(start + _PIECES_AT_ONCE, self._about.pieces))
            names = [self._keys.snapshot_piece(self._number, piece) for piece in wanted]
            found: Any = self._link.call(b"MGET", *names)
            for piece in found:
                if piece is None:
                    raise _PieceMissing
                self.size += len(piece)
                self.checksum = zlib.crc32(piece, self.checksum)
                yield piece


def _read_head(link: RedisLink, keys: Keys, number: int) -> SnapshotAbout | None:
    flat: Any = link.call(b"HGETALL", keys.snapshot_head(number))
    if not flat:
        return None
    fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    if fields.pop(b"version", b"") != b"%d" % SNAPSHOT_VERSION:
        raise SnapshotDamaged(f"snapshot {number} has a version that this program does not know")
    try:
        about = SnapshotAbout(**{name.decode(): int(value) for name, value in fields.items()})
    except (TypeError, ValueError) as exc:
        raise SnapshotDamaged(f"snapshot {number} has a head that cannot be read: {exc}") from exc
    if not 0 <= about.pieces <= _PIECES_MAX:
        raise SnapshotDamaged(f"snapshot {number} names {about.pieces} pieces")
    return about
