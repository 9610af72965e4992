"""The state: what facts do, what may be adopted, snapshots."""

from __future__ import annotations

import pytest

from moonpool.errors import InternalError
from moonpool.native.table.chains import xxh3_64
from moonpool.store import facts
from moonpool.store import state as state_module
from moonpool.store.errors import SnapshotDamaged, UnknownFact
from moonpool.store.facts import Fact, Group
from moonpool.store.records import NodeState, Place, Reason, object_id_of
from moonpool.store.state import EVERY_KEY, State
from moonpool.store.state_snapshot import HEADER
from moonpool.store.table_factory import TableConfig, twin_tables

DIGEST = bytes(16)


def new_state() -> State:
    return State(twin_tables(TableConfig()).objects)


def started(*more: Fact) -> State:
    """A state with two active segments of one node each, in epoch 2."""
    state = new_state()
    for fact in (facts.Leader(2, "m", (), ""), *nodes(1, 2), *more):
        state.apply(fact)
    state.check()
    return state


def nodes(*ids: int) -> list[Fact]:
    made: list[Fact] = []
    for each in ids:
        made += [
            facts.Node(each, f"n{each}", "h", DIGEST, "", "", NodeState.ACTIVE),
            facts.Segment(each, each, f"s{each}", 1, 1 << 20, 64, 1, 1, "", 1, 2, NodeState.ACTIVE),
            facts.Window(each, 0, 1 << 16),
        ]
    return made


def stored(number: int, key: bytes, *segments: int, replaced: int = 0, epoch: int = 2) -> facts.Object:
    places = tuple(Place(each, 4096 * number, number) for each in segments)
    return facts.Object(object_id_of(epoch, number), 0, key, 10, DIGEST, 0, 0, 0, 0, places, replaced)


def keys_of(state: State) -> dict[bytes, int]:
    return {each.key: each.object_id & 0xFFFF for each in state._every_object()}


def test_objects_come_are_replaced_and_go() -> None:
    state = started(stored(1, b"a", 1), stored(2, b"b", 1, 2))
    state.apply(stored(3, b"a", 2, replaced=object_id_of(2, 1)))
    assert keys_of(state) == {b"a": 3, b"b": 2}
    state.apply(facts.PlaceGone(object_id_of(2, 2), 0, b"b", 1, Reason.EVICTED))
    assert state.objects.at(state.objects.find(0, b"b")).places == (Place(2, 8192, 2),)
    state.apply(facts.ObjectsGone(Reason.REMOVED, 0, ((object_id_of(2, 3), b"a"),)))
    assert keys_of(state) == {b"b": 2}
    assert state.high == {2: object_id_of(2, 3)}
    state.check()


def test_a_segment_that_goes_takes_its_places() -> None:
    state = started(stored(1, b"a", 1), stored(2, b"b", 1, 2))
    state.apply(facts.SegmentState(1, NodeState.GONE, 1))
    state.apply(facts.NodeStateSet(1, NodeState.GONE))
    assert keys_of(state) == {b"b": 2}
    assert list(state.segments) == list(state.nodes) == [2]
    assert state.next_segment_id == 3, "ids are never given twice"
    state.check()


def test_a_dead_segment_keeps_its_places() -> None:
    state = started(stored(1, b"a", 1))
    state.apply(facts.SegmentState(1, NodeState.DEAD, 1))
    assert keys_of(state) == {b"a": 1}


@pytest.mark.parametrize(
    "fact",
    [
        facts.Leader(1, "m", (), ""),
        facts.Window(1, 0, 4096),
        facts.Window(1, 1 << 16, 1 << 20),
        facts.Window(9, 0, 4096),
        facts.Segment(1, 1, "again", 1, 1 << 20, 64, 1, 1, "", 1, 2, 1),
        facts.Segment(9, 9, "homeless", 1, 1 << 20, 64, 1, 1, "", 1, 2, 1),
        facts.SegmentState(9, NodeState.ACTIVE, 1),
        facts.NodeStateSet(1, NodeState.GONE),
        facts.PlaceGone(object_id_of(2, 5), 0, b"a", 1, 3),
        facts.PlaceAdded(object_id_of(2, 1), 0, b"absent", Place(1, 0, 0)),
        facts.ObjectsGone(1, 0, ((object_id_of(2, 9), b"a"),)),
        facts.PinSet(object_id_of(2, 9), 0, b"a", 2, 0),
        stored(9, b"a", 1),
        stored(9, b"a", 1, replaced=object_id_of(2, 8)),
    ],
)
def test_a_fact_that_contradicts_the_state_is_an_error(fact: Fact) -> None:
    state = started(stored(1, b"a", 1))
    with pytest.raises(InternalError):
        state.apply(fact)


def test_groups_must_follow() -> None:
    state = new_state()
    state.apply_group(Group(2, 1, 50, (facts.Leader(2, "m", (), ""),)))
    assert (state.sequence, state.now_ms) == (1, 50)
    for first in (1, 3):
        with pytest.raises(UnknownFact):
            state.apply_group(Group(2, first, 60, ()))
    assert state.sequence == 1


# What may be adopted


def test_what_was_known_is_never_adopted() -> None:
    state = started(stored(1, b"a", 1), stored(2, b"b", 1))
    assert not state.may_adopt(0, b"c", object_id_of(2, 2))
    assert state.may_adopt(0, b"c", object_id_of(2, 3)), "lost with the tail"
    assert state.may_adopt(0, b"c", object_id_of(1, 3)), "of a journal that was lost"


