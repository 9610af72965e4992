/* MessagePack as far as the rpc needs it: a bounded check of structure, readers, writers of the shortest forms.
 *
 * Source: the MessagePack specification (github.com/msgpack/msgpack). Extension types and the unused byte 0xc1 are refused.
 * Every reader checks its bounds, so bytes that were never checked cost an error and no more. */
#ifndef MOONPOOL_RPC_MSGPACK_H
#define MOONPOOL_RPC_MSGPACK_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MP_PACK_DEPTH 16u           /* lists and maps inside each other */
#define MP_PACK_CONTAINERS 262144u  /* lists and maps in one frame */

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} mp_pack_reader;

static inline uint64_t mp_pack_big(const uint8_t *p, unsigned n) {
    uint64_t v = 0;
    while (n--) v = v << 8 | *p++;
    return v;
}

/* What a first byte means: bytes of length that follow it, plain bytes, or children. */
typedef struct {
    uint8_t length_bytes; /* of a length or a number of children behind the first byte */
    uint8_t plain;        /* bytes of a scalar behind the first byte */
    uint8_t kind;         /* 0 scalar, 1 text or binary, 2 array, 3 map, 4 not allowed */
} mp_pack_form;

static inline mp_pack_form mp_pack_form_of(uint8_t b) {
    mp_pack_form f = {0, 0, 0};
    switch (b) {
    case 0xc0: case 0xc2: case 0xc3: break;
    case 0xc4: case 0xd9: f.kind = 1; f.length_bytes = 1; break;
    case 0xc5: case 0xda: f.kind = 1; f.length_bytes = 2; break;
    case 0xc6: case 0xdb: f.kind = 1; f.length_bytes = 4; break;
    case 0xca: case 0xce: case 0xd2: f.plain = 4; break;
    case 0xcb: case 0xcf: case 0xd3: f.plain = 8; break;
    case 0xcc: case 0xd0: f.plain = 1; break;
    case 0xcd: case 0xd1: f.plain = 2; break;
    case 0xdc: f.kind = 2; f.length_bytes = 2; break;
    case 0xdd: f.kind = 2; f.length_bytes = 4; break;
    case 0xde: f.kind = 3; f.length_bytes = 2; break;
    case 0xdf: f.kind = 3; f.length_bytes = 4; break;
    default: f.kind = 4; /* 0xc1 and the extension types */
    }
    return f;
}

/* Steps over one value's head, and over the whole of it when it has no children. 0 and the number of children, or -1. */
static inline int mp_pack_step(mp_pack_reader *r, uint64_t *children) {
    uint64_t n, room;
    mp_pack_form f;
    uint8_t b;
    *children = 0;
    if (r->at >= r->end) return -1;
    b = *r->at++;
    room = (uint64_t)(r->end - r->at);
    if (b < 0x80 || b >= 0xe0) return 0;
    if (b < 0xa0) {
        *children = b < 0x90 ? 2u * (b & 15u) : b & 15u;
        return *children <= room ? 0 : -1;
    }
    if (b < 0xc0) {
        n = b & 31u;
    } else {
        f = mp_pack_form_of(b);
        if (f.kind == 4 || f.length_bytes > room || f.plain > room) return -1;
        n = f.plain;
        if (f.kind) {
            n = mp_pack_big(r->at, f.length_bytes);
            r->at += f.length_bytes;
            room -= f.length_bytes;
        }
        if (f.kind >= 2) {
            *children = f.kind == 3 ? 2 * n : n;
            return *children <= room ? 0 : -1; /* each child has at least a byte */
        }
    }
    if (n > room) return -1;
    r->at += n;
    return 0;
}

