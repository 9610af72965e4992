/* Atomic counters and clocks shared by the native modules; thin names over GCC's builtins so that Cython can call them. */
#ifndef MOONPOOL_ATOMICS_H
#define MOONPOOL_ATOMICS_H
#include <stdint.h>
#include <time.h>

static inline int32_t mp_load32(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void mp_store32(int32_t *p, int32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline int32_t mp_add32(int32_t *p, int32_t v) { return __atomic_add_fetch(p, v, __ATOMIC_ACQ_REL); }
static inline int mp_swap_if32(int32_t *p, int32_t expected, int32_t desired) {
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
/* Counters are read while they grow: a relaxed total may lag, never tear. */
static inline uint64_t mp_count(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void mp_tally(uint64_t *p, uint64_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

/* Monotonic: an NTP step must neither fire nor freeze a deadline. */
static inline uint64_t mp_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
/* The monotonic time so many seconds from now. What is negative or no number counts as 0; 30 years are enough for all. */
static inline uint64_t mp_deadline_ns(double timeout_s) {
    if (!(timeout_s > 0)) return mp_now_ns();
    return mp_now_ns() + (uint64_t)((timeout_s < 1e9 ? timeout_s : 1e9) * 1e9);
}
/* A tenth of a second from now, or the deadline (0: none) when that is sooner: waits look for signals in between. */
static inline uint64_t mp_tick_before(uint64_t deadline_ns) {
    uint64_t tick = mp_now_ns() + 100000000u;
    return deadline_ns && deadline_ns < tick ? deadline_ns : tick;
}
#endif
