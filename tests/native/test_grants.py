"""Grants: SipHash against the vectors of its authors, and the 24 bytes against their description."""

from __future__ import annotations

import array
import struct

import pytest

from moonpool.errors import UsageError
from moonpool.native.io.grants import UNITS_MAX, make_grant, make_grants, read_grant, siphash24

KEY = bytes(range(16))
# siphash24 of bytes(range(n)) under KEY, n = 0, 1, ...: first rows of `vectors` in the authors' program.
VECTORS = [
    "310e0edd47db6f72",
    "fd67dc93c539f874",
    "5a4fa9d909806c0d",
    "2d7efbd796666785",
    "b7877127e09427cf",
    "8da699cd64557618",
    "cee3fe586e46c9cb",
    "37d1018bf50002ab",
    "6224939a79f5f593",
    "b0e4a90bdf82009e",
    "f3b9dd94c5bb5d7a",
    "a7ad6b22462fb3f4",
    "fbe50e86bc8f1e75",
    "903d84c02756ea14",
    "eef27a8e90ca23f7",
    "e545be4961ca29a1",
]


def test_siphash_vectors() -> None:
    for size, expected in enumerate(VECTORS):
        assert siphash24(KEY, bytes(range(size))).to_bytes(8, "little").hex() == expected, size
    # The example of the paper's appendix A.
    assert siphash24(KEY, bytes(range(15))) == 0xA129CA6149BE45E5


def test_the_format() -> None:
    region, start, length, deadline, tag = 0x1_0000_0007, 64 * 0x123456789A, 4096, 0xFEDCBA98, 0x1234
    grant = make_grant(KEY, region, start, length, deadline, tag)
    body = (
        (0x123456789A).to_bytes(5, "little") + (64).to_bytes(5, "little") + struct.pack("<IH", deadline, tag)
    )
    assert grant == body + siphash24(KEY, struct.pack("<Q", region) + body).to_bytes(8, "little")
    assert read_grant(grant) == (
        start,
        length,
        deadline,
        tag,
        siphash24(KEY, struct.pack("<Q", region) + body),
    )


def test_a_length_is_rounded_up_to_units() -> None:
    assert [read_grant(make_grant(KEY, 1, 128, n, 9, 1))[1] for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_many_are_each_like_one() -> None:
    starts, lengths = [0, 4096, 64 * UNITS_MAX], [64, 100, 64 * UNITS_MAX]
    expected = b"".join(make_grant(KEY, 5, s, n, 77, 0xFFFF) for s, n in zip(starts, lengths, strict=True))
    assert make_grants(KEY, 5, starts, lengths, 77, 0xFFFF) == expected
    assert make_grants(KEY, 5, array.array("Q", starts), array.array("Q", lengths), 77, 0xFFFF) == expected
    assert make_grants(KEY, 5, [], [], 77, 0) == b""


def test_what_is_no_grant_is_refused() -> None:
    for wrong in (
        lambda: make_grant(b"short", 1, 0, 64, 1, 1),
        lambda: make_grant(KEY, 1, 63, 64, 1, 1),
        lambda: make_grant(KEY, 1, 64 * (UNITS_MAX + 1), 64, 1, 1),
        lambda: make_grants(KEY, 1, [0, 64], [64], 1, 1),
        lambda: read_grant(bytes(23)),
        lambda: siphash24(b"", b""),
    ):
        with pytest.raises(UsageError):
            wrong()
    for numbers in ((-1, 64, 1, 1), (0, 64, 1 << 32, 1), (0, 64, 1, 1 << 16)):
        with pytest.raises(OverflowError):
            make_grant(KEY, 1, *numbers)
