"""Values, payloads, location cache, spans, policies: the pool's parts that need no master."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.engine.engine import Engine
from moonpool.errors import UsageError
from moonpool.store.client_config import ClientConfig, Verify, check_verify
from moonpool.store.client_context import Span
from moonpool.store.client_parts import settle
from moonpool.store.client_results import PutPolicy
from moonpool.store.location_cache import Location, LocationCache
from moonpool.store.records import Pin
from moonpool.store.value import Value, ValuePool, class_bytes
from moonpool.wire.rpc import unpack_value

LOCATION = Location(5, 100, bytes(16), 0, ((1, 0, 0),))


@pytest.fixture
def values() -> Iterator[ValuePool]:
    with Engine() as engine:
        yield ValuePool(engine, 16 << 20)


def take(values: ValuePool, size: int) -> Value:
    value = values.take(size, 9)
    value.view[:] = bytes(i & 0xFF for i in range(size))
    return value


def test_a_value_is_a_buffer(values: ValuePool) -> None:
    value = take(values, 300)
    expected = bytes(i & 0xFF for i in range(300))
    assert bytes(value) == expected
    assert value == expected
    assert value != b"other"
    assert len(value) == 300
    assert value.address % 64 == 0
    assert value.numpy("uint16", (150,)).tobytes() == expected
    assert np.asarray(value.view).shape == (300,)
    assert repr(value) == "<Value of object 0x9, 300 bytes>"


def test_memory_is_used_again_once_the_last_view_is_gone(values: ValuePool) -> None:
    value = take(values, 5000)
    address = value.address
    array = value.numpy()
    value.close()
    with pytest.raises(UsageError, match="closed"):
        memoryview(value)
    other = take(values, 5000)
    assert other.address != address, "memory that an array still shows was given out"
    assert array[299] == 299 & 0xFF
    del array
    gc.collect()
    assert take(values, 5000).address == address


def test_a_with_block_closes_and_closing_twice_does_nothing(values: ValuePool) -> None:
    with take(values, 10) as value:
        address = value.address
    value.close()
    assert value.closed
    assert take(values, 10).address == address


def test_values_outlive_their_engine() -> None:
    with Engine() as engine:
        value = take(ValuePool(engine, 1 << 20), 4096)
    assert bytes(value) == bytes(range(256)) * 16


def test_beyond_the_bound_values_have_memory_of_their_own(values: ValuePool) -> None:
    held = [take(values, size) for size in [1 << 20] * 20 + [4 << 20]]
    assert 12 << 20 <= values.pooled_bytes <= 16 << 20
    assert len({value.address for value in held}) == 21
    assert all(value.numpy()[77] == 77 for value in held)


@pytest.mark.parametrize("size", [0, 1, 512, 513, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 1])
def test_size_classes_hold_their_sizes(size: int) -> None:
    block = class_bytes(size)
    assert size <= block <= max(512, size * 2)
    assert block % 512 == 0
    if size > 4096:
        assert block % 4096 == 0
    if size > 20_480:
        assert block <= size * 1.25


def test_the_cache_forgets_the_least_recent_and_what_is_too_old() -> None:
    cache = LocationCache(2, lease_ns=100)
    for key, at in ((b"a", 0), (b"b", 10), (b"c", 20)):
        cache.remember(key, LOCATION, at)
    assert len(cache) == 2
    assert cache.find(b"a", 21) is None
    assert cache.find(b"b", 109) is LOCATION
    assert cache.find(b"b", 110) is None
    assert cache.find(b"c", 119) is LOCATION
    cache.forget(b"c")
    cache.forget(b"c")
    assert cache.find(b"c", 21) is None


def test_a_span_is_cut_at_any_place() -> None:
    parts = [bytearray(b"0123"), bytearray(b""), bytearray(b"456"), bytearray(b"789")]
    span = Span.of(parts, writable=True)
    assert span.total == 10
    for start in range(11):
        for size in range(11 - start):
            part = span.part(start, size)
            assert part.total == size, (start, size)
            starts = [hold.address for hold in span.holds]
            flat = [
                where
                for address, length in zip(part.addresses, part.lengths, strict=True)
                for where in range(address, address + length)
            ]
            every = [
                address + i for address, buffer in zip(starts, parts, strict=True) for i in range(len(buffer))
            ]
            assert flat == every[start : start + size], (start, size)


def test_what_is_no_memory_is_refused() -> None:
    for wrong in (17, "text", [], [1], np.zeros((4, 4))[:, 1], np.array([object()])):
        with pytest.raises(UsageError):
            Span.of(wrong, writable=False)
    with pytest.raises(UsageError, match="writable"):
        Span.of(b"constant", writable=True)


def test_a_policy_tells_only_what_differs() -> None:
    assert PutPolicy().packed() is None
    packed = PutPolicy(replicas=2, pin=Pin.SOFT, soft_pin_ms=50, preferred=["s1"], tier=0).packed()
    assert packed is not None
    told = {"replicas": 2, "pin": 1, "soft_pin_ms": 50, "preferred": ["s1"], "tier": 0}
    assert unpack_value(packed) == told


@pytest.mark.parametrize(
    "wrong", [{"replicas": 0}, {"soft_pin_ms": 5}, {"pin": Pin.SOFT}, {"preferred": "s1"}]
)
def test_impossible_policies_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        PutPolicy(**wrong)  # type: ignore[arg-type]


def test_settings_find_their_place() -> None:
    config = settle(
        ("a:1", "b:2"), None, {"secret": b"0123456789abcdef", "tenant": "t", "transports": ("tcp",)}
    )
    assert config.addresses == ("a:1", "b:2")
    assert (config.engine.cluster_secret, config.engine.transports) == (b"0123456789abcdef", ("tcp",))
    assert settle((), config, {"tenant": "u"}).addresses == ("a:1", "b:2")
    with pytest.raises(UsageError, match="no setting 'tennant'"):
        settle((), None, {"tennant": "x"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"verify": "maybe"},
        {"transfer_timeout_ms": 0},
        {"addresses": ["a:1"]},
        {"addresses": ("",)},
        {"tenant": ""},
        {"token": "text"},
        {"engine": None},
        {"unavailable_ms": 1.5},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        ClientConfig(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(wrong))


def test_ways_to_verify() -> None:
    assert check_verify("full") is Verify.FULL
    with pytest.raises(UsageError, match="full, range, generation, off"):
        check_verify("none")
