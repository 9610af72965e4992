"""Who leads: the leader's view of its lease, a standby's view of somebody else's, and the election.

Pure but for `elect` and `watch`, which ask Redis once.

Theory of operation. The lease is a key with a TTL that Redis ends; the epoch goes up with every election, in
the same script. Two clocks are never compared. The leader counts its lease from before it asked for it, on
its own CLOCK_BOOTTIME, and stops answering at 90 % of it. A standby takes over when the key is gone *and* as
much time went by on its own clock as the key still had when it was last seen: so a wall clock of Redis's host
that jumps ahead gives no two leaders. A leader that stops cleanly says that nobody answers in its epoch any
more, which cuts the standby's wait short. Facts of a deposed leader are refused by the epoch in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from moonpool.errors import LimitExceeded
from moonpool.store.errors import JournalUnreadable
from moonpool.store.journal import Identity
from moonpool.store.redis_link import RedisLink
from moonpool.store.redis_scripts import (
    BROKEN,
    ELECT,
    EPOCHS_OVER,
    HELD,
    TOKEN_BYTES,
    UNKNOWN_VERSION,
    WATCH,
    Keys,
)
from moonpool.units import NS_PER_MS

#: The part of its lease in which a leader answers; the rest is for what is on its way.
_ANSWERING_PERCENT: Final = 90
_ENDPOINTS_MAX: Final = 16
#: How many epochs are skipped at most where Redis may have forgotten some.
EPOCHS_SKIPPED_MAX: Final = 1_024


class Holder(NamedTuple):
    """What the lease's key says of who holds it."""

    token: bytes
    epoch: int
    name: str
    endpoints: tuple[str, ...]


def describe(who: Identity) -> str:
    """The text about a leader that its lease carries behind token and epoch."""
    return "\n".join((who.name, *who.endpoints[:_ENDPOINTS_MAX]))


def read_holder(value: bytes) -> Holder:
    """Reads a lease's key; what is not there is empty, since this only serves to tell where the leader is."""
    lines = value.decode("utf-8", "replace").split("\n")
    lines += [""] * (3 - len(lines))
    epoch = int(lines[1]) if lines[1].isdecimal() and len(lines[1]) < 10 else 0
    return Holder(value[:TOKEN_BYTES], epoch, lines[2], tuple(lines[3 : 3 + _ENDPOINTS_MAX]))


@final
class Lease:
    """The leader's view of its own lease, by readings of CLOCK_BOOTTIME."""

    def __init__(self, lease_ms: int, asked_ns: int) -> None:
        self._lease_ns = lease_ms * NS_PER_MS
        self._asked_ns = asked_ns
        #: The leader answers before this reading.
        self.until_ns = asked_ns + self._lease_ns * _ANSWERING_PERCENT // 100

    def renewed(self, asked_ns: int) -> None:
        """Redis granted what was asked for at this reading."""
        self.until_ns = max(self.until_ns, asked_ns + self._lease_ns * _ANSWERING_PERCENT // 100)

    def asking(self, now_ns: int) -> None:
        """A renewal is on its way."""
        self._asked_ns = now_ns

    def due_in_ns(self, now_ns: int) -> int:
        """How long until the next renewal is to be asked for: a third of the lease after the last."""
        return max(0, self._asked_ns + self._lease_ns // 3 - now_ns)

    def end(self) -> None:
        """The lease is given up, or was taken."""
        self.until_ns = 0


@final
class Vacancy:
    """A standby's view of the lease that somebody else holds."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._held_until_ns = 0
        self._held_epoch = 0
        self.holder: Holder | None = None

    def saw(self, seen: Watched, asked_ns: int) -> None:
        """Takes in what `watch` answered to a question asked at this reading."""
        if seen.value is None:
            if seen.released and seen.released >= self._held_epoch:
                self._held_until_ns = 0
            self.holder = None
            return
        self.holder = read_holder(seen.value)
        if self.holder.token == self._token:
            return
        self._held_epoch = self.holder.epoch
        self._held_until_ns = max(self._held_until_ns, asked_ns + max(seen.ttl_ms, 0) * NS_PER_MS)

    def open_in_ns(self, now_ns: int) -> int:
        """How long until one may try to lead, as far as is known now; 0: now."""
        if self.holder is not None and self.holder.token == self._token:
            return 0
        return max(0, self._held_until_ns - now_ns)

    def is_open(self, now_ns: int) -> bool:
        """Whether to ask for the lease now."""
        held = self.holder is not None and self.holder.token != self._token
        return not held and self.open_in_ns(now_ns) == 0


@final
@dataclass(frozen=True, slots=True)
class Watched:
    """The lease's key and what is left of it, and the head's numbers; `value` is None when nobody leads."""

    value: bytes | None
    ttl_ms: int
    epoch: int
    sequence: int
    snapshot: int
    released: int
    journal: bytes


def watch(link: RedisLink, keys: Keys) -> Watched:
    """Looks at the lease and the head."""
    answer: Any = link.run(WATCH, [keys.head, keys.leader])
    value, ttl_ms, _, journal, epoch, sequence, snapshot, released = answer
    return Watched(
        value=value,
        ttl_ms=int(ttl_ms),
        epoch=int(epoch or b"0"),
        sequence=int(sequence or b"0"),
        snapshot=int(snapshot or b"0"),
        released=int(released or b"0"),
        journal=journal or b"",
    )


@final
@dataclass(frozen=True, slots=True)
class Candidacy:
    """What one brings to an election. `token` names this process."""

    token: bytes
    about: str
    lease_ms: int
    #: For a journal that does not exist yet.
    new_journal: bytes


@final
@dataclass(frozen=True, slots=True)
class Won:
    """An election's result: the new epoch, and the sequence up to which facts are to be read first."""

    epoch: int
    sequence: int
    journal: bytes


def elect(link: RedisLink, keys: Keys, candidacy: Candidacy, above_epoch: int) -> Won | None:
    """Tries to lead, in an epoch above the journal's and `above_epoch`; None when somebody else does."""
    answer: Any = link.run(
        ELECT,
        [keys.head, keys.leader, keys.journal],
        candidacy.token,
        candidacy.lease_ms,
        candidacy.about,
        above_epoch,
        candidacy.new_journal,
    )
    if answer[0] == HELD:
        return None
    if answer[0] == EPOCHS_OVER:
        raise LimitExceeded(f"the journal under {keys.prefix!r} used all its epochs; take another prefix")
    if answer[0] in (BROKEN, UNKNOWN_VERSION):
        raise JournalUnreadable(
            f"the journal under {keys.prefix!r} cannot be led: its head has version {answer[1]!r}"
            if answer[0] == UNKNOWN_VERSION
            else f"the journal under {keys.prefix!r} cannot be led: the stream is there without its head"
        )
    return Won(int(answer[1]), int(answer[2]), answer[3])
