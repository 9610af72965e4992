"""Records, endpoints, peer-to-peer metadata, and the keeping of leases in told time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moonpool.clock import ManualClock
from moonpool.config import EngineConfig
from moonpool.errors import (
    EngineClosed,
    LimitExceeded,
    MetadataUnavailable,
    NameInUse,
    ProtocolError,
    UsageError,
)
from moonpool.ids import ANY_INSTANCE, InstanceId
from moonpool.metadata import format_endpoint, open_metadata, parse_endpoint
from moonpool.metadata.base import Lease, LeaseState, Record, decode_record, encode_record
from moonpool.metadata.lease_keeper import LEASES_MAX, LeaseKeeper, LeaseTimes
from moonpool.metadata.p2p import P2PMetadata
from moonpool.units import NS_PER_MS

RECORD = Record("node-1", "::1", 7420, "moonpool/ab", InstanceId(bytes(range(16))), 3)
LEASE_MS = 900


# --- records


def test_a_record_survives_the_journey() -> None:
    assert decode_record(encode_record(RECORD), 3) == RECORD
    assert decode_record(encode_record(RECORD).encode(), 3) == RECORD
    assert RECORD.endpoint == "[::1]:7420"


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": None},
        {"name": ""},
        {"name": 5},
        {"host": "two words"},
        {"port": 0},
        {"port": 65_536},
        {"port": True},
        {"port": "7420"},
        {"unix_name": None},
        {"unix_name": "a\nb"},
        {"instance": "00"},
        {"instance": "zz" * 16},
        {"instance": None},
    ],
)
def test_wrong_entries_are_protocol_errors(changes: dict[str, object]) -> None:
    fields = json.loads(encode_record(RECORD)) | changes
    with pytest.raises(ProtocolError):
        decode_record(json.dumps(fields), 1)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '"x"', "{}", b"\xff\xfe", "[" * 4000, "x" * 5000, '{"version":1}']
)
def test_hostile_entries_are_protocol_errors(text: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_record(text, 1)


def test_a_generation_out_of_range_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_record(encode_record(RECORD), -1)
    with pytest.raises(UsageError, match="generation"):
        RECORD.with_generation(1 << 64)


# --- endpoints


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("node-7.rack_2.example:65535", "node-7.rack_2.example", 65_535),
        ("[::1]:7420", "::1", 7420),
        ("[fe80::1%eth0]:7420", "fe80::1%eth0", 7420),
    ],
)
def test_endpoints_are_read_and_written(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == (host, port)
    assert format_endpoint(host, port) == text


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "host:port"),
        ("host", "host:port"),
        (":80", "host:port"),
        ("host:", "host:port"),
        ("host:0", "host:port"),
        ("host:65536", "host:port"),
        ("host:+80", "host:port"),
        ("host:٣", "host:port"),
        ("::1:7420", "brackets: [::1]:7420"),
        ("[::1]", "host:port"),
        ("[host]:80", "not an IPv6 address"),
        ("a b:80", "neither"),
        ("-a:80", "neither"),
        ("a/b:80", "neither"),
        ("x" * 600 + ":80", "at most"),
    ],
)
def test_bad_endpoints_show_the_right_form(text: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_endpoint(text)
    assert advice in str(caught.value)


# --- peer to peer


def test_p2p_resolves_by_reading_the_name() -> None:
    found = P2PMetadata().resolve("[::1]:7420")
    assert (found.host, found.port, found.instance, found.generation) == ("::1", 7420, ANY_INSTANCE, 0)
    with pytest.raises(UsageError, match="host:port"):
        P2PMetadata().resolve("node-1")


def test_p2p_lists_what_this_process_published() -> None:
    metadata = P2PMetadata()
    lease = metadata.register(RECORD)
    assert metadata.list() == [RECORD.with_generation(1)]
    assert lease.report().state is LeaseState.HELD
    metadata.withdraw(lease)
    metadata.withdraw(lease)
    assert metadata.list() == []
    assert lease.report().state is LeaseState.WITHDRAWN


def test_p2p_is_bounded_and_ends() -> None:
    metadata = P2PMetadata()
    leases = [metadata.register(RECORD) for _ in range(LEASES_MAX)]
    with pytest.raises(LimitExceeded):
        metadata.register(RECORD)
    metadata.close()
    metadata.close()
    assert all(lease.report().state is LeaseState.WITHDRAWN for lease in leases)
    with pytest.raises(EngineClosed):
        metadata.register(RECORD)


def test_the_configuration_chooses_the_service() -> None:
    assert isinstance(open_metadata(EngineConfig(), lambda record: True), P2PMetadata)
    with pytest.raises(UsageError, match="metadata"):
        open_metadata(EngineConfig(metadata="redis://host:port"), lambda record: True)


def test_peer_to_peer_needs_no_redis_client() -> None:
    code = (
        "import sys; from moonpool.metadata import open_metadata; from moonpool.config import EngineConfig;"
        "open_metadata(EngineConfig(), lambda record: True); sys.exit('redis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60).returncode == 0


# --- leases in told time


def test_a_given_lease_is_due_at_a_third() -> None:
    times = LeaseTimes.given(1_000, 900 * NS_PER_MS)
    assert times.due_ns == 1_000 + 300 * NS_PER_MS
    assert times.run_out_ns == 1_000 + 900 * NS_PER_MS


def test_failures_are_retried_with_growing_bounded_pauses() -> None:
    times = LeaseTimes.given(0, 900 * NS_PER_MS)
    pauses, now_ns = [], times.due_ns
    for _ in range(6):
        times = times.after_failure(now_ns)
        pauses.append((times.due_ns - now_ns) // NS_PER_MS)
        now_ns = times.due_ns
    assert pauses == [45, 90, 180, 300, 300, 300]
    assert times.run_out_ns == 900 * NS_PER_MS


class Service:
    """A scripted metadata service: what the next renewals answer, and which changes were heard."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.answers: list[Exception | None] = []
        self.asked = 0
        self.heard: list[LeaseState] = []
        self.keeper = LeaseKeeper(self.renew, LEASE_MS, self.clock, self.changed)
        # Driven by `step` alone: the thread is taken as started.
        self.keeper._thread = None
        self.lease = Lease(RECORD)
        self.keeper._times[self.lease] = LeaseTimes.given(0, LEASE_MS * NS_PER_MS)

    def renew(self, lease: Lease) -> None:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer

    def changed(self, lease: Lease) -> None:
        self.heard.append(lease.report().state)

    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds * NS_PER_MS)
        self.keeper.step()


