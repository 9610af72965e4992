"""Reports: what nodes find in their directories, against what the table says.

Record by record (`docs/store/architecture.md`, "What may be adopted"):

| in the directory | in the table | then |
|---|---|---|
| complete | the same object at this place | confirmed |
| complete, unknown id | nothing, or an older object, and no grave | adopted, as a new place or object |
| complete | anything else | retired |
| dead, removed or replaced | the same object | the object ends everywhere |
| dead, otherwise | the same object at this place | the place ends |
| dead, unknown id | an older object at this place | the place ends |
| dead, removed, unknown id | nothing, or an older object | a grave |
| held | | quarantined until the node releases it |

At the end of a segment's report the places that nothing confirmed are sent again as ADD, but for those whose
slot has something else: a journal that lost its end may name such places, and they end.
"""

from __future__ import annotations

from typing import Any, Final, final

from moonpool.errors import ProtocolError
from moonpool.store import facts
from moonpool.store.call import Call
from moonpool.store.directory_report import RecordState, ReportRecord, read_records
from moonpool.store.effects import ADD, RETIRE
from moonpool.store.errors import BadParams
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_endings import end_objects
from moonpool.store.leader_nodes import Nodes
from moonpool.store.params import flag, number, raw
from moonpool.store.quarantine import Quarantined
from moonpool.store.records import (
    DEFAULT_TENANT_ID,
    DIGEST_BYTES,
    ObjectType,
    Place,
    Reason,
    StoredObject,
    epoch_of,
    extent_bytes,
)
from moonpool.store.segment_space import SegmentSpace
from moonpool.store.sessions import CONFIRMED, TAKEN, TOLD, Join, SlotMarks
from moonpool.units import U32_MAX

_PAGE: Final = 4_096
_PAGE_BYTES: Final = 4_096


