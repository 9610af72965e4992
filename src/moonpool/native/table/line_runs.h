/* Runs of set bits in one word: the free lines of a page. */
#ifndef MOONPOOL_LINE_RUNS_H
#define MOONPOOL_LINE_RUNS_H
#include <stdint.h>

static inline int mp_low_bit(uint64_t x) { return __builtin_ctzll(x); }
static inline int mp_high_bit(uint64_t x) { return 63 - __builtin_clzll(x); }

/* The places where a run of at least `length` (1 to 64) set bits begins. */
static inline uint64_t mp_runs(uint64_t free, int length) {
    int have = 1;
    while (have < length && free) {
        const int step = length - have < have ? length - have : have;
        free &= free >> step;
        have += step;
    }
    return free;
}

/* The length of the longest run: 0 to 64. */
static inline int mp_longest_run(uint64_t free) {
    int longest = 0;
    for (int step = 32; step; step >>= 1)
        if (mp_runs(free, longest + step)) longest += step;
    return longest == 63 && free == UINT64_MAX ? 64 : longest;
}
#endif