/* Steps over one value with all that is in it: 0, or -1 when it is cut off, too deep, or has too many lists and maps. */
static inline int mp_pack_skip(mp_pack_reader *r) {
    uint64_t left[MP_PACK_DEPTH + 1], children;
    uint32_t containers = 0;
    unsigned depth = 0;
    const uint8_t *head;
    left[0] = 1;
    for (;;) {
        while (left[depth] == 0) {
            if (depth == 0) return 0;
            depth--;
        }
        left[depth]--;
        head = r->at;
        if (mp_pack_step(r, &children)) return -1;
        if ((*head >= 0x80 && *head < 0xa0) || (*head >= 0xdc && *head <= 0xdf)) {
            /* An empty list counts too: it costs its receiver an object. */
            if (++containers > MP_PACK_CONTAINERS || depth + 1 > MP_PACK_DEPTH) return -1;
            left[++depth] = children;
        }
    }
}

static inline int mp_pack_read_uint(mp_pack_reader *r, uint64_t *value) {
    size_t room = (size_t)(r->end - r->at);
    unsigned n;
    if (!room) return -1;
    if (*r->at < 0x80) {
        *value = *r->at++;
        return 0;
    }
    if (*r->at < 0xcc || *r->at > 0xcf) return -1;
    n = 1u << (*r->at - 0xcc);
    if (room < n + 1) return -1;
    *value = mp_pack_big(r->at + 1, n);
    r->at += n + 1;
    return 0;
}

static inline int mp_pack_read_array(mp_pack_reader *r, uint32_t *count) {
    size_t room = (size_t)(r->end - r->at);
    unsigned n;
    if (!room) return -1;
    if ((*r->at & 0xf0) == 0x90) {
        *count = *r->at++ & 15u;
        return 0;
    }
    if (*r->at != 0xdc && *r->at != 0xdd) return -1;
    n = *r->at == 0xdc ? 2 : 4;
    if (room < n + 1) return -1;
    *count = (uint32_t)mp_pack_big(r->at + 1, n);
    r->at += n + 1;
    return 0;
}

/* Text or binary: where its bytes are, inside the frame. */
static inline int mp_pack_read_bytes(mp_pack_reader *r, const uint8_t **data, uint32_t *count) {
    size_t room = (size_t)(r->end - r->at);
    mp_pack_form f;
    if (!room) return -1;
    if ((*r->at & 0xe0) == 0xa0) {
        *count = *r->at & 31u;
        f.length_bytes = 0;
    } else {
        if (*r->at < 0xc0 || *r->at >= 0xe0) return -1;
        f = mp_pack_form_of(*r->at);
        if (f.kind != 1 || room < 1u + f.length_bytes) return -1;
        *count = (uint32_t)mp_pack_big(r->at + 1, f.length_bytes);
    }
    if (room - 1 - f.length_bytes < *count) return -1;
    *data = r->at + 1 + f.length_bytes;
    r->at = *data + *count;
    return 0;
}

static inline int mp_pack_read_nil(mp_pack_reader *r) {
    if (r->at >= r->end || *r->at != 0xc0) return -1;
    r->at++;
    return 0;
}

/* ---- writers: the caller has room, at most 9 bytes for a number and 5 for a head -------------------------------------- */

static inline uint8_t *mp_pack_put_big(uint8_t *p, uint64_t v, unsigned n) {
    while (n--) *p++ = (uint8_t)(v >> (8 * n));
    return p;
}

static inline uint8_t *mp_pack_uint(uint8_t *p, uint64_t v) {
    if (v < 0x80) { *p++ = (uint8_t)v; return p; }
    if (v <= 0xff) { *p++ = 0xcc; return mp_pack_put_big(p, v, 1); }
    if (v <= 0xffff) { *p++ = 0xcd; return mp_pack_put_big(p, v, 2); }
    if (v <= 0xffffffffu) { *p++ = 0xce; return mp_pack_put_big(p, v, 4); }
    *p++ = 0xcf;
    return mp_pack_put_big(p, v, 8);
}

static inline uint8_t *mp_pack_nil(uint8_t *p) {
    *p++ = 0xc0;
    return p;
}

static inline uint8_t *mp_pack_array(uint8_t *p, uint32_t n) {
    if (n < 16) { *p++ = (uint8_t)(0x90 | n); return p; }
    if (n <= 0xffff) { *p++ = 0xdc; return mp_pack_put_big(p, n, 2); }
    *p++ = 0xdd;
    return mp_pack_put_big(p, n, 4);
}

