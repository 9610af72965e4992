"""Puts whose nodes, deadlines and connections fail: what is stored, given back, and left alone."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.errors import AccessDenied, PeerError, UsageError
from moonpool.store.client import Pool, connect
from moonpool.store.client_results import PutPolicy, PutStatus
from moonpool.store.errors import (
    DeadlinePassed,
    MasterUnavailable,
    QuotaExceeded,
    TooLarge,
    UnknownClient,
    UnknownPut,
)
from moonpool.store.records import EntryCode, Pin


def last(scripted: Any, method: str) -> list[Any]:
    found: list[Any] = [params for name, params in scripted.calls if name == method][-1]
    return found


def test_results_tell_stored_exists_and_no_space_apart(pool: Pool, scripted: Any) -> None:
    stored = pool.put("k", b"value")
    assert (stored.status, stored.replicas, stored.stored) == (PutStatus.STORED, 1, True)
    assert stored.object_id == scripted.objects[b"k"][0]
    assert pool.put("k", b"other").status is PutStatus.EXISTS
    scripted.bend["put_start"] = lambda params: [1, 1, 0, 0, [[int(EntryCode.NO_SPACE), []]]]
    assert pool.put("l", b"value").status is PutStatus.NO_SPACE
    assert pool.get("k") == b"value"


def test_all_copies_are_written(pool: Pool, scripted: Any) -> None:
    data = bytes(range(256)) * 1024
    assert pool.put("k", data, replicas=2).replicas == 2
    for number, offset, _ in scripted.objects[b"k"][3]:
        assert scripted.segments[number - 1].data.view[offset : offset + len(data)] == data


def test_a_copy_that_cannot_be_written_is_named_and_the_rest_counts(pool: Pool, scripted: Any) -> None:
    scripted.engines[1].close()
    result = pool.put("k", b"value" * 2000, replicas=2)
    assert (result.status, result.replicas) == (PutStatus.STORED, 1)
    assert last(scripted, "put_end")[1][0][3] == 0b10
    assert pool.get("k") == b"value" * 2000


def test_with_need_all_such_a_put_is_aborted(pool: Pool, scripted: Any) -> None:
    scripted.engines[1].close()
    with pytest.raises(PeerError):
        pool.put("k", b"value", replicas=2, need_all=True)
    assert "put_end" not in scripted.names()
    assert last(scripted, "put_abort")[1] == [0]
    assert pool.get("k") is None


def test_of_many_only_those_fail_that_no_node_took(pool: Pool, scripted: Any) -> None:
    both = scripted.segments
    scripted.engines[1].close()
    turns = iter([both[1:], both[:1]])

    def one_then_the_other(_params: Any) -> None:
        scripted.segments = next(turns, both)

    # The master sends the second call to the node that is alive.
    scripted.bend["put_start"] = one_then_the_other
    results = pool.put_many(["a"], [b"1"]) + pool.put_many(["b"], [b"2"])
    assert [result.status for result in results] == [PutStatus.FAILED, PutStatus.STORED]
    assert isinstance(results[0].error, PeerError)


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("many", [False, True])
def test_a_refused_grant_means_putting_again(scripted: Any, size: int, many: bool) -> None:
    """The first put meets a node that refuses its grant, the second one does not."""
    both = guarded, open_to_all = list(scripted.segments)
    guarded.data = guarded.engine.allocate(guarded.data.size_bytes, prefault=False, granted=True)
    turns = iter([[guarded]])

    def guarded_first(params: list[Any]) -> Any:
        scripted.segments = next(turns, [open_to_all])
        started = scripted._put_start(*params)
        scripted.segments = both
        return started

    scripted.bend["put_start"] = guarded_first
    data = bytes(range(250)) * (size // 250 + 1)
    with connect(scripted.address, transports=("tcp",)) as pool:
        if many:
            results = pool.put_many(["k", "l"], [data, data])
            assert [result.status for result in results] == [PutStatus.STORED, PutStatus.STORED]
        else:
            assert pool.put("k", data).stored
        assert pool.get("k") == data
    assert scripted.names().count("put_abort") == 1


def test_a_node_that_refuses_every_grant_is_an_error(scripted: Any) -> None:
    (guarded,) = scripted.segments = scripted.segments[:1]
    guarded.data = guarded.engine.allocate(guarded.data.size_bytes, prefault=False, granted=True)
    with connect(scripted.address, transports=("tcp",)) as pool, pytest.raises(AccessDenied):
        pool.put("k", b"value")
    assert scripted.names().count("put_start") == scripted.names().count("put_abort")
    assert not scripted.objects


def test_keys_end_tail_first_but_duplicates_in_order(pool: Pool, scripted: Any) -> None:
    pool.put_many(["head", "tail"], [b"1", b"2"])
    assert last(scripted, "put_start")[0] == [b"tail", b"head"]
    results = pool.put_many(["d", "e", "d"], [b"first", b"e", b"last"])
    assert [result.status for result in results] == [PutStatus.STORED, PutStatus.STORED, PutStatus.EXISTS]
    assert pool.get("d") == b"first"
    results = pool.put_many(["d", "d"], [b"third", b"fourth"], replace=True)
    assert [result.status for result in results] == [PutStatus.STORED, PutStatus.STORED]
    assert pool.get("d") == b"fourth"


def test_a_passed_deadline_is_told_and_nothing_is_posted_after_it(pool: Pool, scripted: Any) -> None:
    scripted.remaining_ms = 0
    with pytest.raises(DeadlinePassed):
        pool.put("k", b"v" * 100_000)
    assert "put_end" not in scripted.names()
    assert not any(scripted.segments[0].data.view[:100_000])
    # Nothing is under way, so the extents are given back.
    assert scripted.names().count("put_abort") == scripted.names().count("put_start")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (EntryCode.UNKNOWN_PUT, UnknownPut),
        (EntryCode.DEADLINE_PASSED, DeadlinePassed),
        (EntryCode.TOO_LARGE, TooLarge),
        (EntryCode.REFUSED, QuotaExceeded),
    ],
)
def test_refusals_are_errors(pool: Pool, scripted: Any, code: EntryCode, kind: type[Exception]) -> None:
    scripted.bend["put_end"] = lambda params: [1, [[int(code), 0]]]
    with pytest.raises(kind):
        pool.put("k", b"value")
    assert pool.put_many(["k"], [b"value"])[0].status is PutStatus.FAILED


def test_a_connection_lost_before_the_end_counted_means_putting_again(pool: Pool, scripted: Any) -> None:
    scripted.drop_connection_on = "put_end"

    def forget(_params: Any) -> None:
        if scripted.drop_connection_on:
            scripted.puts.clear()

    scripted.bend["put_end"] = forget
    assert pool.put("k", b"value").stored
    assert scripted.names().count("put_start") == 2
    assert pool.get("k") == b"value"


def test_a_connection_lost_after_the_end_counted_is_found_out(pool: Pool, scripted: Any) -> None:
    scripted.drop_connection_on = "put_end"

    def end_and_forget(params: Any) -> None:
        if scripted.drop_connection_on:
            scripted._put_end(*params)
            scripted.puts.clear()

    scripted.bend["put_end"] = end_and_forget
    result = pool.put("k", b"value")
    assert (result.status, result.object_id) == (PutStatus.STORED, scripted.objects[b"k"][0])
    assert scripted.names().count("put_start") == 1


def test_a_master_that_changes_each_time_ends_in_an_error(pool: Pool, scripted: Any) -> None:
    def forget(_params: Any) -> None:
        scripted.puts.clear()
        scripted.drop_connection_on = "put_end"

    def go_on(params: Any) -> Any:
        forget(params)

    scripted.bend["put_start"] = go_on
    scripted.bend["put_end"] = lambda params: scripted.puts.clear()
    with pytest.raises((MasterUnavailable, UnknownPut)):
        pool.put("k", b"value")
    assert scripted.names().count("put_start") == 1 + 3
    assert pool.get("k") is None


def test_a_master_that_forgot_us_is_joined_again(pool: Pool, scripted: Any) -> None:
    refusals = iter([UnknownClient(), UnknownClient()])

    def once(_params: Any) -> None:
        refusal = next(refusals, None)
        if refusal is not None:
            raise refusal

    scripted.bend["put_start"] = once
    assert pool.put("k", b"value").stored
    assert scripted.names().count("client_join") == 1 + 2


def test_policies_reach_the_master(pool: Pool, scripted: Any) -> None:
    pool.put("a", b"1", pin=Pin.HARD, group="g", preferred=["s2"], wait_ms=5)
    assert last(scripted, "put_start")[2:] == [{"pin": 2, "group": "g", "preferred": ["s2"]}, 5]
    pool.put("b", b"1", policy=PutPolicy(replicas=2))
    assert last(scripted, "put_start")[2] == {"replicas": 2}
    pool.put("c", b"1")
    assert last(scripted, "put_start")[2] is None
    with pytest.raises(UsageError, match="no setting 'replica'"):
        pool.put("d", b"1", replica=2)
    with pytest.raises(UsageError, match="not both"):
        pool.put("d", b"1", policy=PutPolicy(), replicas=2)


def test_large_calls_are_cut(scripted: Any) -> None:
    with connect(scripted.address, batch_keys_max=3, batch_bytes_max=65_536) as pool:
        keys = [f"k{i}" for i in range(10)]
        assert all(result.stored for result in pool.put_many(keys, [b"v" * 100] * 10))
        assert scripted.names().count("put_start") == 4
        assert all(value == b"v" * 100 for value in pool.get_many(keys))
        assert scripted.names().count("lookup") == 4
        assert pool.exists_many([*keys, "x"]) == [True] * 10 + [False]
        pool.put_many(["x", "y", "z"], [b"v" * 40_000] * 3)
        assert scripted.names().count("put_start") == 7


def test_wrong_calls_are_refused(pool: Pool) -> None:
    for wrong in ("", b"", "k" * 1025, 5):
        with pytest.raises(UsageError):
            pool.put(wrong, b"value")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one value for each key"):
        pool.put_many(["a"], [])
    with pytest.raises(UsageError, match="needs at least one buffer"):
        pool.put("a", [])
