"""Grants: what a pool WRITE over tcp or unix lanes shows to be let into an extent (docs/store/architecture.md).

The master makes a grant for an extent that it gave to an open put; the node that holds the extent checks it. 24 bytes,
little endian: start and length of the extent in units of 64 bytes (5 bytes each), deadline in ms of the node's clock
(u32), tag (u16), and SipHash-2-4 under the node's grant key over the region's handle and these 16 bytes.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from moonpool.errors import UsageError

from array import array

cdef extern from "siphash.h" nogil:
    uint64_t mp_siphash(uint64_t k0, uint64_t k1, const void* data, size_t size)

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>
    /* It goes on while the machine sleeps: a grant must not outlive its deadline by that. */
    static inline uint64_t mp_boot_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_BOOTTIME, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    static inline uint64_t mp_get64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void mp_set64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void mp_add64(uint64_t *p) { __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
    """
    uint64_t mp_boot_ns() nogil
    uint64_t mp_get64(const uint64_t* p) nogil
    void mp_set64(uint64_t* p, uint64_t v) nogil
    void mp_add64(uint64_t* p) nogil

cdef enum:
    KEY_BYTES = 16
    NS_PER_MS = 1000000

UNITS_MAX = (1 << 40) - 1


cdef uint64_t mac_of(uint64_t k0, uint64_t k1, uint64_t region, const uint8_t* grant) noexcept nogil:
    cdef uint8_t message[24]
    memcpy(message, &region, 8)
    memcpy(message + 8, grant, 16)
    return mp_siphash(k0, k1, message, 24)


cdef void grant_make(uint64_t k0, uint64_t k1, uint64_t region, uint64_t start, uint64_t length, uint32_t deadline_ms,
                     uint16_t tag, uint8_t* out) noexcept nogil:
    """Write a grant of [start, start + length) bytes; the length is rounded up to units. Limits are the caller's."""
    cdef uint64_t first = start // GRANT_UNIT
    cdef uint64_t count = (length + GRANT_UNIT - 1) // GRANT_UNIT
    cdef uint64_t mac
    memcpy(out, &first, 5)
    memcpy(out + 5, &count, 5)
    memcpy(out + 10, &deadline_ms, 4)
    memcpy(out + 14, &tag, 2)
    mac = mac_of(k0, k1, region, out)
    memcpy(out + 16, &mac, 8)


cdef bint refuse(mp_grants* grants, int reason) noexcept nogil:
    mp_add64(&grants.refused[reason])
    return False


cdef bint grant_allows(mp_grants* grants, const uint8_t* entry) noexcept nogil:
    """True when a wire entry (handle, offset, length, key, grant) may be written now. Refusals are counted by reason.

    The clock is read here, after the caller made it known that it is about to write: so whoever waits for the
    deadline, and then looks for writers, misses none.
    """
    cdef const uint8_t* grant = entry + 40
    cdef uint64_t region, offset, length, first = 0, count = 0, mac, word
    cdef uint32_t deadline
    memcpy(&word, grant, 8)
    memcpy(&mac, grant + 16, 8)
    memcpy(&count, grant + 5, 5)
    if word == 0 and count == 0 and mac == 0:
        return refuse(grants, GRANT_ABSENT)
    memcpy(&region, entry, 8)
    if not mp_get64(&grants.keyed) or mac != mac_of(mp_get64(&grants.k0), mp_get64(&grants.k1), region, grant):
        return refuse(grants, GRANT_WRONG)
    memcpy(&deadline, grant + 10, 4)
    if (mp_boot_ns() - mp_get64(&grants.zero_ns)) // NS_PER_MS >= deadline:
        return refuse(grants, GRANT_OVER)
    memcpy(&first, grant, 5)
    memcpy(&offset, entry + 8, 8)
    memcpy(&length, entry + 16, 8)
    first *= GRANT_UNIT
    count *= GRANT_UNIT
    if offset < first or offset - first > count or length > count - (offset - first):
        return refuse(grants, GRANT_OUTSIDE)
    mp_add64(&grants.accepted)
    return True