static inline uint8_t *mp_pack_bin(uint8_t *p, uint32_t n) {
    if (n <= 0xff) { *p++ = 0xc4; return mp_pack_put_big(p, n, 1); }
    if (n <= 0xffff) { *p++ = 0xc5; return mp_pack_put_big(p, n, 2); }
    *p++ = 0xc6;
    return mp_pack_put_big(p, n, 4);
}

static inline uint8_t *mp_pack_str(uint8_t *p, uint32_t n) {
    if (n < 32) { *p++ = (uint8_t)(0xa0 | n); return p; }
    if (n <= 0xff) { *p++ = 0xd9; return mp_pack_put_big(p, n, 1); }
    if (n <= 0xffff) { *p++ = 0xda; return mp_pack_put_big(p, n, 2); }
    *p++ = 0xdb;
    return mp_pack_put_big(p, n, 4);
}

/* ---- frames ------------------------------------------------------------------------------------------------------------ */

#define MP_RPC_REQUEST 0
#define MP_RPC_REPLY 1
#define MP_RPC_PUSH 2
#define MP_RPC_METHOD_MAX 64u

typedef struct {
    int type;             /* MP_RPC_* */
    uint64_t id;          /* of requests and replies */
    const uint8_t *method;
    uint32_t method_bytes;
    const uint8_t *error; /* of replies: the value, one nil byte when there is none */
    size_t error_bytes;
    const uint8_t *body;  /* params or result */
    size_t body_bytes;
} mp_rpc_message;

/* Checks a frame's body (without its length word) whole and takes it apart. 0, or -1 when it is not a message. */
static inline int mp_rpc_parse(const uint8_t *data, size_t n, mp_rpc_message *m) {
    mp_pack_reader r = {data, data + n}, whole = r;
    uint32_t count;
    uint64_t type;
    if (mp_pack_skip(&whole) || whole.at != whole.end) return -1;
    if (mp_pack_read_array(&r, &count) || mp_pack_read_uint(&r, &type)) return -1;
    if (type > 2 || count != (type == MP_RPC_PUSH ? 3u : 4u)) return -1;
    memset(m, 0, sizeof *m);
    m->type = (int)type;
    if (type != MP_RPC_PUSH && mp_pack_read_uint(&r, &m->id)) return -1;
    if (type == MP_RPC_REPLY) {
        m->error = r.at;
        if (*r.at != 0xc0 && *r.at != 0x93) return -1;
        mp_pack_skip(&r);
        m->error_bytes = (size_t)(r.at - m->error);
    } else {
        if ((*r.at & 0xe0) != 0xa0 && *r.at != 0xd9) return -1; /* text */
        if (mp_pack_read_bytes(&r, &m->method, &m->method_bytes)) return -1;
        if (!m->method_bytes || m->method_bytes > MP_RPC_METHOD_MAX) return -1;
    }
    m->body = r.at;
    m->body_bytes = (size_t)(r.end - r.at);
    if (type != MP_RPC_REPLY && (*r.at & 0xf0) != 0x90 && *r.at != 0xdc && *r.at != 0xdd) return -1; /* a list */
    return 0;
}

/* Begins a reply with nil for its error, behind four bytes for the length word: where the result goes. At most 15 bytes. */
static inline uint8_t *mp_rpc_begin_reply(uint8_t *p, uint64_t id) {
    p += 4;
    *p++ = 0x94;
    *p++ = MP_RPC_REPLY;
    return mp_pack_uint(p, id);
}

static inline void mp_rpc_length(uint8_t *frame, uint32_t n) {
    frame[0] = (uint8_t)n;
    frame[1] = (uint8_t)(n >> 8);
    frame[2] = (uint8_t)(n >> 16);
    frame[3] = (uint8_t)(n >> 24);
}

static inline uint32_t mp_rpc_length_of(const uint8_t *frame) {
    return (uint32_t)frame[0] | (uint32_t)frame[1] << 8 | (uint32_t)frame[2] << 16 | (uint32_t)frame[3] << 24;
}
#endif
