/* Hashes of one block of tokens, as the engines compute them. Tokens are u32; the machine is little endian.

   Sources of the recipes: vLLM vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py (pickle protocol 5, canonical
   CBOR of RFC 8949 4.2.1); SGLang sglang/srt/mem_cache (pages); Dynamo lib/kv-hashing and Mooncake's RFC 1527 (XXH3). */
#ifndef MOONPOOL_BLOCK_HASHES_H
#define MOONPOOL_BLOCK_HASHES_H
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "sha256.h"

enum { MP_PICKLE = 0, MP_CBOR = 1, MP_PAGE = 2, MP_BIGRAM = 3 };
enum { MP_SHA256_DIGEST = 32, MP_XXH3_DIGEST = 16 };

/* ---- XXH3-64 chains ------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed;
    uint8_t secret[XXH3_SECRET_SIZE_MIN > 192 ? XXH3_SECRET_SIZE_MIN : 192];
} mp_seeded; /* XXH3 derives a secret from the seed for each long input: once is enough */

static void mp_seeded_make(mp_seeded *made, uint64_t seed) {
    made->seed = seed;
#if XXH_VERSION_NUMBER >= 801
    XXH3_generateSecret_fromSeed(made->secret, seed);
#endif
}

static inline uint64_t mp_xxh3_seeded(const void *data, size_t bytes, const mp_seeded *seeded) {
#if XXH_VERSION_NUMBER >= 801
    return XXH3_64bits_withSecretandSeed(data, bytes, seeded->secret, sizeof seeded->secret, seeded->seed);
#else
    return XXH3_64bits_withSeed(data, bytes, seeded->seed);
#endif
}

/* The hash of a block and all before it: of (hash of all before, hash of the block alone). */
static inline uint64_t mp_xxh3_link(uint64_t before, uint64_t alone, uint64_t seed) {
    const uint64_t pair[2] = {before, alone};
    return XXH3_64bits_withSeed(pair, sizeof pair, seed);
}

/* ---- messages of the digest chains ---------------------------------------------------------------------------- */

static inline uint8_t *mp_put(uint8_t *at, const void *data, size_t bytes) {
    if (bytes) memcpy(at, data, bytes);
    return at + bytes;
}

/* pickle.dumps((parent, tuple(tokens), extra), protocol=5), where `extra` is given as the pickle has it. */
static inline uint8_t *mp_put_pickle(uint8_t *out, const uint8_t *parent, size_t parent_bytes, const uint32_t *tokens,
                                     size_t count) {
    uint8_t *at = out + 11; /* PROTO 5, FRAME and its length, which mp_end_pickle fills in */
    *at++ = 0x43;           /* SHORT_BINBYTES */
    *at++ = (uint8_t)parent_bytes;
    at = mp_put(at, parent, parent_bytes);
    *at++ = 0x94; /* MEMOIZE */
    if (count > 3) *at++ = '(';
    for (size_t i = 0; i < count; i++) {
        /* One store of four bytes whatever the token needs: the next token overwrites the rest. */
        const uint32_t token = tokens[i];
        const int wide = token > 0xFF, full = token > 0xFFFF;
        *at = full ? 'J' : wide ? 'M' : 'K'; /* BININT, BININT2, BININT1 */
        memcpy(at + 1, &token, 4);
        at += 2 + wide + 2 * full;
    }
    *at++ = count > 3 ? 't' : (uint8_t)(0x84 + count); /* TUPLE, or TUPLE1 to TUPLE3 */
    *at++ = 0x94;
    return at;
}

static inline uint8_t *mp_end_pickle(uint8_t *out, uint8_t *at) {
    *at++ = 0x87; /* TUPLE3, MEMOIZE, STOP */
    *at++ = 0x94;
    *at++ = '.';
    const uint64_t frame = (uint64_t)(at - out) - 11;
    out[0] = 0x80, out[1] = 5, out[2] = 0x95;
    memcpy(out + 3, &frame, 8);
    return at;
}

