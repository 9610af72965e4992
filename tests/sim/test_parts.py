"""The world's parts do what they model.

A checker that sees nothing, or a network that reorders, proves nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
from simworld.claims import Claims, ExtentStolen
from simworld.loop import MS, SECOND, Future, Loop
from simworld.network import End, Network, NetworkOptions
from simworld.process import Clock, ClockOptions, Process
from simworld.redis_link import dial_redis
from simworld.redis_model import Disk, RedisOptions, RedisServer, lose_tail, lose_unsynced

from moonpool.bench.chaos_history import History, HistoryBroken, content_digest

OLD, NEW, OTHER = content_digest(b"old"), content_digest(b"new"), content_digest(b"other")


def run_until(loop: Loop, when: int) -> None:
    while (due := loop.next_at()) is not None and due <= when:
        loop.step()
    loop.now = when


def process(loop: Loop, name: str, host: str | None = None) -> Process:
    return Process(loop, name, host or name, Clock(loop, ClockOptions()))


# ---- processes and clocks ---------------------------------------------------------------------------


def test_a_stopped_process_does_nothing_until_it_goes_on_and_then_everything_in_order() -> None:
    loop = Loop(1)
    one = process(loop, "one")
    done: list[int] = []
    for number in range(3):
        one.after(number * MS, lambda number=number: done.append(number))  # type: ignore[misc]
    one.stop()
    run_until(loop, SECOND)
    assert done == []
    one.go_on()
    run_until(loop, 2 * SECOND)
    assert done == [0, 1, 2]


def test_a_killed_process_does_nothing_more() -> None:
    loop = Loop(1)
    one = process(loop, "one")
    done: list[str] = []

    async def work() -> None:
        await one.sleep(MS)
        done.append("worked")

    one.spawn(work())
    one.kill()
    one.go_on()
    run_until(loop, SECOND)
    assert done == []


def test_clocks_differ_and_only_go_forward() -> None:
    loop = Loop(2)
    clocks = [Clock(loop, ClockOptions()) for _ in range(8)]
    first = [clock.now_us() for clock in clocks]
    assert len(set(first)) == 8
    loop.now = 100 * SECOND
    passed = [clock.now_us() - before for clock, before in zip(clocks, first, strict=True)]
    assert len(set(passed)) > 1
    assert all(abs(one - 100 * SECOND) <= 100 * SECOND * 2_000 // 1_000_000 for one in passed)
    clocks[0].jump(SECOND)
    assert clocks[0].now_us() - first[0] == passed[0] + SECOND


# ---- network ----------------------------------------------------------------------------------------


class Pair:
    """Two processes with one connection, and what the server heard."""

    def __init__(self, options: NetworkOptions) -> None:
        self.loop = Loop(3)
        self.network = Network(self.loop, options)
        self.client, self.server = process(self.loop, "client"), process(self.loop, "server")
        self.heard: list[Any] = []
        self.ended = 0
        self.network.listen(self.server, "here", self._accept)
        future = self.network.connect(self.client, "here")
        run_until(self.loop, SECOND)
        end = future.value()
        assert end is not None
        self.end = end

    def _accept(self, end: End) -> None:
        end.on_message = self.heard.append

        def closed() -> None:
            self.ended += 1

        end.on_close = closed


def test_messages_of_one_connection_keep_their_order_however_slow_some_are() -> None:
    pair = Pair(NetworkOptions(slow_share=0.5, slow_us_max=300 * MS))
    for number in range(50):
        pair.end.send(number)
    run_until(pair.loop, 10 * SECOND)
    assert pair.heard == list(range(50))


def test_a_partition_holds_messages_back_and_a_cut_loses_them() -> None:
    pair = Pair(NetworkOptions())
    pair.network.part("client", "server")
    pair.end.send("held")
    run_until(pair.loop, 2 * SECOND)
    assert pair.heard == []
    pair.network.heal()
    run_until(pair.loop, 3 * SECOND)
    assert pair.heard == ["held"]
    pair.end.send("lost")
    pair.network.connections_of(pair.client)[0].cut()
    run_until(pair.loop, 4 * SECOND)
    assert pair.heard == ["held"]
    assert not pair.end.is_open
    assert pair.ended == 1


def test_a_stalled_connection_delivers_late_and_a_calm_lifts_everything() -> None:
    pair = Pair(NetworkOptions())
    pair.network.connections_of(pair.client)[0].stall()
    pair.end.send("late")
    run_until(pair.loop, 2 * SECOND)
    assert pair.heard == []
    pair.network.calm()
    run_until(pair.loop, 3 * SECOND)
    assert pair.heard == ["late"]


def test_the_death_of_a_process_is_heard_after_what_it_said() -> None:
    pair = Pair(NetworkOptions())
    pair.end.send("last words")
    pair.client.kill()
    run_until(pair.loop, 2 * SECOND)
    assert pair.heard == ["last words"]
    assert pair.ended == 1


def test_nobody_is_reached_where_nobody_listens() -> None:
    loop = Loop(4)
    network = Network(loop, NetworkOptions())
    future = network.connect(process(loop, "client"), "nowhere")
    run_until(loop, SECOND)
    assert future.value() is None


# ---- Redis ------------------------------------------------------------------------------------------


class Journal:
    """A Redis and one process that talks to it."""

    def __init__(self) -> None:
        self.loop = Loop(5)
        self.network = Network(self.loop, NetworkOptions())
        self.disk = Disk()
        self.client = process(self.loop, "master")
        self.start()

    def start(self) -> None:
        self.server = RedisServer(process(self.loop, "redis"), self.network, self.disk, RedisOptions())

    def call(self, command: str, *params: Any) -> Any:
        answer: Future[Any] = Future()

        async def ask() -> None:
            link = await dial_redis(self.client, self.network, 1_000)
            assert link is not None
            answer.set(await link.call(command, *params))

        self.client.spawn(ask())
        run_until(self.loop, self.loop.now + 100 * MS)
        reply = answer.value()
        return None if reply is None else reply.result


def test_the_journal_takes_only_what_follows_from_the_epoch_that_leads() -> None:
    journal = Journal()
    assert journal.call("elect", "a", 10_000, 0) == (1, 0)
    assert journal.call("elect", "b", 10_000, 0) is None
    assert journal.call("append", 1, 1, 2, b"x") == ("ok", 2)
    assert journal.call("append", 1, 1, 2, b"x") == ("ok", 2)
    assert journal.call("append", 1, 4, 4, b"y") == ("gap", 2)
    assert journal.call("elect", "a", 10_000, 7) == (8, 2)
    assert journal.call("append", 1, 3, 3, b"y") == ("fenced", 8)
    assert not journal.call("renew", "a", 1, 10_000)
    assert journal.call("renew", "a", 8, 10_000)
    assert journal.call("append", 8, 3, 3, b"z") == ("ok", 3)
    last, groups = journal.call("read", 0, 10)
    assert (last, [group.payload for group in groups]) == (3, [b"x", b"z"])


def test_a_kill_keeps_what_was_answered_and_the_loss_of_the_host_only_what_was_synced() -> None:
    journal = Journal()
    journal.call("elect", "a", 100_000, 0)
    journal.call("append", 1, 1, 1, b"x")
    journal.server.process.kill()
    journal.start()
    assert journal.call("read", 0, 10)[0] == 1
    run_until(journal.loop, journal.loop.now + 2 * SECOND)
    journal.call("append", 1, 2, 2, b"y")
    journal.server.process.kill()
    lose_unsynced(journal.disk)
    journal.start()
    assert journal.call("read", 0, 10)[0] == 1
    journal.call("append", 1, 2, 2, b"y")
    journal.call("append", 1, 3, 3, b"z")
    journal.server.process.kill()
    lose_tail(journal.disk, 1)
    journal.start()
    assert journal.server.run_id == 4
    assert journal.call("read", 0, 10)[0] < 3


# ---- checkers ---------------------------------------------------------------------------------------


def stored(
    history: History, tag: int, digest: bytes, began: float, ended: float, *, upsert: bool = False
) -> None:
    history.put_began(tag, "k", digest, began)
    history.put_ending(tag, (began + ended) / 2)
    history.put_ended(tag, ended, is_stored=True, replaces=upsert)


def test_a_get_may_return_a_completed_put() -> None:
    history = History()
    stored(history, 1, OLD, 0, 1)
    assert history.judge_get("k", 2, 3, OLD) == 1


@pytest.mark.parametrize("digest", [OTHER, content_digest(b"")])
def test_a_get_may_not_return_bytes_that_nobody_put(digest: bytes) -> None:
    history = History()
    stored(history, 1, OLD, 0, 1)
    with pytest.raises(HistoryBroken, match="torn"):
        history.judge_get("k", 2, 3, digest)


def test_a_get_may_not_return_another_keys_bytes() -> None:
    history = History()
    history.put_began(1, "other", OTHER, 0)
    with pytest.raises(HistoryBroken, match="put at other"):
        history.judge_get("k", 2, 3, OTHER)


def test_a_get_may_not_return_a_value_that_was_not_complete() -> None:
    history = History()
    history.put_began(1, "k", OLD, 0)
    with pytest.raises(HistoryBroken, match="not complete"):
        history.judge_get("k", 2, 3, OLD)
    history.put_ending(1, 4)
    assert history.judge_get("k", 2, 5, OLD) == 1


def test_a_get_may_not_return_the_old_value_after_an_upsert_returned() -> None:
    history = History()
    stored(history, 1, OLD, 0, 1)
    stored(history, 2, NEW, 2, 4, upsert=True)
    assert history.judge_get("k", 3, 6, OLD) == 1
    assert history.judge_get("k", 5, 6, NEW) == 2
    with pytest.raises(HistoryBroken, match="erased"):
        history.judge_get("k", 5, 6, OLD)


def test_a_get_may_not_return_a_value_after_a_remove_returned() -> None:
    history = History()
    stored(history, 1, OLD, 0, 1)
    number = history.remove_began("k", 2)
    assert history.judge_get("k", 3, 4, OLD) == 1
    history.remove_ended("k", number, 4, is_gone=True)
    with pytest.raises(HistoryBroken, match="erased"):
        history.judge_get("k", 5, 6, OLD)
    with pytest.raises(HistoryBroken, match="said yes"):
        history.judge_present("k", 5, 6)


def test_a_remove_that_overlaps_a_put_may_have_come_first() -> None:
    history = History()
    number = history.remove_began("k", 0)
    stored(history, 1, OLD, 1, 3)
    history.remove_ended("k", number, 4, is_gone=True)
    assert history.judge_get("k", 5, 6, OLD) == 1


def test_a_put_of_unknown_outcome_may_be_seen_and_is_complete_from_then_on() -> None:
    history = History()
    history.put_began(1, "k", OLD, 0)
    history.put_ending(1, 1)
    assert history.judge_get("k", 5, 6, OLD) == 1
    number = history.remove_began("k", 7)
    history.remove_ended("k", number, 8, is_gone=True)
    with pytest.raises(HistoryBroken, match="erased"):
        history.judge_get("k", 9, 10, OLD)


def test_a_put_that_did_not_store_may_not_be_seen() -> None:
    history = History()
    history.put_began(1, "k", OLD, 0)
    history.put_ending(1, 1)
    history.put_ended(1, 2, is_stored=False, replaces=False)
    with pytest.raises(HistoryBroken, match="did not store"):
        history.judge_get("k", 5, 6, OLD)


def test_a_miss_is_explained_by_a_remove_and_by_nothing_else() -> None:
    history = History()
    stored(history, 1, OLD, 0, 1)
    assert [record.tag for record in history.judge_miss("k", 2, 3)] == [1]
    number = history.remove_began("k", 4)
    assert history.judge_miss("k", 2, 5) == []
    history.remove_ended("k", number, 6, is_gone=True)
    assert history.judge_miss("k", 7, 8) == []


def test_a_late_write_into_an_extent_that_was_given_again_is_seen() -> None:
    claims = Claims("segment")
    claims.add(0, 4_096, 1)
    claims.check_write(0, 4_096, 1)
    claims.add(4_096, 4_096, 2)
    claims.check_write(2_048, 2_048, 1)
    claims.add(2_048, 64, 3)
    with pytest.raises(ExtentStolen, match="put 1 wrote"):
        claims.check_write(0, 4_096, 1)
    claims.check_write(0, 2_048, 1)
    with pytest.raises(ExtentStolen, match="nobody gave"):
        claims.check_write(8_192, 64, 2)
