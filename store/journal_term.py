"""One term of a leader, over connections to Redis: groups sent and confirmed, the lease renewed, snapshots
made current. It waits for nothing: `pump` sends what is due, `answered` takes in what came.

Commands are answered in order, so what was sent is a queue of expectations. A group that Redis refuses for
the moment (no memory, no replica, a lost script) leaves those behind it out of sequence; then nothing more is
sent until every answer is in, and all that is not confirmed is sent again. `JournalFenced` and `JournalLost`
end the term; `JournalUnavailable` ends the connection, and `attach` goes on over the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

from moonpool.store.errors import JournalFenced, JournalLost, JournalUnavailable, JournalUnreadable
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_groups import Group, GroupQueue
from moonpool.store.leadership import Lease, Won
from moonpool.store.redis_link import RedisAddress, RedisLink
from moonpool.store.redis_resp import Answer, RedisRefusal, pack_command, pack_script
from moonpool.store.redis_scripts import ALL, APPEND, FENCED, GAP, LOST, PUBLISH, RAISE, RELEASE, RENEW, Keys
from moonpool.units import NS_PER_MS

#: What an entry costs in Redis beside its bytes, roughly: for the bound on the journal.
ENTRY_BYTES: Final = 40
_VERSION_MIN: Final = (6, 2)  # XTRIM with MINID
_LOG: Final = logging.getLogger("moonpool.store.journal")
_SLOW: Final = "Redis is slow to answer"
#: Pause before a refused append is tried again.
_RETRY_NS: Final = 100 * NS_PER_MS


class _Expected(NamedTuple):
    """An answer that is owed: since when, and what to do with it."""

    sent_ns: int
    take: Callable[[Answer, int], None]


class Published(NamedTuple):
    """A snapshot that is written and waits to be made current: its keys, and those that it replaces."""

    number: int
    sequence: int
    new_keys: list[bytes]
    old_keys: list[bytes]


@final
class Term:
    """What one leader wrote in one term. Belongs to the journal's thread."""

    def __init__(
        self, config: JournalConfig, keys: Keys, token: bytes, about: str, won: Won, lease: Lease
    ) -> None:
        self._config = config
        self._keys = keys
        self._token = token
        self._about = about
        self.journal = won.journal
        self.lease = lease
        self.queue = GroupQueue(
            won.epoch, won.sequence, config.group_bytes, config.linger_us, config.groups_in_flight_max
        )
        #: Why the journal takes nothing now; "" when it does.
        self.trouble = ""
        #: Bytes confirmed in this term, with what entries cost.
        self.appended_bytes = 0
        self.appends = 0
        self._link: RedisLink | None = None
        self._run_id = ""
        self._expected: deque[_Expected] = deque()
        self._waiting_for_replicas: deque[int] = deque()
        self._broken_off = False
        self._retry_ns = 0
        self._epoch_wanted = -1
        self._raising = False
        #: Called with the new epoch, and with whether a snapshot became current.
        self.on_epoch: Callable[[int], None] = lambda epoch: None
        self.on_published: Callable[[bool], None] = lambda done: None

    def attach(self, link: RedisLink) -> None:
        """Goes on over a new connection; raises `JournalLost` when it leads to another server or journal."""
        if self._run_id and link.run_id != self._run_id:
            raise JournalLost("Redis was started anew", peer=link.address.shown)
        head: Any = link.call(b"HMGET", self._keys.head, b"journal", b"epoch", b"sequence")
        if head[0] != self.journal or int(head[1] or 0) < self.queue.epoch:
            raise JournalLost(peer=link.address.shown)
        if int(head[1]) > self.queue.epoch:
            raise JournalFenced(peer=link.address.shown)
        if int(head[2] or 0) < self.queue.durable:
            raise JournalLost(
                f"the journal went back from fact {self.queue.durable} to {int(head[2] or 0)}",
                peer=link.address.shown,
            )
        self._link, self._run_id = link, link.run_id
        self._expected.clear()
        self._waiting_for_replicas.clear()
        self._broken_off = self._raising = False
        self._retry_ns = 0
        self.queue.send_again()

    def detach(self) -> None:
        """Closes the connection, if there is one."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def raise_epoch(self, at_least: int) -> None:
        """Asks for an epoch above `at_least` once all that was sent is confirmed."""
        self._epoch_wanted = max(self._epoch_wanted, at_least)

    def publish(self, link: RedisLink, ready: Published, now_ns: int) -> None:
        """Asks Redis to make a snapshot current."""
        packed = pack_script(
            PUBLISH,
            [self._keys.head, self._keys.journal, *ready.new_keys, *ready.old_keys],
            self.journal,
            self.queue.epoch,
            ready.sequence,
            ready.number,
            len(ready.new_keys),
        )
        self._send(link, packed, self._take_published, now_ns)

    def pump(self, link: RedisLink, now_ns: int) -> None:
        """Sends everything that is due."""
        if self._expected and now_ns - self._expected[0].sent_ns > self._config.timeout_ms * NS_PER_MS:
            raise JournalUnavailable(
                f"Redis at {link.address.shown} did not answer within {self._config.timeout_ms} ms",
                peer=link.address.shown,
                timeout_ms=self._config.timeout_ms,
            )
        if self._slow_in_ns(now_ns) == 0 and not self.trouble:
            self.trouble = _SLOW
        if self.lease.due_in_ns(now_ns) == 0:
            self._renew(link, now_ns)
        if self._broken_off:
            if self._expected or now_ns < self._retry_ns:
                return
            self._broken_off = False
            self.queue.send_again()
        if self._epoch_wanted >= 0:
            self._raise(link, now_ns)
        if not self._raising:
            self._send_groups(link, now_ns)

    def due_in_ns(self, now_ns: int) -> int:
        """How long until `pump` has something to do without an answer or a fact coming."""
        due = self.lease.due_in_ns(now_ns)
        if self._expected:
            due = min(due, self._expected[0].sent_ns + self._config.timeout_ms * NS_PER_MS - now_ns)
            due = min(due, self._slow_in_ns(now_ns) or due)
        if self._broken_off:
            return max(0, min(due, self._retry_ns - now_ns) if not self._expected else due)
        linger = self.queue.due_in_ns(now_ns)
        return max(0, due if linger is None else min(due, linger))

    def _slow_in_ns(self, now_ns: int) -> int:
        """How long until the oldest answer is slow to come; 0: it is."""
        if not self._expected:
            return self._config.slow_ms * NS_PER_MS
        return max(0, self._expected[0].sent_ns + self._config.slow_ms * NS_PER_MS - now_ns)

    def answered(self, link: RedisLink, answers: list[Answer], now_ns: int) -> None:
        """Takes in answers, in order."""
        for answer in answers:
            if not self._expected:
                raise JournalUnavailable(
                    f"Redis at {link.address.shown} sent an answer that nobody asked for"
                )
            self._expected.popleft().take(answer, now_ns)
        if self.trouble == _SLOW:
            self.trouble = ""

    @property
    def owes_nothing(self) -> bool:
        """No answer is awaited."""
        return not self._expected

    def renew_now(self, link: RedisLink, now_ns: int) -> None:
        """Renews the lease when it is due, waiting for the answer: while the last facts are read."""
        if self.lease.due_in_ns(now_ns):
            return
        self.lease.asking(now_ns)
        if link.exchange(self._renewal(), 1)[0] != 1:
            raise JournalFenced("another master took the lease while this one read the last facts")
        self.lease.renewed(now_ns)

    def release(self, link: RedisLink) -> None:
        """Gives the lease back, so that another may lead at once; what was appended must be confirmed."""
        self.lease.end()
        link.run(RELEASE, [self._keys.head, self._keys.leader], self._token, self.queue.epoch)

    def _send(self, link: RedisLink, packed: bytes, take: Callable[[Answer, int], None], now_ns: int) -> None:
        self._expected.append(_Expected(now_ns, take))
        link.send(packed)

    def _send_groups(self, link: RedisLink, now_ns: int) -> None:
        keys = [self._keys.head, self._keys.journal]
        packed: list[bytes] = []
        last = 0
        while (group := self.queue.next_group(now_ns)) is not None:
            packed.append(
                pack_script(APPEND, keys, self.journal, group.epoch, group.first, group.last, group.data)
            )
            self._expected.append(_Expected(now_ns, self._taker(group)))
            last = group.last
        if not packed:
            return
        answers = len(packed)
        if self._config.replicas:
            packed.append(pack_command(b"WAIT", self._config.replicas, self._config.replicas_wait_ms))
            self._expected.append(_Expected(now_ns, self._replica_taker(link, last)))
            answers += 1
        link.send(b"".join(packed), answers)

    def _taker(self, group: Group) -> Callable[[Answer, int], None]:
        def take(answer: Answer, now_ns: int) -> None:
            self._take_append(group, answer, now_ns)

        return take

    def _take_append(self, group: Group, answer: Answer, now_ns: int) -> None:
        if isinstance(answer, int):
            self.appends += 1
            if self._config.replicas:
                self._waiting_for_replicas.append(group.last)
            else:
                self._confirm(group.last)
            return
        if isinstance(answer, RedisRefusal):
            self._break_off(answer, now_ns)
            return
        outcome = answer if isinstance(answer, list) else [LOST]
        if outcome[0] == FENCED:
            raise JournalFenced(f"epoch {outcome[1]!r} leads; this master led in {group.epoch}")
        if outcome[0] == GAP and isinstance(outcome[1], int) and outcome[1] >= self.queue.durable:
            self._break_off(None, now_ns)
            return
        raise JournalLost

    def _break_off(self, refusal: RedisRefusal | None, now_ns: int) -> None:
        """Stops sending until every answer is in; then all that is not confirmed goes again."""
        self._broken_off = True
        if refusal is not None:
            self.trouble = refusal.text
            self._retry_ns = now_ns + _RETRY_NS
            if refusal.code == "NOSCRIPT":
                raise JournalUnavailable("Redis forgot its scripts; connecting again")

    def _confirm(self, last: int) -> None:
        group = self.queue.confirm(last)
        if group is not None:
            self.appended_bytes += len(group.data) + ENTRY_BYTES
            self.trouble = ""

    def _replica_taker(self, link: RedisLink, last: int) -> Callable[[Answer, int], None]:
        def take(answer: Answer, now_ns: int) -> None:
            if isinstance(answer, int) and answer >= self._config.replicas:
                while self._waiting_for_replicas and self._waiting_for_replicas[0] <= last:
                    self._confirm(self._waiting_for_replicas.popleft())
                return
            self.trouble = f"{answer!r} of {self._config.replicas} replicas have the last facts"
            packed = pack_command(b"WAIT", self._config.replicas, self._config.replicas_wait_ms)
            self._send(link, packed, self._replica_taker(link, last), now_ns)

        return take

    def _renew(self, link: RedisLink, now_ns: int) -> None:
        self.lease.asking(now_ns)

        def take(answer: Answer, _now_ns: int) -> None:
            if answer == 1:
                self.lease.renewed(now_ns)
            elif isinstance(answer, RedisRefusal):
                self.trouble = answer.text
            else:
                raise JournalFenced("another master took the lease, or the journal is gone")

        self._send(link, self._renewal(), take, now_ns)

    def _renewal(self) -> bytes:
        return pack_script(
            RENEW,
            [self._keys.head, self._keys.leader],
            self._token,
            self.queue.epoch,
            self._config.lease_ms,
            self._about,
            self.journal,
        )

    def _raise(self, link: RedisLink, now_ns: int) -> None:
        if not self.queue.hold() or self._raising or self._expected:
            return
        self._raising = True

        def take(answer: Answer, _now_ns: int) -> None:
            self._raising = False
            if isinstance(answer, RedisRefusal):
                self._break_off(answer, now_ns)
                return
            if not isinstance(answer, int) or answer <= self.queue.epoch:
                raise JournalFenced(f"the epoch could not be raised above {self._epoch_wanted}")
            self._epoch_wanted = -1
            self.queue.raise_epoch(answer)
            self.on_epoch(answer)

        packed = pack_script(
            RAISE,
            [self._keys.head, self._keys.leader],
            self._token,
            self.queue.epoch,
            self._config.lease_ms,
            self._about,
            self._epoch_wanted,
        )
        self._send(link, packed, take, now_ns)

    def _take_published(self, answer: Answer, _now_ns: int) -> None:
        if answer == 0:
            raise JournalFenced
        self.on_published(answer == 1)


def connect_link(config: JournalConfig, address: RedisAddress) -> RedisLink:
    """A connection that knows the journal's scripts; `JournalUnreadable` for a Redis that is too old."""
    link = RedisLink(address, config.timeout_ms, ALL)
    numbers = link.version.split(".")[:2]
    if not all(each.isdecimal() for each in numbers) or tuple(map(int, numbers)) < _VERSION_MIN:
        link.close()
        raise JournalUnreadable(
            f"Redis at {address.shown} is version {link.version!r}; the journal needs 6.2 or newer, or Valkey"
        )
    return link


def warn_of_settings(link: RedisLink) -> None:
    """Says in the log which settings of Redis would lose facts."""
    about: dict[bytes, bytes] = {}
    for section in (b"persistence", b"memory"):
        text = link.call(b"INFO", section)
        lines = text.split(b"\r\n") if isinstance(text, bytes) else []
        about |= dict(line.split(b":", 1) for line in lines if b":" in line)
    if about.get(b"aof_enabled") == b"0":
        _LOG.warning("Redis at %s keeps no append-only file: a crash of it loses facts", link.address.shown)
    if about.get(b"maxmemory", b"0") != b"0" and about.get(b"maxmemory_policy") != b"noeviction":
        _LOG.warning(
            "Redis at %s may evict keys: a pool that it forgets is lost; set maxmemory-policy noeviction",
            link.address.shown,
        )


def poll_ms(due_ns: int) -> float:
    """A wait for `poll`, which rounds fractions up, so that it never ends early and spins."""
    return due_ns / NS_PER_MS
