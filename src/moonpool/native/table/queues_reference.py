"""The plain twin of the recency queues: which objects of one segment are worth least.

Theory of operation. A segment has four queues, least recent first. MAIN and SMALL hold what may be evicted,
SOFT what is evicted last, HELD what is never evicted. Under `lru` everything goes through MAIN. Under
`s3fifo` (Yang et al., SOSP'23, in bytes instead of objects) new objects go to SMALL, which gets half of
the segment; those used in there move to MAIN, the others go and leave a ghost; one that comes back while its
ghost is kept goes to MAIN at once. A use only counts (up to 3); MAIN gives each use one more round.

The paper's own numbers (a tenth, more than one use) are made for the skewed popularity of web objects. Blocks
of prompts are used once a turn of their conversation, minutes apart: with them the published conversation
trace (3,000 requests, a quarter of the distinct blocks) has prefix hits of .234, below an exact LRU's .241;
with these .250.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

SMALL: Final = 0
MAIN: Final = 1
SOFT: Final = 2
HELD: Final = 3
QUEUES: Final = 4
POLICIES: Final = ("lru", "s3fifo")
LRU: Final = 0
S3FIFO: Final = 1

USES_MAX: Final = 3
#: More uses than this in SMALL, and an object moves to MAIN. The native queues use the same two numbers.
USES_TO_MOVE: Final = 0
#: One in so many bytes of a segment is for SMALL.
SMALL_SHARE: Final = 2
#: Rounds of MAIN in one search: enough for the uses of every object to run out.
MAIN_ROUNDS: Final = 4

#: What the ghost of an object is known by.
Name = tuple[int, bytes]


class SegmentQueues:
    """The queues of one segment: object indices, their bytes, uses and ghosts."""

    def __init__(self, policy: int, capacity_bytes: int, ghosts_max: int) -> None:
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.ghosts_max = ghosts_max
        self.order: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(QUEUES)]
        self.queue_of: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.chosen: set[int] = set()
        self.ghosts: OrderedDict[Name, int] = OrderedDict()
        self.ghost_bytes = 0
        self.bytes_in = [0] * QUEUES

    def __len__(self) -> int:
        return len(self.queue_of)

    def total_bytes(self) -> int:
        """Bytes of the extents of all objects on the segment."""
        return sum(self.bytes_in)

    def first_queue(self, name: Name) -> int:
        """Where a new object without a pin goes; its ghost, if it has one, is used up."""
        if self.policy == LRU:
            return MAIN
        return MAIN if self._drop_ghost(name) else SMALL

    def link(self, index: int, queue: int, size: int) -> None:
        """At the recent end of a queue, without uses."""
        self.order[queue][index] = size
        self.bytes_in[queue] += size
        self.queue_of[index] = queue
        self.uses[index] = 0

    def unlink(self, index: int) -> int:
        """Takes an object out; returns its bytes."""
        queue = self.queue_of.pop(index)
        del self.uses[index]
        self.chosen.discard(index)
        size = self.order[queue].pop(index)
        self.bytes_in[queue] -= size
        return size

    def leave_ghost(self, index: int, name: Name) -> None:
        """For an object about to be unlinked: remembers it, if it goes because it was not used in SMALL."""
        if self.policy == LRU or index not in self.chosen or self.queue_of[index] != SMALL:
            return
        self._drop_ghost(name)
        self.ghosts[name] = self.order[SMALL][index]
        self.ghost_bytes += self.order[SMALL][index]
        while len(self.ghosts) > self.ghosts_max or self.ghost_bytes > self.capacity_bytes:
            self._drop_ghost(next(iter(self.ghosts)))

    def move(self, index: int, queue: int) -> None:
        """To the recent end of another queue, or of its own."""
        size = self.order[self.queue_of[index]].pop(index)
        self.bytes_in[self.queue_of[index]] -= size
        self.chosen.discard(index)
        self.order[queue][index] = size
        self.bytes_in[queue] += size
        self.queue_of[index] = queue

    def touch(self, index: int) -> None:
        """A use, as the policy counts it."""
        queue = self.queue_of[index]
        if queue == SOFT or (queue == MAIN and self.policy == LRU):
            self.order[queue].move_to_end(index)
        elif queue != HELD:
            self.uses[index] = min(self.uses[index] + 1, USES_MAX)

    def _drop_ghost(self, name: Name) -> bool:
        size = self.ghosts.pop(name, None)
        self.ghost_bytes -= size or 0
        return size is not None


class Walk:
    """One search through a segment's queues: entries in order, those put back again at the end."""

    def __init__(self, queues: SegmentQueues) -> None:
        self._queues = queues
        self._pending = [deque(order) for order in queues.order]
        rounds = MAIN_ROUNDS if queues.policy == S3FIFO else 1
        self._looks = [
            len(queues.order[SMALL]),
            len(queues.order[MAIN]) * rounds,
            len(queues.order[SOFT]),
            0,
        ]
        self._small_bytes = queues.bytes_in[SMALL]

    def next_entry(self, soft: bool) -> int:
        """The next object to look at, or -1 when there is none."""
        small, main = self._ready(SMALL), self._ready(MAIN)
        full = self._small_bytes > self._queues.capacity_bytes // SMALL_SHARE
        if small and (full or not main):
            index = self._pop(SMALL)
            self._small_bytes -= self._queues.order[SMALL][index]
            return index
        if main:
            return self._pop(MAIN)
        return self._pop(SOFT) if soft and self._ready(SOFT) else -1

    def gets_another_round(self, index: int) -> bool:
        """Whether its uses save it for now; then it has been moved."""
        queues = self._queues
        if queues.policy == LRU or queues.queue_of[index] == SOFT:
            return False
        if queues.queue_of[index] == SMALL:
            if queues.uses[index] <= USES_TO_MOVE:
                return False
            queues.uses[index] = 0
        elif queues.uses[index] == 0:
            return False
        else:
            queues.uses[index] -= 1
        self._back(index, MAIN)
        return True

    def put_back(self, index: int) -> None:
        """To the recent end of its queue: it may not be evicted now."""
        self._back(index, self._queues.queue_of[index])

    def _back(self, index: int, queue: int) -> None:
        self._queues.move(index, queue)
        self._pending[queue].append(index)

    def _ready(self, queue: int) -> bool:
        return bool(self._pending[queue]) and self._looks[queue] > 0

    def _pop(self, queue: int) -> int:
        self._looks[queue] -= 1
        return self._pending[queue].popleft()
