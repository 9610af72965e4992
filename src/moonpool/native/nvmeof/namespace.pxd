"""Namespaces as the data path sees them: geometry, open devices, and how to find them again (see namespace.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_mutex_t

cdef enum:
    WAY_ANY = 0
    WAY_PASSTHROUGH = 1
    WAY_BLOCK = 2

# Where a namespace is, as `look` says.
cdef enum:
    NS_GONE = 0
    NS_COMING_BACK = 1
    NS_LIVE = 2

cdef enum:
    N_COMMANDS = 0
    N_REQUESTS = 1
    N_AGAIN = 2
    N_LOST = 3
    N_FOUND = 4
    N_BOUNCED = 5
    N_EDGES = 6
    N_FLUSHES = 7
    N_DEVICE_ERRORS = 8
    N_COUNTERS = 9

# The devices of one appearance of a namespace: closed when the last command that uses them is back.
cdef struct mp_ns_files:
    int32_t references
    int generic              # -1: none
    int block                # -1: none

cdef struct mp_ns:
    pthread_mutex_t lock     # guards `files`
    pthread_mutex_t edge     # held while a block is read, changed and written
    mp_ns_files* files       # NULL while there is none
    void* finder             # the Python object that looks for it; alive as long as this
    uint32_t nsid
    uint32_t block_bytes
    uint32_t memory_align    # of the block device
    uint64_t piece_bytes_max  # longest command
    uint64_t away_ns         # how long a batch waits for a way to come back
    uint32_t command_ms      # how long a command may take
    uint64_t counters[9]

cdef struct mp_ns_region:
    mp_ns* ns
    uint64_t start           # in bytes of the namespace, of whole blocks
    uint64_t length
    uint32_t fua
    uint32_t way             # WAY_*
    uint32_t writable

cdef mp_ns_files* files_take(mp_ns* ns) noexcept nogil
cdef void files_give(mp_ns* ns, mp_ns_files* files) noexcept nogil
cdef int namespace_look(mp_ns* ns) noexcept nogil

cdef class NativeNamespace:
    cdef mp_ns* ns
    cdef object look
    cdef tuple _devices
    cdef int find_again(self)

cdef class NamespaceRegion:
    cdef mp_ns_region region
    cdef object __weakref__
    cdef readonly NativeNamespace namespace