cdef void grants_set(mp_grants* grants, uint64_t k0, uint64_t k1, uint64_t zero_ns) noexcept nogil:
    """Change key and clock. One that checks a grant meanwhile may see a mixture, which makes no grant right."""
    mp_set64(&grants.keyed, 0)
    mp_set64(&grants.k0, k0)
    mp_set64(&grants.k1, k1)
    mp_set64(&grants.zero_ns, zero_ns)
    mp_set64(&grants.keyed, 1)


cdef int take_key(bytes key, uint64_t* k0, uint64_t* k1) except -1:
    cdef const char* data = key
    if len(key) != KEY_BYTES:
        raise UsageError(f"a grant key has {KEY_BYTES} bytes, not {len(key)}", field="grant_key")
    memcpy(k0, data, 8)
    memcpy(k1, data + 8, 8)
    return 0


cdef int check_extent(uint64_t start, uint64_t length) except -1:
    if start % GRANT_UNIT:
        raise UsageError(f"an extent starts on {GRANT_UNIT} bytes, not at {start}", offset=start)
    if start // GRANT_UNIT > UNITS_MAX or length > UNITS_MAX * GRANT_UNIT:
        raise UsageError("a grant reaches to 2**46 bytes of a region", offset=start, length_bytes=length)
    return 0


cdef const uint64_t[::1] words(values) except *:
    return array("Q", values) if isinstance(values, (list, tuple)) else values


def siphash24(bytes key, bytes data) -> int:
    """SipHash-2-4 of `data` under a key of 16 bytes, as a 64-bit number."""
    cdef uint64_t k0 = 0, k1 = 0
    cdef const char* message = data
    take_key(key, &k0, &k1)
    return mp_siphash(k0, k1, message, len(data))


def make_grant(bytes key, uint64_t region, uint64_t start, uint64_t length, uint32_t deadline_ms,
               uint16_t tag) -> bytes:
    """The grant of one extent: `start` and `length` in bytes, `deadline_ms` by the node's clock. 24 bytes."""
    cdef uint8_t out[24]
    cdef uint64_t k0 = 0, k1 = 0
    take_key(key, &k0, &k1)
    check_extent(start, length)
    grant_make(k0, k1, region, start, length, deadline_ms, tag, out)
    return (<const char*>out)[:GRANT_BYTES]


def make_grants(bytes key, uint64_t region, starts, lengths, uint32_t deadline_ms, uint16_t tag) -> bytearray:
    """Grants of many extents of one region, 24 bytes each, in order.

    `starts` and `lengths` are uint64 arrays (or sequences of ints) of one length.
    """
    cdef const uint64_t[::1] start = words(starts)
    cdef const uint64_t[::1] length = words(lengths)
    cdef uint64_t k0 = 0, k1 = 0
    cdef Py_ssize_t k, n = start.shape[0]
    if length.shape[0] != n:
        raise UsageError(f"{n} starts and {length.shape[0]} lengths: give one of each for every extent")
    take_key(key, &k0, &k1)
    for k in range(n):
        check_extent(start[k], length[k])
    out = bytearray(n * GRANT_BYTES)
    cdef char* data = out
    for k in range(n):
        grant_make(k0, k1, region, start[k], length[k], deadline_ms, tag, <uint8_t*>data + k * GRANT_BYTES)
    return out


def read_grant(bytes grant) -> tuple:
    """(start, length, deadline in ms, tag, MAC) of a grant, nothing of it checked."""
    cdef const char* data = grant
    cdef uint64_t first = 0, count = 0, mac
    cdef uint32_t deadline
    cdef uint16_t tag
    if len(grant) != GRANT_BYTES:
        raise UsageError(f"a grant has {GRANT_BYTES} bytes, not {len(grant)}", field="grant")
    memcpy(&first, data, 5)
    memcpy(&count, data + 5, 5)
    memcpy(&deadline, data + 10, 4)
    memcpy(&tag, data + 14, 2)
    memcpy(&mac, data + 16, 8)
    return first * GRANT_UNIT, count * GRANT_UNIT, deadline, tag, mac
