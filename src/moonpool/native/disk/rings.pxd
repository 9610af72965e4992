"""Rings that batches borrow, and what each has registered with the kernel (see rings.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.disk.uring cimport io_uring
from moonpool.native.io.batch cimport mp_batch, pthread_cond_t, pthread_mutex_t

cdef enum:
    RINGS_MAX = 64
    DEPTH_MAX = 1024
    FILES_MAX = 64              # disks whose descriptors a ring has registered, two each
    WINDOWS_MAX = 256           # windows of own regions that a ring has registered
    WINDOW_BYTES = 64 << 20
    WINDOW_SHIFT = 26
    WINDOW_TOUCHES = 8          # uses of a window before its pages are pinned
    BOUNCE_SLOTS = 64
    BOUNCE_BYTES = 64 << 10
    BOUNCE_INDEX = WINDOWS_MAX  # of the registered buffer that holds all bounce slots

# Totals of a pool, by place; their names are COUNTERS in rings.pyx.
cdef enum:
    RINGS_OPENED = 0
    RINGS_REFUSED
    WINDOWS_REGISTERED
    WINDOWS_REFUSED
    IOS_FIXED
    IOS_BOUNCED
    IOS_CACHED
    IOS_SHORT
    IOS_AGAIN
    IOS_CANCELLED
    DIRECT_REFUSED
    ERRORS_SPACE
    ERRORS_DEVICE
    ERRORS_ACCESS
    ERRORS_END
    ERRORS_OTHER
    COUNTERS_N

cdef struct mp_disk:            # a file or device, or a part of one, as the loop sees it
    uint64_t serial             # never used twice: by it rings remember what they registered
    int fd                      # takes whole blocks only (O_DIRECT, a device), or -1
    int edge_fd                 # takes any range, through the page cache, or -1
    uint64_t start              # of the region in it, in bytes; a multiple of block when fd is used
    uint32_t block              # of positions and lengths on fd: a power of two, at most BOUNCE_BYTES
    uint32_t memory_block       # of addresses on fd: a power of two
    uint32_t piece_bytes        # longest I/O, a multiple of block
    uint32_t writable
    uint32_t is_device          # a block device: it ends early only when it is gone
    int32_t write_flags         # RWF_* of each WRITE
    int32_t buffered            # set once fd refused: everything goes by edge_fd then
    uint32_t dirty              # written since it was last made durable

cdef struct mp_io:              # one I/O in flight
    mp_disk* disk
    uint32_t work               # the transfer that it is a piece of, as a place in mp_ring.works
    uint32_t bounce             # its bounce slot, or BOUNCE_SLOTS
    uint32_t by_edge            # it goes by edge_fd
    int32_t fixed               # its registered buffer, or -1
    uint64_t at                 # where in the disk
    char* memory
    char* user                  # where a bounced READ goes
    uint32_t want               # bytes asked of the disk
    uint32_t need               # how many of them must come
    uint32_t done
    uint32_t skip               # of a bounced READ: what lies before the wanted bytes, and how many those are
    uint32_t useful
    uint32_t busy
    uint32_t next               # in the list of free ones

cdef struct mp_work:            # a transfer of which pieces are in flight
    uint64_t transfer
    uint32_t pieces
    uint32_t all_cut
    uint32_t failed             # a status
    uint32_t next

cdef struct mp_window:
    uint64_t handle             # of the own region; 0: free
    uint64_t base
    uint64_t end
    uint32_t touches
    uint32_t state              # 0: candidate, 1: registered, 2: refused

cdef struct mp_ring:
    io_uring uring
    pthread_mutex_t tables      # guards files and windows, and what the kernel has of them
    uint64_t files[64]          # serials
    mp_window windows[256]
    uint32_t has_files
    uint32_t has_buffers
    char* bounce
    uint64_t bounce_free        # one bit a slot
    uint32_t bounce_fixed
    uint32_t busy
    uint32_t owed               # completions that nobody waits for any more
    uint32_t depth
    uint32_t in_flight
    mp_io* ios
    mp_work* works
    uint32_t free_io            # depth: none
    uint32_t free_work

cdef struct mp_ring_pool:
    pthread_mutex_t lock
    pthread_cond_t given
    mp_ring* rings[64]
    uint32_t n_rings
    uint32_t rings_max
    uint32_t depth
    uint32_t setup_flags
    uint32_t busy
    uint32_t closed
    uint64_t counters[32]

cdef mp_ring* pool_take(mp_ring_pool* pool, mp_batch* batch, int* status) noexcept nogil
cdef void pool_give(mp_ring_pool* pool, mp_ring* ring) noexcept nogil
cdef int file_index(mp_ring* ring, mp_disk* disk) noexcept nogil
cdef int window_index(mp_ring_pool* pool, mp_ring* ring, uint64_t handle, uint64_t base, uint64_t length,
                      uint64_t address, uint64_t n) noexcept nogil
cdef void forget_window(mp_ring* ring, int index) noexcept nogil
cdef char* bounce_memory(mp_ring* ring) noexcept nogil

cdef class DiskRings:
    cdef mp_ring_pool* pool