def test_nothing_is_asked_before_a_lease_is_due() -> None:
    service = Service()
    service.advance(299)
    assert service.asked == 0
    service.advance(1)
    assert service.asked == 1
    assert service.lease.report().renewals == 1
    service.advance(299)
    assert service.asked == 1


def test_a_lease_fails_runs_out_and_comes_back() -> None:
    service = Service()
    service.answers = [MetadataUnavailable()] * 5
    for _ in range(5):
        service.advance(300)
    assert service.heard == [LeaseState.FAILING, LeaseState.EXPIRED]
    report = service.lease.report()
    assert (report.failures, report.renewals) == (5, 0)
    assert isinstance(report.last_error, MetadataUnavailable)
    service.advance(300)
    assert service.heard == [LeaseState.FAILING, LeaseState.EXPIRED, LeaseState.HELD]
    assert service.lease.report().last_error is None


def test_a_lost_name_is_not_asked_for_again() -> None:
    service = Service()
    service.answers = [NameInUse(name="node-1")]
    service.advance(300)
    assert service.heard == [LeaseState.LOST]
    for _ in range(5):
        service.advance(300)
    assert service.asked == 1
    assert service.keeper.leases() == []


def test_a_dropped_lease_keeps_its_last_state() -> None:
    service = Service()
    assert service.keeper.drop(service.lease)
    assert not service.keeper.drop(service.lease)
    service.lease.ended(LeaseState.WITHDRAWN)
    service.lease.renewed()
    service.lease.failed(MetadataUnavailable(), LeaseState.FAILING)
    service.advance(1_000)
    assert (service.asked, service.heard) == (0, [])
    assert service.lease.report().state is LeaseState.WITHDRAWN


def test_a_lease_withdrawn_during_its_renewal_stays_withdrawn() -> None:
    service = Service()

    def withdraw_meanwhile(lease: Lease) -> None:
        service.keeper.drop(lease)
        lease.ended(LeaseState.WITHDRAWN)

    service.keeper._renew = withdraw_meanwhile
    service.advance(300)
    assert service.lease.report().state is LeaseState.WITHDRAWN
    assert service.keeper.leases() == []


def test_an_owner_that_fails_does_not_end_the_keeping(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()

    def fail(lease: Lease) -> None:
        raise RuntimeError("owner's mistake")

    service.keeper._changed = fail
    service.answers = [MetadataUnavailable()]
    service.advance(300)
    assert "owner's mistake" in caplog.text
    service.advance(300)
    assert service.lease.report().state is LeaseState.HELD


def test_the_keeper_is_bounded_and_ends() -> None:
    keeper = LeaseKeeper(lambda lease: None, 60_000, ManualClock(), lambda lease: None)
    for _ in range(LEASES_MAX):
        keeper.add(Lease(RECORD), 0)
    with pytest.raises(LimitExceeded):
        keeper.add(Lease(RECORD), 0)
    thread = keeper._thread
    assert thread is not None
    keeper.close(30.0)
    keeper.close(30.0)
    assert not thread.is_alive()
    with pytest.raises(EngineClosed):
        keeper.add(Lease(RECORD), 0)
