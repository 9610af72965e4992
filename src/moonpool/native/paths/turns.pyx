"""Turns: in which order batches that wait are driven, and when.

Theory of operation. Each batch has a key, fixed when it comes: its time of coming (or its deadline), less a head start
for each class above LOW. The least key has its turn. So a batch of a higher class goes before all of a lower one that
came up to a head start earlier, and after those that came before that: nothing starves, whatever comes. Inside a class
the order is that of coming, or of deadlines.

A class may have a cap, a bucket of bytes that fills at its rate and holds a tenth of a second of it. A batch starts
when the bucket is not empty and takes all its bytes out at once, which may leave a debt: batches larger than the bucket
run too, and the rate holds over time. While its class waits for the bucket, others go on. A batch whose deadline has
passed has its turn at once, so that it can be ended.

Who asks may leave out what cannot run now (its segment is busy). The twin in turns_reference.py gives the same order.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from moonpool.errors import LimitExceeded, UsageError

cdef uint64_t NS_PER_S = 1000000000
cdef uint64_t BUCKET_NS = 100000000          # a bucket holds what its rate brings in this time
cdef uint64_t NO_DEADLINE_NS = 60000000000   # where deadlines decide, what has none counts as due so late
cdef uint64_t RATE_MAX = <uint64_t>1 << 42


cdef int level_of(int of) noexcept nogil:
    return CLASS_NORMAL if of == CLASS_DIRECT else of


cdef void turns_init(mp_turns* turns, uint64_t head_start_ns, bint by_deadline) noexcept nogil:
    """Nothing waits, no caps."""
    memset(turns, 0, sizeof(mp_turns))
    turns.head_start_ns = head_start_ns
    turns.by_deadline = by_deadline


cdef void turns_cap(mp_turns* turns, int of, uint64_t bytes_per_s) noexcept nogil:
    """Cap a class, not DIRECT; 0: no cap."""
    turns.classes[of].rate = bytes_per_s if bytes_per_s < RATE_MAX else RATE_MAX


cdef int64_t bucket_bytes(mp_class* one) noexcept nogil:
    return <int64_t>(one.rate // (NS_PER_S // BUCKET_NS)) + 1


cdef void fill(mp_class* one, uint64_t now_ns) noexcept nogil:
    """Add what the rate brought since the last time, in whole bytes."""
    cdef uint64_t spent, brought
    if one.rate == 0 or now_ns <= one.paid_ns:
        return
    if one.paid_ns == 0:
        one.paid_ns = now_ns
        one.tokens = bucket_bytes(one)
        return
    spent = now_ns - one.paid_ns
    if spent >= NS_PER_S:
        # Long ago: whole seconds first, so that nothing overflows.
        brought = spent // NS_PER_S * one.rate if spent // NS_PER_S < 1 << 20 else one.rate << 20
        one.paid_ns += spent // NS_PER_S * NS_PER_S
        one.tokens += <int64_t>brought
        spent = now_ns - one.paid_ns
    # In steps of a microsecond: a byte's time is then lost by nobody.
    brought = spent // 1000 * one.rate // 1000000
    if brought:
        one.tokens += <int64_t>brought
        one.paid_ns = now_ns
    if one.tokens > bucket_bytes(one):
        one.tokens = bucket_bytes(one)


cdef bint is_open(mp_turns* turns, mp_class* one) noexcept nogil:
    return one.rate == 0 or turns.uncapped or one.tokens > 0


cdef uint64_t opens_ns(mp_class* one) noexcept nogil:
    """When the bucket will not be empty any more."""
    cdef uint64_t missing = <uint64_t>(1 - one.tokens)
    return one.paid_ns + (missing // one.rate) * NS_PER_S + (missing % one.rate + 1) * 1000000 // one.rate * 1000 + 2000


cdef void turns_add(mp_turns* turns, mp_turn* turn, uint64_t now_ns) noexcept nogil:
    """Queue what `turn` names; its `what`, `n_bytes`, `until_ns` and `of` are set. It is theirs until it comes back."""
    cdef mp_class* one = &turns.classes[turn.of]
    cdef uint64_t due = now_ns, ahead = (CLASS_HIGH - level_of(turn.of)) * turns.head_start_ns
    cdef mp_turn** place
    if turns.by_deadline:
        due = turn.until_ns if turn.until_ns else now_ns + NO_DEADLINE_NS
    turn.key = due + ahead
    turn.since_ns = now_ns
    turn.next = NULL
    turn.held = 0
    one.submitted += 1
    turns.n += 1
    if one.tail == NULL:
        one.head = turn
        one.tail = turn
    elif one.tail.key <= turn.key:
        one.tail.next = turn
        one.tail = turn
    else:
        place = &one.head
        while place[0].key <= turn.key:
            place = &place[0].next
        turn.next = place[0]
        place[0] = turn


cdef void take_out(mp_turns* turns, mp_class* one, mp_turn* before, mp_turn* turn) noexcept nogil:
    if before == NULL:
        one.head = turn.next
    else:
        before.next = turn.next
    if one.tail == turn:
        one.tail = before
    turns.n -= 1


cdef bint is_late(mp_turn* turn, uint64_t now_ns) noexcept nogil:
    return turn.until_ns != 0 and now_ns >= turn.until_ns


cdef mp_turn* first_of(mp_turns* turns, int of, uint64_t now_ns, mp_may may, void* context, mp_turn** before,
                       int* answer, uint64_t* wake_ns) noexcept nogil:
    """The first of a class that may start now, or that is gone; `wake_ns` comes nearer when the class is held up."""
    cdef mp_class* one = &turns.classes[of]
    cdef mp_turn* turn = one.head
    cdef bint is_free
    before[0] = NULL
    fill(one, now_ns)
    is_free = is_open(turns, one)
    if turn != NULL and not is_free:
        nearer(wake_ns, opens_ns(one))
    while turn != NULL:
        if is_free or is_late(turn, now_ns):
            answer[0] = may(context, turn.what)
            if answer[0] != TURN_NOT_NOW:
                return turn
        else:
            one.held += not turn.held
            turn.held = 1
            if turn.until_ns:
                nearer(wake_ns, turn.until_ns)
        before[0] = turn
        turn = turn.next
    return NULL


cdef void nearer(uint64_t* wake_ns, uint64_t at_ns) noexcept nogil:
    if wake_ns[0] == 0 or at_ns < wake_ns[0]:
        wake_ns[0] = at_ns


cdef mp_turn* turns_next(mp_turns* turns, uint64_t now_ns, mp_may may, void* context,
                         uint64_t* wake_ns) noexcept nogil:
    """Take out whose turn it is; NULL when it is nobody's. Then `wake_ns` says when a cap lets one start (0: none).

    `may` is asked for each that waits, in order, and must answer the same while this runs.
    """
    cdef mp_turn* best = NULL
    cdef mp_turn* best_before = NULL
    cdef mp_turn* before = NULL
    cdef mp_turn* turn
    cdef int of, answer = 0, best_answer = 0
    cdef mp_class* one
    cdef uint64_t waited
    wake_ns[0] = 0
    for of in range(CLASSES):
        turn = first_of(turns, of, now_ns, may, context, &before, &answer, wake_ns)
        # Of equal keys the higher class goes first.
        if turn != NULL and (best == NULL or turn.key <= best.key):
            best = turn
            best_before = before
            best_answer = answer
    if best == NULL:
        return NULL
    one = &turns.classes[best.of]
    take_out(turns, one, best_before, best)
    if best_answer == TURN_GONE:
        one.gone += 1
        return best
    if is_late(best, now_ns):
        one.late += 1
    elif one.rate:
        one.tokens -= <int64_t>best.n_bytes
    waited = now_ns - best.since_ns if now_ns > best.since_ns else 0
    one.started += 1
    one.started_bytes += best.n_bytes
    one.waited_ns += waited
    if waited > one.waited_max_ns:
        one.waited_max_ns = waited
    return best


cdef uint32_t turns_ready(mp_turns* turns, uint64_t now_ns, mp_may may, void* context,
                          uint32_t most) noexcept nogil:
    """How many could have their turn now, each looked at alone; counts no further than `most`.

    Of a class that its cap holds up one counts: somebody should be there when the cap lets it start.
    """
    cdef mp_turn* turn
    cdef uint32_t n = 0
    cdef int of
    for of in range(CLASSES):
        fill(&turns.classes[of], now_ns)
        turn = turns.classes[of].head
        while turn != NULL and n < most:
            n += may(context, turn.what) != TURN_NOT_NOW
            turn = turn.next if is_open(turns, &turns.classes[of]) else NULL
    return n


cdef mp_turn* turns_sweep(mp_turns* turns, mp_may may, void* context) noexcept nogil:
    """Take out one that is gone; NULL when none is."""
    cdef mp_turn* before
    cdef mp_turn* turn
    cdef int of
    for of in range(CLASSES):
        before = NULL
        turn = turns.classes[of].head
        while turn != NULL:
            if may(context, turn.what) == TURN_GONE:
                take_out(turns, &turns.classes[of], before, turn)
                turns.classes[of].gone += 1
                return turn
            before = turn
            turn = turn.next
    return NULL


cdef int may_by_group(void* context, void* what) noexcept nogil:
    """For the Python face: `what` is a node's index, plus 1; some groups are blocked."""
    cdef mp_groups* groups = <mp_groups*>context
    return TURN_NOT_NOW if groups.blocked >> groups.of[<size_t>what - 1] & 1 else TURN_TAKE


