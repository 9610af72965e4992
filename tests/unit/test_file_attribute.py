"""What an owner publishes of a region in a file: it comes back as it was, and nothing else is taken."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import ProtocolError, UsageError
from moonpool.transport.file_attribute import (
    BLOCK_BYTES_MAX,
    PATH_BYTES_MAX,
    TAG_BYTES,
    FileAttribute,
    FileFlag,
)
from moonpool.transport.file_backing import FileOptions

TAG = bytes(range(TAG_BYTES))
PLAIN = FileAttribute(flags=FileFlag.DIRECT, block_bytes=4096, start=8192, size_bytes=1 << 30, tag=TAG)
SHARED = replace(PLAIN, flags=FileFlag.DIRECT | FileFlag.SHARED, path="/pool/data å")


@st.composite
def attributes(draw: st.DrawFn) -> FileAttribute:
    """Any that an owner may publish."""
    block = 1 << draw(st.integers(0, 16))
    flags = FileFlag(draw(st.integers(0, int(sum(FileFlag)))))
    path = ""
    if flags & FileFlag.SHARED:
        flags |= FileFlag.DIRECT
        letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
        path = "/" + draw(st.text(letters, max_size=PATH_BYTES_MAX // 4 - 1))
    return FileAttribute(
        flags=flags,
        block_bytes=block,
        start=draw(st.integers(0, 1 << 40)) * block,
        size_bytes=draw(st.integers(1, 1 << 62)),
        tag=draw(st.binary(min_size=TAG_BYTES, max_size=TAG_BYTES)),
        path=path,
    )


@given(attributes())
def test_it_comes_back_as_it_was(about: FileAttribute) -> None:
    raw = about.encode()
    assert len(raw) <= 40 + PATH_BYTES_MAX
    assert FileAttribute.decode(raw) == about


@given(st.binary(max_size=200))
def test_garbage_is_refused(raw: bytes) -> None:
    try:
        about = FileAttribute.decode(raw)
    except ProtocolError:
        return
    assert about.encode() == raw, "what is taken means exactly these bytes"


@given(attributes(), st.data())
def test_a_changed_bit_is_refused_or_means_what_it_says(about: FileAttribute, data: st.DataObject) -> None:
    raw = bytearray(about.encode())
    place = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[place // 8] ^= 1 << place % 8
    try:
        changed = FileAttribute.decode(bytes(raw))
    except ProtocolError:
        return
    assert changed.encode() == bytes(raw)
    assert changed.block_bytes <= BLOCK_BYTES_MAX


@pytest.mark.parametrize(
    ("place", "form", "value"),
    [
        (0, "<B", 2),  # a version to come
        (1, "<B", 0x80),  # a flag to come
        (2, "<H", 5),  # a path that is not there
        (4, "<I", 0),  # blocks of nothing
        (4, "<I", 4095),
        (4, "<I", 2 * BLOCK_BYTES_MAX),
        (8, "<Q", 8193),  # not on a block
        (8, "<Q", 1 << 63),
        (16, "<Q", 0),
        (16, "<Q", (1 << 62) + 1),
    ],
)
def test_what_makes_no_sense_is_refused(place: int, form: str, value: int) -> None:
    raw = bytearray(PLAIN.encode())
    struct.pack_into(form, raw, place, value)
    with pytest.raises(ProtocolError):
        FileAttribute.decode(bytes(raw))


@pytest.mark.parametrize(
    "path", [b"relative", b"/zero\0byte", b"/\xff\xfe", b"", b"/" + b"x" * PATH_BYTES_MAX]
)
def test_only_an_absolute_path_is_shared(path: bytes) -> None:
    head = bytearray(SHARED.encode()[:40])
    struct.pack_into("<H", head, 2, len(path))
    with pytest.raises(ProtocolError):
        FileAttribute.decode(bytes(head) + path)


def test_a_file_that_is_not_shared_has_no_path() -> None:
    head = bytearray(PLAIN.encode())
    struct.pack_into("<H", head, 2, 5)
    with pytest.raises(ProtocolError):
        FileAttribute.decode(bytes(head) + b"/file")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", -1),
        ("offset", 1.5),
        ("offset", 1 << 62),
        ("create", 1),
        ("direct", None),
        ("sync", "always"),
        ("preallocate", "yes"),
        ("shared", 0),
        ("block", 512),
    ],
)
def test_a_wrong_option_is_named(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        FileOptions.of({name: value})
    assert caught.value.field == name
