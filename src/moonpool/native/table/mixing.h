/* 64-bit mixing for tables: a multiply-and-fold hash under a secret seed, and independent stamps for set members. */
#ifndef MOONPOOL_MIXING_H
#define MOONPOOL_MIXING_H
#include <stdint.h>

/* Both halves of the 128-bit product. Callers choose the keys (a block hash may come from anywhere); without the seed
   they cannot choose where it lands. */
static inline uint64_t mp_fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* SplitMix64's output function (Steele, Lea, Flood 2014). */
static inline uint64_t mp_scatter(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline int mp_lowest_bit(uint64_t x) { return __builtin_ctzll(x); }
static inline int mp_bits_below(uint64_t x, int bit) { return __builtin_popcountll(x & (((uint64_t)1 << bit) - 1)); }
static inline void mp_prefetch(const void *p) { __builtin_prefetch(p); }
#endif
