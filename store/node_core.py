"""A node's decisions: effects in, directory changes and acknowledgements out. Pure.

**States.** AWAY (no connection), JOINING (`node_join` sent), REPORTING (pages of directories go out), ACTIVE.
A lost connection or RESET leads back to AWAY; memory, directories, pins and unsettled fences stay. Each
connection is a join: it brings a new grant key, so all grants of earlier joins are wrong from then on, and
effects are counted from 1 again.

**Effects** are applied in the order of their numbers, each once: a repeat is skipped, one that leaves a gap
is ignored until the master sends the missing ones again. An epoch below the highest seen is refused.

**Release.** After RETIRE or FENCE an extent is *held* while a view pins it, a lane carries a WRITE into it
that was let in before, or a living process of this host may still write it; then the next acknowledgement
says `released`. The object's grants may outlive it: they are *denied* (by the start and the tag that they
show). What is held when a join begins is reported as held. A later effect on the slot drops what was to be
said of it.

Times are milliseconds of one clock of the caller's that goes on while the machine sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, final

from moonpool.errors import ProtocolError
from moonpool.store.directory import CHUNK_BYTES, DEAD
from moonpool.store.directory_report import pack_records
from moonpool.store.errors import StaleEpoch
from moonpool.store.node_effects import (
    ANY_SLOT,
    TAG_MASK,
    Add,
    Effect,
    Fence,
    Rehash,
    Reset,
    Retire,
    read_effect,
)
from moonpool.store.node_hashing import HashWork
from moonpool.store.node_holds import LANES_ONLY, Fencing, Holds
from moonpool.store.node_pins import PinBook, PinPlace
from moonpool.store.node_segment import CoreSegment, Reporter, check_object
from moonpool.store.node_views import Views

#: A join is over before the node's clock could wrap in a grant's 32 bits.
JOIN_MS_MAX: Final = 1 << 31


class Phase(Enum):
    """Where the node stands with its master."""

    AWAY = "away"
    JOINING = "joining"
    REPORTING = "reporting"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Bounds of a node's core."""

    pins_max: int = 1_000_000
    pins_per_client_max: int = 65_536
    jobs_max: int = 4_096
    report_page_bytes: int = 1 << 20
    released_per_ack_max: int = 16_384


