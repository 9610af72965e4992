/* Copies with non-temporal stores for cold blocks: on a block that nobody reads soon they save the read-for-ownership and
 * leave the caches alone, 1.4-1.9x memcpy from 4 KiB up (bench/ceiling). Hot blocks are memcpy's. */
#ifndef MOONPOOL_COPYKERNELS_H
#define MOONPOOL_COPYKERNELS_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*mp_stream_fn)(char *d, const char *s, size_t blocks);

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
__attribute__((target("avx2"))) static void mp_stream_avx2(char *d, const char *s, size_t blocks) {
    for (; blocks; blocks--, d += 256, s += 256) {
        _mm_prefetch(s + 2048, _MM_HINT_NTA);
        _mm_prefetch(s + 2112, _MM_HINT_NTA);
        _mm_prefetch(s + 2176, _MM_HINT_NTA);
        _mm_prefetch(s + 2240, _MM_HINT_NTA);
        for (int i = 0; i < 256; i += 64) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(s + i));
            __m256i b = _mm256_loadu_si256((const __m256i *)(s + i + 32));
            _mm256_stream_si256((__m256i *)(d + i), a);
            _mm256_stream_si256((__m256i *)(d + i + 32), b);
        }
    }
}
__attribute__((target("avx512f"))) static void mp_stream_avx512(char *d, const char *s, size_t blocks) {
    for (; blocks; blocks--, d += 256, s += 256) {
        _mm_prefetch(s + 2048, _MM_HINT_NTA);
        _mm_prefetch(s + 2112, _MM_HINT_NTA);
        _mm_prefetch(s + 2176, _MM_HINT_NTA);
        _mm_prefetch(s + 2240, _MM_HINT_NTA);
        __m512i a = _mm512_loadu_si512(s), b = _mm512_loadu_si512(s + 64);
        __m512i c = _mm512_loadu_si512(s + 128), e = _mm512_loadu_si512(s + 192);
        _mm512_stream_si512((__m512i *)d, a);
        _mm512_stream_si512((__m512i *)(d + 64), b);
        _mm512_stream_si512((__m512i *)(d + 128), c);
        _mm512_stream_si512((__m512i *)(d + 192), e);
    }
}
static inline void mp_fence(void) { _mm_sfence(); }
static mp_stream_fn mp_pick_stream(const char **name) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) { *name = "avx512"; return mp_stream_avx512; }
    if (__builtin_cpu_supports("avx2")) { *name = "avx2"; return mp_stream_avx2; }
    *name = "memcpy";
    return 0;
}
#else
static inline void mp_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static mp_stream_fn mp_pick_stream(const char **name) { *name = "memcpy"; return 0; }
#endif

/* Streams the 64-byte-aligned middle; head and tail are plain. Regions must not overlap. Callers end with mp_fence. */
static inline void mp_copy_stream(mp_stream_fn stream, char *d, const char *s, size_t n) {
    size_t head = (size_t)(-(uintptr_t)d & 63), blocks;
    if (!stream || n < 512) { memcpy(d, s, n); return; }
    memcpy(d, s, head);
    d += head; s += head; n -= head;
    blocks = n / 256;
    stream(d, s, blocks);
    memcpy(d + blocks * 256, s + blocks * 256, n - blocks * 256);
}
#endif