/* The head of a CBOR item: major type and argument in the shortest form. */
static inline uint8_t *mp_put_cbor_head(uint8_t *at, uint8_t major, uint32_t value) {
    if (value < 24) {
        *at++ = (uint8_t)(major | value);
    } else if (value <= 0xFF) {
        *at++ = major | 24;
        *at++ = (uint8_t)value;
    } else if (value <= 0xFFFF) {
        *at++ = major | 25;
        *at++ = (uint8_t)(value >> 8);
        *at++ = (uint8_t)value;
    } else {
        *at++ = major | 26;
        mp_store_be32(at, value);
        at += 4;
    }
    return at;
}

/* Canonical CBOR of [parent, [tokens], extra], where `extra` is given encoded. */
static inline uint8_t *mp_put_cbor(uint8_t *at, const uint8_t *parent, size_t parent_bytes, const uint32_t *tokens,
                                   size_t count) {
    *at++ = 0x83;
    at = mp_put_cbor_head(at, 0x40, (uint32_t)parent_bytes);
    at = mp_put(at, parent, parent_bytes);
    at = mp_put_cbor_head(at, 0x80, (uint32_t)count);
    for (size_t i = 0; i < count; i++) at = mp_put_cbor_head(at, 0x00, tokens[i]);
    return at;
}

/* The parent's digest and the tokens as they are; a bigram page holds each token with the one after it. */
static inline uint8_t *mp_put_page(uint8_t *at, const uint8_t *parent, size_t parent_bytes, const uint32_t *tokens,
                                   size_t count, int bigram) {
    at = mp_put(at, parent, parent_bytes);
    if (!bigram) return mp_put(at, tokens, 4 * count);
    for (size_t i = 0; i < count; i++) at = mp_put(at, tokens + i, 8);
    return at;
}

/* ---- digest chains -------------------------------------------------------------------------------------------- */

typedef struct {
    int encoding;        /* MP_PICKLE ... MP_BIGRAM */
    int digest_bytes;    /* MP_SHA256_DIGEST or MP_XXH3_DIGEST */
    mp_sha256_fn sha256; /* picked for this processor */
    size_t block_tokens;
    uint8_t *message; /* mp_message_bytes of room */
} mp_recipe;

/* Room for any message of a recipe, its padding included. */
static inline size_t mp_message_bytes(size_t block_tokens, size_t parent_bytes, size_t extra_bytes) {
    return 64 + parent_bytes + 8 * block_tokens + extra_bytes + MP_SHA256_PADDING;
}

/* Digest of one block after `parent` (which may be empty), into `out`. */
static inline void mp_digest_block(const mp_recipe *recipe, const uint8_t *parent, size_t parent_bytes,
                                   const uint32_t *tokens, const uint8_t *extra, size_t extra_bytes, uint8_t *out) {
    uint8_t *const message = recipe->message;
    uint8_t *at;
    if (recipe->encoding == MP_PICKLE) {
        at = mp_put_pickle(message, parent, parent_bytes, tokens, recipe->block_tokens);
        at = mp_end_pickle(message, mp_put(at, extra, extra_bytes));
    } else if (recipe->encoding == MP_CBOR) {
        at = mp_put_cbor(message, parent, parent_bytes, tokens, recipe->block_tokens);
        at = mp_put(at, extra, extra_bytes);
    } else {
        at = mp_put_page(message, parent, parent_bytes, tokens, recipe->block_tokens, recipe->encoding == MP_BIGRAM);
    }
    const size_t bytes = (size_t)(at - message);
    if (recipe->digest_bytes == MP_SHA256_DIGEST) {
        mp_sha256(recipe->sha256, message, bytes, out);
    } else {
        XXH128_canonicalFromHash((XXH128_canonical_t *)out, XXH3_128bits(message, bytes));
    }
}

/* The 64 bits that stand for a digest in events: the last eight bytes, of a page the first eight, big endian. */
static inline uint64_t mp_key_of_digest(const mp_recipe *recipe, const uint8_t *digest) {
    const uint8_t *p = recipe->encoding >= MP_PAGE ? digest : digest + recipe->digest_bytes - 8;
    return (uint64_t)mp_load_be32(p) << 32 | mp_load_be32(p + 4);
}
#endif
