/* A core for tests of the rpc's loop: its answers follow from the request alone. Compiled by conftest.py. */
#include <stdlib.h>
#include "rpc_msgpack.h"

/* The structures of rpc_hot.pxd. */
typedef struct { uint8_t *data; size_t length, capacity, limit; } hot_out;
typedef struct {
    uint64_t connection;
    uint32_t client, tenant;
    uint64_t now_ms;
    const uint8_t *params;
    size_t params_bytes;
} hot_call;
typedef int (*hot_function)(void *core, int method, const hot_call *call, hot_out *out);
struct { hot_function function; void *core; } hot_binding;
uint64_t hot_calls[4];
uint64_t hot_last_ms;
uint32_t hot_last_client, hot_last_tenant;

enum { ANSWERED, COLD, BAD_PARAMS, NO_MEMORY };

static int reserve(hot_out *out, size_t more) {
    size_t wanted = out->length + more;
    uint8_t *grown;
    if (wanted > out->limit) return -1;
    if (wanted <= out->capacity) return 0;
    grown = realloc(out->data, wanted * 2);
    if (!grown) return -2;
    out->data = grown;
    out->capacity = wanted * 2;
    return 0;
}

/* exists: 1 for keys that do not begin with '-'. */
static int exists(mp_pack_reader *r, uint32_t n, hot_out *out) {
    const uint8_t *key;
    uint32_t size, k;
    uint8_t *p;
    if (reserve(out, n + 5)) return COLD;
    p = mp_pack_bin(out->data + out->length, n);
    for (k = 0; k < n; k++) {
        if (mp_pack_read_bytes(r, &key, &size) || !size) return BAD_PARAMS;
        *p++ = *key != '-';
    }
    out->length = (size_t)(p - out->data);
    return ANSWERED;
}

/* lookup: nil for keys that begin with '-', else an object of as many bytes as the key and one place. */
static int lookup(mp_pack_reader *r, uint32_t n, hot_out *out) {
    const uint8_t *key;
    uint32_t size, k;
    uint8_t *p;
    if (reserve(out, 16 + 64 * (size_t)n)) return COLD;
    p = mp_pack_array(out->data + out->length, 3);
    p = mp_pack_uint(mp_pack_uint(p, 7), 9);
    p = mp_pack_array(p, n);
    for (k = 0; k < n; k++) {
        if (mp_pack_read_bytes(r, &key, &size) || !size) return BAD_PARAMS;
        if (*key == '-') { p = mp_pack_nil(p); continue; }
        p = mp_pack_array(p, 5);
        p = mp_pack_uint(mp_pack_uint(p, 7ull << 40 | (k + 1)), size);
        p = mp_pack_bin(p, 16);
        memset(p, *key, 16);
        p = mp_pack_array(mp_pack_uint(p + 16, 1), 1);
        p = mp_pack_array(p, 3);
        p = mp_pack_uint(mp_pack_uint(mp_pack_uint(p, 3), 4096ull * k), k);
    }
    out->length = (size_t)(p - out->data);
    return ANSWERED;
}

/* put_start and put_end: the epoch alone, which changes something and tells nothing. */
static int change(hot_out *out) {
    if (reserve(out, 2)) return COLD;
    out->data[out->length++] = 0x91;
    out->data[out->length++] = 7;
    return ANSWERED;
}

static int answer(void *core, int method, const hot_call *call, hot_out *out) {
    mp_pack_reader r = {call->params, call->params + call->params_bytes};
    const uint8_t *key;
    uint32_t count, n, size;
    mp_pack_reader first;
    hot_calls[method]++;
    hot_last_ms = call->now_ms;
    hot_last_client = call->client;
    hot_last_tenant = call->tenant;
    if (method >= 2) return change(out);
    if (mp_pack_read_array(&r, &count) || count != 2 || mp_pack_read_array(&r, &n)) return BAD_PARAMS;
    first = r;
    if (n && mp_pack_read_bytes(&first, &key, &size) == 0 && size == 4) {
        if (memcmp(key, "cold", 4) == 0) return COLD;
        if (memcmp(key, "full", 4) == 0) return NO_MEMORY;
    }
    return method == 0 ? exists(&r, n, out) : lookup(&r, n, out);
}

void *hot_bind(void) {
    hot_binding.function = answer;
    hot_binding.core = 0;
    return &hot_binding;
}