@final
class NodeCore:
    """See above. Not thread-safe; nothing here blocks."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        segments: Sequence[CoreSegment],
        fencing: Fencing,
        limits: CoreLimits,
    ) -> None:
        self._identity = identity
        self.segments = list(segments)
        self.fencing = fencing
        self._limits = limits
        self.phase = Phase.AWAY
        self.epoch = max((one.directory.header.epoch for one in segments), default=0)
        self.node_id = 0
        self.grant_key = b""
        self.settings: Mapping[str, Any] = {}
        self.applied = 0
        #: When the node's clock read 0: the moment the present join was sent.
        self.zero_ms = 0
        self.pins = PinBook(limits.pins_max, limits.pins_per_client_max)
        self._index: dict[int, int] = {}
        self.holds = Holds(self.pins, fencing)
        self._reporter = Reporter(self.segments, self.holds, self.pins, limits.report_page_bytes)
        self.hashing = HashWork(self.segments, limits.jobs_max)
        self.views = Views(self.segments, self._index, self.pins)
        self._said: tuple[list[tuple[PinPlace, int]], int] | None = None
        self._page: tuple[int, int, int] | None = None
        self.counters = dict.fromkeys(
            (
                "effects_applied",
                "effects_repeated",
                "effects_ahead",
                "effects_stale",
                "joins",
                "pins_overwritten",
            ),
            0,
        )

    # ---- joining -------------------------------------------------------------------------------------------

    def join_params(self, now_ms: int) -> list[Any]:
        """The parameters of `node_join`, sent at this moment: the node's clock begins."""
        self.lost()
        self.phase = Phase.JOINING
        self.zero_ms = now_ms
        about = self._identity
        fields = [about[name] for name in ("name", "host", "instance", "engine_endpoint", "view_endpoint")]
        return [*fields, self.epoch, [one.join_map() for one in self.segments]]

    def joined(self, reply: object) -> None:
        """The master's answer: `[epoch, node id, [segment id, ...], grant key, settings]`.

        StaleEpoch for a lower epoch than one seen, ProtocolError for what is no such answer.
        """
        if not isinstance(reply, list) or len(reply) < 5:
            raise ProtocolError("the master's answer to node_join is not of its shape")
        epoch, node_id, ids, key, settings = reply[:5]
        self.see(epoch)
        good = (
            type(node_id) is int and isinstance(key, bytes) and len(key) == 16 and isinstance(settings, dict)
        )
        if not good or not isinstance(ids, list) or len(ids) != len(self.segments):
            raise ProtocolError("the master's answer to node_join has wrong fields")
        if any(type(one) is not int or not 0 < one < 1 << 32 for one in ids):
            raise ProtocolError("the master gave a segment an impossible id")
        self.node_id, self.grant_key, self.settings = node_id, key, settings
        for index, segment_id in enumerate(ids):
            self.segments[index].joined(segment_id)
            self._index[segment_id] = index
        self.applied = 0
        self.holds.join_begins()
        self.hashing.join_begins()
        self._said = None
        self._page = (0, 0, 0)
        self.phase = Phase.REPORTING if self.segments else Phase.ACTIVE
        self.counters["joins"] += 1

    def lost(self) -> None:
        """The connection is gone: everything is kept for the next join."""
        self.phase = Phase.AWAY
        self._said = None
        self._page = None

    def wants_join(self, now_ms: int) -> bool:
        """True when a new join is due: there is none, or its clock comes near its end."""
        return self.phase is Phase.AWAY or now_ms - self.zero_ms >= JOIN_MS_MAX

    def see(self, epoch: object) -> None:
        """An epoch in a message of the master's: StaleEpoch for a lower one than one seen."""
        if type(epoch) is not int or not 0 <= epoch < 1 << 23:
            raise ProtocolError(f"the master sent the epoch {epoch!r}")
        if epoch < self.epoch:
            self.counters["effects_stale"] += 1
            raise StaleEpoch(f"the master is of epoch {epoch}, this node has seen {self.epoch}")
        if epoch > self.epoch:
            self.epoch = epoch
            for segment in self.segments:
                segment.directory.note_epoch(epoch)

    # ---- reporting -----------------------------------------------------------------------------------------

    def next_page(self) -> list[Any] | None:
        """Parameters of the next `node_report`; None when there is none to send. Send one at a time."""
        if self.phase is not Phase.REPORTING or self._page is None:
            return None
        index, number, start = self._page
        segment = self.segments[index]
        records, after = self._reporter.records(index, start)
        last = after < 0
        self._page = (index + 1, 0, 0) if last else (index, number + 1, after)
        return [segment.id, number, last, pack_records(records)]

    def page_answered(self, reply: object) -> None:
        """The page that went out last was taken. After the last one the node is active."""
        if not isinstance(reply, list) or not reply:
            raise ProtocolError("the master's answer to node_report is not of its shape")
        self.see(reply[0])
        if self._page is not None and self._page[0] == len(self.segments):
            self._page = None
            self.phase = Phase.ACTIVE

    # ---- effects -------------------------------------------------------------------------------------------

    def effects(self, epoch: object, first: object, effects: object, now_ms: int) -> None:
        """A push of the master's: effects numbered from `first`. Raises StaleEpoch and ProtocolError.

        What comes before a wrong effect is applied.
        """
        self.see(epoch)
        if type(first) is not int or first < 1 or not isinstance(effects, list):
            raise ProtocolError("the master's effects are not of their shape")
        if not self.takes_effects:
            return
        for number, raw in enumerate(effects, first):
            if number <= self.applied:
                self.counters["effects_repeated"] += 1
                continue
            if number > self.applied + 1:
                self.counters["effects_ahead"] += 1
                return
            effect = read_effect(raw)
            self.apply(effect, now_ms)
            self.note_applied(1)
            if type(effect) is Reset:
                return

    @property
    def takes_effects(self) -> bool:
        """True between a join and its loss."""
        return self.phase in (Phase.REPORTING, Phase.ACTIVE)

    def note_applied(self, count: int) -> None:
        """So many more effects are done."""
        self.applied += count
        self.counters["effects_applied"] += count

    def index_of(self, segment_id: int) -> int:
        """Our number of the segment that the master calls so; -1 for none."""
        index = self._index.get(segment_id, -1)
        return index if index >= 0 and self.segments[index].id == segment_id else -1

    def busy_places(self) -> set[PinPlace]:
        """Places that somebody is concerned with: what an effect does there depends on more than the slot."""
        return {*self.holds.places(), *self.pins.places(), *self.hashing.places()}

    def apply(self, effect: Effect, now_ms: int) -> None:
        """Does one effect; ProtocolError when it cannot be."""
        index = self.index_of(effect.segment)
        if index < 0:
            raise ProtocolError(f"the master names segment {effect.segment}, which this node does not have")
        segment = self.segments[index]
        if isinstance(effect, Reset):
            self._reset(index)
            return
        slot = effect.slot
        whole = isinstance(effect, Fence) and slot == ANY_SLOT
        if slot >= segment.directory.header.slots and not whole:
            raise ProtocolError(f"the master names slot {slot} of segment {effect.segment}: there is none")
        place = PinPlace(index, slot)
        match effect:
            case Add():
                self._add(place, effect, now_ms)
            case Retire():
                self._retire(place, effect, now_ms)
            case Fence():
                self._fence(place, effect, now_ms)
            case Rehash():
                self.hashing.rehash(place, effect)

    def _forget(self, place: PinPlace) -> None:
        """A new effect on a slot: what was to be said of it is of the past."""
        self.holds.forget(place)
        self.hashing.forget(place)

    def _add(self, place: PinPlace, effect: Add, now_ms: int) -> None:
        segment = self.segments[place.segment]
        directory = segment.directory
        new = effect.new
        if new.object_id <= directory.word(place.slot) & ~DEAD:
            return
        check_object(segment, new)
        self._forget(place)
        if self.pins.count(place):
            self.counters["pins_overwritten"] += 1
        directory.plain.note(place.slot, effect.tag, now_ms)
        # Its chunk digests may not be known: they are computed here then, and must give the root.
        whole = new.size <= CHUNK_BYTES or len(new.chunks) > 0
        if whole or not self.hashing.show_later(place, new):
            directory.add(place.slot, new)

    def _retire(self, place: PinPlace, effect: Retire, now_ms: int) -> None:
        segment = self.segments[place.segment]
        waiting = self.hashing.unverified(place)
        if waiting is not None and waiting.object_id == effect.object_id:
            offset, size = waiting.offset, waiting.size
        elif segment.directory.retire(place.slot, effect.object_id, effect.reason) or (
            segment.directory.word(place.slot) == DEAD | effect.object_id
        ):
            entry = segment.directory.entry(place.slot)
            offset, size = entry.offset, entry.size
        else:
            # Not here: an ADD that failed its check. Nobody reads what was never shown.
            self._forget(place)
            self.holds.begin(place, 0, 0, 0)
            return
        self._forget(place)
        self.deny(place.segment, offset, size, segment.directory.plain.noted(place.slot), now_ms)
        ticket = self.fencing.begin(place.segment, offset, size, LANES_ONLY, now_ms)
        self.holds.begin(place, ticket, offset, size)

    def deny(self, segment: int, offset: int, size: int, noted: tuple[int, int], now_ms: int) -> None:
        """The grants of a put are refused when its object went before they are over."""
        tag, added_ms = noted
        until = added_ms + self._grant_ms(size) if tag else 0
        if now_ms < until:
            self.fencing.deny(segment, offset, tag, until)

    def _grant_ms(self, size: int) -> int:
        """The longest that grants of a put of this size can last after its end."""
        rate = self.settings.get("put_bytes_per_ms", 0)
        extra = size // rate if type(rate) is int and rate > 0 else 0
        base = self.settings.get("put_ms", 0)
        return (base if type(base) is int else 0) + extra

    def _fence(self, place: PinPlace, effect: Fence, now_ms: int) -> None:
        capacity = self.segments[place.segment].directory.header.capacity
        if effect.offset > capacity or effect.length > capacity - effect.offset:
            raise ProtocolError("the master fences an extent outside of its segment")
        self._forget(place)
        until = self.zero_ms + effect.until_ms
        if effect.put_id and until > now_ms:
            self.fencing.deny(place.segment, effect.offset, effect.put_id & TAG_MASK, until)
        ticket = self.fencing.begin(place.segment, effect.offset, effect.length, effect.instance, until)
        self.holds.begin(place, ticket, effect.offset, effect.length)

    def _reset(self, index: int) -> None:
        self.hashing.forget_segment(index)
        self.segments[index].directory.reset()
        self.lost()

    @property
    def is_waiting(self) -> bool:
        """True while extents are held or bytes hashed: then `tick` is worth calling often."""
        return len(self.holds) > 0 or self.hashing.is_busy

    # ---- acknowledging -------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> bool:
        """Looks for extents that nobody uses any more; True when there is something to say at once."""
        self.holds.look(now_ms)
        return bool(self.holds.releases or self.hashing.answers) and self._said is None

    def ack_params(self, now_ms: int) -> list[Any] | None:
        """Parameters of `node_ack`; None while one is unanswered, or when there is no join."""
        if self._said is not None or not self.takes_effects:
            return None
        places = self.holds.to_say(self._limits.released_per_ack_max)
        answers = self.hashing.answers
        self._said = (places, len(answers))
        released = [[self.segments[place.segment].id, place.slot] for place, _ in places]
        return [self.applied, now_ms - self.zero_ms, released, answers]

    def ack_answered(self, reply: object) -> None:
        """The acknowledgement was taken: what it said need not be said again."""
        if not isinstance(reply, list) or not reply:
            raise ProtocolError("the master's answer to node_ack is not of its shape")
        self.see(reply[0])
        if self._said is None:
            return
        places, answers = self._said
        self._said = None
        self.holds.said(places)
        self.hashing.said(answers)

    # ---- looking in ----------------------------------------------------------------------------------------

    def totals(self) -> dict[str, int]:
        """Counters since the start."""
        return {
            **self.counters,
            "views_opened": self.views.opened,
            "views_refused": self.views.refused,
            "views_dropped": self.views.dropped,
            "rehashes": self.hashing.asked,
            "rehashes_damaged": self.hashing.damaged,
            "adds_damaged": self.hashing.adds_damaged,
        }

    def gauges(self) -> dict[str, int]:
        """Numbers of the moment."""
        return {
            "objects": sum(one.directory.live for one in self.segments),
            "capacity_bytes": sum(one.directory.header.capacity for one in self.segments),
            "log_free_bytes": sum(one.directory.log_free_bytes() for one in self.segments),
            "objects_without_log": sum(one.directory.without_log for one in self.segments),
            "pins": self.pins.total,
            "clients_with_pins": self.pins.holders,
            "held_extents": len(self.holds),
            "releases_waiting": self.holds.releases,
            "hash_jobs_waiting": self.hashing.jobs,
            "epoch": self.epoch,
            "effect": self.applied,
        }
