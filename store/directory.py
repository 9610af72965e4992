"""A segment's directory: what each of its extents holds, in shared memory that clients read one-sided.

Layout (docs/store/architecture.md, "Segment memory"): a header page, one state word a slot, one entry of 64
bytes a slot, and a log with keys and chunk digests. The node is the only writer. It writes log, entry, and
then the state word with release order, so a reader that sees an object's id in the word sees a whole entry.
Of a dead object only the word changes; entry and log stay until the slot is used again. Words never go back.

What a client reads from a peer's directory is untrusted: `read_header` and `read_entry` check every number
against the directory's own bounds before anybody follows it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias, final

from moonpool.errors import LimitExceeded, ProtocolError, UsageError
from moonpool.native.io.directory import StateWords
from moonpool.native.io.effects import SegmentEffects
from moonpool.store.directory_log import LOG_UNIT, LogSpace

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"MOONDIR1"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
ENTRY_BYTES: Final = 64
WORD_BYTES: Final = 8
CRC_OFFSET: Final = HEADER_BYTES - 4
SLOTS_MAX: Final = 1 << 24
KEY_BYTES_MAX: Final = 1024
DIGEST_BYTES: Final = 16
CHUNK_BYTES: Final = 65_536
SIZE_MAX: Final = 1 << 40
#: In a state word: the object named by the other bits is gone.
DEAD: Final = 1 << 63
#: In an entry's flags: the log had no room for the key and the chunk digests.
FLAG_NO_LOG: Final = 1
#: In an entry's flags: from this bit on, why the object was retired.
REASON_SHIFT: Final = 4

_HEADER: Final = struct.Struct("<8sIIIIQQQQQ16s")
_ENTRY: Final = struct.Struct("<QQ16sIHBBQIIQ")
_CRC: Final = struct.Struct("<I")
_FLAGS_OFFSET: Final = 39
#: What `plain` is given of the log at a time, and what it must have left at the beginning of a push.
_RESERVE_BYTES: Final = 262_144
_RESERVE_MIN_BYTES: Final = 16_384


def word_offset(slot: int) -> int:
    """Where a slot's state word lies in its directory."""
    return HEADER_BYTES + WORD_BYTES * slot


