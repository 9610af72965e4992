"""The codec of what an owner publishes: whatever comes in, a value within bounds or ProtocolError."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moonpool.errors import ProtocolError
from moonpool.transport.nvme_attribute import ATTRIBUTE_BYTES_MAX, NamespaceRange, Target, decode

RANGE = NamespaceRange(
    subsystem_nqn="nqn.2026-01.lab:ns",
    nsid=1,
    wwid="uuid.0a49f228-1fbf-451f-a5ff-010fbbc01162",
    block_bytes=4096,
    offset=8192,
    size_bytes=1_000_001,
    fua=True,
    passthrough="no",
    targets=(Target("tcp", "10.99.0.2", "4420"), Target("rdma", "fe80::1%lab0", "4421")),
)


@pytest.mark.parametrize(
    "given",
    [
        RANGE,
        replace(RANGE, targets=(), fua=False, passthrough="auto"),
        replace(RANGE, targets=RANGE.targets * 4, passthrough="yes", block_bytes=512, offset=512),
    ],
)
def test_round_trip(given: NamespaceRange) -> None:
    assert decode(given.encode()) == given
    assert len(given.encode()) <= ATTRIBUTE_BYTES_MAX


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RANGE, block_bytes=1000),
        replace(RANGE, block_bytes=256),
        replace(RANGE, nsid=0),
        replace(RANGE, nsid=0xFFFFFFFF),
        replace(RANGE, size_bytes=0),
        replace(RANGE, offset=4095),
        replace(RANGE, subsystem_nqn=""),
        replace(RANGE, subsystem_nqn="nqn.a,hostnqn=b"),
        replace(RANGE, wwid="x" * 193),
        replace(RANGE, wwid="tab\there"),
        replace(RANGE, targets=RANGE.targets * 5),
        replace(RANGE, targets=(Target("fc", "10.0.0.1"),)),
        replace(RANGE, targets=(Target("tcp", "10.0.0.1,nqn=x"),)),
        replace(RANGE, targets=(Target("tcp", "10.0.0.1", "70000"),)),
        replace(RANGE, targets=(Target("tcp", "10.0.0.1", ""),)),
    ],
)
def test_what_is_no_range_is_refused_on_both_sides(wrong: NamespaceRange) -> None:
    with pytest.raises(ProtocolError):
        wrong.encode()


def test_every_cut_and_every_tail_is_refused() -> None:
    whole = RANGE.encode()
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(whole[:size])
    with pytest.raises(ProtocolError):
        decode(whole + b"\0")


def test_garbage_gives_a_value_within_bounds_or_protocol_error() -> None:
    chance = random.Random(11)
    whole = RANGE.encode()
    understood = 0
    for _ in range(5_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            found = decode(bytes(data))
        except ProtocolError:
            continue
        understood += 1
        found.check()
        assert found.encode() == bytes(data)
    for _ in range(2_000):
        with pytest.raises(ProtocolError):
            decode(chance.randbytes(chance.randrange(300)))
    assert understood > 0, "the mutations must reach behind the header"
