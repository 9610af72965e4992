"""Frames of the rpc: the reference codec's rules, and the native codecs byte for byte against it."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import LimitExceeded, ProtocolError, UsageError
from moonpool.native.io import rpc_frames
from moonpool.wire.rpc import (
    CONTAINERS_MAX,
    DEPTH_MAX,
    FrameSplitter,
    RpcFault,
    RpcMessage,
    RpcPush,
    RpcReply,
    RpcRequest,
    decode_body,
    encode_frame,
    pack_fault,
    pack_value,
    unpack_fault,
    unpack_value,
)

U64 = st.integers(0, 2**64 - 1)
IDS = st.integers(1, 2**64 - 1)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.binary(max_size=40),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=18) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)
PARAMS = st.lists(VALUES, max_size=5)
FAULTS = st.builds(
    RpcFault, st.integers(1, 65_535), NAMES, st.text(st.characters(codec="utf-8"), max_size=40)
)
KEYS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=1_024), st.text(st.characters(codec="utf-8"), min_size=1, max_size=90)
    ),
    max_size=40,
)
MESSAGES = st.one_of(
    st.builds(RpcRequest, U64, NAMES, PARAMS),
    st.builds(RpcReply, U64, st.none(), VALUES),
    st.builds(RpcReply, U64, FAULTS, st.none()),
    st.builds(RpcPush, NAMES, PARAMS),
)


@given(MESSAGES)
def test_a_message_comes_back(message: RpcMessage) -> None:
    frame = encode_frame(message)
    assert struct.unpack("<I", frame[:4])[0] == len(frame) - 4
    assert decode_body(frame[4:]) == message


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_is_cut_into_frames_wherever_it_was_broken(
    messages: list[RpcMessage], cuts: list[int]
) -> None:
    stream = b"".join(encode_frame(message) for message in messages)
    splitter, bodies, edges = (
        FrameSplitter(),
        [],
        sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)}),
    )
    start = 0
    for edge in edges:
        bodies += splitter.feed(stream[start:edge])
        start = edge
    assert [decode_body(body) for body in bodies] == messages


@given(IDS, NAMES, PARAMS)
def test_a_native_call_has_the_bytes_of_the_reference(
    message_id: int, method: str, params: list[Any]
) -> None:
    native = rpc_frames.call_frame(message_id, method, pack_value(params))
    assert native == encode_frame(RpcRequest(message_id, method, params))


@given(IDS, KEYS, U64)
def test_native_reads_have_the_bytes_of_the_reference(
    message_id: int, keys: list[Any], lease_ms: int
) -> None:
    exists = encode_frame(RpcRequest(message_id, "exists", [keys, lease_ms]))
    assert rpc_frames.exists_frame(message_id, keys, lease_ms) == exists
    lookup = encode_frame(RpcRequest(message_id, "lookup", [keys, lease_ms]))
    assert rpc_frames.lookup_frame(message_id, tuple(keys), lease_ms) == lookup


@given(IDS, KEYS, st.data())
def test_native_puts_have_the_bytes_of_the_reference(
    message_id: int, keys: list[Any], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(U64, min_size=len(keys), max_size=len(keys)))
    policy = data.draw(st.one_of(st.none(), st.dictionaries(NAMES, SCALARS, max_size=3)))
    wait_ms = data.draw(U64)
    packed = None if policy is None else pack_value(policy)
    expected = encode_frame(RpcRequest(message_id, "put_start", [keys, sizes, policy, wait_ms]))
    assert rpc_frames.put_start_frame(message_id, keys, sizes, packed, wait_ms) == expected
    roots = data.draw(st.binary(min_size=16 * len(keys), max_size=16 * len(keys)))
    chunks = data.draw(
        st.one_of(st.none(), st.lists(st.binary(max_size=300), min_size=len(keys), max_size=len(keys)))
    )
    entries = [
        [number, roots[16 * number : 16 * number + 16], b"" if chunks is None else chunks[number]]
        for number in range(len(keys))
    ]
    expected = encode_frame(RpcRequest(message_id, "put_end", [wait_ms, entries]))
    assert rpc_frames.put_end_frame(message_id, wait_ms, range(len(keys)), roots, chunks) == expected


@given(
    st.lists(MESSAGES.filter(lambda message: not isinstance(message, RpcRequest)), max_size=6),
    st.integers(0, 60),
)
def test_native_messages_are_those_of_the_reference(messages: list[RpcMessage], lost: int) -> None:
    whole = b"".join(encode_frame(message) for message in messages)
    begun = encode_frame(RpcPush("begun", ["x" * 60]))[:lost]
    used, taken = rpc_frames.take_messages(whole + begun, 1 << 24)
    assert used == len(whole)
    assert [_as_message(one) for one in taken] == messages


def _as_message(taken: tuple[int | None, bytes | str | None, bytes]) -> RpcMessage:
    first, second, body = taken
    if first is None:
        return RpcPush(str(second), unpack_value(body))
    return RpcReply(first, unpack_fault(second) if isinstance(second, bytes) else None, unpack_value(body))


PLACES = st.lists(st.tuples(st.integers(0, 2**32 - 1), U64, st.integers(0, 2**32 - 1)), max_size=4)


@given(
    U64,
    U64,
    st.lists(
        st.none() | st.tuples(IDS, U64, st.binary(min_size=16, max_size=16), st.integers(0, 255), PLACES)
    ),
)
def test_a_lookup_reply_is_read_as_it_was_written(epoch: int, version: int, entries: list[Any]) -> None:
    reply = rpc_frames.lookup_result(msgpack.packb([epoch, version, entries]), len(entries))
    assert (reply.epoch, reply.segments_version, len(reply)) == (epoch, version, len(entries))
    expected = [None if one is None else (*one[:4], tuple(one[4])) for one in entries]
    assert [reply.entry(k) for k in range(len(entries))] == expected
    assert list(reply.object_ids) == [0 if one is None else one[0] for one in entries]
    assert list(reply.sizes) == [0 if one is None else one[1] for one in entries]
    assert reply.digests == b"".join(bytes(16) if one is None else one[2] for one in entries)
    assert list(reply.types) == [0 if one is None else one[3] for one in entries]
    places = [place for one in entries if one is not None for place in one[4]]
    assert list(reply.place_counts) == [0 if one is None else len(one[4]) for one in entries]
    assert list(zip(reply.place_segments, reply.place_offsets, reply.place_slots, strict=True)) == places


@given(U64, st.lists(st.tuples(st.integers(0, 255), PLACES), max_size=6), st.binary(min_size=24, max_size=24))
def test_a_put_start_reply_is_read_as_it_was_written(number: int, entries: list[Any], grant: bytes) -> None:
    granted = [[code, [[*place, grant] for place in places]] for code, places in entries]
    reply = rpc_frames.put_start_result(msgpack.packb([1, 2, number, 3, granted]), len(entries))
    assert (reply.epoch, reply.segments_version, reply.put_id, reply.remaining_ms) == (1, 2, number, 3)
    assert [reply.entry(k) for k in range(len(entries))] == [
        (code, tuple((*place, grant) for place in places)) for code, places in entries
    ]
    assert list(reply.codes) == [code for code, _ in entries]
    assert reply.grants == grant * sum(len(places) for _, places in entries)


@given(U64, st.lists(st.tuples(st.integers(0, 255), U64), max_size=9))
def test_a_put_end_reply_is_read_as_it_was_written(epoch: int, entries: list[tuple[int, int]]) -> None:
    reply = rpc_frames.put_end_result(msgpack.packb([epoch, entries]), len(entries))
    assert reply.epoch == epoch
    assert [reply.entry(k) for k in range(len(entries))] == entries
    assert list(reply.codes) == [code for code, _ in entries]
    assert list(reply.object_ids) == [number for _, number in entries]


GOOD_LOOKUP = [1, 2, [None, [5, 10, bytes(16), 1, [[3, 4096, 2]]]]]
WRONG_LOOKUPS: list[Any] = [
    None,
    [1, 2],
    [1, 2, [None]],
    [1, -2, [None, None]],
    [1, 2, [None, [0, 10, bytes(16), 1, []]]],
    [1, 2, [None, [5, 10, bytes(15), 1, []]]],
    [1, 2, [None, [5, 10, bytes(16), 256, []]]],
    [1, 2, [None, [5, 10, bytes(16), 1, [[3, 4096]]]]],
    [1, 2, [None, [5, 10, bytes(16), 1, [[2**32, 4096, 2]]]]],
    [1, 2, [None, [5, 10, bytes(16), 1, 7]]],
]


@pytest.mark.parametrize("wrong", WRONG_LOOKUPS)
def test_a_lookup_reply_that_is_none_is_refused(wrong: Any) -> None:
    assert rpc_frames.lookup_result(msgpack.packb(GOOD_LOOKUP), 2).entry(1) is not None
    with pytest.raises(ProtocolError):
        rpc_frames.lookup_result(msgpack.packb(wrong), 2)


@pytest.mark.parametrize("length", range(40))
def test_a_reply_cut_off_is_refused_at_every_byte(length: int) -> None:
    packed = msgpack.packb(GOOD_LOOKUP)
    with pytest.raises(ProtocolError):
        rpc_frames.lookup_result(packed[: min(length, len(packed) - 1)], 2)


@pytest.mark.parametrize("key", [b"", "", b"k" * 1_025, "é" * 513, 7, None, "\ud800"])
def test_a_key_that_cannot_be_one_is_refused_by_name(key: Any) -> None:
    with pytest.raises(UsageError):
        rpc_frames.exists_frame(1, ["good", key], 0)


def test_counts_that_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="2 keys came with 1 sizes"):
        rpc_frames.put_start_frame(1, ["a", "b"], [1], None, 0)
    with pytest.raises(UsageError, match="not 16 for each"):
        rpc_frames.put_end_frame(1, 9, [0, 1], bytes(16))
    with pytest.raises(UsageError, match="chunk lists"):
        rpc_frames.put_end_frame(1, 9, [0], bytes(16), [b"", b""])
    with pytest.raises(UsageError, match="not one key"):
        rpc_frames.exists_frame(1, "a key", 0)
    with pytest.raises(UsageError, match="whole number"):
        rpc_frames.put_start_frame(1, ["a"], [-1], None, 0)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def frame_of(value: Any) -> bytes:
    body: bytes = msgpack.packb(value)
    return struct.pack("<I", len(body)) + body


# Of a message around them: the array of the message and the list of the params.
@pytest.mark.parametrize(("depth", "fits"), [(DEPTH_MAX - 2, True), (DEPTH_MAX - 1, False)])
def test_depth_is_bounded_alike_on_both_sides(depth: int, fits: bool) -> None:
    frame = frame_of([2, "push", [nested(depth)]])
    if fits:
        decode_body(frame[4:])
        assert rpc_frames.take_messages(frame, 1 << 24)[0] == len(frame)
        return
    with pytest.raises(ProtocolError):
        decode_body(frame[4:])
    with pytest.raises(ProtocolError):
        rpc_frames.take_messages(frame, 1 << 24)


@pytest.mark.parametrize(("lists", "fits"), [(CONTAINERS_MAX - 3, True), (CONTAINERS_MAX - 2, False)])
def test_lists_are_bounded_alike_on_both_sides(lists: int, fits: bool) -> None:
    frame = frame_of([2, "push", [[[]] * lists]])
    if fits:
        decode_body(frame[4:])
        assert rpc_frames.take_messages(frame, 1 << 24)[0] == len(frame)
        return
    with pytest.raises(ProtocolError):
        decode_body(frame[4:])
    with pytest.raises(ProtocolError):
        rpc_frames.take_messages(frame, 1 << 24)


NOT_MESSAGES: list[Any] = [
    0,
    [],
    {},
    ["push", "m", []],
    [3, "m", []],
    [2, "m"],
    [2, "m", [], 0],
    [2, "", []],
    [2, "m" * 65, []],
    [2, b"m", []],
    [2, "m", {}],
    [1, -1, None, 0],
    [1, 1, 5, 0],
    [0, 1, "m", None],
    [2, "m", [msgpack.ExtType(1, b"x")]],
    [2, "m", [msgpack.Timestamp(5)]],
]


@pytest.mark.parametrize("value", NOT_MESSAGES, ids=repr)
def test_what_is_no_message_is_refused_by_both(value: Any) -> None:
    frame = frame_of(value)
    with pytest.raises(ProtocolError):
        decode_body(frame[4:])
    with pytest.raises(ProtocolError):
        rpc_frames.take_messages(frame, 1 << 24)


@given(st.binary(max_size=80))
def test_any_bytes_are_taken_or_refused_by_both(body: bytes) -> None:
    """The native check is of structure alone: what it refuses, the reference refuses too."""
    frame = struct.pack("<I", len(body)) + body
    try:
        rpc_frames.take_messages(frame, 1 << 24)
    except ProtocolError:
        try:
            message = decode_body(body)
        except ProtocolError:
            return
        assert isinstance(message, RpcRequest)


def test_frames_above_the_bound_are_refused_on_their_way_out_and_in() -> None:
    with pytest.raises(LimitExceeded):
        encode_frame(RpcPush("push", [bytes(2_000)]), frame_bytes_max=1_000)
    frame = encode_frame(RpcPush("push", [bytes(2_000)]))
    with pytest.raises(ProtocolError):
        FrameSplitter(1_000).feed(frame[:4])
    with pytest.raises(ProtocolError):
        rpc_frames.take_messages(frame[:4], 1_000)
    with pytest.raises(ProtocolError):
        FrameSplitter().feed(bytes(4))


def test_a_fault_is_cut_to_its_bounds_and_survives_lone_surrogates() -> None:
    fault = unpack_fault(pack_fault(RpcFault(64, "N" * 100, "m\ud800" * 2_000)))
    assert (fault.code, len(fault.name), len(fault.message)) == (64, 64, 1_024)


@pytest.mark.parametrize(
    "wrong", [None, [], [0, "N", "m"], [64, 5, "m"], [64, "N", b"m"], [70_000, "N", "m"], ["64", "N", "m"]]
)
def test_what_is_no_fault_is_refused(wrong: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_fault(msgpack.packb(wrong))


def test_values_that_cannot_be_sent_are_the_callers_fault() -> None:
    for value in (object(), 2**64, {1: object()}):
        with pytest.raises(UsageError):
            pack_value(value)
