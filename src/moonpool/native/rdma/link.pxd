"""The rails to one peer (see link.pyx)."""

from libc.stdint cimport uint32_t
from moonpool.native.rdma.bounce cimport BounceArena
from moonpool.native.rdma.queues cimport mp_link

cdef class Link:
    cdef mp_link* raw
    cdef list queues         # CompletionQueue of each pair
    cdef list queue_pairs    # QueuePair of each pair, or None
    cdef list devices
    cdef BounceArena arena
    cdef object discard(self, uint32_t k)
