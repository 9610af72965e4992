/* The frames of a data lane, as they lie on the wire (docs/architecture.md, "Wire"; reference codec: moonpool/wire/transfer.py). */
#ifndef MOONPOOL_FRAMES_H
#define MOONPOOL_FRAMES_H
#include <stdint.h>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little endian and these structures are used in place: port frames.h before building here"
#endif
#define MP_MAGIC 0x504D
#define MP_REPLY 0x80
#define MP_GROUP_MAX 256
#define MP_LENGTH_MAX ((uint64_t)1 << 40)
#define MP_NOTICE_MAX 65536
typedef struct __attribute__((packed)) {
    uint16_t magic;
    uint8_t op;
    uint8_t flags; /* in a reply: the worst status */
    uint32_t count;
    uint64_t id;
    uint64_t payload;
    uint64_t reserved;
} mp_header;
typedef struct __attribute__((packed)) {
    uint64_t region;
    uint64_t offset;
    uint64_t length;
    uint8_t key[16];
    uint8_t grant[24]; /* all zero in version 1 */
} mp_entry;
_Static_assert(sizeof(mp_header) == 32 && sizeof(mp_entry) == 64, "frame layout");
#endif