@final
class Reports:
    """Takes in the pages of nodes' reports."""

    def __init__(self, core: LeaderCore, nodes: Nodes) -> None:
        self._core = core
        self._nodes = nodes

    def node_report(self, call: Call) -> list[Any]:
        """One page of one segment's directory."""
        core, join = self._core, call.join
        segment_id = number(call.params[0], "segment", 0, U32_MAX)
        page = number(call.params[1], "page", 0, U32_MAX)
        last = flag(call.params[2], "last")
        data = raw(call.params[3], "entries")
        space = core.spaces.get(segment_id)
        if space is None or join.reporting.get(segment_id) != page:
            raise BadParams(f"page {page} of segment {segment_id} is not what this join has to report next")
        try:
            records = read_records(data, space.slot_count, space.capacity)
        except ProtocolError as exc:
            raise BadParams(exc.message, field="entries") from exc
        core.check_may_change()
        self._nodes.heard_ms[join.node_id] = core.now_ms
        join.reporting[segment_id] = page + 1
        if page == 0:
            join.confirmed[segment_id] = SlotMarks()
            join.adopted[segment_id] = {}
            join.passed_on[segment_id] = {}
        marks = join.confirmed[segment_id]
        for record in records:
            if not marks.tell(record.slot):
                # A slot that is told twice: nothing of it can be believed.
                self._nodes.reset(segment_id)
                return [core.counters.epoch]
            self._take(join, space, record)
            if segment_id not in core.spaces:
                return [core.counters.epoch]
        if last:
            self._complete(join, space)
        return [core.counters.epoch]

    def _take(self, join: Join, space: SegmentSpace, record: ReportRecord) -> None:
        core = self._core
        index = core.objects.find(record.tenant, record.key) if record.key else -1
        stored = core.objects.at(index) if index >= 0 else None
        if record.state == RecordState.HELD:
            self._quarantine(join, space, record, _reason_of(record, stored))
        elif record.state == RecordState.DEAD:
            self._take_dead(join, space, record, stored)
        elif not record.key:
            # Without its key it cannot be found: an ADD at the end tells the node again what it should be.
            pass
        elif stored is not None and Place(space.segment_id, record.offset, record.slot) in stored.places:
            if stored.object_id == record.object_id:
                join.confirmed[space.segment_id][record.slot] = CONFIRMED
        elif not self._adopt(join, space, record, stored):
            self._retire(join, space, record, _reason_of(record, stored))

    # Complete entries that the table does not have

    def _adopt(
        self, join: Join, space: SegmentSpace, record: ReportRecord, stored: StoredObject | None
    ) -> bool:
        core, object_id = self._core, record.object_id
        fits = (
            core.state.may_adopt(record.tenant, record.key, object_id)
            and epoch_of(object_id) < core.counters.epoch
            and (stored is None or stored.object_id <= object_id)
            and len(record.digest) == DIGEST_BYTES
            and record.object_type <= max(ObjectType)
            and self._tenant_known(record)
            and self._cover(space, record)
        )
        if not fits:
            return False
        place = Place(space.segment_id, record.offset, record.slot)
        self._forget_older(space, record)
        if stored is not None and stored.object_id == object_id:
            if stored.size != record.size or stored.digest != record.digest:
                return False
            if any(each.segment == space.segment_id for each in stored.places):
                return False
            core.commit(facts.PlaceAdded(object_id, record.tenant, record.key, place))
        else:
            core.commit(
                facts.Object(
                    object_id,
                    record.tenant,
                    record.key,
                    record.size,
                    record.digest,
                    record.object_type,
                    0,
                    0,
                    0,
                    (place,),
                    stored.object_id if stored is not None else 0,
                )
            )
            if stored is not None:
                for old in stored.places:
                    if (old.segment, old.slot) != (place.segment, place.slot):
                        core.retire(stored, old, Reason.REPLACED, 0)
        core.stored_events(record.tenant, [(record.key, (place,))])
        join.adopted[space.segment_id][record.slot] = object_id
        join.confirmed[space.segment_id][record.slot] = TAKEN
        return True

    def _tenant_known(self, record: ReportRecord) -> bool:
        """Tenants that a journal lost are unknown: their ids may mean others now."""
        core = self._core
        if record.tenant == DEFAULT_TENANT_ID:
            return True
        made = core.state.tenant_epochs.get(record.tenant)
        return made is not None and epoch_of(record.object_id) >= made

    def _cover(self, space: SegmentSpace, record: ReportRecord) -> bool:
        """Sees to it that windows cover an entry's extent and slot; False when they cannot."""
        core = self._core
        unit = _PAGE_BYTES if record.size >= _PAGE_BYTES else 64
        if record.offset % unit or record.offset + extent_bytes(record.size) > space.capacity:
            return False
        slots_end = -(-(record.slot + 1) * space.capacity // space.slot_count)
        end = -(-max(record.offset + extent_bytes(record.size), slots_end) // _PAGE_BYTES) * _PAGE_BYTES
        end = min(end, space.capacity)
        if space.resolved and space.added:
            return False
        if space.resolved:
            space.unresolve()
        if end <= space.floor:
            return True
        if space.windows or space.added != space.floor:
            # Windows of this leader follow the floor: what lies there is known.
            return False
        # In one step as large as a window, or each page would open some more.
        end = min(space.capacity, max(end, space.floor + core.config.window_bytes))
        core.commit(facts.Window(space.segment_id, space.floor, end - space.floor))
        space.raise_floor(end)
        return True

    def _retire(self, join: Join, space: SegmentSpace, record: ReportRecord, reason: Reason) -> None:
        """Nobody wants the entry: its word must be stamped dead."""
        if self._quarantine(join, space, record, reason):
            return
        # Its extent is given already, or was never opened: only the word matters.
        effect = (RETIRE, space.segment_id, record.slot, record.object_id, reason)
        self._core.send(join, effect)

    def _quarantine(self, join: Join, space: SegmentSpace, record: ReportRecord, reason: Reason) -> bool:
        """Keeps a reported extent from being freed with what nobody explains; True when it is quarantined."""
        if space.resolved:
            return record.slot in space.quarantine
        self._forget_older(space, record)
        if record.slot in space.quarantine:
            return True
        if not self._cover(space, record):
            return False
        entry = Quarantined(
            space.segment_id,
            record.slot,
            record.offset,
            record.size,
            self._core.free_after_ms,
            object_id=record.object_id,
            reason=record.reason or reason,
            instance=bytes(16),
        )
        space.quarantine[record.slot] = entry
        space.quarantined_bytes += extent_bytes(record.size)
        join.confirmed[space.segment_id][record.slot] = TAKEN
        return True

    def _forget_older(self, space: SegmentSpace, record: ReportRecord) -> None:
        """Ends the quarantine of what was in the slot before: the journal lost that it was released."""
        entry = space.quarantine.get(record.slot)
        if entry is not None and entry.object_id != record.object_id and not space.resolved:
            del space.quarantine[record.slot]
            space.quarantined_bytes -= extent_bytes(entry.size)

    # Dead entries

    def _take_dead(
        self, join: Join, space: SegmentSpace, record: ReportRecord, stored: StoredObject | None
    ) -> None:
        core = self._core
        if not core.state.knows(record.object_id):
            # Whatever the table has in this slot from before had ended when it was given on.
            join.passed_on[space.segment_id][record.slot] = record.object_id
        ended = record.reason in (Reason.REMOVED, Reason.REPLACED)
        if stored is not None and stored.object_id == record.object_id:
            here = any(
                each.segment == space.segment_id and each.slot == record.slot for each in stored.places
            )
            reason = Reason.EVICTED if record.reason == Reason.EVICTED else Reason.DAMAGED
            if ended or (here and len(stored.places) == 1):
                self._end(stored, Reason.REMOVED if ended else reason)
            elif here:
                self.drop_place(stored, space.segment_id, reason)
            return
        unknown = bool(record.key) and not core.state.knows(record.object_id)
        if not (ended and unknown) or core.state.settled or not core.state.adopting:
            return
        if stored is None:
            pair = ((record.object_id, record.key),)
            core.commit(facts.ObjectsGone(Reason.REMOVED, record.tenant, pair))
        elif stored.object_id < record.object_id:
            self._end(stored, Reason.REMOVED)
            pair = ((record.object_id, record.key),)
            core.commit(facts.ObjectsGone(Reason.REMOVED, record.tenant, pair))

    def _end(self, stored: StoredObject, reason: Reason) -> None:
        core = self._core
        lease_ms = core.objects.lease_until(core.objects.find(stored.tenant, stored.key))
        needs = end_objects(core, [stored], [lease_ms], reason)
        core.hold(None, needs, ((stored.tenant, stored.key),))

    def drop_place(self, stored: StoredObject, segment_id: int, reason: Reason) -> None:
        """An object loses one of several places, or ends with its only one."""
        core = self._core
        if len(stored.places) == 1:
            self._end(stored, reason)
            return
        place = next(each for each in stored.places if each.segment == segment_id)
        lease_ms = core.objects.lease_until(core.objects.find(stored.tenant, stored.key))
        core.commit(facts.PlaceGone(stored.object_id, stored.tenant, stored.key, segment_id, reason))
        needs = core.retire(stored, place, reason, lease_ms)
        core.hold(None, needs, ((stored.tenant, stored.key),))
        core.removed_events(stored.tenant, [(stored.key, (place,))])

    # The end of a segment's report

    def _complete(self, join: Join, space: SegmentSpace) -> None:
        self._send_missing(join, space)
        for noted in (join.reporting, join.confirmed, join.adopted, join.passed_on):
            del noted[space.segment_id]
        if not join.reporting:
            self._nodes.reports_complete(join)

    def _send_missing(self, join: Join, space: SegmentSpace) -> None:
        """ADDs for the places that the directory lacks."""
        core, segment_id = self._core, space.segment_id
        confirmed = join.confirmed[segment_id]
        places = len(core.objects.packed_places(segment_id)) // 24
        if not confirmed.count(TAKEN) and confirmed.count(CONFIRMED) == places:
            return
        after = -1
        while page := core.objects.places_on(segment_id, after, _PAGE):
            after = page[-1]
            for index in page:
                stored = core.objects.at(index)
                place = next(each for each in stored.places if each.segment == segment_id)
                if join.slot_is_anothers(segment_id, place.slot, stored.object_id):
                    self._drop_taken(stored, segment_id)
                elif confirmed[place.slot] in (0, TOLD):
                    self._send_add(join, stored, place)

    def _drop_taken(self, stored: StoredObject, segment_id: int) -> None:
        """Ends a place whose slot was given on, as the journal forgot; nothing of it is given back."""
        core = self._core
        gone = tuple(each for each in stored.places if each.segment == segment_id)
        if len(stored.places) == 1:
            pair = ((stored.object_id, stored.key),)
            core.commit(facts.ObjectsGone(Reason.EVICTED, stored.tenant, pair))
        else:
            fact = facts.PlaceGone(stored.object_id, stored.tenant, stored.key, segment_id, Reason.EVICTED)
            core.commit(fact)
        core.removed_events(stored.tenant, [(stored.key, gone)])

    def _send_add(self, join: Join, stored: StoredObject, place: Place) -> None:
        self._core.send(
            join,
            (
                ADD,
                place.segment,
                place.slot,
                place.offset,
                stored.size,
                stored.tenant,
                stored.object_id,
                stored.key,
                stored.digest,
                stored.object_type,
                b"",
                0,
            ),
        )


def _reason_of(record: ReportRecord, stored: StoredObject | None) -> Reason:
    """Why nobody wants an entry. Only what ended for good may be called removed: it stays dead everywhere."""
    if stored is None:
        return Reason.REMOVED
    return Reason.EVICTED if stored.object_id == record.object_id else Reason.REPLACED
