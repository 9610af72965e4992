/* A set of small integers: a bitmap under bitmaps of its non-zero words, so that the lowest member, and the nearest one
   on either side of a number, are found in one step a level (64-ary: four levels hold 2^24, five 2^30, six 2^36). */
#ifndef MOONPOOL_BIT_TREE_H
#define MOONPOOL_BIT_TREE_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MP_BIT_LEVELS 6
#define MP_NO_BIT UINT64_MAX

typedef struct {
    uint64_t *level[MP_BIT_LEVELS];     /* level[0] has a bit for each number; level[levels - 1] is one word */
    uint64_t bits;
    int levels;
} mp_bit_tree;

static inline size_t mp_bits_words(uint64_t bits) { return (size_t)((bits + 63) >> 6); }

static inline void mp_bits_release(mp_bit_tree *tree) {
    for (int k = 0; k < MP_BIT_LEVELS; k++) free(tree->level[k]);
    memset(tree, 0, sizeof *tree);
}

/* An empty set of numbers below `bits` (1 to 2^36). False without memory; pages are only used once touched. */
static inline int mp_bits_prepare(mp_bit_tree *tree, uint64_t bits) {
    memset(tree, 0, sizeof *tree);
    tree->bits = bits;
    for (uint64_t left = bits;; left = mp_bits_words(left)) {
        if (tree->levels == MP_BIT_LEVELS) break;
        tree->level[tree->levels] = calloc(mp_bits_words(left), sizeof(uint64_t));
        if (!tree->level[tree->levels]) break;
        tree->levels++;
        if (left <= 64) return 1;
    }
    mp_bits_release(tree);
    return 0;
}

static inline size_t mp_bits_bytes(const mp_bit_tree *tree) {
    size_t words = 0;
    uint64_t left = tree->bits;
    for (int k = 0; k < tree->levels; k++) words += mp_bits_words(left), left = mp_bits_words(left);
    return words * sizeof(uint64_t);
}

static inline int mp_bits_has(const mp_bit_tree *tree, uint64_t i) { return tree->level[0][i >> 6] >> (i & 63) & 1; }

static inline void mp_bits_set(mp_bit_tree *tree, uint64_t i) {
    for (int k = 0; k < tree->levels; k++) {
        uint64_t *word = &tree->level[k][i >> 6];
        const uint64_t before = *word;
        *word = before | (uint64_t)1 << (i & 63);
        if (before) return;
        i >>= 6;
    }
}

static inline void mp_bits_clear(mp_bit_tree *tree, uint64_t i) {
    for (int k = 0; k < tree->levels; k++) {
        uint64_t *word = &tree->level[k][i >> 6];
        *word &= ~((uint64_t)1 << (i & 63));
        if (*word) return;
        i >>= 6;
    }
}

static inline uint64_t mp_bits_first(const mp_bit_tree *tree) {
    uint64_t i = 0;
    for (int k = tree->levels - 1; k >= 0; k--) {
        const uint64_t word = tree->level[k][i];
        if (!word) return MP_NO_BIT;
        i = i << 6 | (uint64_t)__builtin_ctzll(word);
    }
    return i;
}

static inline uint64_t mp_bits_at_or_before(const mp_bit_tree *tree, uint64_t i) {
    for (int k = 0; k < tree->levels; k++) {
        uint64_t word = tree->level[k][i >> 6] & UINT64_MAX >> (63 - (i & 63));
        if (word) {
            i = (i >> 6) << 6 | (uint64_t)(63 - __builtin_clzll(word));
            while (k-- > 0) i = i << 6 | (uint64_t)(63 - __builtin_clzll(tree->level[k][i]));
            return i;
        }
        if (i < 64) return MP_NO_BIT;
        i = (i >> 6) - 1;
    }
    return MP_NO_BIT;
}

static inline uint64_t mp_bits_at_or_after(const mp_bit_tree *tree, uint64_t i) {
    uint64_t size = tree->bits;
    for (int k = 0; k < tree->levels && i < size; k++) {
        uint64_t word = tree->level[k][i >> 6] & UINT64_MAX << (i & 63);
        if (word) {
            i = (i >> 6) << 6 | (uint64_t)__builtin_ctzll(word);
            while (k-- > 0) i = i << 6 | (uint64_t)__builtin_ctzll(tree->level[k][i]);
            return i;
        }
        i = (i >> 6) + 1;
        size = mp_bits_words(size);
    }
    return MP_NO_BIT;
}

/* Asserts that every upper bit says whether its word below is zero. */
static inline int mp_bits_consistent(const mp_bit_tree *tree) {
    uint64_t size = tree->bits;
    for (int k = 0; k + 1 < tree->levels; k++) {
        size = mp_bits_words(size);
        for (uint64_t w = 0; w < size; w++)
            if ((tree->level[k + 1][w >> 6] >> (w & 63) & 1) != (tree->level[k][w] != 0)) return 0;
    }
    return 1;
}
#endif
