/* SipHash-2-4 with 64 bits of output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012), little endian hosts. */
#ifndef MOONPOOL_SIPHASH_H
#define MOONPOOL_SIPHASH_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t mp_rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline void mp_sip_round(uint64_t v[4]) {
    v[0] += v[1]; v[1] = mp_rotate(v[1], 13); v[1] ^= v[0]; v[0] = mp_rotate(v[0], 32);
    v[2] += v[3]; v[3] = mp_rotate(v[3], 16); v[3] ^= v[2];
    v[0] += v[3]; v[3] = mp_rotate(v[3], 21); v[3] ^= v[0];
    v[2] += v[1]; v[1] = mp_rotate(v[1], 17); v[1] ^= v[2]; v[2] = mp_rotate(v[2], 32);
}

static inline void mp_sip_word(uint64_t v[4], uint64_t word) {
    v[3] ^= word;
    mp_sip_round(v);
    mp_sip_round(v);
    v[0] ^= word;
}

static inline uint64_t mp_siphash(uint64_t k0, uint64_t k1, const void *data, size_t size) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t v[4] = {k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du, k0 ^ 0x6c7967656e657261u, k1 ^ 0x7465646279746573u};
    uint64_t word, last = (uint64_t)size << 56;
    size_t k, left = size & 7;
    for (k = 0; k + 8 <= size; k += 8) {
        memcpy(&word, p + k, 8);
        mp_sip_word(v, word);
    }
    word = 0;
    memcpy(&word, p + k, left);
    mp_sip_word(v, last | word);
    v[2] ^= 0xff;
    for (k = 0; k < 4; k++) mp_sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}
#endif
