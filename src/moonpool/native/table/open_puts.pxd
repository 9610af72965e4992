"""Open puts, for other native modules (see open_puts.pyx)."""

cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from moonpool.native.table.id_map cimport mp_id_map

cdef enum:                # states of a key
    KEY_OPEN = 0
    KEY_ENDED = 1
    KEY_DROPPED = 2

cdef struct PutPlace:
    uint64_t offset
    uint32_t segment
    uint32_t slot

cdef struct PutKey:
    uint64_t size
    uint32_t text         # where its key begins in Put.text
    uint32_t place        # its first place in Put.places
    uint16_t key_bytes
    uint8_t places
    uint8_t state

cdef struct Put:          # one piece of memory: this, and then the three arrays
    uint64_t put_id
    uint64_t deadline_ms
    uint64_t arrival
    uint64_t soft_pin_end_ms
    uint64_t group
    uint32_t client
    uint32_t tenant
    uint32_t count        # keys
    uint32_t open_keys
    uint32_t text_bytes
    uint32_t place_count
    uint32_t heap_at
    uint8_t object_type
    uint8_t pin
    bint replace
    Put* prev             # in the ring of its client, in order of arrival
    Put* next
    PutKey* keys
    PutPlace* places
    uint8_t* text

cdef enum:                # what `begin` says when it makes no put
    PUTS_FULL = 1
    ENTRIES_FULL = 2
    PUTS_NO_MEMORY = 3
    PUT_ID_TAKEN = 4


@cython.final
cdef class OpenPuts:
    cdef mp_id_map by_id          # Put*
    cdef mp_id_map by_client      # the first Put* of the ring
    cdef mp_id_map by_segment     # bytes being written
    cdef mp_id_map by_tenant
    cdef Put** heap
    cdef uint32_t heap_room
    cdef uint32_t puts
    cdef uint64_t entries
    cdef uint64_t arrivals
    cdef readonly uint64_t puts_max
    cdef readonly uint64_t entries_max

    cdef int refusal(self, uint64_t put_id, uint64_t count) noexcept nogil
    cdef Put* begin(self, uint32_t count, uint32_t places, uint32_t text_bytes) noexcept nogil
    cdef bint enter(self, Put* put) noexcept nogil
    cdef Put* find(self, uint64_t put_id) noexcept nogil
    cdef bint end_key(self, Put* put, uint32_t index, uint8_t state) noexcept nogil

    cdef void leave(self, Put* put) noexcept nogil
    cdef void count_key(self, Put* put, PutKey* key, bint open) noexcept nogil
    cdef void sift_up(self, uint32_t at) noexcept nogil
    cdef void sift_down(self, uint32_t at) noexcept nogil
