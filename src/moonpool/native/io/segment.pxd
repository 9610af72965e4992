"""An open segment as the data plane sees it: the peer's regions and the paths to it (see segment.pyx)."""

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport mp_batch
from moonpool.native.io.guard cimport mp_guard
from moonpool.native.io.regions cimport LocalRegions, mp_regions

cdef extern from "latency.h" nogil:
    enum:
        MP_BUCKETS
    ctypedef struct mp_path_stats:
        uint64_t batches[2]
        uint64_t transfers[2]
        uint64_t bytes[2]
        uint64_t nanoseconds[2]
        uint64_t errors[2][16]
        uint64_t latency[2][116]
        uint64_t fallbacks
    uint64_t mp_bucket_upper(unsigned int index)
    void mp_path_record(mp_path_stats* stats, int write, uint64_t transfers, uint64_t n_bytes, uint64_t ns)

cdef enum:
    PATHS_MAX = 32

cdef struct mp_remote_region:
    uint64_t handle       # 0: none
    uint64_t base         # address in the owner's process
    uint64_t length
    uint32_t access
    uint32_t map_writable
    char* map             # where it is mapped here, or NULL
    uint32_t process_vm   # the owner granted process_vm_* on it
    uint8_t read_key[16]
    uint8_t write_key[16]
    void* extra[8]        # by EXTRA_* of regions.pxd: remote keys of a NIC, say; valid inside the guard

cdef struct mp_path:
    uint16_t id
    int (*run)(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil
    void* context
    uint32_t device           # 1: it takes transfers whose local side is memory of a device
    mp_path_stats stats

cdef struct mp_segment:
    mp_guard guard
    mp_remote_region* slots   # fixed capacity
    uint32_t capacity
    int32_t dead              # 0, or the status that every new transfer gets
    mp_regions* own
    uint64_t stream_min_bytes
    mp_path paths[32]
    uint32_t n_paths
    void* lanes               # mp_lanes* that notifications go by, or NULL

cdef int segment_run(void* context, mp_batch* batch) noexcept nogil
cdef void segment_offer(mp_segment* segment, mp_batch* batch, mp_path* but) noexcept nogil
cdef int segment_check(mp_segment* segment, mp_batch* batch, uint64_t i, mp_remote_region** region) noexcept nogil
cdef bint path_takes(mp_path* path, mp_batch* batch, uint64_t i) noexcept nogil

cdef class NativeSegment:
    cdef mp_segment* raw
    cdef list keep
    cdef LocalRegions own
    cdef mp_path* add_path(self, int (*run)(mp_path*, mp_segment*, mp_batch*) noexcept nogil, void* context,
                           object keep) except NULL
    cdef void set_extra(self, uint64_t handle, int which, void* extra, object keep) except *
    cdef mp_remote_region* slot_of(self, uint64_t handle) except NULL
