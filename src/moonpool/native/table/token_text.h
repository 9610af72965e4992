/* Decimal numbers with commas between them, many at a time. Commas are found 64 letters at a time, and each number is
 * read from the eight letters before its comma: no number waits for the length of the one before it. */
#ifndef MP_TOKEN_TEXT_H
#define MP_TOKEN_TEXT_H
#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t mp_commas(const unsigned char *text) {
    const __m128i comma = _mm_set1_epi8(',');
    uint64_t mask = 0;
    for (int k = 0; k < 4; k++) {
        __m128i piece = _mm_loadu_si128((const __m128i *)(text + 16 * k));
        mask |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(piece, comma)) << (16 * k);
    }
    return mask;
}

/* The `n` (1 to 8) digits that end before `stop`; 0 when one is no digit. At least eight letters lie before `stop`. */
static inline int mp_digits_before(const unsigned char *stop, int n, uint32_t *number) {
    uint64_t values, others;
    memcpy(&values, stop - 8, 8);
    values = (values ^ 0x3030303030303030u) >> (8 * (8 - n)) << (8 * (8 - n));
    others = ((values & 0x7f7f7f7f7f7f7f7fu) + 0x7676767676767676u) | values;
    if (others & 0x8080808080808080u) return 0;
    values = values * 10 + (values >> 8);
    *number = (uint32_t)(((values & 0x000000ff000000ffu) * 0x000f424000000064u +
                          ((values >> 16) & 0x000000ff000000ffu) * 0x0000271000000001u) >> 32);
    return 1;
}

/* Reads numbers of at most eight digits, with "," or ", " behind each, from text[*at] on, and stops at the first that is
 * anything else or near the end. *at moves to where that one starts. Returns how many were read. Needs *at >= 8. */
static inline int64_t mp_read_numbers(const unsigned char *text, int64_t *at, int64_t end, uint32_t *out) {
    int64_t first = *at, base = *at, count = 0;
    for (; base + 66 <= end; base += 64) {
        uint64_t mask = mp_commas(text + base);
        for (; mask; mask &= mask - 1) {
            int64_t stop = base + __builtin_ctzll(mask), n = stop - first;
            if (n < 1 || n > 8 || (text[first] == '0' && n > 1)) goto done;
            if (!mp_digits_before(text + stop, (int)n, out + count)) goto done;
            count++;
            first = stop + 1 + (text[stop + 1] == ' ');
        }
    }
done:
    *at = first;
    return count;
}
#endif
