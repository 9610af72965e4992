"""Hostile bytes at a live lane: the same groups, the same answers and the same endings as the reference's.

The lanes are real loopback connections to a `TargetServer` in this process; what it must do is predicted by
`moonpool.wire.lane_parser` and the model of the volume fuzzer, whose short form runs here too. Hypothesis
prints the input of a failure; the other tests print their seed.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.bench.frame_fuzz import FuzzPlan, report, run
from moonpool.bench.frame_fuzz_bulk import BulkMaker, confirm
from moonpool.bench.frame_fuzz_frames import FrameMaker
from moonpool.bench.frame_fuzz_lanes import LaneFuzzer
from moonpool.bench.frame_fuzz_model import Oracle, RegionFacts, TargetFacts, Violation, pattern
from moonpool.bench.frame_fuzz_target import LAYOUTS, FuzzedTarget, GuardedMemory
from moonpool.bench.frame_fuzz_wire import Where, receive_up_to
from moonpool.errors import ProtocolError, Status
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.server import TargetServer
from moonpool.operations import Access
from moonpool.wire.lane_parser import (
    GroupEnded,
    GroupOpened,
    Notification,
    PayloadPiece,
    TargetEvent,
    TargetParser,
)
from moonpool.wire.transfer import (
    ENTRIES_MAX,
    ENTRY_BYTES,
    LENGTH_MAX,
    Entry,
    GroupHeader,
    LaneOp,
    encode_group,
)

WAIT_S = 20.0
STREAM_BYTES_MAX = 8_192
#: AddressSanitizer keeps up to 256 MiB of freed memory, to notice its use.
SANITIZED_SLACK_KIB = 512 * 1_024
SIZE = 1_000
GUARD_BYTES = 96
GUARD = 0xA5
READ_KEY, WRITE_KEY = b"the read key 16b", b"the write key 16"
INSTANCE = bytes(range(1, 17))


#: Two regions between guards: the first may be read, the second written.
ACCESSES = (Access.READ, Access.WRITE)
STARTS = tuple(GUARD_BYTES + k * (SIZE + GUARD_BYTES) for k in range(2))
FACTS = TargetFacts(
    pid=0,
    port=0,
    unix_name="",
    instance=INSTANCE,
    regions_max=8,
    regions=tuple(
        RegionFacts(
            name=str(k),
            handle=1 << 32 | k,
            size_bytes=SIZE,
            access=access,
            read_key=READ_KEY,
            write_key=WRITE_KEY,
            first_seed=k,
            written_seed=k,
        )
        for k, access in enumerate(ACCESSES)
    ),
    stale_handle=3 << 32,
)
ORACLE = Oracle(FACTS)


@dataclass
class Prediction:
    """What the reference makes of a stream: the answers up to its end or its first broken rule."""

    answers: bytearray = field(default_factory=bytearray)
    #: How many bytes break no rule; the next one does, when there is one.
    legal_bytes: int = 0
    groups: int = 0
    #: Where in `answers` the status of a notification is: QUEUE_FULL depends on earlier streams.
    notices: list[int] = field(default_factory=list)
    #: (place in the writable region, byte), in order.
    writes: list[tuple[int, int]] = field(default_factory=list)
    _opened: GroupOpened = field(default_factory=lambda: GroupOpened(GroupHeader(LaneOp.PING, 0, 0, 0), ()))

    def take(self, event: TargetEvent) -> None:
        if isinstance(event, GroupOpened):
            self._opened = event
        elif isinstance(event, PayloadPiece):
            entry = self._opened.entries[event.entry]
            if ORACLE.status_of(LaneOp.WRITE, entry) is Status.COMPLETE:
                at = entry.offset + event.offset
                self.writes += [(at + k, byte) for k, byte in enumerate(event.data)]
        elif isinstance(event, Notification):
            self.notices.append(len(self.answers) + 3)
            self.answers += ORACLE.answer(event.header, ())
        else:
            self.answers += ORACLE.answer(self._opened.header, self._opened.entries)
        self.groups += isinstance(event, GroupEnded | Notification)


def predict(stream: bytes) -> Prediction:
    parser = TargetParser()
    made = Prediction()
    # Byte by byte, since a broken rule drops the events of the same call.
    for at in range(len(stream)):
        try:
            events = parser.feed(stream[at : at + 1])
        except ProtocolError:
            break
        for event in events:
            made.take(event)
        made.legal_bytes = at + 1
    return made


class LiveTarget:
    """A server whose memory is known byte for byte."""

    def __init__(self, io: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.full(STARTS[-1] + SIZE + GUARD_BYTES, GUARD, dtype=np.uint8)
        self.regions = LocalRegions(FACTS.regions_max)
        for facts, start in zip(FACTS.regions, STARTS, strict=True):
            self.memory[start : start + SIZE] = pattern(facts.first_seed, SIZE)
            address = int(self.memory.ctypes.data) + start
            handle = self.regions.add(address, SIZE, int(facts.access), READ_KEY, WRITE_KEY)
            assert handle == facts.handle
        self.expected = self.memory.copy()
        self.server = TargetServer(
            self.regions,
            io=io,
            spin_ns=0,
            spin_max_bytes=0,
            stall_ns=int(WAIT_S * 1e9),
            lanes_max=64,
            notices_max=1,
        )
        self.listener = socket.create_server(("127.0.0.1", 0))

    def connect(self) -> socket.socket:
        ours = socket.create_connection(self.listener.getsockname())
        theirs, _ = self.listener.accept()
        ours.settimeout(WAIT_S)
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.add_lane(theirs.detach(), INSTANCE)
        return ours

    def check_memory(self, writes: list[tuple[int, int]]) -> None:
        """Every byte is what it was, or what the reference says was written there since."""
        for at, byte in writes:
            self.expected[STARTS[1] + at] = byte
        assert (self.memory == self.expected).all(), "memory is not what the reference says"

    def wait_for_no_lanes(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.server.lanes:
            assert time.monotonic() < deadline, "the lane's thread goes on"
            time.sleep(0.0005)

    def close(self) -> None:
        self.listener.close()
        assert self.server.close(WAIT_S), "lane threads did not end"


@pytest.fixture(scope="module", params=[0, 1], ids=["blocking", "epoll"])
def target(request: pytest.FixtureRequest) -> Iterator[LiveTarget]:
    live = LiveTarget(request.param)
    yield live
    live.close()


def receive_until_end(sock: socket.socket) -> bytes:
    out = b""
    try:
        while piece := sock.recv(65_536):
            out += piece
    except ConnectionResetError:
        pass  # the target closed with bytes of ours unread
    return out


def send_in_pieces(sock: socket.socket, data: bytes, cuts: list[int]) -> None:
    position = 0
    while position < len(data):
        for size in cuts:
            sock.sendall(data[position : position + size])
            position += size


def check_lane(target: LiveTarget, stream: bytes, cuts: list[int]) -> None:
    """Sends a stream in pieces; answers, ending and memory must be the reference's."""
    expected = predict(stream)
    breaks = expected.legal_bytes < len(stream)
    before = target.server.counters()
    with target.connect() as sock:
        # The byte that breaks a rule goes last and alone, so that a reset cannot take answers with it.
        send_in_pieces(sock, stream[: expected.legal_bytes], cuts)
        answers = bytearray(receive_up_to(sock, len(expected.answers)))
        for at in expected.notices:
            assert answers[at] in (Status.COMPLETE, Status.QUEUE_FULL)
            answers[at] = Status.COMPLETE
        assert answers == expected.answers
        if breaks:
            sock.sendall(stream[expected.legal_bytes : expected.legal_bytes + 1])
        else:
            sock.shutdown(socket.SHUT_WR)
        assert receive_until_end(sock) == b"", "more came than the reference answers"
    target.wait_for_no_lanes()
    after = target.server.counters()
    assert after["lanes_broken"] - before["lanes_broken"] == breaks
    assert after["groups"] - before["groups"] >= expected.groups
    target.check_memory(expected.writes)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Some frames of the fuzzer's with up to three accidents, or bytes alone."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    maker = FrameMaker(ORACLE, random.Random(draw(st.integers(0, 2**32))))
    stream = b""
    for _ in range(draw(st.integers(1, 4))):
        frame = maker.legal().data
        if len(stream) + len(frame) <= STREAM_BYTES_MAX:
            stream += frame
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(stream)))
        end = draw(st.integers(at, min(len(stream), at + 64)))
        stream = stream[:at] + draw(st.binary(max_size=8)) + stream[draw(st.sampled_from([at, end])) :]
    return stream


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(stream=streams(), cuts=st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_a_live_lane_does_what_the_reference_says(target: LiveTarget, stream: bytes, cuts: list[int]) -> None:
    check_lane(target, stream, cuts)


def changed(frame: bytes, at: int, form: str, value: int) -> bytes:
    out = bytearray(frame)
    struct.pack_into(form, out, at, value)
    return bytes(out)


PING = encode_group(GroupHeader(LaneOp.PING, 0, 1, 0))
READ = encode_group(GroupHeader(LaneOp.READ, 1, 2, 8), [Entry(1 << 32, 0, 8, READ_KEY)])
BROKEN = {
    "magic": changed(PING, 0, "<H", 0x4D50),
    "operation 0": changed(PING, 2, "<B", 0),
    "operation 6": changed(PING, 2, "<B", 6),
    "flags": changed(PING, 3, "<B", 1),
    "count of a ping": changed(PING, 4, "<I", 1),
    "payload of a ping": changed(PING, 16, "<Q", 1),
    "reserved": changed(PING, 24, "<Q", 1),
    "no entries": changed(READ, 4, "<I", 0),
    "too many entries": changed(READ, 4, "<I", ENTRIES_MAX + 1),
    "payload beyond all lengths": changed(READ, 16, "<Q", LENGTH_MAX + 1),
    "payload below the lengths": changed(READ, 16, "<Q", 7),
    "length": changed(changed(READ, 16, "<Q", LENGTH_MAX), 48, "<Q", LENGTH_MAX + 1),
    "grant": changed(READ, 32 + ENTRY_BYTES - 1, "<B", 1),
    "message": encode_group(GroupHeader(LaneOp.NOTIFY, 0, 1, 65_536))[:16] + struct.pack("<QQ", 65_537, 0),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_broken_rule_closes_the_lane_after_the_answers_before_it(target: LiveTarget, rule: str) -> None:
    stream = PING + READ + BROKEN[rule]
    assert predict(stream).legal_bytes < len(stream), "the reference allows it"
    assert predict(stream).groups == 2
    check_lane(target, stream, [1_000])


def test_bulk_frames_are_predicted_as_the_reference_does() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    maker = FrameMaker(ORACLE, random.Random(seed))
    bulk = BulkMaker(maker, ORACLE, np.random.default_rng(seed)).make(1_000)
    confirm(ORACLE, bulk, bulk.frames)
    made = predict(bulk.data[: 100 * 96])
    assert made.groups == 100
    assert bulk.answer.startswith(bytes(made.answers))


def test_the_volume_fuzzer_notices_a_wrong_answer() -> None:
    """A target that allows what it should not: here it is the fuzzer that was told of less access."""
    target = FuzzedTarget()
    with target.engine:
        facts = target.facts()
        told = tuple(replace(one, access=Access.NONE) if one.name == "both" else one for one in facts.regions)
        fuzzer = LaneFuzzer(Where(replace(facts, regions=told), WAIT_S), seed=1)
        with pytest.raises(Violation, match="lane run 1 of seed 1"):
            fuzzer.run(20_000)
        honest = LaneFuzzer(Where(facts, WAIT_S), seed=1)
        assert honest.run(20_000) > 1


def test_the_volume_fuzzer_notices_a_changed_byte() -> None:
    for where, place in (("before", -1), ("behind", LAYOUTS[2].size_bytes), ("neither old nor written", 0)):
        memory = GuardedMemory(LAYOUTS[2])
        assert memory.problems(may_be_written=True) == []
        ctypes.c_ubyte.from_address(memory.array.ctypes.data + place).value ^= 0xFF
        (problem,) = memory.problems(may_be_written=True)
        assert where in problem


@pytest.mark.timeout(100)
def test_an_engine_under_fire_in_short() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    plan = FuzzPlan(frames=40_000, seed=seed)
    if os.environ.get("MOONPOOL_SANITIZED"):
        plan = replace(plan, memory_slack_kib=SANITIZED_SLACK_KIB)
    result = report(run(plan))
    assert result["violations"] == []
    assert result["frames"] >= 40_000
    assert result["connections_closed"] == result["connections"]
    assert set(result["sent"]) == {"lanes", "control", "hellos"}
    assert result["bystanders"]["healthy_bytes"] > 0
    assert result["target"]["written"] > 0
