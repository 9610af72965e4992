"""Grants: what a pool WRITE over tcp or unix lanes shows to be let into an extent (docs/store/architecture.md).

The master makes a grant for an extent that it gave to an open put; the node that holds the extent checks it. 24 bytes,
little endian: start and length of the extent in units of 64 bytes (5 bytes each), deadline in ms of the node's clock
(u32), tag (u16), and SipHash-2-4 under the node's grant key over the region's handle and these 16 bytes.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from moonpool.native.io.batch cimport (
    mp_sync_init,
    pthread_cond_destroy,
    pthread_cond_t,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)

from array import array

from moonpool.errors import UsageError

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
    DENIALS_MIN = 256
    DENIALS_MAX = 1048576    # 32 MiB

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
    cdef uint16_t tag
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
    memcpy(&tag, grant + 14, 2)
    if mp_get64(&grants.denying) and is_denied(grants, region, first // GRANT_UNIT, tag):
        return refuse(grants, GRANT_DENIED)
    mp_add64(&grants.accepted)
    return True


cdef void grants_open(mp_grants* grants) noexcept nogil:
    """Of a zeroed struct."""
    cdef pthread_cond_t unused
    mp_sync_init(&grants.lock, &unused)
    pthread_cond_destroy(&unused)


cdef void grants_close(mp_grants* grants) noexcept nogil:
    pthread_mutex_destroy(&grants.lock)
    free(grants.denials)
    grants.denials = NULL
    grants.capacity = grants.used = grants.denying = 0


cdef void grants_set(mp_grants* grants, uint64_t k0, uint64_t k1, uint64_t zero_ns) noexcept nogil:
    """Change key and clock: all grants made before are wrong, so nothing needs to be denied any more.

    One that checks a grant meanwhile may see a mixture of keys, which makes no grant right.
    """
    mp_set64(&grants.keyed, 0)
    mp_set64(&grants.k0, k0)
    mp_set64(&grants.k1, k1)
    mp_set64(&grants.zero_ns, zero_ns)
    pthread_mutex_lock(&grants.lock)
    free(grants.denials)
    grants.denials = NULL
    grants.capacity = grants.used = 0
    mp_set64(&grants.denying, 0)
    pthread_mutex_unlock(&grants.lock)
    mp_set64(&grants.keyed, 1)


cdef uint64_t place_of(mp_grants* grants, uint64_t region, uint64_t start, uint16_t tag) noexcept nogil:
    """Where the look for a denial begins."""
    cdef uint64_t h = (region * <uint64_t>0x9E3779B97F4A7C15) ^ (start + <uint64_t>0x9E3779B97F4A7C15)
    h = (h ^ (h >> 30)) * <uint64_t>0xBF58476D1CE4E5B9 + tag
    h = (h ^ (h >> 27)) * <uint64_t>0x94D049BB133111EB
    return (h ^ (h >> 31)) & (grants.capacity - 1)


cdef bint is_denied(mp_grants* grants, uint64_t region, uint64_t start, uint16_t tag) noexcept nogil:
    cdef uint64_t at
    cdef mp_denial* one
    cdef bint found = False
    pthread_mutex_lock(&grants.lock)
    if grants.capacity:
        at = place_of(grants, region, start, tag)
        while grants.denials[at].region and not found:
            one = &grants.denials[at]
            found = one.region == region and one.start == start and one.tag == tag and mp_boot_ns() < one.until_ns
            at = (at + 1) & (grants.capacity - 1)
    pthread_mutex_unlock(&grants.lock)
    return found


cdef void put_denial(mp_grants* grants, mp_denial* new, uint64_t now_ns) noexcept nogil:
    """There is a free place. Lock held."""
    cdef uint64_t at = place_of(grants, new.region, new.start, new.tag)
    while grants.denials[at].region and grants.denials[at].until_ns > now_ns:
        at = (at + 1) & (grants.capacity - 1)
    grants.used += grants.denials[at].region == 0
    grants.denials[at] = new[0]


cdef bint make_room(mp_grants* grants, uint64_t now_ns) noexcept nogil:
    """Have a free place in four: drop what is over, and grow if that is not enough. Lock held."""
    cdef mp_denial* old = grants.denials
    cdef uint64_t old_capacity = grants.capacity, live = 0, k, wanted
    if (grants.used + 1) * 4 <= old_capacity * 3:
        return True
    for k in range(old_capacity):
        live += old[k].region != 0 and old[k].until_ns > now_ns
    wanted = old_capacity if old_capacity else DENIALS_MIN
    while (live + 1) * 2 > wanted:
        wanted *= 2
    if wanted > DENIALS_MAX:
        return False
    grants.denials = <mp_denial*>calloc(wanted, sizeof(mp_denial))
    if grants.denials == NULL:
        grants.denials = old
        return False
    grants.capacity = wanted
    grants.used = 0
    for k in range(old_capacity):
        if old[k].region != 0 and old[k].until_ns > now_ns:
            put_denial(grants, &old[k], now_ns)
    free(old)
    return True


cdef bint grants_deny(mp_grants* grants, uint64_t region, uint64_t start, uint16_t tag,
                      uint64_t until_ns) noexcept nogil:
    """Refuse grants for the extent at `start` bytes that show the tag, until then. False when there is no room."""
    cdef uint64_t now_ns = mp_boot_ns()
    cdef mp_denial new
    cdef bint done
    new.region = region
    new.start = start // GRANT_UNIT
    new.until_ns = until_ns
    new.tag = tag
    pthread_mutex_lock(&grants.lock)
    done = make_room(grants, now_ns)
    if done:
        put_denial(grants, &new, now_ns)
        mp_set64(&grants.denying, grants.used)
    pthread_mutex_unlock(&grants.lock)
    return done


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
