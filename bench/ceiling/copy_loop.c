/* The ceiling of the shm transport: a loop that copies between private memory and a mapping shared by two processes.
 *
 * Three copies: the C library's memcpy, and non-temporal stores with AVX2 and with AVX-512, which spare the read of
 * the destination's cache lines and so win when the block is cold and large. Addresses must be 64-byte aligned and
 * the block a multiple of 256 bytes for the last two. */
#include <errno.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "job.h"

enum { MEMCPY = 0, AVX2_NON_TEMPORAL = 1, AVX512_NON_TEMPORAL = 2, PREFETCH_BYTES = 1024 };

__attribute__((target("avx2"))) static void copy_avx2(char *destination, const char *source, uint64_t length) {
  for (uint64_t i = 0; i < length; i += 128) {
    const char *from = source + i;
    char *to = destination + i;
    _mm_prefetch(from + PREFETCH_BYTES, _MM_HINT_NTA);
    _mm_prefetch(from + PREFETCH_BYTES + 64, _MM_HINT_NTA);
    __m256i a = _mm256_load_si256((const __m256i *)from);
    __m256i b = _mm256_load_si256((const __m256i *)(from + 32));
    __m256i c = _mm256_load_si256((const __m256i *)(from + 64));
    __m256i d = _mm256_load_si256((const __m256i *)(from + 96));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
    _mm256_stream_si256((__m256i *)(to + 64), c);
    _mm256_stream_si256((__m256i *)(to + 96), d);
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) static void copy_avx512(char *destination, const char *source, uint64_t length) {
  for (uint64_t i = 0; i < length; i += 256) {
    const char *from = source + i;
    char *to = destination + i;
    for (int line = 0; line < 256; line += 64) _mm_prefetch(from + PREFETCH_BYTES + line, _MM_HINT_NTA);
    __m512i a = _mm512_load_si512(from);
    __m512i b = _mm512_load_si512(from + 64);
    __m512i c = _mm512_load_si512(from + 128);
    __m512i d = _mm512_load_si512(from + 192);
    _mm512_stream_si512((__m512i *)to, a);
    _mm512_stream_si512((__m512i *)(to + 64), b);
    _mm512_stream_si512((__m512i *)(to + 128), c);
    _mm512_stream_si512((__m512i *)(to + 192), d);
  }
  _mm_sfence();
}

/* 1 when this CPU can run the variant, else 0. */
int copy_supported(uint32_t variant) {
  __builtin_cpu_init();
  switch (variant) {
    case MEMCPY: return 1;
    case AVX2_NON_TEMPORAL: return __builtin_cpu_supports("avx2") != 0;
    case AVX512_NON_TEMPORAL: return __builtin_cpu_supports("avx512f") != 0;
    default: return 0;
  }
}

static void copy_block(uint32_t variant, char *destination, const char *source, uint64_t length) {
  if (variant == AVX512_NON_TEMPORAL)
    copy_avx512(destination, source, length);
  else if (variant == AVX2_NON_TEMPORAL)
    copy_avx2(destination, source, length);
  else
    memcpy(destination, source, length);
}

/* Runs one job from `source` to `destination`; `latencies_ns` receives one value per operation. Returns 0 or -errno. */
int copy_run(const struct job *job, char *destination, const char *source, uint64_t *latencies_ns,
             struct outcome *outcome) {
  uint64_t step = job->count * job->block_bytes;
  uint64_t misaligned = ((uintptr_t)destination | (uintptr_t)source) % 64 | job->block_bytes % 256;
  if (!copy_supported(job->kind) || step == 0 || step > job->span_bytes) return -EINVAL;
  if (job->kind != MEMCPY && misaligned) return -EINVAL;
  uint64_t positions = job->span_bytes / step;
  uint64_t started = now_ns(), before = started, done = 0;
  while (job_goes_on(job, done, before - started)) {
    uint64_t start = done % positions * step;
    for (uint32_t i = 0; i < job->count; i++) {
      uint64_t offset = start + i * job->block_bytes;
      copy_block(job->kind, destination + offset, source + offset, job->block_bytes);
    }
    uint64_t after = now_ns();
    latencies_ns[done++] = after - before;
    before = after;
  }
  *outcome = (struct outcome){done, before - started};
  return 0;
}
