"""One batch on its way to namespaces (see carry.pyx)."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from moonpool.native.disk.rings cimport mp_ring
from moonpool.native.io.batch cimport mp_batch
from moonpool.native.io.segment cimport mp_path, mp_segment
from moonpool.native.nvmeof.namespace cimport mp_ns, mp_ns_files, mp_ns_region

cdef enum:
    DEPTH = 32               # commands under way for one batch

# One command or request, from its piece of a transfer to its end.
cdef struct mp_ns_slot:
    uint64_t i               # the transfer
    uint64_t at              # of the transfer's bytes
    uint64_t n               # bytes of the transfer in this piece
    uint64_t first           # in bytes of the namespace: whole blocks from here
    uint64_t n_blocks_bytes  # so many
    uint64_t moved           # of these (a request to a block device may be short)
    uint64_t again_ns        # not before
    uint64_t lost_ns         # when it first came back for want of a way; 0 before
    char* data
    mp_ns_region* region
    mp_ns_files* files       # while it is under way
    uint32_t tries
    uint8_t state            # FREE, READY, FLYING
    uint8_t kind             # SLOT_*
    uint8_t bounced

# Bytes of a WRITE that do not fill their block.
cdef struct mp_ns_edge:
    uint64_t i
    uint64_t at
    uint64_t n

cdef struct mp_ns_run:
    mp_path* path            # NULL: every transfer goes to `only`
    mp_segment* segment
    mp_batch* batch
    mp_ns_region* only
    mp_ring* ring
    char* bounce             # of the ring: one place for each slot
    mp_ns* lost              # a namespace without a way, which all wait for; NULL when there is none
    void* edges              # Python: asks the owner to write edges; NULL when they are ours to write
    uint64_t lost_since_ns
    uint64_t i               # the transfer that pieces are cut from
    uint64_t at              # how far
    uint64_t carried
    uint64_t n_bytes
    uint32_t* open           # by transfer: pieces that have not ended
    uint8_t* verdict         # by transfer: PENDING, or what it failed with
    mp_ns_edge* edge
    uint64_t n_edges
    uint64_t edges_room
    uint32_t one_open
    uint8_t one_verdict
    uint32_t flying
    uint32_t ready
    int passthrough
    int stop                 # status of all that has not begun, once the batch is interrupted
    mp_ns_slot slots[32]

cdef int run_open(mp_ns_run* run) noexcept nogil
cdef void run_pump(mp_ns_run* run, bint cutting) noexcept nogil
cdef void run_close(mp_ns_run* run) noexcept nogil
cdef mp_ns_region* region_of(mp_ns_run* run, uint64_t i) noexcept nogil
cdef void fail(mp_ns_run* run, uint64_t i, int status) noexcept nogil
cdef void piece_ended(mp_ns_run* run, uint64_t i) noexcept nogil
cdef void slot_ready(mp_ns_run* run, mp_ns_slot* slot) noexcept nogil
