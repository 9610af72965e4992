"""Sizes and durations as text, and the clock values built on them."""

from __future__ import annotations

import pytest

from moonpool.clock import BootClock, Deadline, ManualClock, SystemClock
from moonpool.errors import UsageError
from moonpool.units import (
    GIB,
    KIB,
    MIB,
    format_duration,
    format_rate,
    format_size,
    parse_duration_ns,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4_096", 4096),
        (" 64 KiB ", 64 * KIB),
        ("64k", 64 * KIB),
        ("8M", 8 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("1.5 GB", 1_500_000_000),
        ("2tib", 2048 * GIB),
        ("7 B", 7),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "KiB", "-1", "1.5", "0.3 B", "1e3", "5 parsecs", "1 2", "9" * 21, "1__0", "٣", "1.0000000001G"],
)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("250us", 250_000),
        ("3 s", 3_000_000_000),
        ("1.5 min", 90_000_000_000),
        ("1h", 3_600 * 10**9),
        ("9ns", 9),
    ],
)
def test_durations_are_read(text: str, duration_ns: int) -> None:
    assert parse_duration_ns(text) == duration_ns


@pytest.mark.parametrize("text", ["", "3", "s", "-1 s", "1 day", "0.5 ns"])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="duration"):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (4097, "4.00 KiB"), (1023, "1023 B"), (64 * KIB, "64 KiB"), (3 * GIB // 2, "1.50 GiB")],
)
def test_sizes_are_written(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [(0, "0 ns"), (4_050, "4.05 us"), (1_200_000_000, "1.20 s"), (123_456, "123 us"), (12.34, "12.3 ns")],
)
def test_durations_are_written(duration_ns: float, text: str) -> None:
    assert format_duration(duration_ns) == text


@pytest.mark.parametrize(("rate", "text"), [(7.85e9, "7.85 GB/s"), (1.2e8, "120 MB/s"), (5.0, "5.00 B/s")])
def test_rates_are_written(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_a_manual_clock_moves_only_forward() -> None:
    clock = ManualClock(10)
    assert clock.advance(5) == 15
    assert clock.now_ns() == 15
    with pytest.raises(UsageError, match="back"):
        clock.advance(-1)


@pytest.mark.parametrize("clock", [SystemClock(), BootClock()])
def test_system_clocks_never_go_back(clock: SystemClock | BootClock) -> None:
    readings = [clock.now_ns() for _ in range(100)]
    assert readings == sorted(readings)


def test_a_deadline_counts_down_and_stays_at_zero() -> None:
    deadline = Deadline.after_s(1_000, 2e-6)
    assert deadline.end_ns == 3_000
    assert deadline.remaining_ns(2_500) == 500
    assert deadline.remaining_s(2_500) == 5e-7
    assert not deadline.expired(2_999)
    assert deadline.expired(3_000)
    assert deadline.remaining_ns(9_000) == 0


def test_no_timeout_never_expires() -> None:
    for never in (Deadline.after_s(0, None), Deadline.after_s(0, float("inf"))):
        assert never.remaining_s(10**18) is None
        assert not never.expired(10**18)


def test_the_earlier_deadline_wins() -> None:
    soon, late, never = Deadline(5), Deadline.after_ms(0, 1), Deadline(None)
    assert soon.earlier(late) is soon
    assert late.earlier(soon) is soon
    assert never.earlier(soon) is soon
    assert soon.earlier(never) is soon


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_senseless_timeouts_are_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout"):
        Deadline.after_s(0, timeout_s)
