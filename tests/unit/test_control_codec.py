"""Control frames: round trips, pinned bytes, and every bound on what a frame may cost."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import (
    STATUS_ERRORS,
    EngineClosed,
    InternalError,
    LimitExceeded,
    NoSuchSegment,
    PeerGone,
    ProtocolError,
    StaleHandle,
    Status,
    TransferTimeout,
    TransportUnavailable,
    UsageError,
)
from moonpool.wire.control import (
    ERROR_MESSAGE_LENGTH_MAX,
    FRAME_BYTES_MAX,
    ControlLimits,
    ControlMessage,
    ControlParser,
    PushMessage,
    ReplyMessage,
    RequestMessage,
    WireError,
    decode_message,
    encode_message,
    error_from_wire,
    wire_error,
)

LIMITS = ControlLimits()
U64 = st.integers(0, 2**64 - 1)
METHODS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.binary(max_size=20),
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=10)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
PARAMS = st.dictionaries(KEYS, VALUES, max_size=5)
WIRE_ERRORS = st.builds(
    WireError, st.integers(0, 255), METHODS, st.text(st.characters(codec="utf-8"), max_size=1_024)
)
MESSAGES = st.one_of(
    st.builds(RequestMessage, U64, METHODS, PARAMS),
    st.builds(ReplyMessage, U64, st.none() | WIRE_ERRORS, VALUES),
    st.builds(PushMessage, METHODS, PARAMS),
)


def frame(value: Any) -> bytes:
    body = msgpack.packb(value)
    return struct.pack("<I", len(body)) + body


def drain(parser: ControlParser) -> list[ControlMessage]:
    messages = []
    while (one := parser.next_frame()) is not None:
        messages.append(one.message)
    return messages


def test_frames_are_pinned() -> None:
    assert (
        encode_message(RequestMessage(5, "describe", {})) == b"\x0d\0\0\0" + b"\x94\x00\x05\xa8describe\x80"
    )
    assert encode_message(ReplyMessage(5, None, {})) == b"\x05\0\0\0" + b"\x94\x01\x05\xc0\x80"
    failed = ReplyMessage(5, WireError(6, "StaleHandle", "gone"))
    assert encode_message(failed) == b"\x17\0\0\0" + b"\x94\x01\x05\x93\x06\xabStaleHandle\xa4gone\xc0"
    assert encode_message(PushMessage("x", {"n": 1})) == b"\x08\0\0\0" + b"\x93\x02\xa1x\x81\xa1n\x01"


@given(st.lists(MESSAGES, max_size=5), st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(
    messages: list[ControlMessage], data: st.DataObject
) -> None:
    stream = b"".join(encode_message(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = ControlParser()
    seen: list[ControlMessage] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        parser.feed(stream[start:end])
        seen += drain(parser)
    assert seen == messages
    assert parser.frames_begun == len(messages)
    assert not parser.is_inside_frame


def test_frames_are_numbered_by_their_first_byte() -> None:
    first, second = encode_message(PushMessage("one")), encode_message(PushMessage("two"))
    parser = ControlParser()
    parser.feed(first[:1])
    assert (parser.frames_begun, parser.is_inside_frame) == (1, True)
    parser.feed(first[1:])
    assert (parser.frames_begun, parser.is_inside_frame) == (1, False)
    parser.feed(second[:3])
    assert (parser.frames_begun, parser.is_inside_frame) == (2, True)
    parser.feed(second[3:])
    frames = [parser.next_frame(), parser.next_frame()]
    assert [one.index for one in frames if one is not None] == [0, 1]
    assert parser.next_frame() is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "text",
        {},
        [],
        [0],
        [9, 1, "m", {}],
        [True, 1, "m", {}],
        [-1, 1, "m", {}],
        ["0", 1, "m", {}],
        [0, 1, "m"],
        [0, 1, "m", {}, None],
        [0, -1, "m", {}],
        [0, True, "m", {}],
        [0, "1", "m", {}],
        [0, 1, "", {}],
        [0, 1, "m" * 65, {}],
        [0, 1, b"m", {}],
        [0, 1, 5, {}],
        [0, 1, "m", []],
        [0, 1, "m", None],
        [0, 1, "m", {b"key": 1}],
        [1, 1, None],
        [1, 1, "error", None],
        [1, 1, [8, "AccessDenied"], None],
        [1, 1, [256, "AccessDenied", ""], None],
        [1, 1, [True, "AccessDenied", ""], None],
        [1, 1, [8, "n" * 65, ""], None],
        [1, 1, [8, 8, ""], None],
        [1, 1, [8, "AccessDenied", b""], None],
        [2, "m"],
        [2, "m", []],
    ],
)
def test_wrong_shapes_are_refused(value: Any) -> None:
    parser = ControlParser()
    parser.feed(frame(value))
    with pytest.raises(ProtocolError):
        parser.next_frame()


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",  # never used by MessagePack
        b"\x94\x00\x01\xa1m",  # cut off
        b"\x94\x00\x01\xa1m\x80\x80",  # more than one value
        b"\x94\x00\x01\xa1\xff\x80",  # a method that is not UTF-8
        b"\x94\x00\x01\xa1m\x81\x01\x02",  # a key that is a number
        b"\x94\x00\x01\xa1m\x81\x90\x02",  # a key that is a list
        b"\x94\x00\x01\xa1m\x81\xa1k\xd6\xff\0\0\0\0",  # a timestamp
        b"\x94\x00\x01\xa1m\x81\xa1k\xd4\x05\0",  # an extension type
        b"\x94\x00\x01\xa1m\x81\xa1k\xdd\xff\xff\xff\xff",  # a list of 2^32 items
        b"\x94\x00\x01\xa1m\x81\xa1k\xdf\xff\xff\xff\xff",  # a map of 2^32 entries
        b"\x94\x00\x01\xa1m\x81\xa1k\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    ],
)
def test_bad_messagepack_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(body, LIMITS)


@pytest.mark.parametrize("length", [0, 1_025, 0xFFFFFFFF])
def test_a_length_outside_the_limit_is_refused_before_its_bytes_come(length: int) -> None:
    parser = ControlParser(ControlLimits(frame_bytes_max=1_024))
    parser.feed(struct.pack("<I", length))
    with pytest.raises(ProtocolError, match=str(length)):
        parser.next_frame()


def test_a_failed_parser_gives_what_came_before_and_holds_nothing_after() -> None:
    parser = ControlParser(ControlLimits(frame_bytes_max=1_024))
    good = PushMessage("good")
    parser.feed(encode_message(good) + b"\xff\xff\xff\xff" + b"x" * 10_000)
    one = parser.next_frame()
    assert one is not None
    assert one.message == good
    for _ in range(2):
        with pytest.raises(ProtocolError):
            parser.next_frame()
        parser.feed(encode_message(good))
    assert parser.frames_begun == 2
    assert len(parser._buffer) == 0


def test_after_a_bad_frame_no_later_one_is_believed() -> None:
    parser = ControlParser()
    parser.feed(frame("bad") + encode_message(PushMessage("later")))
    for _ in range(2):
        with pytest.raises(ProtocolError):
            parser.next_frame()


def test_containers_are_bounded() -> None:
    limits = ControlLimits(containers_max=10)
    within: list[Any] = [0, 1, "m", {"k": [[]] * 7}]  # the outer array, params, and 8 lists
    assert isinstance(decode_message(msgpack.packb(within), limits), RequestMessage)
    with pytest.raises(ProtocolError, match="more than 10 lists and maps"):
        decode_message(msgpack.packb([0, 1, "m", {"k": [[]] * 8}]), limits)
    with pytest.raises(ProtocolError, match="more than 10 lists and maps"):
        decode_message(msgpack.packb([0, 1, "m", {"k": [{}] * 8}]), limits)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"k": inner}])
def test_depth_is_bounded(wrap: Any) -> None:
    def nested(depth: int) -> bytes:
        value: Any = 1
        for _ in range(depth - 2):
            value = wrap(value)
        packed: bytes = msgpack.packb([0, 1, "m", {"k": value}])
        return packed

    assert isinstance(decode_message(nested(LIMITS.depth_max), LIMITS), RequestMessage)
    with pytest.raises(ProtocolError, match="nests more than 16"):
        decode_message(nested(LIMITS.depth_max + 1), LIMITS)


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01"])
def test_endless_nesting_is_refused(opener: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(b"\x94\x00\x01\xa1m" + opener * 100_000, LIMITS)


def test_the_encoder_holds_to_the_limits() -> None:
    just_fits = ReplyMessage(1, None, b"x" * (FRAME_BYTES_MAX - 9))
    assert len(encode_message(just_fits)) == 4 + FRAME_BYTES_MAX
    with pytest.raises(LimitExceeded, match="ask for less") as caught:
        encode_message(ReplyMessage(1, None, b"x" * (FRAME_BYTES_MAX - 8)))
    assert caught.value.limit == FRAME_BYTES_MAX
    with pytest.raises(LimitExceeded):
        encode_message(PushMessage("m", {"k": b"x" * 100}), ControlLimits(frame_bytes_max=100))


@pytest.mark.parametrize("value", [object(), 2**64, {1, 2}, "\ud800", 1j])
def test_what_messagepack_cannot_carry_is_the_callers_error(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be encoded"):
        encode_message(RequestMessage(1, "m", {"k": value}))


def test_limits_are_checked() -> None:
    for wrong in ({"frame_bytes_max": 0}, {"frame_bytes_max": FRAME_BYTES_MAX + 1}, {"containers_max": 1}):
        with pytest.raises(UsageError):
            ControlLimits(**wrong)


def test_errors_travel_as_themselves() -> None:
    for error in (StaleHandle(handle=5), NoSuchSegment("no such name"), TransferTimeout()):
        sent = wire_error(error)
        assert (sent.code, sent.name) == (error.status, type(error).__name__)
        received = error_from_wire(sent, "host:1")
        assert type(received) is type(error)
        assert received.peer == "host:1"
        assert error.message in str(received)


def test_an_error_with_its_own_parameters_travels_too() -> None:
    received = error_from_wire(wire_error(TransportUnavailable("no library", "install it")))
    assert type(received) is TransportUnavailable
    assert "no library" in str(received)


def test_foreign_errors_tell_only_their_kind() -> None:
    sent = wire_error(ValueError("a password"))
    assert "password" not in sent.message
    assert type(error_from_wire(sent)) is InternalError
    assert wire_error(MemoryError()).code == Status.NO_MEMORY


def test_an_error_about_the_peers_process_is_not_about_ours() -> None:
    assert type(error_from_wire(wire_error(EngineClosed()))) is PeerGone


@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (WireError(8, "StaleHandle", ""), STATUS_ERRORS[Status.ACCESS_DENIED]),  # name and code disagree
        (WireError(6, "os.system", ""), StaleHandle),
        (WireError(6, "Status", ""), StaleHandle),
        (WireError(200, "StaleHandle", ""), ProtocolError),
        (WireError(0, "StaleHandle", ""), ProtocolError),
        (WireError(1, "StaleHandle", ""), ProtocolError),
    ],
)
def test_the_code_rules_over_the_name(wire: WireError, kind: type[Exception]) -> None:
    assert type(error_from_wire(wire)) is kind


def test_an_error_message_always_fits() -> None:
    sent = wire_error(UsageError("\ud800" + "x" * 5_000))
    assert len(sent.message) == ERROR_MESSAGE_LENGTH_MAX
    message = decode_message(encode_message(ReplyMessage(1, sent))[4:], LIMITS)
    assert message == ReplyMessage(1, sent)
