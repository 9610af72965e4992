"""The target side (see server.pyx)."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_cond_t, pthread_mutex_t
from moonpool.native.io.regions cimport LocalRegions, mp_regions
from moonpool.native.io.stream cimport iovec, mp_stream

cdef struct mp_notice:
    mp_notice* next
    uint64_t id
    uint32_t size
    uint8_t sender[16]

# What `inside` says; writers.pyx reads it, and with it where[] and length[].
cdef enum:
    LANE_OUTSIDE = 0
    LANE_CHECKING = 1        # a WRITE, whose entries are being looked at
    LANE_WRITING = 2         # where[] and length[] say to what
    LANE_READING = 3

cdef struct mp_connection:
    mp_connection* next
    mp_connection* previous
    mp_server* server
    mp_stream stream
    int32_t inside           # in the region table's grace period: it may be touching memory (see enum)
    uint64_t serial          # of the lane, never used twice
    uint64_t group           # counts its groups
    uint32_t count           # of entries in the group
    uint8_t peer[16]         # instance id of the initiator
    uint8_t* stage           # bytes received and not yet consumed: stage[begin:end]
    uint32_t begin
    uint32_t end
    iovec* pieces
    char* where[256]
    uint64_t length[256]
    uint8_t marks[256]
    char* trash              # where the payload of refused entries goes

cdef enum:
    SENDERS = 512            # initiators whose last notification number is remembered

cdef struct mp_sender:
    uint8_t instance[16]
    uint64_t last_id

cdef struct mp_server:
    pthread_mutex_t lock
    pthread_cond_t changed
    mp_connection* connections
    uint32_t n_connections
    uint32_t n_max
    int32_t stopping
    mp_regions* regions
    uint64_t spin_ns
    uint64_t spin_max_bytes
    uint64_t stall_ns
    int io
    mp_notice* first
    mp_notice* last
    uint32_t n_notices
    uint32_t n_notices_max
    int notice_fd
    mp_sender senders[512]
    uint32_t next_sender
    # counters
    uint64_t accepted
    uint64_t groups
    uint64_t bytes_read
    uint64_t bytes_written
    uint64_t refused
    uint64_t broken
    uint64_t notices_full

cdef class TargetServer:
    cdef mp_server* raw
    cdef LocalRegions regions