def entry_offset(slots: int, slot: int) -> int:
    """Where a slot's entry lies in a directory of so many slots."""
    return HEADER_BYTES + -(-slots * WORD_BYTES // ENTRY_BYTES) * ENTRY_BYTES + ENTRY_BYTES * slot


def directory_bytes(slots: int, log_bytes: int) -> int:
    """The size of a whole directory."""
    return entry_offset(slots, slots) + log_bytes


class Header(NamedTuple):
    """The first page. `instance` is that of the engine that holds the data."""

    segment: int
    slots: int
    generation: int
    capacity: int
    epoch: int
    log_offset: int
    log_bytes: int
    instance: bytes


class Entry(NamedTuple):
    """What an extent holds. At `log_place` are the key, padded to 8 bytes, and the chunk digests."""

    offset: int
    size: int
    digest: bytes
    tenant: int
    key_bytes: int
    object_type: int
    flags: int
    log_place: int
    chunk_count: int
    object_id: int

    @property
    def reason(self) -> int:
        """Why a dead object was retired; 0 when that is not known."""
        return self.flags >> REASON_SHIFT

    @property
    def chunks_place(self) -> int:
        """Where the chunk digests begin, from the directory's start."""
        return self.log_place + -(-self.key_bytes // WORD_BYTES) * WORD_BYTES

    @property
    def log_end(self) -> int:
        """Where the entry's part of the log ends."""
        return self.chunks_place + self.chunk_count * WORD_BYTES


class NewObject(NamedTuple):
    """What `Directory.add` writes. `chunks` are the chunk digests, 8 bytes each; empty for a single chunk."""

    offset: int
    size: int
    tenant: int
    object_id: int
    key: bytes
    digest: bytes
    object_type: int
    chunks: bytes


def pack_header(header: Header) -> bytes:
    """The header page, with its checksum."""
    fields = (header.segment, header.slots, header.generation, header.capacity, header.epoch)
    page = bytearray(HEADER_BYTES)
    _HEADER.pack_into(
        page, 0, MAGIC, VERSION, ENTRY_BYTES, *fields, header.log_offset, header.log_bytes, header.instance
    )
    _CRC.pack_into(page, CRC_OFFSET, zlib.crc32(memoryview(page)[:CRC_OFFSET]))
    return bytes(page)


def read_header(page: Bytes, region_bytes: int) -> Header:
    """Reads a peer's header page; ProtocolError unless all of it is possible in a region of that size.

    A page that is being rewritten has a wrong checksum for a moment: read it once more.
    """
    data = bytes(page)
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a directory's header has {HEADER_BYTES} bytes, not {len(data)}")
    if _CRC.unpack_from(data, CRC_OFFSET)[0] != zlib.crc32(data[:CRC_OFFSET]):
        raise ProtocolError("the directory's header is damaged, or was being written: read it again")
    magic, version, entry_bytes, *fields, instance = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or entry_bytes != ENTRY_BYTES:
        raise ProtocolError(f"this is no directory of version {VERSION}: update the older end")
    header = Header._make((*fields, instance))
    if not (
        0 < header.slots <= SLOTS_MAX
        and header.log_offset == entry_offset(header.slots, header.slots)
        and header.log_offset + header.log_bytes <= region_bytes
    ):
        raise ProtocolError("the directory's header has impossible numbers")
    return header


def read_entry(data: Bytes, header: Header) -> Entry:
    """Reads a peer's entry; ProtocolError unless extent and log place lie inside segment and log."""
    raw = bytes(data)
    if len(raw) != ENTRY_BYTES:
        raise ProtocolError(f"a directory entry has {ENTRY_BYTES} bytes, not {len(raw)}")
    entry = _unpack_entry(raw)
    inside = entry.offset <= header.capacity and entry.size <= header.capacity - entry.offset
    chunks = -(-entry.size // CHUNK_BYTES)
    if entry.flags & FLAG_NO_LOG:
        logged = entry.chunk_count == 0
    else:
        logged = (
            0 < entry.key_bytes <= KEY_BYTES_MAX
            and entry.chunk_count in ({chunks, 0} if chunks > 1 else {0})
            and entry.log_place % WORD_BYTES == 0
            and header.log_offset <= entry.log_place
            and entry.log_end <= header.log_offset + header.log_bytes
        )
    if not inside or not logged or not 0 < entry.object_id < DEAD:
        raise ProtocolError("a directory entry has impossible numbers")
    return entry


def _unpack_entry(raw: Bytes, offset: int = 0) -> Entry:
    fields = _ENTRY.unpack_from(raw, offset)
    return Entry._make((*fields[:9], fields[10]))


@final
class Directory:
    """The node's own directory, in memory that it alone writes. Not thread-safe.

    `memory` is a writable buffer of at least `directory_bytes`, zeroed; `close` lets go of it.
    """

    def __init__(self, memory: bytearray | memoryview, header: Header) -> None:
        if not 0 < header.slots <= SLOTS_MAX:
            raise UsageError(f"a directory has 1 to {SLOTS_MAX} slots, not {header.slots}", field="slots")
        if header.log_offset != entry_offset(header.slots, header.slots):
            raise UsageError("the log follows the last entry", field="log_offset")
        self._view = memoryview(memory).cast("B")
        needed = directory_bytes(header.slots, header.log_bytes)
        if len(self._view) < needed:
            raise UsageError(
                f"a directory of {header.slots} slots needs {needed} bytes, not {len(self._view)}"
            )
        self._words = StateWords(memory, HEADER_BYTES, header.slots)
        #: Does plain effects straight from their bytes; see `moonpool.native.io.effects`.
        self.plain = SegmentEffects(
            memory, header.slots, header.capacity, header.log_offset, header.log_bytes
        )
        self._log = LogSpace(header.log_bytes)
        self._entries = entry_offset(header.slots, 0)
        #: How many objects came whose key and chunks found no room in the log.
        self.without_log = 0
        self._live = 0
        self._write_header(header)

    @property
    def header(self) -> Header:
        """As it stands in the first page."""
        return self._header

    @property
    def live(self) -> int:
        """How many objects can be read."""
        return self._live + self.plain.live_delta

    def _write_header(self, header: Header) -> None:
        self._header = header
        self._view[:HEADER_BYTES] = pack_header(header)

    def note_epoch(self, epoch: int) -> None:
        """Remembers the highest epoch seen."""
        if epoch > self._header.epoch:
            self._write_header(self._header._replace(epoch=epoch))

    def name(self, segment: int) -> None:
        """Sets the segment id that the master gave."""
        if segment != self._header.segment:
            self._write_header(self._header._replace(segment=segment))

    def word(self, slot: int) -> int:
        """The state word of a slot; IndexError for one that is not there."""
        return self._words.load(slot)

    def entry(self, slot: int) -> Entry:
        """The entry of a slot; zeros where nothing was ever written."""
        return _unpack_entry(self._view, self._entries + ENTRY_BYTES * slot)

    def key(self, entry: Entry) -> bytes:
        """The key of an entry; empty when the log had no room."""
        if entry.flags & FLAG_NO_LOG:
            return b""
        return bytes(self._view[entry.log_place : entry.log_place + entry.key_bytes])

    def chunks(self, entry: Entry) -> bytes:
        """The chunk digests of an entry, 8 bytes each; empty for a single chunk, or when there are none."""
        return bytes(self._view[entry.chunks_place : entry.log_end])

    def add(self, slot: int, new: NewObject) -> bool:
        """Makes an object readable. False, and nothing done, when the slot saw that id or a later one."""
        check_new(new, self._header.capacity)
        word = self._words.load(slot)
        if new.object_id <= word & ~DEAD:
            return False
        if word:
            self.retire(slot, word & ~DEAD)
            self._free_log(slot)
        padded = -(-len(new.key) // WORD_BYTES) * WORD_BYTES
        place = self._take_log(padded + len(new.chunks))
        flags, chunks = (0, new.chunks) if place >= 0 else (FLAG_NO_LOG, b"")
        log_place = self._header.log_offset + place if place >= 0 else 0
        if place >= 0:
            self._view[log_place : log_place + len(new.key)] = new.key
            self._view[log_place + padded : log_place + padded + len(chunks)] = chunks
        else:
            self.without_log += 1
        # Nobody follows the entry while the word is 0 or dead.
        _ENTRY.pack_into(
            self._view,
            self._entries + ENTRY_BYTES * slot,
            new.offset,
            new.size,
            new.digest,
            new.tenant,
            len(new.key) if place >= 0 else 0,
            new.object_type,
            flags,
            log_place,
            len(chunks) // WORD_BYTES,
            0,
            new.object_id,
        )
        self._words.store(slot, new.object_id)
        self._live += 1
        return True

    def retire(self, slot: int, object_id: int, reason: int = 0) -> bool:
        """Stamps an object dead; False, and nothing done, when the slot holds another one or none.

        `reason` (0 to 15) goes into the entry's flags first.
        """
        if self._words.load(slot) != object_id or not object_id:
            return False
        self._view[self._entries + ENTRY_BYTES * slot + _FLAGS_OFFSET] |= (reason & 15) << REASON_SHIFT
        self._words.store(slot, DEAD | object_id)
        self._live -= 1
        return True

    def reset(self) -> None:
        """All objects dead, the log empty, and a new generation. The words stay, so that none goes back."""
        for slot in self.used():
            word = self._words.load(slot)
            self.retire(slot, word & ~DEAD)
            entry = self.entry(slot)
            flags = entry.flags | FLAG_NO_LOG
            entry = entry._replace(key_bytes=0, flags=flags, log_place=0, chunk_count=0)
            _ENTRY.pack_into(self._view, self._entries + ENTRY_BYTES * slot, *entry[:9], 0, entry.object_id)
        self._log.clear()
        self.plain.give_reserve(0, 0)
        self._write_header(self._header._replace(generation=self._header.generation + 1))

    def used(self, start: int = 0) -> Iterator[int]:
        """Slots from `start` on that hold or held an object, ascending."""
        slot = self._words.next_used(start)
        while slot >= 0:
            yield slot
            slot = self._words.next_used(slot + 1)

    def log_free_bytes(self) -> int:
        """Bytes of the log that no entry uses."""
        return self._log.free_bytes + self.plain.reserve_left

    def refill(self) -> None:
        """Sees to it that `plain` has room for the logs of new objects, while there is some."""
        if self.plain.reserve_left >= _RESERVE_MIN_BYTES:
            return
        size = min(_RESERVE_BYTES, self._log.free_bytes // 4 // LOG_UNIT * LOG_UNIT)
        place = self._log.take(size) if size >= _RESERVE_MIN_BYTES else -1
        if place >= 0:
            self._give_back(*self.plain.give_reserve(place, size))

    def free_log(self, place: int, size_bytes: int) -> None:
        """A block of the log, by its place there, that `plain` does not need any more."""
        self._log.give_back(place, size_bytes)

    def _give_back(self, place: int, size_bytes: int) -> None:
        if size_bytes:
            self._log.give_back(place, size_bytes)

    def _take_log(self, size_bytes: int) -> int:
        place = self._log.take(size_bytes)
        if place < 0 and self.plain.reserve_left:
            self._give_back(*self.plain.give_reserve(0, 0))
            place = self._log.take(size_bytes)
        return place

    def close(self) -> None:
        """Lets go of the memory."""
        self._words.release()
        self.plain.release()
        self._view.release()

    def _free_log(self, slot: int) -> None:
        entry = self.entry(slot)
        if not entry.flags & FLAG_NO_LOG:
            self._log.give_back(entry.log_place - self._header.log_offset, entry.log_end - entry.log_place)


def check_new(new: NewObject, capacity: int) -> None:
    """UsageError, with what is wrong, unless the object can stand in a segment of that size."""
    chunks = -(-new.size // CHUNK_BYTES)
    if new.offset > capacity or new.size > capacity - new.offset or not 0 <= new.size <= SIZE_MAX:
        raise UsageError("the extent is not inside the segment", offset=new.offset, length_bytes=new.size)
    if not 0 < len(new.key) <= KEY_BYTES_MAX:
        raise LimitExceeded(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(new.key)}", limit=KEY_BYTES_MAX)
    if len(new.digest) != DIGEST_BYTES:
        raise UsageError(f"a digest has {DIGEST_BYTES} bytes, not {len(new.digest)}", field="digest")
    if len(new.chunks) not in ({chunks * WORD_BYTES, 0} if chunks > 1 else {0}):
        raise UsageError(f"{new.size} bytes have {chunks} chunk digests", field="chunks")
    if not 0 < new.object_id < DEAD or not 0 <= new.tenant < 1 << 32 or not 0 <= new.object_type < 256:
        raise UsageError("object id, tenant or type is out of range", value=str(new.object_id))
