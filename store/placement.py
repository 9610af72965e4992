"""Where copies go: a schedule of segments that a cursor walks, weighted by room.

The schedule is a short list in which a segment stands as often as its share of the room; each key starts one
step further. For several copies the walk prefers hosts that have none, then nodes, then segments. Pure: the
same schedule and cursor give the same places, in Python and in the native core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from moonpool.store.records import Place
from moonpool.store.segment_space import SegmentSpace

#: Longest schedule with weights; with more segments each stands in it once.
SCHEDULE_MAX: Final = 256


def weigh(rooms: Sequence[tuple[int, int]]) -> list[int]:
    """A schedule of segment ids from (id, room): each by its share, spread out evenly. Deterministic."""
    total = sum(room for _, room in rooms)
    if not rooms or len(rooms) >= SCHEDULE_MAX or total <= 0:
        return [segment for segment, _ in rooms]
    steps = min(SCHEDULE_MAX, 16 * len(rooms))
    counts = [max(1, steps * room // total) for _, room in rooms]
    # Each stands at the middles of equal parts of the round; sorting these interleaves them.
    marks = sorted(
        ((2 * turn + 1) * 1_000_000 // (2 * count), segment)
        for (segment, _), count in zip(rooms, counts, strict=True)
        for turn in range(count)
    )
    return [segment for _, segment in marks]


def allocate_one(
    spaces: dict[int, SegmentSpace], schedule: Sequence[int], start: int, size: int
) -> Place | None:
    """One extent on the first segment from `start` on that has room, or None."""
    count = len(schedule)
    tried: set[int] | None = None
    for step in range(count):
        segment = schedule[(start + step) % count]
        if tried is not None and segment in tried:
            continue
        found = spaces[segment].allocate(size)
        if found is not None:
            return Place(segment, *found)
        if tried is None:
            tried = set()
        tried.add(segment)
    return None


def allocate_copies(
    spaces: dict[int, SegmentSpace], schedule: Sequence[int], start: int, size: int, copies: int
) -> tuple[Place, ...]:
    """Up to `copies` extents on distinct segments: distinct hosts as far as they go, then distinct nodes."""
    count = len(schedule)
    order = list(dict.fromkeys(schedule[(start + step) % count] for step in range(count)))
    places: list[Place] = []
    hosts: set[str] = set()
    nodes: set[int] = set()
    used: set[int] = set()
    for rule in range(3):
        for segment in order:
            if len(places) == copies:
                return tuple(places)
            space = spaces[segment]
            if (
                segment in used
                or (rule == 0 and space.host in hosts)
                or (rule <= 1 and space.node_id in nodes)
            ):
                continue
            found = space.allocate(size)
            used.add(segment)
            if found is not None:
                places.append(Place(segment, *found))
                hosts.add(space.host)
                nodes.add(space.node_id)
    return tuple(places)


def preferred_first(schedule: Iterable[int], preferred: Sequence[int]) -> list[int]:
    """The schedule with the preferred segments before all others, in their order."""
    rest = [segment for segment in schedule if segment not in preferred]
    return [*preferred, *rest]
