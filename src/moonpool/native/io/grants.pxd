"""Grants of pool WRITEs: making them (master) and checking them (node). See grants.pyx."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_mutex_t

cdef enum:
    GRANT_BYTES = 24
    GRANT_UNIT = 64          # extents start and end on it

# Why a WRITE was refused: indices of mp_grants.refused.
cdef enum:
    GRANT_ABSENT = 0
    GRANT_WRONG = 1
    GRANT_OVER = 2
    GRANT_OUTSIDE = 3
    GRANT_DENIED = 4
    GRANT_REASONS = 5

cdef struct mp_denial:
    # Grants for an extent of this region that starts there, with this tag, are refused until then.
    uint64_t region          # 0: free
    uint64_t start           # in units
    uint64_t until_ns        # CLOCK_BOOTTIME
    uint16_t tag

cdef struct mp_grants:
    uint64_t k0              # the node's grant key; no grant is right while `keyed` is 0
    uint64_t k1
    uint64_t keyed
    uint64_t zero_ns         # CLOCK_BOOTTIME when the node's clock read 0
    uint64_t accepted
    uint64_t refused[5]
    pthread_mutex_t lock     # of what follows
    mp_denial* denials       # open addressing; over-age ones stay until their place is needed
    uint64_t capacity        # a power of two, or 0
    uint64_t used
    uint64_t denying         # `used`, to be read without the lock

cdef void grant_make(uint64_t k0, uint64_t k1, uint64_t region, uint64_t start, uint64_t length, uint32_t deadline_ms,
                     uint16_t tag, uint8_t* out) noexcept nogil
cdef bint grant_allows(mp_grants* grants, const uint8_t* entry) noexcept nogil
cdef void grants_open(mp_grants* grants) noexcept nogil
cdef void grants_close(mp_grants* grants) noexcept nogil
cdef void grants_set(mp_grants* grants, uint64_t k0, uint64_t k1, uint64_t zero_ns) noexcept nogil
cdef bint grants_deny(mp_grants* grants, uint64_t region, uint64_t start, uint16_t tag,
                      uint64_t until_ns) noexcept nogil
