/* Counters of one path: written by whoever drives a batch, read at any time. */
#ifndef MOONPOOL_LATENCY_H
#define MOONPOOL_LATENCY_H
#include <stdint.h>
#include "atomics.h"
#define MP_BUCKETS 116 /* four per power of two of nanoseconds, from 256 ns to 2^37 ns (137 s) */
typedef struct {
    uint64_t batches[2], transfers[2], bytes[2];
    uint64_t nanoseconds[2];
    uint64_t errors[2][16];
    uint64_t latency[2][MP_BUCKETS];
    uint64_t fallbacks; /* transfers that this path left to the next one after trying */
} mp_path_stats;

static inline unsigned mp_bucket(uint64_t ns) {
    unsigned top, index;
    if (ns < 256) return 0;
    top = 63u - (unsigned)__builtin_clzll(ns);
    index = (top - 8) * 4 + (unsigned)((ns >> (top - 2)) & 3) ;
    return index < MP_BUCKETS ? index : MP_BUCKETS - 1;
}
/* First nanosecond above a bucket. */
static inline uint64_t mp_bucket_upper(unsigned index) {
    unsigned top = index / 4 + 8;
    return ((uint64_t)1 << top) + ((uint64_t)(index % 4 + 1) << (top - 2));
}
static inline void mp_path_record(mp_path_stats *s, int write, uint64_t transfers, uint64_t bytes, uint64_t ns) {
    mp_tally(&s->batches[write], 1);
    mp_tally(&s->transfers[write], transfers);
    mp_tally(&s->bytes[write], bytes);
    mp_tally(&s->nanoseconds[write], ns);
    mp_tally(&s->latency[write][mp_bucket(ns)], 1);
}
#endif
