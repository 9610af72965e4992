"""A map of 64-bit ids to values other than 0 (see id_map.h)."""

from libc.stdint cimport uint64_t

cdef extern from "id_map.h" nogil:
    ctypedef struct mp_id_entry:
        uint64_t id
        uint64_t value
    ctypedef struct mp_id_map:
        mp_id_entry* entries
        uint64_t mask
        uint64_t count
        uint64_t seed
    void mp_id_map_release(mp_id_map* map)
    uint64_t* mp_id_find(const mp_id_map* map, uint64_t id)
    uint64_t mp_id_get(const mp_id_map* map, uint64_t id)
    bint mp_id_reserve(mp_id_map* map, uint64_t more)
    void mp_id_set(mp_id_map* map, uint64_t id, uint64_t value)
    void mp_id_remove(mp_id_map* map, uint64_t id)
    void mp_id_add(mp_id_map* map, uint64_t id, uint64_t more)
