/* XXH3 compiled for avx512: one instruction set a translation unit, chosen at run time by mp_pick_xxh3. */
#include "xxh3.h"
#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx2,bmi2")
#define XXH_VECTOR XXH_AVX512
#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t mp_xxh3_64_avx512(const void *p, size_t n) { return XXH3_64bits(p, n); }
#else
uint64_t mp_xxh3_64_avx512(const void *p, size_t n) { return mp_xxh3_64_base(p, n); }
#endif
