/* SHA-256 (FIPS 180-4) of one message that lies in a buffer of our own: by the processor's SHA instructions where it
   has them, else in plain C.

   hashlib costs half a microsecond a call before it hashes anything; a block's message is about 130 bytes, and each
   block waits for the digest of the one before. */
#ifndef MOONPOOL_SHA256_H
#define MOONPOOL_SHA256_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MP_SHA256_PADDING 72 /* bytes behind the message that mp_sha256 may write */

typedef void (*mp_sha256_fn)(uint32_t state[8], const uint8_t *data, size_t blocks);

static const uint32_t mp_sha256_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t mp_load_be32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void mp_store_be32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)(v >> 24), p[1] = (uint8_t)(v >> 16), p[2] = (uint8_t)(v >> 8), p[3] = (uint8_t)v;
}

static inline uint32_t mp_ror32(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void mp_sha256_plain(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks; blocks--, data += 64) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++) w[i] = mp_load_be32(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (mp_ror32(a, 7) ^ mp_ror32(a, 18) ^ a >> 3) + w[i - 7] +
                   (mp_ror32(b, 17) ^ mp_ror32(b, 19) ^ b >> 10);
        }
        memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t t1 = s[7] + (mp_ror32(e, 6) ^ mp_ror32(e, 11) ^ mp_ror32(e, 25)) +
                          ((e & s[5]) ^ (~e & s[6])) + mp_sha256_constants[i] + w[i];
            uint32_t t2 = (mp_ror32(a, 2) ^ mp_ror32(a, 13) ^ mp_ror32(a, 22)) +
                          ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            s[7] = s[6], s[6] = s[5], s[5] = e, s[4] = s[3] + t1;
            s[3] = s[2], s[2] = s[1], s[1] = a, s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) state[i] += s[i];
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("sha,sse4.1,ssse3"))) static void mp_sha256_instructions(uint32_t state[8], const uint8_t *data,
                                                                               size_t blocks) {
    const __m128i flip = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8);
    __m128i cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; blocks; blocks--, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i m[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i w;
            if (i < 4) {
                w = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), flip);
            } else {
                const __m128i seven = _mm_alignr_epi8(m[(i + 3) & 3], m[(i + 2) & 3], 4);
                const __m128i first = _mm_sha256msg1_epu32(m[i & 3], m[(i + 1) & 3]);
                w = _mm_sha256msg2_epu32(_mm_add_epi32(first, seven), m[(i + 3) & 3]);
            }
            m[i & 3] = w;
            __m128i t = _mm_add_epi32(w, _mm_loadu_si128((const __m128i *)(mp_sha256_constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, t);
            t = _mm_shuffle_epi32(t, 0x0E);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, t);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(high, low, 8));
}

static int mp_has_sha_instructions(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}
#endif

static mp_sha256_fn mp_pick_sha256(int plain_only) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!plain_only && mp_has_sha_instructions()) return mp_sha256_instructions;
#endif
    (void)plain_only;
    return mp_sha256_plain;
}

/* Digest of the n bytes at message; writes the padding behind them (MP_SHA256_PADDING bytes of room). */
static inline void mp_sha256(mp_sha256_fn compress, uint8_t *message, size_t n, uint8_t out[32]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t blocks = (n + 8) / 64 + 1;
    memset(message + n, 0, blocks * 64 - n);
    message[n] = 0x80;
    mp_store_be32(message + blocks * 64 - 8, (uint32_t)((uint64_t)n >> 29));
    mp_store_be32(message + blocks * 64 - 4, (uint32_t)(n << 3));
    compress(state, message, blocks);
    for (int i = 0; i < 8; i++) mp_store_be32(out + 4 * i, state[i]);
}
#endif
