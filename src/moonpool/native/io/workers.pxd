"""Worker threads (see workers.pyx)."""

from libc.stdint cimport int32_t, uint32_t
from moonpool.native.io.batch cimport Batch, pthread_cond_t, pthread_mutex_t, pthread_t
from moonpool.native.paths.turns cimport mp_turns

cdef struct mp_pool:
    pthread_mutex_t lock
    pthread_cond_t work
    mp_turns turns           # what waits, each node with a reference of its batch
    uint32_t idle
    int32_t stop
    uint32_t share           # most threads that drive batches of one segment at a time
    void* busy[64]           # the segments of the batches that threads drive now, NULL where none does

cdef class WorkerPool:
    cdef mp_pool pool
    cdef readonly uint32_t threads
    cdef readonly uint32_t queued_max
    cdef pthread_t handles[64]
    cdef uint32_t running
    cdef object starting     # held while a thread is started: `running` is its place
