"""The directory of a segment: its bytes, words that never go back, its log, its report, and hostile ones."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from moonpool.errors import InternalError, LimitExceeded, ProtocolError, UsageError
from moonpool.store.directory import (
    DEAD,
    ENTRY_BYTES,
    FLAG_NO_LOG,
    HEADER_BYTES,
    Directory,
    Header,
    NewObject,
    directory_bytes,
    entry_offset,
    pack_header,
    read_entry,
    read_header,
    word_offset,
)
from moonpool.store.directory_log import LOG_UNIT, LogSpace
from moonpool.store.directory_report import RecordState, ReportRecord, pack_records, read_records

SLOTS = 20
CAPACITY = 1 << 20
LOG_BYTES = 1024


def make(log_bytes: int = LOG_BYTES) -> tuple[bytearray, Directory]:
    memory = bytearray(directory_bytes(SLOTS, log_bytes))
    header = Header(7, SLOTS, 3, CAPACITY, 5, entry_offset(SLOTS, SLOTS), log_bytes, bytes(range(16)))
    return memory, Directory(memory, header)


def an_object(object_id: int, key: bytes = b"key", size: int = 4096, chunks: bytes = b"") -> NewObject:
    return NewObject(8192, size, 9, object_id, key, bytes([object_id & 255]) * 16, 1, chunks)


def test_the_bytes_are_those_of_the_contract() -> None:
    memory, directory = make()
    chunks = struct.pack("<2Q", 11, 12)
    assert directory.add(3, an_object(77, b"a key of 17 bytes", 100_000, chunks))
    magic, version, entry_bytes = struct.unpack_from("<8sII", memory)
    assert (magic, version, entry_bytes) == (b"MOONDIR1", 1, 64)
    assert struct.unpack_from("<IIQQQQQ", memory, 16) == (7, 20, 3, CAPACITY, 5, 4096 + 192 + 1280, LOG_BYTES)
    assert memory[64:80] == bytes(range(16))
    assert struct.unpack_from("<I", memory, 4092)[0] == zlib.crc32(memory[:4092])
    assert struct.unpack_from("<20Q", memory, 4096) == (0, 0, 0, 77, *([0] * 16))
    entry = struct.unpack_from("<QQ16sIHBBQIIQ", memory, 4096 + 192 + 3 * 64)
    place = entry[7]
    assert entry == (8192, 100_000, b"\x4d" * 16, 9, 17, 1, 0, place, 2, 0, 77)
    assert memory[place : place + 17] == b"a key of 17 bytes"
    assert memory[place + 24 : place + 40] == chunks
    assert (word_offset(3), entry_offset(SLOTS, 3)) == (4096 + 24, 4096 + 192 + 192)


def test_words_go_forward_only() -> None:
    _, directory = make()
    assert not directory.retire(4, 10)
    assert directory.add(4, an_object(10))
    assert not directory.add(4, an_object(10))
    assert not directory.add(4, an_object(9))
    assert directory.word(4) == 10
    assert not directory.retire(4, 9)
    assert directory.retire(4, 10, 3)
    assert (directory.entry(4).reason, directory.key(directory.entry(4))) == (3, b"key")
    assert not directory.retire(4, 10)
    assert directory.word(4) == DEAD | 10
    assert not directory.add(4, an_object(10))
    assert directory.add(4, an_object(11, b"next"))
    assert directory.key(directory.entry(4)) == b"next"
    assert directory.live == 1


def test_a_dead_entry_keeps_its_key_until_the_slot_is_used_again() -> None:
    _, directory = make()
    directory.add(0, an_object(1, b"old"))
    directory.retire(0, 1)
    assert directory.key(directory.entry(0)) == b"old"
    before = directory.log_free_bytes()
    directory.add(0, an_object(2, b"new"))
    assert directory.log_free_bytes() == before


def test_a_full_log_leaves_objects_readable() -> None:
    _, directory = make(log_bytes=64)
    assert directory.add(0, an_object(1, b"x" * 60))
    assert directory.add(1, an_object(2, b"y" * 60))
    entry = directory.entry(1)
    assert (directory.word(1), entry.flags, directory.key(entry), entry.size) == (2, 1, b"", 4096)
    assert directory.without_log == 1
    directory.add(0, an_object(3, b"z" * 60))
    assert directory.key(directory.entry(0)) == b"z" * 60


def test_reset_keeps_the_words() -> None:
    _, directory = make()
    for slot, object_id in ((1, 5), (2, 6)):
        directory.add(slot, an_object(object_id))
    directory.retire(2, 6)
    directory.reset()
    assert [directory.word(slot) for slot in (0, 1, 2)] == [0, DEAD | 5, DEAD | 6]
    assert (directory.header.generation, directory.live) == (4, 0)
    assert directory.log_free_bytes() == LOG_BYTES
    assert not directory.add(1, an_object(5))
    assert directory.add(1, an_object(7, b"again"))
    assert list(directory.used()) == [1, 2]


def test_header_changes_are_checked_ones() -> None:
    memory, directory = make()
    directory.note_epoch(9)
    directory.note_epoch(4)
    directory.name(70)
    header = read_header(memory[:HEADER_BYTES], len(memory))
    assert (header.epoch, header.segment) == (9, 70)
    directory.close()


@pytest.mark.parametrize(
    "wrong",
    [
        an_object(1)._replace(offset=CAPACITY),
        an_object(1)._replace(size=CAPACITY),
        an_object(1)._replace(digest=b"short"),
        an_object(0),
        an_object(DEAD),
        an_object(1)._replace(chunks=bytes(8)),
        an_object(1, size=65_537)._replace(chunks=bytes(8)),
        an_object(1)._replace(tenant=-1),
        an_object(1)._replace(object_type=256),
        an_object(1, b""),
        an_object(1, b"k" * 1025),
    ],
)
def test_what_cannot_be_is_refused(wrong: NewObject) -> None:
    memory, directory = make()
    before = bytes(memory)
    with pytest.raises((UsageError, LimitExceeded)):
        directory.add(0, wrong)
    assert bytes(memory) == before
    with pytest.raises(IndexError):
        directory.add(SLOTS, an_object(1))


def test_a_peers_directory_is_not_trusted() -> None:
    memory, directory = make()
    directory.add(3, an_object(77, b"key", 100_000, bytes(16)))
    page = bytes(memory[:HEADER_BYTES])
    header = read_header(page, len(memory))
    assert header == directory.header
    place = entry_offset(SLOTS, 3)
    assert read_entry(memory[place : place + ENTRY_BYTES], header) == directory.entry(3)
    seed = 20_261_129
    random_numbers = random.Random(seed)
    for _ in range(300):
        broken = bytearray(page)
        broken[random_numbers.randrange(HEADER_BYTES)] ^= 1 << random_numbers.randrange(8)
        with pytest.raises(ProtocolError):
            read_header(broken, len(memory))
        lying = bytearray(memory[place : place + ENTRY_BYTES])
        for _ in range(3):
            lying[random_numbers.randrange(ENTRY_BYTES)] = random_numbers.randrange(256)
        try:
            entry = read_entry(lying, header)
        except ProtocolError:
            continue
        assert entry.offset + entry.size <= CAPACITY
        if not entry.flags & FLAG_NO_LOG:
            assert header.log_offset <= entry.log_place
            assert entry.log_end <= len(memory)
    for field, value in (("slots", 0), ("log_offset", 64), ("log_bytes", 1 << 60), ("slots", 1 << 31)):
        with pytest.raises(ProtocolError):
            read_header(pack_header(header._replace(**{field: value})), len(memory))
    with pytest.raises(ProtocolError):
        read_header(page[:-1], len(memory))


def test_the_log_gives_every_byte_out_once() -> None:
    seed = 5
    random_numbers = random.Random(seed)
    log = LogSpace(4096)
    held: dict[int, int] = {}
    for _ in range(4000):
        if held and random_numbers.random() < 0.48:
            offset = random_numbers.choice(sorted(held))
            log.give_back(offset, held.pop(offset))
            continue
        size = random_numbers.randrange(1, 200)
        offset = log.take(size)
        if offset < 0:
            continue
        assert offset % LOG_UNIT == 0
        assert offset + size <= log.size_bytes
        end = offset + size
        assert all(end <= other or other + n <= offset for other, n in held.items()), f"seed {seed}"
        held[offset] = size
    for offset, size in held.items():
        log.give_back(offset, size)
    assert log.free_bytes == 4096
    with pytest.raises(InternalError):
        log.give_back(0, 8192)
    log.clear()
    assert log.take(4096) == 0
    assert log.take(1) == -1


def test_free_pieces_of_the_log_are_merged_when_they_are_needed() -> None:
    log = LogSpace(1024)
    blocks = [log.take(16) for _ in range(64)]
    assert log.take(16) == -1
    for offset in blocks:
        log.give_back(offset, 16)
    assert log.take(1024) == 0


def test_a_report_is_read_as_it_was_packed() -> None:
    records = [
        ReportRecord(0, RecordState.COMPLETE, 1, 2, 4096, 100, 7, bytes(range(16)), b"a"),
        ReportRecord(19, RecordState.DEAD, 0, 0, 0, 0, 9, bytes(16), b"k" * 1024, 3),
        ReportRecord(5, RecordState.HELD, 0, 0, 64, 64, 0, bytes(16), b""),
    ]
    data = pack_records(records)
    assert len(data) == 3 * 56 + 1025
    assert read_records(data, SLOTS, CAPACITY) == records
    assert read_records(b"", SLOTS, CAPACITY) == []
    seed = 11
    random_numbers = random.Random(seed)
    for _ in range(300):
        broken = bytearray(data[: random_numbers.randrange(len(data))])
        for _ in range(random_numbers.randrange(3)):
            if broken:
                broken[random_numbers.randrange(len(broken))] = random_numbers.randrange(256)
        try:
            found = read_records(bytes(broken), SLOTS, CAPACITY)
        except ProtocolError:
            continue
        assert all(one.slot < SLOTS and one.offset + one.size <= CAPACITY for one in found)
