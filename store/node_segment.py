"""A segment as a node's core has it, and what is reported of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool.errors import MoonpoolError, ProtocolError
from moonpool.store.directory import DEAD, Directory, NewObject, check_new
from moonpool.store.directory_report import RECORD_BYTES, RecordState, ReportRecord
from moonpool.store.node_holds import Hold, Holds
from moonpool.store.node_pins import PinBook, PinPlace

_NO_DIGEST: Final = bytes(16)


@final
@dataclass(slots=True, kw_only=True)
class CoreSegment:
    """`about` is its map in `node_join`, but for what the directory's header says."""

    about: Mapping[str, Any]
    directory: Directory
    id: int = 0

    def join_map(self) -> dict[str, Any]:
        """As `node_join` carries it."""
        header = self.directory.header
        return {
            **self.about,
            "generation": header.generation,
            "capacity": header.capacity,
            "slots": header.slots,
        }

    def joined(self, segment_id: int) -> None:
        """A new join: grants of earlier ones are over."""
        self.id = segment_id
        self.directory.name(segment_id)
        self.directory.plain.join_begins()


def check_object(segment: CoreSegment, new: NewObject) -> None:
    """ProtocolError when the object cannot stand in the segment."""
    try:
        check_new(new, segment.directory.header.capacity)
    except MoonpoolError as problem:
        raise ProtocolError(f"the master added an impossible object: {problem}") from problem


@final
class Reporter:
    """Makes the pages of a report, one at a time."""

    def __init__(self, segments: list[CoreSegment], holds: Holds, pins: PinBook, page_bytes: int) -> None:
        self._segments = segments
        self._holds = holds
        self._pins = pins
        self._page_bytes = page_bytes

    def records(self, index: int, start: int) -> tuple[list[ReportRecord], int]:
        """A page of a segment's records, and where to go on, or -1. Begin with 0.

        First come fenced extents in slots that never held an object, then all slots that did.
        """
        directory = self._segments[index].directory
        slots = directory.header.slots
        records: list[ReportRecord] = []
        size = 0
        if start < slots:
            for slot, hold in sorted(self._holds.of_segment(index)):
                if slot < start or directory.word(slot):
                    continue
                if size >= self._page_bytes:
                    return records, slot
                records.append(_held(slot, hold))
                size += RECORD_BYTES
        for slot in directory.used(max(0, start - slots)):
            if size >= self._page_bytes:
                return records, slots + slot
            record = self._record(directory, PinPlace(index, slot))
            records.append(record)
            size += RECORD_BYTES + len(record.key)
        return records, -1

    def _record(self, directory: Directory, place: PinPlace) -> ReportRecord:
        entry = directory.entry(place.slot)
        state = RecordState.COMPLETE
        if directory.word(place.slot) & DEAD:
            hold = self._holds.at(place)
            if hold is not None and (hold.offset, hold.length) != (entry.offset, entry.size):
                return _held(place.slot, hold)  # of a later put, which was fenced
            held = hold is not None or self._pins.count(place) > 0
            state = RecordState.HELD if held else RecordState.DEAD
        return ReportRecord(
            place.slot,
            state,
            entry.object_type,
            entry.tenant,
            entry.offset,
            entry.size,
            entry.object_id,
            entry.digest,
            directory.key(entry),
            entry.reason,
        )


def _held(slot: int, hold: Hold) -> ReportRecord:
    """An extent that never held a complete object, as far as this slot's entry tells."""
    return ReportRecord(slot, RecordState.HELD, 0, 0, hold.offset, hold.length, 0, _NO_DIGEST, b"")
