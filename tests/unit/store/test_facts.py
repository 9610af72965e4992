"""Facts as bytes: fixtures that pin every type, strict reading, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.store import facts
from moonpool.store.errors import UnknownFact
from moonpool.store.facts import TYPES, Fact, decode_fact, decode_group, encode_fact, encode_group
from moonpool.store.records import Place

GOLDEN = Path(__file__).parents[2] / "golden" / "facts_v1.txt"
DIGEST = bytes(range(16))
#: One of each type, with fields at their usual and their largest.
SAMPLES: tuple[Fact, ...] = (
    facts.Leader(3, "m1", ("10.0.0.1:7420", "/run/m1"), "run-1"),
    facts.Node(1, "n1", "h1", DIGEST, "10.0.0.2:1", "/run/n1", 1),
    facts.Segment(1, 1, "n1-0", 1, 1 << 30, 4096, 1, 1, "cpu:0", 1 << 32 | 1, 1 << 32 | 2, 1),
    facts.SegmentState(1, 2, 1),
    facts.Window(1, 0, 256 << 20),
    facts.Object(3 << 40 | 1, 0, b"key", 4096, DIGEST, 1, 0, 0, 0, (Place(1, 0, 0),), 0),
    facts.Object(
        (1 << 63) - 1,
        2**32 - 1,
        b"\xff" * 1024,
        1 << 40,
        DIGEST,
        8,
        1,
        1 << 50,
        2**64 - 1,
        (Place(1, 1 << 40, 7), Place(2, 64, 2**32 - 1)),
        3 << 40 | 1,
    ),
    facts.ObjectsGone(3, 0, ((3 << 40 | 1, b"key"), (3 << 40 | 2, b""))),
    facts.PlaceGone(3 << 40 | 1, 0, b"key", 1, 5),
    facts.PlaceAdded(3 << 40 | 1, 0, b"key", Place(2, 128, 3)),
    facts.PinSet(3 << 40 | 1, 0, b"key", 2, 0),
    facts.Tenant(1, "team", 1 << 40, DIGEST * 2),
    facts.NodeStateSet(1, 4),
    facts.Settled(),
)


def test_every_type_has_a_sample_and_as_many_letters_as_fields() -> None:
    assert {type(sample) for sample in SAMPLES} == TYPES.keys()
    for kind, (_, letters) in TYPES.items():
        assert len(letters) == len(kind._fields)
    numbers = [number for number, _ in TYPES.values()]
    assert len(set(numbers)) == len(numbers)


def test_the_bytes_are_those_of_version_1() -> None:
    """A change here is a new version of the journal's format."""
    lines = [f"{type(sample).__name__} {encode_fact(sample).hex()}" for sample in SAMPLES]
    assert GOLDEN.read_text().splitlines() == lines


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_what_is_written_is_read(sample: Fact) -> None:
    again = decode_fact(encode_fact(sample))
    assert again == sample
    assert type(again) is type(sample)


@pytest.mark.parametrize(
    "row",
    [
        [],
        [1],
        [99, 1],
        [0, 1, 2],
        [True, 1, 3, "m", [], ""],
        [1, 2, 3, "m", [], ""],
        [1, True, 3, "m", [], ""],
        [1, 1, 3, "m", []],
        [1, 1, 3, "m", [], "", 0],
        [1, 1, -3, "m", [], ""],
        [1, 1, 3.0, "m", [], ""],
        [1, 1, 3, b"m", [], ""],
        [1, 1, 3, "m", ["a", 1], ""],
        [1, 1, 3, "m", "ab", ""],
        [4, 1, 1, True, 1],
        [9, 1, 5, 0, b"k", [1, 2]],
        [9, 1, 5, 0, "k", [1, 2, 3]],
        [7, 1, 1, 0, [[1, b"k", 3]]],
        [7, 1, 1, 0, [1]],
        [13, 1, 1],
        "fact",
        None,
        {1: 2},
    ],
)
def test_what_is_not_a_fact_is_refused(row: Any) -> None:
    with pytest.raises(UnknownFact):
        decode_fact(msgpack.packb(row))


def test_bytes_left_over_and_cut_off_are_refused() -> None:
    whole = encode_fact(SAMPLES[5])
    for data in (whole + b"\x00", whole[:-1], b"", whole * 2):
        with pytest.raises(UnknownFact):
            decode_fact(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_fact_or_the_error(data: bytes) -> None:
    try:
        fact = decode_fact(data)
    except UnknownFact:
        return
    assert decode_fact(encode_fact(fact)) == fact


@given(st.integers(0, len(SAMPLES) - 1), st.integers(0, 2000), st.integers(1, 255))
def test_a_changed_byte_gives_a_fact_or_the_error(which: int, at: int, flip: int) -> None:
    data = bytearray(encode_fact(SAMPLES[which]))
    data[at % len(data)] ^= flip
    try:
        fact = decode_fact(bytes(data))
    except UnknownFact:
        return
    assert decode_fact(encode_fact(fact)) == fact


def test_a_group_holds_its_facts() -> None:
    data = encode_group(3, 7, 123_456, [encode_fact(sample) for sample in SAMPLES])
    group = decode_group(data)
    assert group == facts.Group(3, 7, 123_456, SAMPLES)
    plain = msgpack.unpackb(data, raw=False)
    assert plain[:4] == [1, 3, 7, 123_456]
    assert len(plain[4]) == len(SAMPLES)


@pytest.mark.parametrize(
    "row", [[1, 3, 7, 5], [2, 3, 7, 5, []], [1, 3, 7, "5", []], [1, 3, 7, 5, [[99, 1]]], 5]
)
def test_what_is_no_group_is_refused(row: Any) -> None:
    with pytest.raises(UnknownFact):
        decode_group(msgpack.packb(row))
