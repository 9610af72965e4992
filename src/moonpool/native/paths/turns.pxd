"""Whose turn it is among what waits: classes with a head start, deadlines, caps (see turns.pyx).

Pure: no I/O, no clock, no allocation, no GIL. One `mp_turns` is guarded by its user's lock in every call.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    CLASS_LOW = 0
    CLASS_NORMAL = 1
    CLASS_HIGH = 2
    CLASS_DIRECT = 3         # as NORMAL, but never capped: parts of what a caller drives itself
    CLASSES = 4

cdef enum:
    TURN_NOT_NOW = 0         # what `may` answers: leave it
    TURN_TAKE = 1
    TURN_GONE = 2            # somebody else has it: take it out, and charge nothing

cdef struct mp_turn:
    mp_turn* next
    void* what
    uint64_t key             # the least comes first
    uint64_t n_bytes
    uint64_t since_ns
    uint64_t until_ns        # its deadline; 0: none
    uint8_t of               # CLASS_*
    uint8_t held             # counted as held up by its cap

cdef struct mp_class:
    mp_turn* head            # ascending keys
    mp_turn* tail
    uint64_t rate            # bytes a second; 0: no cap
    int64_t tokens           # bytes that may start; negative while a large batch is paid for
    uint64_t paid_ns         # until when tokens have been added
    uint64_t submitted       # counters
    uint64_t started
    uint64_t started_bytes
    uint64_t gone
    uint64_t waited_ns
    uint64_t waited_max_ns
    uint64_t held
    uint64_t late            # deadline passed before its turn

cdef struct mp_turns:
    mp_class classes[4]
    uint64_t head_start_ns   # a class goes before what came so much earlier in the class below
    uint32_t n
    uint8_t by_deadline      # inside a class: earliest deadline first, else first come first served
    uint8_t uncapped         # caps are off: what is queued is to end

ctypedef int (*mp_may)(void* context, void* what) noexcept nogil

cdef void turns_init(mp_turns* turns, uint64_t head_start_ns, bint by_deadline) noexcept nogil
cdef void turns_cap(mp_turns* turns, int of, uint64_t bytes_per_s) noexcept nogil
cdef void turns_add(mp_turns* turns, mp_turn* turn, uint64_t now_ns) noexcept nogil
cdef mp_turn* turns_next(mp_turns* turns, uint64_t now_ns, mp_may may, void* context,
                         uint64_t* wake_ns) noexcept nogil
cdef uint32_t turns_ready(mp_turns* turns, uint64_t now_ns, mp_may may, void* context, uint32_t most) noexcept nogil
cdef mp_turn* turns_sweep(mp_turns* turns, mp_may may, void* context) noexcept nogil

cdef struct mp_groups:
    uint32_t blocked
    uint8_t of[1024]

cdef dict class_counts(mp_class* one)

cdef class Turns:
    cdef mp_turns raw
    cdef mp_turn nodes[1024]
    cdef uint64_t names[1024]
    cdef uint8_t used[1024]
    cdef mp_groups groups
