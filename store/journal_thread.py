"""The journal in Redis: one thread that stands by, is elected, appends, renews, and steps down.

Theory of operation. Standing by, the thread has read the whole journal into a state and follows it; when the
lease is open (`leadership.Vacancy`) it asks to be elected, reads the last stretch up to the sequence that the
election named, and hands the state over with `Elected`. Leading, it sends what `append` queued (`Term`). It
steps down (`Deposed`) when it is fenced, when Redis was started anew, or when the journal went back: the
taker throws its state away, and the thread reads the journal afresh. While Redis is merely away the term goes
on: facts wait in the queue, and the lease decides how long the leader may answer.

    loop thread:  append ──mailbox──▶ thread ──EVALSHA──▶ Redis
                  take   ◀─notices─── thread ◀──answers──

Numbers that both sides read are plain attributes written by one side only. `wake` is called whenever there is
something new for the loop thread to look at.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
from collections.abc import Callable, Sequence
from typing import Final, final

from moonpool.clock import BootClock, Clock
from moonpool.errors import MoonpoolError
from moonpool.store.errors import JournalFenced, JournalLost, JournalUnavailable, JournalUnreadable
from moonpool.store.journal import Deposed, Elected, EpochRaised, Identity, Notice
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_live import Listener, LiveTerm
from moonpool.store.journal_mailbox import Mailbox
from moonpool.store.journal_reader import JournalReader
from moonpool.store.journal_snapshots import SnapshotDuty
from moonpool.store.journal_term import Term, connect_link, poll_ms, warn_of_settings
from moonpool.store.leadership import EPOCHS_SKIPPED_MAX, Candidacy, Lease, Vacancy, describe, elect, watch
from moonpool.store.private_redis import PrivateRedis
from moonpool.store.redis_link import RedisAddress, RedisLink
from moonpool.store.redis_resp import RedisRefusal
from moonpool.store.redis_runs import NO_RUN, run_of, vouch
from moonpool.store.redis_scripts import Keys
from moonpool.store.state import State
from moonpool.store.tables import ObjectTable
from moonpool.units import NS_PER_MS, NS_PER_S

_LOG: Final = logging.getLogger("moonpool.store.journal")
#: Pauses between attempts to reach Redis, in seconds; the last one stays.
_PAUSES_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2)
#: Pause after a journal that cannot be loaded: someone has to look first.
_UNREADABLE_PAUSE_S: Final = 1.0
#: How long `close` lets the last facts become durable.
_FLUSH_S: Final = 5.0
_LOOK_NS: Final = 20 * NS_PER_MS


@final
class RedisJournal:
    """A pool's journal in Redis; see `moonpool.store.journal.Journal`."""

    def __init__(
        self,
        config: JournalConfig,
        identity: Identity,
        make_objects: Callable[[], ObjectTable],
        wake: Callable[[], None],
        listener: Listener | None = None,
    ) -> None:
        self.config: Final = config
        self._trouble = "the journal was not read yet"
        self.leader_endpoints: tuple[str, ...] = ()
        #: "standby", "leader" or "closed".
        self.role = "standby"
        self._mail = Mailbox(wake)
        self._clock: Clock = BootClock()
        self._keys = Keys(config.prefix)
        self._about = describe(identity)
        self._token = os.urandom(16).hex().encode()
        self._private = (
            PrivateRedis(config.data_dir, config.timeout_ms, config.start_timeout_ms)
            if not config.address
            else None
        )
        self._reader = JournalReader(self._keys, make_objects)
        self._terms = 0
        self._server_run = NO_RUN
        self._snapshots = SnapshotDuty(config, self._keys)
        self._live = LiveTerm(self._mail, self._snapshots, listener)
        self._links_polled = select.POLLIN if listener is None else 0
        self._counts = {"journal_terms": 0, "journal_deposed": 0, "journal_reconnects": 0, "journal_loads": 0}
        self._closing = False
        self._release = False
        self._thread = threading.Thread(target=self._run, name="moonpool-journal", daemon=True)

    # -- called by the loop thread

    def start(self) -> None:
        """Begins to stand by for leadership."""
        self._thread.start()

    def take(self) -> list[Notice]:
        """What happened since the last call, in order; never waits."""
        return self._mail.take_notices()

    def append(self, first_sequence: int, facts: Sequence[bytes], now_ms: int, *, urgent: bool) -> None:
        """Queues facts of one decision; never waits. `urgent`: a reply waits for them."""
        self._mail.put_facts(first_sequence, facts, now_ms, urgent=urgent)
        self.service()

    def service(self) -> None:
        """Takes in what Redis answered and sends what is due; never waits. To be called in each turn."""
        self._live.assist(self._clock.now_ns())

    @property
    def durable(self) -> int:
        """The last sequence that is durable in the term that was taken last; 0 when that is over."""
        number, durable = self._live.progress
        return durable if number == self._mail.term else 0

    @property
    def trouble(self) -> str:
        """Why the journal does not take facts now; "" when it does."""
        return self._trouble or self._live.trouble

    def room(self) -> bool:
        """False while the queue or the journal is at its bound: no mutation may be decided."""
        return self._live.queued_bytes < self.config.queue_bytes_max and self._snapshots.has_room

    def may_answer(self, now_ns: int) -> bool:
        """Whether the leader's lease still holds at this reading of CLOCK_BOOTTIME."""
        return now_ns < self._live.lease_until_ns

    @property
    def lease_until_ns(self) -> int:
        """The reading at which the lease ends; 0 when this master does not lead."""
        return self._live.lease_until_ns

    def resign(self, reason: str) -> bool:
        """Gives the term up, so that the journal is read afresh; `Deposed` follows."""
        self._live.resigned = reason
        self._mail.poke()
        return True

    def raise_epoch(self, at_least: int) -> None:
        """Asks for an epoch above `at_least`; `EpochRaised` or `Deposed` follows."""
        self._live.epoch_asked = max(self._live.epoch_asked, at_least)
        self._mail.poke()

    def write_snapshot(self, state: State) -> None:
        """Forks a child that writes the state as it is now; the caller stops only for the fork."""
        self._snapshots.begin(state)
        self._mail.poke()

    def counters(self) -> dict[str, int]:
        """Gauges and counters for metrics; callable from any thread."""
        return {
            **self._counts,
            **self._snapshots.counters(),
            "journal_queue_bytes": self._live.queued_bytes,
            "journal_appends": self._live.appends,
            "journal_durable_sequence": self.durable,
            "journal_leading": int(self.role == "leader"),
            "journal_in_trouble": int(bool(self.trouble)),
        }

    def close(self, *, release: bool) -> None:
        """Ends the thread; with `release`, after what was appended is durable, another may lead at once.

        A private server is stopped with `release` and left running without.
        """
        if self._closing:
            return
        self._release = release
        self._closing = True
        self._mail.poke()
        if self._thread.ident is not None:
            self._thread.join()
        self.role = "closed"
        self._snapshots.close()
        self._mail.close()
        if self._private is not None and release:
            self._private.leave(self._server_run)
        elif self._private is not None:
            self._private.forsake()

    # -- the journal's thread

    def _run(self) -> None:
        attempts = 0
        while not self._closing:
            try:
                self._serve()
                attempts = 0
                continue
            except (JournalUnreadable, RedisRefusal) as exc:
                self._tell_trouble(str(exc))
                pause_s = _UNREADABLE_PAUSE_S
            except JournalUnavailable as exc:
                self._tell_trouble(str(exc))
                pause_s = _PAUSES_S[min(attempts, len(_PAUSES_S) - 1)]
                attempts += 1
            except MoonpoolError as exc:
                self._tell_trouble(str(exc))
                pause_s = _UNREADABLE_PAUSE_S
            except Exception as exc:  # a bug must not end the thread silently: it says so, and steps down
                _LOG.exception("the journal's thread failed")
                self._tell_trouble(f"the journal failed: {exc!r}; please report this with the log")
                pause_s = _UNREADABLE_PAUSE_S
            self._mail.pause(pause_s, self._stopped)

    def _serve(self) -> None:
        """One connection of standing by, and the term that may follow."""
        link = self._connect()
        try:
            term = self._stand_by(link)
        except BaseException:
            link.close()
            raise
        if term is None:
            link.close()
            return
        try:
            self._lead(term, link)
        finally:
            link.close()
            self._snapshots.abandon()

    def _connect(self) -> RedisLink:
        if self._private is not None:
            address = self._private.ensure(self._stopped)
        else:
            address = RedisAddress.parse(self.config.address)
        link = connect_link(self.config, address)
        try:
            if self._private is not None and self._private.goes_on_with:
                vouch(link, self._keys, self._private.goes_on_with)
                self._private.goes_on_with = ""
            self._server_run = run_of(link, self._keys)
        except BaseException:
            link.close()
            raise
        return link

    def _stand_by(self, link: RedisLink) -> Term | None:
        """Follows the journal until this master is elected; None when closing."""
        self._load(link, lambda: None)
        vacancy = Vacancy(self._token)
        look_ms = max(1, self.config.lease_ms // 10)
        while not self._closing:
            asked_ns = self._clock.now_ns()
            vacancy.saw(watch(link, self._keys), asked_ns)
            self.leader_endpoints = vacancy.holder.endpoints if vacancy.holder else ()
            self._trouble = ""
            if vacancy.is_open(self._clock.now_ns()):
                term = self._stand_for_election(link)
                if term is not None:
                    return term
            try:
                self._reader.follow(link, look_ms)
            except JournalLost:  # trimmed past this point, or another journal
                self._load(link, lambda: None)
        return None

    def _load(self, link: RedisLink, breathe: Callable[[], None]) -> None:
        self._reader.load(link, breathe)
        self._counts["journal_loads"] += 1

    def _stand_for_election(self, link: RedisLink) -> Term | None:
        asked_ns = self._clock.now_ns()
        new_journal = os.urandom(16).hex().encode()
        candidacy = Candidacy(self._token, self._about, self.config.lease_ms, new_journal)
        above, state = self._reader.epoch, self._reader.state
        if state.run not in ("", self._server_run.name) or not state.sequence:
            # Another run of Redis may have forgotten the last elections, or (an empty journal) all of them;
            # and no epoch may be given twice: an object id would mean two objects, a number two segments or
            # tenants. By chance, for what was forgotten may have begun here too.
            above += 1 + secrets.randbelow(EPOCHS_SKIPPED_MAX)
        won = elect(link, self._keys, candidacy, above)
        if won is None:
            return None
        term = Term(
            self.config, self._keys, self._token, self._about, won, Lease(self.config.lease_ms, asked_ns)
        )
        term.on_epoch = self._epoch_raised
        term.on_published = self._snapshots.published
        self._catch_up(link, term, won.journal, won.sequence)
        state = self._reader.state
        if state.sequence != won.sequence:
            raise JournalLost(f"the journal ends at fact {won.sequence}; {state.sequence} were read")
        term.attach(link)
        warn_of_settings(link)
        self._snapshots.lead(self._reader, self._clock.now_ns())
        return term

    def _catch_up(self, link: RedisLink, term: Term, journal: bytes, sequence: int) -> None:
        """Reads the last stretch, renewing the lease on the way."""

        def breathe() -> None:
            term.renew_now(link, self._clock.now_ns())

        if self._reader.journal not in (journal, b"") or self._reader.sequence > sequence:
            self._load(link, breathe)
        while self._reader.sequence < sequence:
            breathe()
            try:
                self._reader.follow(link, 0)
            except JournalLost:
                self._load(link, breathe)

    def _lead(self, term: Term, link: RedisLink) -> None:
        state = self._reader.hand_over()
        self._terms += 1
        self._counts["journal_terms"] += 1
        self._live.begin(term, self._terms)
        self._live.connected(link)
        self.role = "leader"
        self._trouble = ""
        self._mail.tell(Elected(state, term.queue.epoch, self._terms, self._server_run.name))
        reason = "this master is closing"
        connected = True
        try:
            while not self._closing:
                if not connected:
                    connected = self._reconnect(term)
                    continue
                try:
                    self._lead_over()
                except JournalUnavailable as exc:
                    self._tell_trouble(str(exc))
                    self._live.disconnected()
                    connected = False
            if self._release and connected:
                self._finish(term)
        except (JournalFenced, JournalLost) as exc:
            reason = str(exc)
            self._counts["journal_deposed"] += 1
            _LOG.warning("this master steps down: %s", reason)
        except JournalUnavailable as exc:
            reason = str(exc)
        finally:
            self._live.end()
            self.role = "standby"
            self._mail.tell(Deposed(reason))

    def _lead_over(self) -> None:
        """Leads over one connection until it fails or the journal closes."""
        link = self._live.link
        poller = select.poll()
        poller.register(self._mail, select.POLLIN)
        while not self._closing:
            due_ns = self._live.advance(self._clock.now_ns())
            poller.register(link, self._links_polled | (select.POLLOUT if link.unsent else 0))
            for fd, _ in poller.poll(poll_ms(due_ns)):
                if fd == self._mail.fileno():
                    self._mail.drain()

    def _reconnect(self, term: Term) -> bool:
        """Another connection for the same term; False when this attempt failed."""
        try:
            link = self._connect()
            try:
                term.attach(link)
            except BaseException:
                link.close()
                raise
        except (JournalUnavailable, RedisRefusal) as exc:
            self._tell_trouble(str(exc))
            self._mail.pause(_PAUSES_S[-1], self._stopped)
            return False
        self._live.connected(link)
        self._snapshots.reattached()
        self._trouble = ""
        self._counts["journal_reconnects"] += 1
        return True

    def _finish(self, term: Term) -> None:
        """Before a clean end: everything appended becomes durable, then the lease is given back."""
        end_ns = self._clock.now_ns() + int(_FLUSH_S * NS_PER_S)
        link = self._live.link
        poller = select.poll()
        while (now_ns := self._clock.now_ns()) < end_ns:
            due_ns = self._live.advance(now_ns)
            if self._live.settled:
                term.release(link)
                return
            poller.register(link, select.POLLIN | (select.POLLOUT if link.unsent else 0))
            poller.poll(poll_ms(min(due_ns, _LOOK_NS)))

    def _epoch_raised(self, epoch: int) -> None:
        self._mail.tell(EpochRaised(epoch))

    def _tell_trouble(self, text: str) -> None:
        if self._trouble != text:
            _LOG.warning("the journal is in trouble: %s", text)
            self._trouble = text
            self._mail.nudge()

    def _stopped(self) -> bool:
        return self._closing
