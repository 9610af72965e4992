/* XXH3 for the build's baseline instruction set. */
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "xxh3.h"

uint64_t mp_xxh3_64_base(const void *p, size_t n) { return XXH3_64bits(p, n); }

void mp_xxh3_128_base(const void *p, size_t n, uint64_t out[2]) {
    XXH128_hash_t h = XXH3_128bits(p, n);
    out[0] = h.low64;
    out[1] = h.high64;
}
