"""Turns: the native order against its twin on random histories, and what it promises."""

from __future__ import annotations

import random

import pytest

from moonpool.errors import LimitExceeded, UsageError
from moonpool.native.paths.turns import Turns
from moonpool.native.paths.turns_reference import DIRECT, HIGH, LOW, NORMAL, PlainTurns

MS, S = 1_000_000, 1_000_000_000
MIB = 1 << 20


@pytest.mark.parametrize("by_deadline", [False, True])
def test_the_native_order_is_its_twins(by_deadline: bool) -> None:
    for seed in range(120):
        dice = random.Random(seed)
        head_start = dice.choice([0, MS, 100 * MS])
        caps = [(of, round(2 ** dice.uniform(0, 36))) for of in range(3) if dice.random() < 0.5]
        both = (
            Turns(head_start, by_deadline=by_deadline, caps=caps),
            PlainTurns(head_start, by_deadline=by_deadline, caps=caps),
        )
        now = 1 + dice.randrange(S)
        for name in range(300):
            if dice.random() < 0.5 and len(both[1]) < 200:
                until = dice.choice([0, now + dice.randrange(1, 100 * MS), now + 30 * S])
                of, size, group = dice.randrange(4), round(2 ** dice.uniform(0, 30)), dice.randrange(4)
                for each in both:
                    each.add(name, of, size, now, until_ns=until, group=group)
            else:
                blocked = dice.choice([0, 0, dice.getrandbits(4)])
                assert both[0].next(now, blocked) == both[1].next(now, blocked), f"seed {seed}, step {name}"
                assert both[0].ready(now, blocked) == both[1].ready(now, blocked)
            now += dice.choice([0, 0, 1_000, MS, 50 * MS, 3 * S])
            assert len(both[0]) == len(both[1])
        for of in range(4):
            assert both[0].counts(of) == both[1].counts(of), f"seed {seed}"


def order(turns: Turns, now: int) -> list[int]:
    found = []
    while (name := turns.next(now)[0]) is not None:
        found.append(name)
    return found


def test_higher_classes_go_first_and_each_in_its_order() -> None:
    turns = Turns(100 * MS)
    for name, of in enumerate([LOW, HIGH, NORMAL, LOW, DIRECT, HIGH, NORMAL]):
        turns.add(name, of, 1, S + name)
    assert order(turns, 2 * S) == [1, 5, 2, 4, 6, 0, 3]


def test_low_waits_a_bounded_time_under_a_flood_of_high() -> None:
    """High batches come faster than they are driven; a low one has its turn after two head starts."""
    turns = Turns(100 * MS)
    now = S
    turns.add(0, LOW, 1, now)
    for name in range(1, 1_000):
        turns.add(name, HIGH, 1, now)
        now += MS
        if name % 2 and turns.next(now)[0] == 0:
            break
    else:
        pytest.fail("the low one starved")
    # What had come before that moment and was not driven yet goes first: twice the time at half the speed.
    assert now - S <= 2 * 2 * 100 * MS + 3 * MS


def test_without_a_head_start_the_order_is_that_of_coming() -> None:
    turns = Turns(0)
    for name, of in enumerate([LOW, HIGH, NORMAL]):
        turns.add(name, of, 1, S + name)
    assert order(turns, 2 * S) == [0, 1, 2]


def test_deadlines_decide_inside_a_class_when_asked() -> None:
    turns = Turns(100 * MS, by_deadline=True)
    for name, until in enumerate([30 * S, 5 * S, 0, 10 * S]):
        turns.add(name, NORMAL, 1, S, until_ns=until)
    assert order(turns, 2 * S) == [1, 3, 0, 2]


def test_a_cap_holds_over_time_and_holds_up_no_other() -> None:
    turns = Turns(100 * MS, caps=[(LOW, 100 * MIB)])
    now = S
    for name in range(40):
        turns.add(name, LOW, 8 * MIB, now)
    for name in range(100, 110):
        turns.add(name, NORMAL, 8 * MIB, now)
    begun: list[tuple[int, int]] = []
    while len(turns):
        name, wake = turns.next(now)
        if name is not None:
            begun.append((now, name))
            continue
        assert wake > now, "else it would spin"
        now = wake
    assert [name for at, name in begun if at == S][:10] == list(range(100, 110))
    low = [at for at, name in begun if name < 100]
    # 320 MiB at 100 MiB/s; the bucket of 10 MiB and the last batch's debt are what may be ahead of it.
    assert 3.0 <= (low[-1] - S) / S <= 3.2
    assert turns.counts(LOW)["held"] >= 38
    assert turns.counts(NORMAL)["held"] == 0


def test_a_late_one_is_not_held_up_by_its_cap() -> None:
    turns = Turns(0, caps=[(LOW, MIB)])
    turns.add(1, LOW, 10 * MIB, S)
    turns.add(2, LOW, MIB, S, until_ns=S + 5 * MS)
    assert turns.next(S)[0] == 1
    name, wake = turns.next(S)
    assert (name, wake) == (None, S + 5 * MS)
    assert turns.next(wake)[0] == 2, "so that it can be ended"
    assert turns.counts(LOW)["late"] == 1


def test_what_is_blocked_is_passed_over() -> None:
    turns = Turns(0)
    turns.add(1, NORMAL, 1, S, group=3)
    turns.add(2, NORMAL, 1, S + 1, group=4)
    assert turns.next(2 * S, 1 << 3) == (2, 0)
    assert turns.next(2 * S, 1 << 3) == (None, 0)
    assert turns.next(2 * S) == (1, 0)


def test_bounds_are_typed_errors() -> None:
    turns = Turns(0)
    for name in range(1024):
        turns.add(name, LOW, 1, S)
    with pytest.raises(LimitExceeded):
        turns.add(1024, LOW, 1, S)
    with pytest.raises(UsageError):
        Turns(0, caps=[(DIRECT, 1)])
    with pytest.raises(UsageError):
        turns.counts(4)