def test_an_object_that_ends_unsettled_leaves_a_grave() -> None:
    state = started(stored(5, b"a", 1))
    state.apply(facts.ObjectsGone(Reason.EVICTED, 0, ((object_id_of(2, 5), b"a"),)))
    assert not state.may_adopt(0, b"a", object_id_of(1, 9))
    assert state.may_adopt(0, b"a", object_id_of(2, 6))
    assert state.may_adopt(0, b"other", object_id_of(1, 9))
    state.apply(facts.Settled())
    assert not state.graves
    assert state.may_adopt(0, b"a", object_id_of(1, 9))


def test_a_remove_of_an_absent_key_leaves_a_grave_and_an_empty_key_one_for_all() -> None:
    state = started()
    state.apply(facts.ObjectsGone(Reason.REMOVED, 0, ((object_id_of(2, 0), b"a"),)))
    assert not state.may_adopt(0, b"a", object_id_of(1, 9))
    state.apply(facts.ObjectsGone(Reason.REMOVED, 0, ((object_id_of(2, 0), EVERY_KEY),)))
    assert not state.may_adopt(0, b"b", object_id_of(1, 9))
    assert state.may_adopt(1, b"b", object_id_of(1, 9)), "of another tenant"


def test_a_settled_state_takes_no_end_of_an_absent_object() -> None:
    state = started(facts.Settled())
    with pytest.raises(InternalError):
        state.apply(facts.ObjectsGone(Reason.REMOVED, 0, ((object_id_of(2, 0), b"a"),)))


def test_too_many_graves_end_all_adoption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "GRAVES_MAX", 2)
    state = started()
    for key in (b"a", b"b", b"c"):
        state.apply(facts.ObjectsGone(Reason.REMOVED, 0, ((object_id_of(2, 0), key),)))
    assert not state.graves
    assert not state.may_adopt(0, b"z", object_id_of(1, 9))
    state.apply(facts.Settled())
    assert state.may_adopt(0, b"z", object_id_of(1, 9))


def test_a_segment_that_goes_unsettled_with_objects_ends_all_adoption() -> None:
    state = started(stored(1, b"a", 1))
    state.apply(facts.SegmentState(2, NodeState.GONE, 1))
    assert state.adopting, "nothing ended with it"
    state.apply(facts.SegmentState(1, NodeState.GONE, 1))
    assert not state.adopting


def test_another_run_of_the_journals_server_hides_all_places() -> None:
    state = started(stored(1, b"a", 1))
    state.apply(facts.SegmentState(2, NodeState.DEAD, 1))
    state.apply(facts.Leader(3, "m", (), "run-2"))
    assert state.segments[1].state == state.nodes[1].state == NodeState.JOINING
    assert state.segments[2].state == NodeState.DEAD
    state.apply(facts.SegmentState(1, NodeState.ACTIVE, 1))
    state.apply(facts.Leader(4, "m", (), "run-2"))
    assert state.segments[1].state == NodeState.ACTIVE


# Snapshots and hashes


def busy_state() -> State:
    state = started(stored(1, b"a", 1), stored(2, b"b", 1, 2), facts.Tenant(1, "t", 5, b""))
    state.apply(facts.ObjectsGone(Reason.REMOVED, 0, ((object_id_of(2, 1), b"a"),)))
    state.now_ms = 77
    return state


def test_a_snapshot_gives_the_same_state() -> None:
    state = busy_state()
    chunks = list(state.snapshot_chunks())
    again = State.restore(chunks, twin_tables(TableConfig()).objects)
    assert again.state_hash() == state.state_hash()
    assert again.meta() == state.meta()
    assert again.now_ms == 77
    again.check()
    for fact in (stored(3, b"c", 2), facts.Settled()):
        state.apply(fact)
        again.apply(fact)
    assert again.state_hash() == state.state_hash()


def test_a_damaged_snapshot_loads_nothing() -> None:
    chunks = list(busy_state().snapshot_chunks())
    assert len(chunks) == 2
    bad = bytearray(chunks[1])
    bad[-1] ^= 1
    cases = [
        [],
        chunks[:1],
        chunks[1:],
        [*chunks, chunks[1]],
        [chunks[1], chunks[0]],
        [chunks[0], bytes(bad)],
        [chunks[0], chunks[1][:-1]],
        [chunks[0][:10], chunks[1]],
        [b"", *chunks],
        [b"X" + chunks[0][1:], chunks[1]],
    ]
    for case in cases:
        with pytest.raises(SnapshotDamaged):
            State.restore(case, twin_tables(TableConfig()).objects)


def test_content_of_another_version_is_refused() -> None:
    payload = b"\x80"
    chunk = HEADER.pack(b"MOONSNP1", 0, 1, 1, xxh3_64(payload, 0)) + payload
    with pytest.raises(SnapshotDamaged):
        State.restore([chunk], twin_tables(TableConfig()).objects)


def test_the_hash_sees_every_kind_of_change() -> None:
    changes: list[Fact] = [
        stored(7, b"z", 1),
        facts.PinSet(object_id_of(2, 2), 0, b"b", 2, 0),
        facts.PlaceGone(object_id_of(2, 2), 0, b"b", 1, 3),
        facts.Tenant(1, "t", 6, b""),
        facts.Window(1, 1 << 16, 4096),
        facts.SegmentState(1, NodeState.SUSPECT, 1),
        facts.NodeStateSet(1, NodeState.SUSPECT),
        facts.Settled(),
    ]
    seen = {busy_state().state_hash()}
    for change in changes:
        state = busy_state()
        state.apply(change)
        seen.add(state.state_hash())
    assert len(seen) == len(changes) + 1


def test_the_hash_does_not_see_recency_and_leases() -> None:
    state, other = busy_state(), busy_state()
    index = other.objects.find(0, b"b")
    other.objects.touch(index)
    other.objects.extend_lease(index, 500)
    assert state.state_hash() == other.state_hash()
