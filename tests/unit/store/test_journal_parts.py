"""The pure parts of the journal: groups on their way, answers of Redis, leases, snapshots, config."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import InternalError, ProtocolError, UsageError
from moonpool.store import facts
from moonpool.store.errors import SnapshotDamaged
from moonpool.store.facts import decode_group, encode_fact
from moonpool.store.journal import Elected, EpochRaised, Identity
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_groups import URGENT_GROUPS_MAX, Group, GroupQueue
from moonpool.store.journal_mailbox import Mailbox
from moonpool.store.journal_memory import MemoryJournal
from moonpool.store.leadership import Lease, Vacancy, Watched, describe, read_holder
from moonpool.store.redis_link import RedisAddress
from moonpool.store.redis_resp import ARRAY_ITEMS_MAX, AnswerParser, RedisRefusal, pack_command
from moonpool.store.snapshots import compressed, restored_chunks
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, twin_tables
from moonpool.units import NS_PER_MS, NS_PER_US


def some_facts(first: int, count: int) -> list[bytes]:
    return [encode_fact(facts.Tenant(number, "t", 0, b"")) for number in range(first, first + count)]


def queue(**options: int) -> GroupQueue:
    values = {"group_bytes": 1_000, "linger_us": 1_000, "in_flight_max": 4, **options}
    return GroupQueue(3, 0, **values)


class TestGroups:
    def test_a_fact_that_nobody_waits_for_lingers(self) -> None:
        one = queue()
        one.add(1, some_facts(1, 1), 7, urgent=False, now_ns=0)
        assert one.next_group(0) is None
        assert one.due_in_ns(400 * NS_PER_US) == 600 * NS_PER_US
        one.add(2, some_facts(2, 1), 8, urgent=False, now_ns=900 * NS_PER_US)
        group = one.next_group(1_000 * NS_PER_US)
        assert group is not None
        assert decode_group(group.data).now_ms == 8
        assert (group.epoch, group.first, group.last) == (3, 1, 2)
        assert one.due_in_ns(0) is None

    def test_an_urgent_one_leaves_at_once_until_many_are_under_way(self) -> None:
        one = queue(in_flight_max=64)
        for number in range(1, URGENT_GROUPS_MAX + 1):
            one.add(number, some_facts(number, 1), 1, urgent=True, now_ns=0)
            assert one.next_group(0) is not None
        one.add(URGENT_GROUPS_MAX + 1, some_facts(1, 1), 1, urgent=True, now_ns=0)
        assert one.next_group(0) is None
        one.confirm(1)
        assert one.next_group(0) is not None

    def test_a_large_one_is_cut_and_a_decision_is_never_split(self) -> None:
        one = queue(group_bytes=100)
        decision = some_facts(1, 50)
        one.add(1, decision, 1, urgent=False, now_ns=0)
        group = one.next_group(0)
        assert group is not None
        assert len(decode_group(group.data).facts) == 50

    def test_no_more_than_the_bound_is_under_way(self) -> None:
        one = queue(in_flight_max=2, group_bytes=1)
        for number in range(1, 5):
            one.add(number, some_facts(number, 1), 1, urgent=False, now_ns=0)
        assert [one.next_group(0) is not None for _ in range(3)] == [True, True, False]
        assert one.in_flight == 2
        assert one.due_in_ns(0) is None

    def test_what_was_not_confirmed_is_sent_again_in_order(self) -> None:
        one = queue(group_bytes=1)
        for number in range(1, 4):
            one.add(number, some_facts(number, 1), 1, urgent=False, now_ns=0)
        sent = [one.next_group(0) for _ in range(3)]
        one.confirm(1)
        one.send_again()
        assert [one.next_group(0), one.next_group(0)] == sent[1:]
        assert one.durable == 1
        one.confirm(2)
        one.confirm(3)
        assert one.idle
        assert one.bytes == 0

    def test_a_confirmation_out_of_turn_changes_nothing(self) -> None:
        one = queue(group_bytes=1)
        one.add(1, some_facts(1, 1), 1, urgent=False, now_ns=0)
        one.next_group(0)
        assert one.confirm(2) is None
        assert one.durable == 0

    def test_facts_that_do_not_follow_are_a_bug(self) -> None:
        with pytest.raises(InternalError):
            queue().add(2, some_facts(2, 1), 1, urgent=False, now_ns=0)

    def test_an_epoch_is_not_raised_under_way(self) -> None:
        one = queue(group_bytes=1)
        one.add(1, some_facts(1, 1), 1, urgent=False, now_ns=0)
        one.next_group(0)
        with pytest.raises(InternalError):
            one.raise_epoch(4)
        assert not one.hold()
        one.add(2, some_facts(2, 1), 1, urgent=True, now_ns=0)
        assert one.next_group(0) is None, "held until the epoch is raised, however large"
        assert one.due_in_ns(0) is None
        one.confirm(1)
        assert one.hold()
        one.raise_epoch(9)
        group = one.next_group(0)
        assert group is not None
        assert group.epoch == 9

    @pytest.mark.parametrize("seed", range(5))
    def test_whatever_happens_the_journal_gets_each_fact_once_in_order(self, seed: int) -> None:
        rng = random.Random(seed)
        one = queue(in_flight_max=3, group_bytes=60)
        journal: list[int] = []
        wire: list[Group] = []
        number = now_ns = 0
        for _ in range(600):
            now_ns += rng.randrange(400 * NS_PER_US)
            count = rng.randrange(4)
            if count:
                one.add(
                    number + 1, some_facts(number + 1, count), 1, urgent=rng.random() < 0.2, now_ns=now_ns
                )
                number += count
            while (group := one.next_group(now_ns)) is not None:
                wire.append(group)
            while wire and rng.random() < 0.6:
                arrived = wire.pop(0)
                if arrived.first == len(journal) + 1:
                    journal += range(arrived.first, arrived.last + 1)
                if arrived.last <= len(journal):
                    one.confirm(arrived.last)
            if rng.random() < 0.05:  # the connection is lost, with some of what was on its way
                wire = []
                one.send_again()
        one.flush()
        while not one.idle:
            while (group := one.next_group(now_ns)) is not None:
                wire.append(group)
            arrived = wire.pop(0)
            if arrived.first == len(journal) + 1:
                journal += range(arrived.first, arrived.last + 1)
            one.confirm(arrived.last)
        assert journal == list(range(1, number + 1)), f"seed={seed}"
        assert one.bytes == 0


class TestAnswers:
    CASES = (
        (b"+OK\r\n", [b"OK"]),
        (b":-7\r\n", [-7]),
        (b"$-1\r\n*-1\r\n", [None, None]),
        (b"$4\r\na\r\nb\r\n*0\r\n", [b"a\r\nb", []]),
        (b"*2\r\n*1\r\n:1\r\n$0\r\n\r\n", [[[1], b""]]),
    )

    @pytest.mark.parametrize(("data", "answers"), CASES)
    @pytest.mark.parametrize("step", [1, 2, 5, 1_000])
    def test_answers_come_whole_however_they_are_cut(
        self, data: bytes, answers: list[Any], step: int
    ) -> None:
        parser = AnswerParser()
        got: list[Any] = []
        for start in range(0, len(data), step):
            got += parser.feed(data[start : start + step])
        assert got == answers

    def test_a_refusal_is_a_value(self) -> None:
        (answer,) = AnswerParser().feed(b"-OOM command not allowed\r\n")
        assert isinstance(answer, RedisRefusal)
        assert answer.code == "OOM"

    @pytest.mark.parametrize(
        "data",
        [
            b"?\r\n",
            b"$x\r\n",
            b"$-2\r\n",
            b":\r\n",
            b":1" + b"0" * 30 + b"\r\n",
            b"$3\r\nabcdef\r\n",
            b"$99999999999\r\n",
            b"*%d\r\n" % (ARRAY_ITEMS_MAX + 1),
            b"*1\r\n" * 20,
            b"+" + b"x" * 100_000,
        ],
    )
    def test_what_is_no_answer_is_refused(self, data: bytes) -> None:
        with pytest.raises(ProtocolError):
            AnswerParser().feed(data)

    @given(st.lists(st.binary(max_size=40), max_size=6))
    def test_any_bytes_give_answers_or_an_error(self, pieces: list[bytes]) -> None:
        """However the bytes are cut: the same answers in the same order, or an error both times."""

        def answers(parts: list[bytes]) -> list[object] | None:
            parser = AnswerParser()
            found: list[object] = []
            try:
                for part in parts:
                    found += parser.feed(part)
            except ProtocolError:
                return None
            return found

        assert repr(answers(pieces)) == repr(answers([b"".join(pieces)]))

    @given(st.lists(st.binary(max_size=40), min_size=1, max_size=6))
    def test_a_command_reads_back_as_an_array(self, words: list[bytes]) -> None:
        assert AnswerParser().feed(pack_command(*words)) == [words]


class TestLeases:
    def test_the_leader_counts_from_before_it_asked_and_stops_early(self) -> None:
        lease = Lease(1_000, 0)
        assert lease.until_ns == 900 * NS_PER_MS
        assert lease.due_in_ns(0) == 1_000 * NS_PER_MS // 3
        lease.asking(400 * NS_PER_MS)
        assert lease.until_ns == 900 * NS_PER_MS, "asking is not having"
        lease.renewed(400 * NS_PER_MS)
        assert lease.until_ns == 1_300 * NS_PER_MS
        lease.renewed(100 * NS_PER_MS)
        assert lease.until_ns == 1_300 * NS_PER_MS, "a late answer takes nothing back"
        lease.end()
        assert lease.until_ns == 0

    @staticmethod
    def seen(holder: str, ttl_ms: int = 0, released: int = 0) -> Watched:
        value = f"{holder * 32}\n5\n{holder}\nhost:1".encode() if holder else None
        return Watched(
            value=value, ttl_ms=ttl_ms, epoch=5, sequence=0, snapshot=0, released=released, journal=b"j"
        )

    def test_a_standby_waits_as_long_as_the_lease_had_left(self) -> None:
        vacancy = Vacancy(b"o" * 32)
        assert vacancy.is_open(0)
        vacancy.saw(self.seen("a", ttl_ms=800), 100 * NS_PER_MS)
        assert not vacancy.is_open(100 * NS_PER_MS)
        # The clock of Redis's host jumped: the key is gone long before its time.
        vacancy.saw(self.seen(""), 200 * NS_PER_MS)
        assert not vacancy.is_open(200 * NS_PER_MS)
        assert vacancy.open_in_ns(200 * NS_PER_MS) == 700 * NS_PER_MS
        assert vacancy.is_open(900 * NS_PER_MS)

    def test_a_lease_that_was_given_back_is_open_at_once(self) -> None:
        vacancy = Vacancy(b"o" * 32)
        vacancy.saw(self.seen("a", ttl_ms=800), 0)
        vacancy.saw(self.seen("", released=4), NS_PER_MS)
        assert not vacancy.is_open(NS_PER_MS), "an earlier leader gave that one back"
        vacancy.saw(self.seen("", released=5), NS_PER_MS)
        assert vacancy.is_open(NS_PER_MS)

    def test_ones_own_lease_is_open(self) -> None:
        vacancy = Vacancy(b"a" * 32)
        vacancy.saw(self.seen("a", ttl_ms=800), 0)
        assert vacancy.is_open(0)

    def test_a_holder_is_read_back_and_junk_is_empty(self) -> None:
        about = describe(Identity(name="m", endpoints=("h:1", "@x")))
        holder = read_holder(b"t" * 32 + b"\n17\n" + about.encode())
        assert (holder.token, holder.epoch, holder.name) == (b"t" * 32, 17, "m")
        assert holder.endpoints == ("h:1", "@x")
        assert read_holder(b"\xff\n\xfe").epoch == 0


class TestPieces:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("piece_bytes", [64, 4_096])
    def test_chunks_come_back_and_pieces_are_equal(self, seed: int, piece_bytes: int) -> None:
        rng = random.Random(seed)
        chunks = [rng.randbytes(rng.choice((0, 1, 50, 5_000))) for _ in range(20)]
        pieces = list(compressed(chunks, piece_bytes))
        assert {len(piece) for piece in pieces[:-1]} <= {piece_bytes}
        assert list(restored_chunks(pieces)) == chunks

    @pytest.mark.parametrize("change", ["cut", "flip", "more", "empty"])
    def test_what_is_not_whole_is_refused(self, change: str) -> None:
        pieces = list(compressed([b"abc" * 1_000, b"z" * 500], 64))
        broken = {
            "cut": pieces[:-1],
            "flip": [bytes([pieces[0][0] ^ 1]) + pieces[0][1:], *pieces[1:]],
            "more": [*pieces, b"x"],
            "empty": [],
        }[change]
        with pytest.raises(SnapshotDamaged):
            list(restored_chunks(broken))


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("address", "http://x"),
            ("address", "redis://h:99999"),
            ("address", "redis://h/x"),
            ("address", "redis+unix://"),
            ("prefix", "a b"),
            ("prefix", ""),
            ("lease_ms", 0),
            ("lease_ms", True),
            ("queue_bytes_max", 1),
            ("replicas", -1),
            ("data_dir", ""),
        ],
    )
    def test_a_wrong_field_is_refused(self, field: str, value: Any) -> None:
        given_fields: dict[str, Any] = {"data_dir": "d", **{field: value}}
        with pytest.raises(UsageError):
            JournalConfig(**given_fields)

    def test_addresses_are_read_and_hide_their_secrets(self) -> None:
        one = RedisAddress.parse("rediss://me:s%40cret@host:7000/3")
        assert (one.host, one.port, one.tls, one.user, one.password, one.database) == (
            "host",
            7000,
            True,
            "me",
            "s@cret",
            3,
        )
        assert "cret" not in one.shown
        other = RedisAddress.parse("redis+unix:///a/b.sock?db=2")
        assert (other.path, other.database) == ("/a/b.sock", 2)
        assert RedisAddress.parse("redis://h").port == 6379


def test_the_journal_in_memory_leads_at_once_and_keeps_the_order() -> None:
    woken: list[int] = []
    one = MemoryJournal(
        Identity(name="m", endpoints=("@m",)),
        lambda: twin_tables(TableConfig()).objects,
        lambda: woken.append(1),
    )
    assert not one.may_answer(0)
    one.start()
    (elected,) = one.take()
    assert isinstance(elected, Elected)
    assert (elected.epoch, elected.state.sequence) == (1, 0)
    assert one.may_answer(1 << 61)
    one.append(1, [b"x", b"y"], 5, urgent=False)
    assert one.durable == 2
    one.raise_epoch(6)
    assert one.take() == [EpochRaised(7)]
    assert one.room()
    assert not one.resign("no")
    one.close(release=True)
    assert not one.may_answer(0)
    assert one.lease_until_ns == 0
    assert len(woken) == 2


def test_the_mailbox_drops_facts_of_an_earlier_term() -> None:
    woken: list[int] = []
    mail = Mailbox(lambda: woken.append(1))
    try:
        mail.put_facts(1, [b"abc"], 1, urgent=False)
        assert mail.bytes == 3
        mail.tell(Elected(State(twin_tables(TableConfig()).objects), 1, 4))
        mail.take_notices()
        mail.put_facts(1, [b"de"], 1, urgent=True)
        assert [one.facts for one in mail.take_facts(4)] == [[b"de"]]
        assert mail.bytes == 0
        mail.pause(5.0, lambda: True)
        assert len(woken) == 1
    finally:
        mail.close()
