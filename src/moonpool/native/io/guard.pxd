"""The grace period of guard.h, the clock and the counters of atomics.h."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "atomics.h" nogil:
    int32_t mp_load32(const int32_t* p)
    void mp_store32(int32_t* p, int32_t v)
    int32_t mp_add32(int32_t* p, int32_t v)
    bint mp_swap_if32(int32_t* p, int32_t expected, int32_t desired)
    uint64_t mp_count(const uint64_t* p)
    void mp_tally(uint64_t* p, uint64_t v)
    uint64_t mp_now_ns()
    uint64_t mp_deadline_ns(double timeout_s)
    uint64_t mp_tick_before(uint64_t deadline_ns)

cdef extern from "guard.h" nogil:
    ctypedef struct mp_guard:
        pass
    void mp_guard_init(mp_guard* g)
    void mp_guard_destroy(mp_guard* g)
    void mp_guard_lock(mp_guard* g)
    void mp_guard_unlock(mp_guard* g)
    uint32_t mp_guard_enter_locked(mp_guard* g)
    void mp_guard_leave(mp_guard* g, uint32_t ticket)
    int mp_guard_drain(mp_guard* g, uint64_t deadline_ns)
    uint32_t mp_guard_users(mp_guard* g)
