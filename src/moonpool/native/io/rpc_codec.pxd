"""The hot methods' requests and replies as C structures (see rpc_codec.pyx)."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef struct frame_buffer:
    uint8_t* data
    size_t length
    size_t capacity

cdef struct place_entry:
    uint64_t offset
    uint32_t segment
    uint32_t slot
    uint8_t grant[24]        # of put_start; else zero

cdef struct reply_entry:
    uint64_t object_id       # 0: a miss; of put_start: nothing
    uint64_t size
    uint8_t digest[16]
    uint8_t type
    uint8_t code             # of put_start and put_end
    uint32_t first_place
    uint32_t n_places

cdef class PlacesReply:
    cdef readonly uint64_t epoch
    cdef readonly uint64_t segments_version
    cdef reply_entry* entries
    cdef place_entry* places
    cdef uint32_t n_entries, n_places, room
    cdef int read_places(self, void* reader, reply_entry* entry, bint granted) except -1
    cdef int allocate(self, uint32_t n) except -1
    cdef reply_entry* entry_at(self, Py_ssize_t index) except NULL
    cdef tuple places_of(self, reply_entry* entry, bint granted)
    cdef object entry_column(self, const void* field, size_t size, str form)
    cdef object place_column(self, const void* field, size_t size, str form)

cdef class LookupReply(PlacesReply):
    cdef int read(self, const uint8_t* data, size_t n, uint32_t expected) except -1

cdef class PutReply(PlacesReply):
    cdef readonly uint64_t put_id
    cdef readonly uint64_t remaining_ms
    cdef int read(self, const uint8_t* data, size_t n, uint32_t expected) except -1

cdef class EndReply(PlacesReply):
    cdef int read(self, const uint8_t* data, size_t n, uint32_t expected) except -1

cdef object listed(keys)
cdef uint64_t as_number(value) except? 0xdeadbeefdeadbeef
cdef int write_call(frame_buffer* f, uint64_t message_id, str method, bytes params) except -1
cdef int write_exists(frame_buffer* f, uint64_t message_id, keys, uint64_t lease_ms) except -1
cdef int write_lookup(frame_buffer* f, uint64_t message_id, keys, uint64_t lease_ms) except -1
cdef int write_put_start(frame_buffer* f, uint64_t message_id, keys, sizes, bytes policy, uint64_t wait_ms) except -1
cdef int write_put_end(frame_buffer* f, uint64_t message_id, uint64_t put_id, indexes, digests, chunks) except -1
cdef bytes read_exists(const uint8_t* data, size_t n, uint32_t expected)
