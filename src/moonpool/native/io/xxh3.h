/* XXH3 (Yann Collet's xxHash, BSD-2-Clause header of libxxhash) per instruction set. */
#ifndef MOONPOOL_XXH3_H
#define MOONPOOL_XXH3_H
#include <stddef.h>
#include <stdint.h>
typedef uint64_t (*mp_xxh3_fn)(const void *p, size_t n);
uint64_t mp_xxh3_64_base(const void *p, size_t n);
uint64_t mp_xxh3_64_avx2(const void *p, size_t n);
uint64_t mp_xxh3_64_avx512(const void *p, size_t n);
void mp_xxh3_128_base(const void *p, size_t n, uint64_t out[2]);

static inline mp_xxh3_fn mp_pick_xxh3(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return mp_xxh3_64_avx512;
    if (__builtin_cpu_supports("avx2")) return mp_xxh3_64_avx2;
#endif
    return mp_xxh3_64_base;
}
#endif
