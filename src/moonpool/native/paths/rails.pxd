"""Which rail carries the next slice, and how large it is: for paths of several rails (see rails.pyx).

Pure: no I/O, no clock, no allocation, no GIL. One `mp_rails` is guarded by its user's lock in every call.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    RAILS_MAX = 32
    RAIL_WAIT = -1           # those that could carry it are full: choose again after the next completion
    RAIL_NONE = -2           # no rail may carry it now: leave it to the next path, or wait for a probe

cdef enum:
    RAIL_UP = 0
    RAIL_PAUSED = 1          # failed: carries nothing until `until_ns`, then one probe
    RAIL_PROBING = 2         # one probe is under way
    RAIL_DEMOTED = 3         # far slower than the best: only probes, unless there is no other

cdef enum:
    RAILS_DATA_PROBES = 1    # a slice of the caller's may serve as probe of a paused rail

cdef struct mp_rail:
    uint64_t link_rate       # bytes a nanosecond, in 65536ths; also what is believed until it is learned
    uint64_t rate            # learned
    uint64_t latency_ns      # of a slice besides its service: base, then learned
    uint64_t queued_bytes    # booked and not ended, each slice with `overhead_bytes` for its fixed cost
    uint64_t mark_ns         # last completion, or when the rail began to be busy
    uint64_t until_ns        # PAUSED: when a probe may go; DEMOTED: when the next one is due
    uint64_t pause_ns        # the last pause; grows with failures, halves with healthy time
    uint64_t healthy_ns      # since when it is up without a failure or a halving of the pause
    uint64_t seen_bytes      # what the rate is learned from, with what it took
    uint64_t seen_ns
    uint64_t batch_bytes     # completions of the last look, which came together
    uint64_t batch_ns
    uint32_t inflight
    uint32_t slots           # most slices in flight
    uint32_t penalty         # factor on expected times, in 256ths
    uint8_t state
    uint8_t fresh            # no completion since it began to be busy: the next one includes the latency
    uint8_t unlearned        # the completions of the last look say nothing of the rate
    uint8_t cut_off          # its link is down: no probes until it comes back
    uint64_t slices          # counters
    uint64_t bytes
    uint64_t failures
    uint64_t pauses
    uint64_t probes
    uint64_t demotions

cdef struct mp_rails:
    uint32_t n
    uint32_t flags
    uint64_t slice_min_bytes
    uint64_t slice_max_bytes
    uint64_t overhead_bytes
    uint64_t depth_ns        # queued on a rail beyond latency and one slice, against late polls
    uint64_t pause_min_ns
    uint64_t pause_max_ns
    mp_rail rails[32]

cdef void rails_init(mp_rails* rails, uint32_t flags) noexcept nogil
cdef int rails_add(mp_rails* rails, uint64_t bytes_per_s, uint64_t latency_ns, uint32_t penalty,
                   uint32_t slots) noexcept nogil
cdef int rails_choose(mp_rails* rails, uint64_t bytes, uint64_t backlog, uint64_t now_ns,
                      uint32_t allowed) noexcept nogil
cdef int rails_next(mp_rails* rails, uint64_t left, uint64_t backlog, uint64_t now_ns, uint32_t allowed,
                    uint64_t* slice_bytes) noexcept nogil
cdef uint64_t rails_slice_bytes(mp_rails* rails, uint64_t bytes) noexcept nogil
cdef void rails_done(mp_rails* rails, int rail, uint64_t bytes, uint64_t now_ns) noexcept nogil
cdef void rails_failed(mp_rails* rails, int rail, uint64_t bytes, uint64_t now_ns) noexcept nogil
cdef void rails_unbook(mp_rails* rails, int rail, uint64_t bytes) noexcept nogil
cdef int rails_idle_probe(mp_rails* rails, uint64_t now_ns) noexcept nogil
cdef void rails_probed(mp_rails* rails, int rail, bint ok, uint64_t now_ns) noexcept nogil
cdef void rails_link(mp_rails* rails, int rail, bint up, uint64_t now_ns) noexcept nogil
cdef uint32_t rails_usable(mp_rails* rails) noexcept nogil

cdef class Rails:
    cdef mp_rails raw
    cdef int checked(self, int rail) except -1
