"""Bytes that a node has to hash: on a REHASH of the master's, and for an ADD without chunk digests. Pure.

The jobs are done elsewhere, by a thread that may take its time; what they found comes back through `hashed`.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, final

from moonpool.store.directory import NewObject
from moonpool.store.node_effects import Rehash
from moonpool.store.node_pins import PinPlace
from moonpool.store.node_segment import CoreSegment

#: The task of a job that no REHASH asked for.
NO_TASK: Final = -1


class Verdict:
    """Of a REHASH."""

    TRUE: Final = 0
    DAMAGED: Final = 1
    ABSENT: Final = 2


class Job(NamedTuple):
    """`[offset, offset + size)` of a segment's data."""

    task: int
    place: PinPlace
    object_id: int
    offset: int
    size: int


@final
class HashWork:
    """Jobs that wait, objects that are shown only once their bytes are known to be right, and answers."""

    def __init__(self, segments: list[CoreSegment], jobs_max: int) -> None:
        self._segments = segments
        self._jobs_max = jobs_max
        self._jobs: deque[Job] = deque()
        self._unverified: dict[PinPlace, NewObject] = {}
        self._answers: deque[list[int]] = deque()
        self.asked = self.damaged = self.adds_damaged = 0
        self._taken = 0

    @property
    def is_busy(self) -> bool:
        """True while a job waits or is being done."""
        return len(self._jobs) > 0 or self._taken > 0

    @property
    def jobs(self) -> int:
        """How many wait."""
        return len(self._jobs)

    @property
    def answers(self) -> list[list[int]]:
        """`[task, verdict]` of what was found and not yet told."""
        return list(self._answers)

    def said(self, count: int) -> None:
        """The master has heard of the first so many answers."""
        for _ in range(count):
            self._answers.popleft()

    def join_begins(self) -> None:
        """Nobody waits for the answers of an earlier join."""
        self._answers.clear()
        self._jobs = deque(job for job in self._jobs if job.task == NO_TASK)

    def show_later(self, place: PinPlace, new: NewObject) -> bool:
        """Hash an object before it is shown; False when too much waits."""
        if len(self._jobs) >= self._jobs_max:
            return False
        self._unverified[place] = new
        self._jobs.append(Job(NO_TASK, place, new.object_id, new.offset, new.size))
        return True

    def unverified(self, place: PinPlace) -> NewObject | None:
        """The object that is to be shown there."""
        return self._unverified.get(place)

    def places(self) -> list[PinPlace]:
        """Where objects are to be shown."""
        return list(self._unverified)

    def forget(self, place: PinPlace) -> None:
        """Do not show it."""
        self._unverified.pop(place, None)

    def forget_segment(self, segment: int) -> None:
        """Show nothing there that is not shown yet."""
        self._unverified = {p: new for p, new in self._unverified.items() if p.segment != segment}

    def rehash(self, place: PinPlace, effect: Rehash) -> None:
        """A question of the master's. One too many is dropped: it asks again."""
        directory = self._segments[place.segment].directory
        self.asked += 1
        if directory.word(place.slot) != effect.object_id or not effect.object_id:
            self._answers.append([effect.task, Verdict.ABSENT])
        elif len(self._jobs) < self._jobs_max:
            entry = directory.entry(place.slot)
            self._jobs.append(Job(effect.task, place, effect.object_id, entry.offset, entry.size))

    def take(self) -> Job | None:
        """The next job; say `hashed` afterwards."""
        if not self._jobs:
            return None
        self._taken += 1
        return self._jobs.popleft()

    def hashed(self, job: Job, root: bytes, chunks: bytes) -> None:
        """The root digest and the chunk digests (8 bytes each) of a job's bytes."""
        self._taken -= 1
        segment = self._segments[job.place.segment]
        if job.task == NO_TASK:
            new = self._unverified.get(job.place)
            if new is None or new.object_id != job.object_id:
                return
            del self._unverified[job.place]
            if root == new.digest:
                segment.directory.add(job.place.slot, new._replace(chunks=chunks))
            else:
                self.adds_damaged += 1
            return
        if segment.directory.word(job.place.slot) != job.object_id:
            verdict = Verdict.ABSENT
        elif root == segment.directory.entry(job.place.slot).digest:
            verdict = Verdict.TRUE
        else:
            verdict = Verdict.DAMAGED
            self.damaged += 1
        self._answers.append([job.task, verdict])