cdef class Turns:
    """The same for Python: tests and studies. Up to 1024 wait; what waits is a number."""

    def __init__(self, uint64_t head_start_ns, *, bint by_deadline=False, caps=()):
        turns_init(&self.raw, head_start_ns, by_deadline)
        for of, rate in caps:
            if not 0 <= of < CLASS_DIRECT:
                raise UsageError(f"class {of} cannot be capped")
            turns_cap(&self.raw, of, rate)

    def add(self, uint64_t name, int of, uint64_t n_bytes, uint64_t now_ns, *, uint64_t until_ns=0,
            unsigned int group=0) -> None:
        """Queue a number of a class; `group` (below 32) is what `next` may leave out."""
        cdef uint32_t k = 0
        while k < 1024 and self.used[k]:
            k += 1
        if k == 1024 or not 0 <= of < CLASSES or group >= 32:
            raise LimitExceeded("at most 1024 wait, in classes 0 to 3 and groups 0 to 31", limit=1024)
        self.used[k] = 1
        self.names[k] = name
        self.groups.of[k] = <uint8_t>group
        self.nodes[k].what = <void*><size_t>(k + 1)
        self.nodes[k].n_bytes = n_bytes
        self.nodes[k].until_ns = until_ns
        self.nodes[k].of = <uint8_t>of
        turns_add(&self.raw, &self.nodes[k], now_ns)

    def next(self, uint64_t now_ns, uint32_t blocked=0) -> tuple:
        """Whose turn it is, or None; and when to ask again, or 0. `blocked`: a bit for each group left out."""
        cdef uint64_t wake_ns = 0
        cdef mp_turn* turn
        cdef size_t k
        self.groups.blocked = blocked
        turn = turns_next(&self.raw, now_ns, may_by_group, &self.groups, &wake_ns)
        if turn == NULL:
            return None, wake_ns
        k = <size_t>turn.what - 1
        self.used[k] = 0
        return self.names[k], 0

    def ready(self, uint64_t now_ns, uint32_t blocked=0, uint32_t most=1024) -> int:
        """See `turns_ready`."""
        self.groups.blocked = blocked
        return turns_ready(&self.raw, now_ns, may_by_group, &self.groups, most)

    def __len__(self):
        return self.raw.n

    def counts(self, int of) -> dict:
        """The counters of a class."""
        if not 0 <= of < CLASSES:
            raise UsageError(f"there is no class {of}")
        return class_counts(&self.raw.classes[of])


cdef dict class_counts(mp_class* one):
    return {
        "submitted": one.submitted,
        "started": one.started,
        "started_bytes": one.started_bytes,
        "gone": one.gone,
        "waited_ns": one.waited_ns,
        "waited_max_ns": one.waited_max_ns,
        "held": one.held,
        "late": one.late,
    }
