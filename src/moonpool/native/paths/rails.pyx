"""Rails: which of several carries the next slice, and how large it is.

Theory of operation. A rail is one pair of devices, ours and the peer's. Each has a service rate, which begins at the
speed of its link and is then learned, and a latency. The next slice goes where it is expected to end first:
(queued + slice) / rate + latency, times the rail's penalty. Late binding: a rail is given no more than what keeps it
busy over its latency, one slice and `depth_ns`; whoever holds the bytes asks again after each completion, so an
estimate that is wrong costs one window and not a share of the whole.

How large: all rails together could end what is left (`left` and `backlog`) at one time, the level to which water
would fill them. What a rail should carry until then is its share. A slice is a sixth of the share, so that slices are
few at first and small at the end, and the whole share when that is less than two of the least: then all rails end
together. With two slices under way a rail can fall to a quarter of its rate at any moment and still end about with the
others.

What is learned: bytes over busy time since the last completion (or since the rail began to be busy, less its
latency), so that waiting in our own queue is no part of it. Completions that one look found together (equal `now_ns`)
are one measurement. Old ones lose half their weight every `MEMORY_SLICES` least slices. Good or bad, an
estimate of a rail that carries nothing moves back to its link's speed within seconds.

Healing: a failed rail is PAUSED; each failure doubles its next pause; each span of healthy service as long as the pause
halves it: one success does not clear the memory of a rail that flaps. Then one probe goes, PROBING, and its success
makes the rail UP. A rail `SLOW_SHARE` times slower than the best is DEMOTED: it gets probes, and data only where
no other rail may carry it, until a probe finds it twice as fast as that.

Integers only, so that every machine decides alike; the twin in rails_reference.py gives the same answers. Time is
CLOCK_MONOTONIC in nanoseconds, rates are bytes a nanosecond in 65536ths.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from moonpool.errors import UsageError

cdef enum:
    CUT_BYTES = 4096               # slices begin on multiples of it, counted from the transfer's start
    LEAST_SLICE_BYTES = 16384
    MEMORY_SLICES = 32
    SLOW_SHARE = 16
    PARTS = 6                      # of a share: a slice is one of them
    LATENCY_SHARE = 8              # an observed latency counts one eighth
    PENALTY_ONE = 256
    PENALTY_MAX = 4096             # 16 times
    STALL_FACTOR = 4               # a completion is late after so many times what was expected

cdef uint64_t RATE_MIN = 32                       # 0.5 MB/s
cdef uint64_t RATE_MAX = <uint64_t>1 << 26        # 1 TB/s
cdef uint64_t BYTES_MAX = <uint64_t>1 << 44       # all sums stay below 2^63
cdef uint64_t LATENCY_MAX_NS = 1000000000
cdef uint64_t QUANTUM_NS = 2000                   # a slice should take at least so long,
cdef uint64_t QUANTUM_RAIL_NS = 500               # and so much for each rail that one thread feeds
cdef uint64_t FORGET_NS = 1000000000              # after so long without service an estimate is half forgotten


cdef uint64_t lesser(uint64_t a, uint64_t b) noexcept nogil:
    return a if a < b else b


cdef uint64_t greater(uint64_t a, uint64_t b) noexcept nogil:
    return a if a > b else b


cdef uint64_t took_ns(uint64_t n_bytes, uint64_t rate) noexcept nogil:
    return (lesser(n_bytes, BYTES_MAX) << 16) // rate


cdef void rails_init(mp_rails* rails, uint32_t flags) noexcept nogil:
    """No rails, and the usual bounds; change the fields before the first rail is added."""
    memset(rails, 0, sizeof(mp_rails))
    rails.flags = flags
    rails.slice_min_bytes = LEAST_SLICE_BYTES
    rails.slice_max_bytes = 1 << 20
    rails.overhead_bytes = 4096
    rails.depth_ns = 10000
    rails.pause_min_ns = 10000000
    rails.pause_max_ns = 30000000000


cdef int rails_add(mp_rails* rails, uint64_t bytes_per_s, uint64_t latency_ns, uint32_t penalty,
                   uint32_t slots) noexcept nogil:
    """A rail more, UP: its index, or RAIL_NONE when there are RAILS_MAX. `bytes_per_s`: the slower end's link."""
    cdef mp_rail* rail
    if rails.n >= RAILS_MAX:
        return RAIL_NONE
    rail = &rails.rails[rails.n]
    memset(rail, 0, sizeof(mp_rail))
    # In two steps: bytes a second times 65536 may not fit.
    rail.link_rate = lesser(bytes_per_s, <uint64_t>1 << 46) * 1024 // 1000000 * 64 // 1000
    rail.link_rate = lesser(greater(rail.link_rate, RATE_MIN), RATE_MAX)
    rail.rate = rail.link_rate
    rail.latency_ns = lesser(latency_ns, LATENCY_MAX_NS)
    rail.penalty = <uint32_t>lesser(greater(penalty, PENALTY_ONE), PENALTY_MAX)
    rail.slots = slots if slots else 1
    rail.state = RAIL_UP
    rails.n += 1
    return <int>rails.n - 1


