"""The loop that carries a batch's transfers to and from disks (see drive.pyx)."""

from moonpool.native.disk.rings cimport mp_ring_pool
from moonpool.native.io.batch cimport mp_batch
from moonpool.native.io.segment cimport mp_path, mp_segment

cdef struct mp_disk_path:       # the context of a path whose regions have an mp_disk in extra[which]
    mp_ring_pool* pool
    int which                   # EXTRA_*

cdef int disk_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil
