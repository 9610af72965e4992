"""What the cuda transport publishes of a region: it can be read back, and nothing else can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import ProtocolError
from moonpool.transport.cuda_attribute import DEVICE, SLOTS, CudaAttribute, decode, encode


def test_what_is_published_is_read_back() -> None:
    device = CudaAttribute(kind=DEVICE, runtime="cuda", device=7, uuid=bytes(range(16)))
    slots = CudaAttribute(kind=SLOTS, runtime="cambricon", slot_bytes=4 << 20)
    for one in (device, slots):
        assert decode(encode(one)) == one
        assert len(encode(one)) == 48


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: b"\x02" + raw[1:],
        lambda raw: raw[:1] + b"\x03" + raw[2:],
        lambda raw: raw[:4] + b"\x01" + raw[5:],
        lambda raw: raw[:8] + b"\x01" + raw[9:],
        lambda raw: raw[:32] + bytes(16),
        lambda raw: raw[:32] + b"a\0b" + bytes(13),
        lambda raw: raw[:32] + b"\xff\xfe" + bytes(14),
    ],
)
def test_what_cannot_have_been_published_is_refused(spoil: object) -> None:
    raw = encode(CudaAttribute(kind=DEVICE, runtime="cuda", device=1))
    with pytest.raises(ProtocolError):
        decode(spoil(raw))  # type: ignore[operator]


def test_slots_have_a_size_within_reason() -> None:
    for size in (0, 1 << 40):
        with pytest.raises(ProtocolError):
            decode(encode(CudaAttribute(kind=SLOTS, runtime="cuda", slot_bytes=size)))


@given(st.binary(max_size=64))
def test_bytes_of_any_kind_are_read_or_refused(raw: bytes) -> None:
    try:
        about = decode(raw)
    except ProtocolError:
        return
    assert encode(about) == raw