cdef uint64_t forgiven(mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """What the rail is believed to do: what was learned, but one that carries nothing is slowly forgiven."""
    cdef uint64_t idle
    if rail.inflight or now_ns <= rail.mark_ns or rail.rate >= rail.link_rate or rail.mark_ns == 0:
        return rail.rate
    idle = lesser(now_ns - rail.mark_ns, FORGET_NS * 64) >> 10
    return rail.rate + (rail.link_rate - rail.rate) * idle // (idle + (FORGET_NS >> 10))


cdef uint64_t rate_now(mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """The same with the rail's penalty."""
    return greater(forgiven(rail, now_ns) * PENALTY_ONE // rail.penalty, 1)


cdef uint64_t waiting_ns(mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """How long what is queued on the rail still takes: what the slice that is served has behind it counts."""
    cdef uint64_t rate = rate_now(rail, now_ns), whole, served
    if rail.inflight == 0:
        return 0
    whole = took_ns(rail.queued_bytes, rate)
    served = now_ns - rail.mark_ns if now_ns > rail.mark_ns else 0
    if not rail.fresh:
        served += rail.latency_ns  # it began while the word of the last one was on its way
    # Served without our knowing may be about one slice: the end of a second one would have been seen.
    if rail.inflight > 1:
        served = lesser(served, whole // rail.inflight * 3 // 2)
    return whole - served if whole > served else 0


cdef uint64_t offset_ns(mp_rails* rails, mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """What a slice on this rail takes besides service: its latency, and by how much the rail is late with the last."""
    cdef uint64_t latency = rail.latency_ns * rail.penalty // PENALTY_ONE
    cdef uint64_t expected
    if rail.inflight and now_ns > rail.mark_ns:
        expected = took_ns(rail.queued_bytes // rail.inflight, rail.rate) + rail.latency_ns + rails.depth_ns
        expected *= STALL_FACTOR
        if now_ns - rail.mark_ns > expected:
            latency += lesser(now_ns - rail.mark_ns - expected, <uint64_t>1 << 34)
    return latency


cdef uint64_t expected_ns(mp_rails* rails, mp_rail* rail, uint64_t n_bytes, uint64_t now_ns) noexcept nogil:
    """From now until a slice that is posted now would have ended."""
    cdef uint64_t end = took_ns(n_bytes + rails.overhead_bytes, rate_now(rail, now_ns))
    return end + waiting_ns(rail, now_ns) + offset_ns(rails, rail, now_ns)


cdef bint has_room(mp_rails* rails, mp_rail* rail, uint64_t n_bytes) noexcept nogil:
    """True when the rail would run dry, or soon, before it hears of another slice."""
    cdef uint64_t window
    if rail.inflight == 0:
        return True
    if rail.inflight >= rail.slots or rail.state != RAIL_UP:
        return False
    if rail.inflight == 1:
        return True  # else it would be idle from the end of its slice until we know of it
    window = (rail.latency_ns + rails.depth_ns) * rail.rate >> 16
    return rail.queued_bytes <= window + n_bytes + rails.overhead_bytes


cdef bint may_carry(mp_rails* rails, mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """True when the rail takes data: it is up, or a slice may be the probe that is due."""
    if rail.state == RAIL_UP:
        return True
    return (rails.flags & RAILS_DATA_PROBES and rail.state != RAIL_PROBING and rail.inflight == 0
            and not rail.cut_off and now_ns >= rail.until_ns)


cdef uint32_t candidates(mp_rails* rails, uint64_t now_ns, uint32_t allowed) noexcept nogil:
    """The rails among `allowed` that may be given data; demoted ones only when no other is UP."""
    cdef uint32_t i, found = 0, slow = 0
    cdef bint up = False
    for i in range(rails.n):
        if allowed >> i & 1:
            if may_carry(rails, &rails.rails[i], now_ns):
                found |= <uint32_t>1 << i
                up |= rails.rails[i].state == RAIL_UP
            elif rails.rails[i].state == RAIL_DEMOTED:
                slow |= <uint32_t>1 << i
    return found if up else found | slow


cdef uint64_t level_ns(mp_rails* rails, uint32_t mask, uint64_t n_bytes, uint64_t now_ns) noexcept nogil:
    """From now until all rails of `mask` together could have ended what they have queued and `n_bytes` more."""
    cdef uint64_t level = 0, rate, filled, speed
    cdef uint64_t late[32]
    cdef uint32_t i, full = mask, used
    while True:
        # Rails whose own queue lasts beyond the level take nothing: without them it is lower, so try again.
        filled = lesser(n_bytes, BYTES_MAX)
        speed = 0
        for i in range(rails.n):
            if full >> i & 1:
                rate = rate_now(&rails.rails[i], now_ns)
                late[i] = offset_ns(rails, &rails.rails[i], now_ns) + waiting_ns(&rails.rails[i], now_ns)
                filled += lesser(late[i], took_ns(BYTES_MAX, rate)) * rate >> 16
                speed += rate
        if speed == 0:
            return level
        level = (lesser(filled, BYTES_MAX) << 16) // speed
        used = 0
        for i in range(rails.n):
            if full >> i & 1 and late[i] < level:
                used |= <uint32_t>1 << i
        if used == full or used == 0:
            return level
        full = used


cdef uint64_t share_bytes(mp_rails* rails, mp_rail* rail, uint64_t level, uint64_t now_ns) noexcept nogil:
    """What a rail should still take to end with the others, at `level`."""
    cdef uint64_t late = offset_ns(rails, rail, now_ns) + waiting_ns(rail, now_ns)
    cdef uint64_t rate = rate_now(rail, now_ns)
    return lesser(level - late, took_ns(BYTES_MAX, rate)) * rate >> 16 if level > late else 0


cdef uint64_t least_slice(mp_rails* rails, mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """The smallest slice worth its fixed cost on this rail; a multiple of CUT_BYTES."""
    cdef uint64_t quantum = greater(QUANTUM_NS, QUANTUM_RAIL_NS * rails.n)
    cdef uint64_t size = lesser(quantum * rate_now(rail, now_ns) >> 16, rails.slice_max_bytes // 2)
    size = greater(size, rails.slice_min_bytes)
    return size // CUT_BYTES * CUT_BYTES if size >= CUT_BYTES else CUT_BYTES


cdef void book(mp_rails* rails, int index, uint64_t n_bytes, uint64_t now_ns) noexcept nogil:
    cdef mp_rail* rail = &rails.rails[index]
    if rail.inflight == 0:
        rail.rate = forgiven(rail, now_ns)
        # What a probe says counts alone.
        rail.seen_bytes = rail.seen_bytes + rail.batch_bytes if rail.state == RAIL_UP else 0
        rail.seen_ns = took_ns(rail.seen_bytes, rail.rate)
        rail.batch_bytes = rail.batch_ns = 0
        rail.mark_ns = now_ns
        rail.fresh = 1
        rail.unlearned = 0
    if rail.state != RAIL_UP and now_ns >= rail.until_ns:
        rail.probes += 1
        if rail.state == RAIL_PAUSED:
            rail.state = RAIL_PROBING
        else:
            hold_off(rails, rail, RAIL_DEMOTED, now_ns)
    rail.inflight += 1
    rail.queued_bytes += n_bytes + rails.overhead_bytes


cdef int quickest(mp_rails* rails, uint32_t mask, uint64_t n_bytes, uint64_t now_ns, bint ready,
                  uint64_t* end_ns) noexcept nogil:
    """Where a slice is expected to end first, among those of `mask`, or those with room; RAIL_NONE if none."""
    cdef int best = RAIL_NONE
    cdef uint64_t end
    cdef uint32_t i
    cdef mp_rail* rail
    for i in range(rails.n):
        rail = &rails.rails[i]
        if mask >> i & 1 and (not ready or has_room(rails, rail, n_bytes)):
            end = expected_ns(rails, rail, n_bytes, now_ns)
            if best == RAIL_NONE or end < end_ns[0]:
                best = <int>i
                end_ns[0] = end
    return best


cdef int rails_choose(mp_rails* rails, uint64_t bytes, uint64_t backlog, uint64_t now_ns,
                      uint32_t allowed) noexcept nogil:
    """The rail for a slice of `bytes`, booked there; RAIL_WAIT or RAIL_NONE, and nothing booked.

    `backlog`: what the caller has to send after it. A rail that is slower, and has room where the best one has
    none, is taken when the slice ends there before all of the backlog could end.
    """
    cdef uint32_t mask = candidates(rails, now_ns, allowed)
    cdef uint64_t best_ns = 0, ready_ns = 0
    cdef int best = quickest(rails, mask, bytes, now_ns, False, &best_ns), ready
    if best == RAIL_NONE:
        return RAIL_NONE
    if not has_room(rails, &rails.rails[best], bytes):
        ready = quickest(rails, mask, bytes, now_ns, True, &ready_ns)
        if ready == RAIL_NONE or ready_ns > level_ns(rails, mask, bytes + backlog, now_ns):
            return RAIL_WAIT
        best = ready
    book(rails, best, bytes, now_ns)
    return best


cdef uint64_t fit(mp_rails* rails, uint64_t left, uint64_t size, uint64_t least) noexcept nogil:
    """A slice of about `size` of the `left` bytes such that no rest is too small; at least 1, at most `left`."""
    size = lesser(greater(size // CUT_BYTES * CUT_BYTES, least), rails.slice_max_bytes)
    if left <= size:
        return left
    if left - size >= least:
        return size
    return left if left <= rails.slice_max_bytes else left // 2 // CUT_BYTES * CUT_BYTES


cdef int rails_next(mp_rails* rails, uint64_t left, uint64_t backlog, uint64_t now_ns, uint32_t allowed,
                    uint64_t* slice_bytes) noexcept nogil:
    """The rail for the next slice of a transfer with `left` (> 0) bytes uncut, and the slice's size; booked.

    RAIL_WAIT or RAIL_NONE, and nothing booked. Sizes are multiples of 4096 but for a transfer's last slice; never 0.
    """
    cdef uint32_t mask, i
    cdef uint64_t level, share, least, size, end, best_ns = 0
    cdef int best = RAIL_NONE
    cdef bint full = False
    cdef mp_rail* rail
    slice_bytes[0] = 0
    if left == 0:
        return RAIL_NONE
    mask = candidates(rails, now_ns, allowed)
    if mask == 0:
        return RAIL_NONE
    level = level_ns(rails, mask, left + backlog, now_ns)
    for i in range(rails.n):
        rail = &rails.rails[i]
        if not mask >> i & 1:
            continue
        least = least_slice(rails, rail, now_ns)
        share = share_bytes(rails, rail, level, now_ns)
        if share < lesser(least, left) // 2:
            continue
        if rail.state != RAIL_UP:
            share = least  # a probe, or a slow rail: as little as it can be
        elif share >= 2 * least:
            share //= PARTS
        size = fit(rails, left, share, least)
        if not has_room(rails, rail, size):
            full = True
            continue
        end = expected_ns(rails, rail, least, now_ns)
        if best == RAIL_NONE or end < best_ns:
            best = <int>i
            best_ns = end
            slice_bytes[0] = size
    if best == RAIL_NONE:
        if full:
            return RAIL_WAIT
        # Too little is left to be shared: all of it where it ends first.
        best = rails_choose(rails, lesser(left, rails.slice_max_bytes), backlog, now_ns, allowed)
        if best >= 0:
            slice_bytes[0] = lesser(left, rails.slice_max_bytes)
        return best
    if expected_ns(rails, &rails.rails[best], slice_bytes[0], now_ns) > level:
        # It will be among the last to end: shares do not matter any more, only where it ends first.
        best = quickest(rails, mask, slice_bytes[0], now_ns, True, &best_ns)
    book(rails, best, slice_bytes[0], now_ns)
    return best


cdef uint64_t rails_slice_bytes(mp_rails* rails, uint64_t bytes) noexcept nogil:
    """About how large the slices of a transfer of `bytes` should be when they are all cut before any is sent."""
    cdef uint32_t i, n = 0
    cdef uint64_t least = 0
    for i in range(rails.n):
        if rails.rails[i].state == RAIL_UP:
            n += 1
            least = greater(least, least_slice(rails, &rails.rails[i], rails.rails[i].mark_ns))
    if n == 0:
        return bytes
    return fit(rails, bytes, bytes // (4 * n), least)


cdef void learn(mp_rails* rails, mp_rail* rail, uint64_t weight, uint64_t now_ns) noexcept nogil:
    """A slice that counts `weight` bytes ended now."""
    cdef uint64_t elapsed = now_ns - rail.mark_ns if now_ns > rail.mark_ns else 0
    cdef uint64_t served, memory
    if elapsed or rail.fresh:
        # The look before this one is closed: what it found becomes part of the estimate.
        rail.seen_bytes += rail.batch_bytes
        rail.seen_ns += rail.batch_ns
        rail.batch_bytes = rail.batch_ns = rail.unlearned = 0
        memory = MEMORY_SLICES * greater(rails.slice_min_bytes, LEAST_SLICE_BYTES)
        memory = greater(memory, rail.rate * (QUANTUM_NS * MEMORY_SLICES) >> 16)
        while rail.seen_bytes > memory:
            rail.seen_bytes //= 2
            rail.seen_ns //= 2
    if rail.fresh:
        served = took_ns(weight, rail.rate)
        if served < 2 * rail.latency_ns and elapsed < STALL_FACTOR * (served + rail.latency_ns):
            rail.unlearned = 1
            served = elapsed - served if elapsed > served else 0
            rail.latency_ns -= rail.latency_ns // LATENCY_SHARE
            rail.latency_ns += (lesser(served, LATENCY_MAX_NS) + LATENCY_SHARE - 1) // LATENCY_SHARE
        elapsed = greater(elapsed - rail.latency_ns if elapsed > rail.latency_ns else 0, elapsed // 2)
        rail.fresh = 0
    rail.mark_ns = greater(now_ns, rail.mark_ns)
    if rail.unlearned:
        return
    rail.batch_bytes += weight
    rail.batch_ns += elapsed
    served = rail.seen_ns + rail.batch_ns
    if served:
        rail.rate = (lesser(rail.seen_bytes + rail.batch_bytes, BYTES_MAX) << 16) // served
    rail.rate = lesser(greater(rail.rate, RATE_MIN), lesser(RATE_MAX, 2 * rail.link_rate))


cdef void drop_booking(mp_rails* rails, mp_rail* rail, uint64_t n_bytes) noexcept nogil:
    rail.queued_bytes -= lesser(rail.queued_bytes, n_bytes + rails.overhead_bytes)
    if rail.inflight:
        rail.inflight -= 1
    if rail.inflight == 0:
        rail.queued_bytes = 0


cdef void hold_off(mp_rails* rails, mp_rail* rail, int state, uint64_t now_ns) noexcept nogil:
    """PAUSED or DEMOTED, for twice as long as the last time before it is probed."""
    rail.pause_ns = lesser(greater(rail.pause_ns * 2, rails.pause_min_ns), rails.pause_max_ns)
    rail.until_ns = now_ns + rail.pause_ns
    rail.state = <uint8_t>state


cdef void judge(mp_rails* rails, mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """Demote a rail that is far slower than the best, and take one back that is no longer."""
    cdef uint64_t best = 0
    cdef uint32_t i
    for i in range(rails.n):
        if rails.rails[i].state == RAIL_UP:
            best = greater(best, rails.rails[i].rate)
    if rail.state == RAIL_UP and rail.rate < best // SLOW_SHARE:
        hold_off(rails, rail, RAIL_DEMOTED, now_ns)
        rail.demotions += 1
    elif rail.state == RAIL_DEMOTED and rail.rate >= best // (SLOW_SHARE // 2):
        rail.state = RAIL_UP
        rail.healthy_ns = now_ns


cdef void heal(mp_rails* rails, mp_rail* rail, uint64_t now_ns) noexcept nogil:
    """Halve the pause for each span of its own length that the rail was well."""
    if rail.pause_ns and now_ns > rail.healthy_ns and now_ns - rail.healthy_ns >= rail.pause_ns:
        rail.pause_ns = rail.pause_ns // 2 if rail.pause_ns > rails.pause_min_ns else 0
        rail.healthy_ns = now_ns


cdef void rails_done(mp_rails* rails, int index, uint64_t bytes, uint64_t now_ns) noexcept nogil:
    """A slice ended well. All completions that one look found have the same `now_ns`."""
    cdef mp_rail* rail = &rails.rails[index]
    learn(rails, rail, bytes + rails.overhead_bytes, now_ns)
    drop_booking(rails, rail, bytes)
    rail.slices += 1
    rail.bytes += bytes
    if rail.state == RAIL_PROBING:
        rail.state = RAIL_UP
        rail.healthy_ns = now_ns
    if rail.state == RAIL_UP:
        heal(rails, rail, now_ns)
    judge(rails, rail, now_ns)


cdef void pause(mp_rails* rails, mp_rail* rail, uint64_t now_ns) noexcept nogil:
    if rail.state != RAIL_PAUSED:
        hold_off(rails, rail, RAIL_PAUSED, now_ns)
        rail.pauses += 1


cdef void rails_failed(mp_rails* rails, int index, uint64_t bytes, uint64_t now_ns) noexcept nogil:
    """A slice failed by the rail's fault: its bytes are the caller's again. What is flushed after it pauses no more."""
    cdef mp_rail* rail = &rails.rails[index]
    drop_booking(rails, rail, bytes)
    rail.failures += 1
    pause(rails, rail, now_ns)


cdef void rails_unbook(mp_rails* rails, int index, uint64_t bytes) noexcept nogil:
    """A slice was taken back, which says nothing of the rail."""
    cdef mp_rail* rail = &rails.rails[index]
    drop_booking(rails, rail, bytes)
    if rail.state == RAIL_PROBING and rail.inflight == 0:
        rail.state = RAIL_PAUSED  # its probe is due still


cdef int rails_idle_probe(mp_rails* rails, uint64_t now_ns) noexcept nogil:
    """A rail on which the caller should send a probe of its own now, noted as under way; -1 when none is due."""
    cdef uint32_t i
    cdef mp_rail* rail
    for i in range(rails.n):
        rail = &rails.rails[i]
        if now_ns < rail.until_ns or rail.cut_off or rail.inflight:
            continue
        if rail.state == RAIL_UP:
            continue
        if rail.state == RAIL_PAUSED:
            rail.state = RAIL_PROBING
        rail.until_ns = now_ns + rails.pause_max_ns  # should its end never be told
        rail.probes += 1
        return <int>i
    return -1


cdef void rails_probed(mp_rails* rails, int index, bint ok, uint64_t now_ns) noexcept nogil:
    """How the caller's probe ended. A demoted rail that answers is UP again, on trial at twice what it did."""
    cdef mp_rail* rail = &rails.rails[index]
    if not ok:
        rail.failures += 1
        pause(rails, rail, now_ns)
    elif rail.state == RAIL_PROBING or rail.state == RAIL_DEMOTED:
        if rail.state == RAIL_DEMOTED:
            rail.rate = greater(rail.rate, rail.link_rate // (SLOW_SHARE // 2))
            rail.seen_bytes = rail.seen_ns = rail.batch_bytes = rail.batch_ns = 0
        rail.state = RAIL_UP
        rail.healthy_ns = now_ns


cdef void rails_link(mp_rails* rails, int index, bint up, uint64_t now_ns) noexcept nogil:
    """The link of a rail went down (no probes until it is back) or came up (probed at once)."""
    cdef mp_rail* rail = &rails.rails[index]
    if up:
        if rail.cut_off:
            rail.cut_off = 0
            rail.until_ns = now_ns
    elif not rail.cut_off:
        pause(rails, rail, now_ns)
        rail.cut_off = 1


cdef uint32_t rails_usable(mp_rails* rails) noexcept nogil:
    """Bit mask of the rails that are given data now."""
    return candidates(rails, 0, <uint32_t>-1)


cdef class Rails:
    """The same for Python: simulators, studies and tests. Not thread-safe; numbers are unsigned 64-bit."""

    def __cinit__(self, *, bint data_probes=False, slice_min_bytes=None, slice_max_bytes=None, depth_ns=None,
                  pause_min_ns=None, pause_max_ns=None):
        rails_init(&self.raw, RAILS_DATA_PROBES if data_probes else 0)
        if slice_min_bytes is not None:
            self.raw.slice_min_bytes = slice_min_bytes
        if slice_max_bytes is not None:
            self.raw.slice_max_bytes = slice_max_bytes
        if depth_ns is not None:
            self.raw.depth_ns = depth_ns
        if pause_min_ns is not None:
            self.raw.pause_min_ns = pause_min_ns
        if pause_max_ns is not None:
            self.raw.pause_max_ns = pause_max_ns
        if self.raw.slice_min_bytes < CUT_BYTES or self.raw.slice_max_bytes < 2 * self.raw.slice_min_bytes:
            raise UsageError(f"slices are at least {CUT_BYTES} bytes, the largest at least twice the least")

    cdef int checked(self, int rail) except -1:
        if not 0 <= rail < <int>self.raw.n:
            raise UsageError(f"there is no rail {rail}")
        return rail

    def add(self, uint64_t bytes_per_s, uint64_t latency_ns, *, double penalty=1.0, uint32_t slots=64) -> int:
        """A rail more: its index."""
        index = rails_add(&self.raw, bytes_per_s, latency_ns, <uint32_t>(penalty * PENALTY_ONE), slots)
        if index < 0:
            raise UsageError(f"there are at most {RAILS_MAX} rails")
        return index

    def choose(self, uint64_t n_bytes, uint64_t backlog, uint64_t now_ns, uint32_t allowed=0xFFFFFFFF) -> int:
        """See `rails_choose`."""
        return rails_choose(&self.raw, n_bytes, backlog, now_ns, allowed)

    def next(self, uint64_t left, uint64_t backlog, uint64_t now_ns, uint32_t allowed=0xFFFFFFFF) -> tuple:
        """See `rails_next`: the rail and the slice's bytes."""
        cdef uint64_t size = 0
        cdef int rail = rails_next(&self.raw, left, backlog, now_ns, allowed, &size)
        return rail, size

    def slice_bytes(self, uint64_t n_bytes) -> int:
        """See `rails_slice_bytes`."""
        return rails_slice_bytes(&self.raw, n_bytes)

    def done(self, int rail, uint64_t n_bytes, uint64_t now_ns) -> None:
        """See `rails_done`."""
        rails_done(&self.raw, self.checked(rail), n_bytes, now_ns)

    def failed(self, int rail, uint64_t n_bytes, uint64_t now_ns) -> None:
        """See `rails_failed`."""
        rails_failed(&self.raw, self.checked(rail), n_bytes, now_ns)

    def unbook(self, int rail, uint64_t n_bytes) -> None:
        """See `rails_unbook`."""
        rails_unbook(&self.raw, self.checked(rail), n_bytes)

    def idle_probe(self, uint64_t now_ns) -> int:
        """See `rails_idle_probe`."""
        return rails_idle_probe(&self.raw, now_ns)

    def probed(self, int rail, bint ok, uint64_t now_ns) -> None:
        """See `rails_probed`."""
        rails_probed(&self.raw, self.checked(rail), ok, now_ns)

    def link(self, int rail, bint up, uint64_t now_ns) -> None:
        """See `rails_link`."""
        rails_link(&self.raw, self.checked(rail), up, now_ns)

    @property
    def usable(self) -> int:
        """See `rails_usable`."""
        return rails_usable(&self.raw)

    def state(self, int rail) -> dict:
        """All that is known of a rail, by the names of `mp_rail`."""
        return self.raw.rails[self.checked(rail)]
