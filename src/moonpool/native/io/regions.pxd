"""The table of the regions this process offers, as C structures for target threads and batches (see regions.pyx)."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from moonpool.native.io.grants cimport mp_grants
from moonpool.native.io.guard cimport mp_guard

cdef enum:
    ACCESS_READ = 1
    ACCESS_WRITE = 2
    LOCAL_WRITABLE = 4     # this process may read into it; peers never see the bit
    GRANTED = 8            # a peer's WRITE over a lane shows a grant; peers never see the bit
    UNMAPPED = 16          # bytes without an address in this process (a file, a device): no lane carries them
    DEVICE = 32            # with UNMAPPED: `base` is an address of a device, which no CPU may touch
    EXTRAS = 8             # what transports keep for a region, one place each
    EXTRA_RDMA = 0
    EXTRA_FILE = 1
    EXTRA_NVMEOF = 2
    EXTRA_CXL = 3
    EXTRA_CUDA = 4
    EXTRA_OFI = 5
    KEY_BYTES = 16

cdef struct mp_region:
    uint64_t handle        # 0: free
    uint64_t base
    uint64_t length
    uint32_t access        # ACCESS_* granted to peers
    uint32_t generation    # of the slot's latest use
    uint8_t read_key[16]
    uint8_t write_key[16]
    void* extra[8]         # by EXTRA_*: local keys of a NIC, say; valid while the handle is, inside the guard

# What `regions_cover` says of a range: nothing there, bytes that the CPU reaches, bytes of a device.
cdef enum:
    COVER_NONE = 0
    COVER_HOST = 1
    COVER_DEVICE = 2

cdef struct mp_span:
    uint64_t base
    uint64_t end
    uint32_t slot
    uint32_t bits          # of the region's access: LOCAL_WRITABLE, DEVICE

cdef struct mp_regions:
    mp_guard guard
    mp_region* slots       # fixed capacity: never moves, so a reader inside the guard may hold a pointer into it
    mp_span* order         # live regions by base; guarded by the lock
    uint32_t capacity
    uint32_t used
    uint32_t live
    mp_grants grants       # for all regions with GRANTED

cdef int regions_cover(mp_regions* table, uint64_t address, uint64_t length, bint writing) noexcept nogil
cdef mp_region* regions_find(mp_regions* table, uint64_t address, uint64_t length) noexcept nogil
cdef int regions_resolve(mp_regions* table, const uint8_t* entry, uint32_t need, char** where,
                         uint64_t* length) noexcept nogil

cdef class LocalRegions:
    cdef mp_regions* table
    cdef list free_slots
    cdef dict kept
    cdef void set_extra(self, uint64_t handle, int which, void* extra, object keep) except *
    cdef uint32_t place_of(self, uint64_t address, uint64_t length) except? 0xFFFFFFFF
