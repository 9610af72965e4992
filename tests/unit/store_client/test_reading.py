"""Reads over true rpc and engine memory, with masters and copies wrong in every way that a test can bend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moonpool.errors import UsageError
from moonpool.store.client import Pool
from moonpool.store.client_results import GetStatus
from moonpool.store.errors import DataLost, DestinationTooSmall, NotReady

DEAD = 1 << 63
SIZES = (0, 1, 63, 4096, 65_536, 65_537, 300_000)


def content(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed + size).bytes(size)


def spoil(scripted: Any, key: bytes, *numbers: int) -> None:
    """Flips a byte in the copies of an object on these segments."""
    for number, offset, _ in scripted.objects[key][3]:
        if number in numbers:
            scripted.segments[number - 1].data.view[offset] ^= 1


def test_objects_of_every_size_come_back(pool: Pool) -> None:
    for size in SIZES:
        assert pool.put(f"k{size}", content(size)).stored
    for size in SIZES:
        value = pool.get(f"k{size}")
        assert value == content(size)
        out = bytearray(size + 3)
        assert pool.get_into(f"k{size}", out)[:2] == (GetStatus.HIT, size)
        assert out == content(size) + bytes(3)
    values = pool.get_many([f"k{size}" for size in SIZES])
    assert all(value == content(size) for value, size in zip(values, SIZES, strict=True))


def test_a_miss_is_none_and_leaves_the_destination_alone(pool: Pool) -> None:
    out = bytearray(b"mine")
    assert pool.get("absent") is None
    assert pool.get_into("absent", out).status is GetStatus.MISS
    assert out == b"mine"
    assert pool.get_many([]) == []
    assert pool.get_into_many([], []) == []


def test_duplicate_keys_each_get_their_own_bytes(pool: Pool) -> None:
    pool.put("a", content(5000))
    pool.put("b", content(70_000))
    keys = ["a", "b", "a", "none", "b", "a"]
    values = pool.get_many(keys)
    sizes = [value and len(value) for value in values]
    assert sizes == [5000, 70_000, 5000, None, 70_000, 5000]
    outs = [bytearray(70_000) for _ in keys]
    results = pool.get_into_many(keys, outs)
    assert [result.length for result in results] == [5000, 70_000, 5000, 0, 70_000, 5000]
    assert outs[0][:5000] == outs[2][:5000] == outs[5][:5000] == content(5000)
    assert outs[1] == outs[4] == content(70_000)


def test_scatter_lists(pool: Pool) -> None:
    whole = content(200_000)
    pool.put_from("s", [whole[:7], b"", whole[7:100_000], whole[100_000:]])
    assert pool.get("s") == whole
    parts = [bytearray(65_530), bytearray(12), bytearray(200_000)]
    assert pool.get_into("s", parts).length == 200_000
    assert b"".join(bytes(part) for part in parts)[:200_000] == whole


def test_arrays_go_in_and_out(pool: Pool) -> None:
    array = np.arange(6000, dtype=np.float32).reshape(60, 100)
    pool.put("array", array)
    value = pool.get("array")
    assert value is not None
    assert (value.numpy(np.float32, (60, 100)) == array).all()
    out = np.zeros_like(array)
    assert pool.get_into("array", out).hit
    assert (out == array).all()


def test_a_damaged_copy_is_never_returned_and_another_is_used(pool: Pool, scripted: Any) -> None:
    pool.put("two", content(9000), replicas=2)
    spoil(scripted, b"two", 1)
    for _ in range(3):
        assert pool.get("two") == content(9000)
    spoil(scripted, b"two", 2)
    with pytest.raises(DataLost) as caught:
        pool.get("two")
    assert caught.value.reason == "the bytes do not match their digest"
    out = bytearray(b"x" * 9001)
    with pytest.raises(DataLost):
        pool.get_into("two", out)
    assert out == bytes(9000) + b"x"
    places = {tuple(params[2:]) for method, params in scripted.calls if method == "damaged"}
    assert places == {(number, slot) for number, _, slot in scripted.objects[b"two"][3]}


def test_one_lost_key_does_not_spoil_the_others(pool: Pool, scripted: Any) -> None:
    keys = ["a", "lost", "b"]
    pool.put_many(keys, [content(5000, seed) for seed in range(3)])
    spoil(scripted, b"lost", 1)
    outs = [bytearray(5000) for _ in keys]
    results = pool.get_into_many(keys, outs)
    assert [result.status for result in results] == [GetStatus.HIT, GetStatus.FAILED, GetStatus.HIT]
    assert isinstance(results[1].error, DataLost)
    assert outs == [content(5000, 0), bytes(5000), content(5000, 2)]
    with pytest.raises(DataLost):
        pool.get_many(keys)


def test_an_object_replaced_while_it_was_read_is_read_anew(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(4096, 1))
    stale = scripted._lookup([b"k"], 0)
    pool.upsert("k", content(8192, 2))
    spoiled = stale[2][0][4][0]
    scripted.segments[0].data.view[spoiled[1]] ^= 1  # the old extent is in use for something else
    answers = iter([stale])
    scripted.bend["lookup"] = lambda _params: next(answers, None)
    assert pool.get("k") == content(8192, 2)


def test_an_object_removed_while_it_was_read_is_a_miss(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(4096))
    stale = scripted._lookup([b"k"], 0)
    pool.remove("k")
    scripted.segments[0].data.view[stale[2][0][4][0][1]] ^= 1
    answers = iter([stale])
    scripted.bend["lookup"] = lambda _params: next(answers, None)
    out = bytearray(b"x" * 4096)
    assert pool.get_into("k", out).status is GetStatus.MISS
    assert out == bytes(4096), "bytes of somebody else's object were left behind"


def test_a_node_that_is_gone_leaves_the_other_copy(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(9000), replicas=2)
    pool.put("alone", content(9000))
    scripted.engines[0].close()
    assert pool.get("k") == content(9000)
    with pytest.raises(DataLost) as caught:
        pool.get("alone")
    assert caught.value.reason == "no node that holds it answered"


def test_too_small_a_destination_is_refused_and_untouched(pool: Pool) -> None:
    pool.put("k", content(100))
    out = bytearray(b"x" * 99)
    with pytest.raises(DestinationTooSmall) as caught:
        pool.get_into("k", out)
    assert (caught.value.length_bytes, caught.value.limit) == (100, 99)
    assert out == b"x" * 99
    with pytest.raises(UsageError, match="writable"):
        pool.get_into("k", bytes(100))
    with pytest.raises(UsageError, match="one for each key"):
        pool.get_into_many(["k"], [])


@pytest.mark.parametrize("verify", ["off", "generation"])
def test_weaker_checks_are_asked_for_by_name(pool: Pool, scripted: Any, verify: str) -> None:
    pool.put("k", content(5000))
    spoil(scripted, b"k", 1)
    value = pool.get("k", verify=verify)
    assert value is not None
    assert bytes(value) != content(5000)


def test_generation_finds_an_extent_that_is_another_objects(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(5000))
    stored = scripted.objects[b"k"]
    scripted._stamp(stored, DEAD)
    # The word says dead, the master says alive: only the digest can tell, and it does.
    assert pool.get("k", verify="generation") == content(5000)
    spoil(scripted, b"k", 1)
    with pytest.raises(DataLost):
        pool.get("k", verify="generation")


def test_ranges(pool: Pool, scripted: Any) -> None:
    whole = content(300_000)
    pool.put("k", whole)
    for offset, length in ((0, 10), (65_530, 20), (299_990, 100), (300_000, 5), (7, None), (131_072, 65_536)):
        stop = len(whole) if length is None else offset + length
        assert pool.get("k", offset=offset, length=length) == whole[offset:stop], (offset, length)
    out = bytearray(1000)
    assert pool.get_into("k", out, offset=299_500).length == 500
    assert out[:500] == whole[299_500:]
    assert pool.get("absent", offset=5) is None
    with pytest.raises(UsageError, match="ends before"):
        pool.get("k", offset=300_001)
    for wrong in ({"offset": -1}, {"length": -1}, {"offset": 1.5}):
        with pytest.raises(UsageError):
            pool.get("k", **wrong)  # type: ignore[arg-type]
    spoil(scripted, b"k", 1)
    with pytest.raises(DataLost):
        pool.get("k", offset=1, length=5)


def test_the_master_is_asked_tail_first_with_a_lease_for_the_size(pool: Pool, scripted: Any) -> None:
    pool.put_many(["head", "middle", "tail"], [b"1", b"2", b"3"])
    outs = [bytearray(1 << 20) for _ in range(3)]
    scripted.calls.clear()
    pool.get_into_many(["head", "middle", "tail"], outs)
    method, (keys, lease_ms) = scripted.calls[0]
    assert (method, keys) == ("lookup", [b"tail", b"middle", b"head"])
    assert lease_ms == 20 + 3 * (1 << 20) // 50_000
    assert scripted.names() == ["lookup"]


def test_leases_are_no_longer_than_the_master_gives(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(10))
    pool.get_into("k", np.zeros(1 << 30, dtype=np.uint8))
    assert next(params for name, params in scripted.calls if name == "lookup")[1] <= 5_000
    assert pool._calls.reader.lease_ms(1 << 40) == 5_000


def test_a_changed_list_of_segments_is_fetched_before_places_are_followed(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(5000))
    scripted.version += 1
    scripted.calls.clear()
    assert pool.get("k") == content(5000)
    assert scripted.names().count("segments") == 1
    scripted.calls.clear()
    assert pool.get("k") == content(5000)
    assert scripted.names() == ["lookup"]


def test_a_master_that_is_not_ready_is_asked_again(pool: Pool, scripted: Any) -> None:
    pool.put("k", content(10))
    refusals = iter([NotReady(), NotReady()])

    def not_ready(_params: list[Any]) -> None:
        refusal = next(refusals, None)
        if refusal is not None:
            raise refusal

    scripted.bend["lookup"] = not_ready
    assert pool.get("k") == content(10)
