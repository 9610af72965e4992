"""The bounce arena: registered memory of fixed size, through which buffers go that no device knows.

Slots are taken by batches and given back when their bytes have left or were copied out; who gets none waits for those
of others. A page before the slots takes the bytes of flushing READs, which nobody looks at.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from moonpool.native.io.batch cimport pthread_mutex_destroy, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock
from moonpool.native.io.memory cimport SharedMemory
from moonpool.native.verbs.memory cimport MemoryRegistration

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "pthread.h" nogil:
    int pthread_mutex_init(pthread_mutex_t* lock, void* attributes)


cdef int32_t arena_take(mp_arena* arena) noexcept nogil:
    """A free slot, or -1."""
    cdef int32_t slot = -1
    pthread_mutex_lock(&arena.lock)
    if arena.n_unused:
        arena.n_unused -= 1
        slot = arena.unused[arena.n_unused]
    pthread_mutex_unlock(&arena.lock)
    return slot


cdef void arena_give(mp_arena* arena, int32_t slot) noexcept nogil:
    pthread_mutex_lock(&arena.lock)
    arena.unused[arena.n_unused] = slot
    arena.n_unused += 1
    pthread_mutex_unlock(&arena.lock)


cdef class BounceArena:
    """Slots in `memory`, which `registration` made known to the devices; both live as long as this."""

    def __cinit__(self, SharedMemory memory not None, MemoryRegistration registration not None):
        cdef uint32_t k
        cdef uint64_t n = 0
        if memory.size_bytes > SCRATCH_BYTES:
            n = (memory.size_bytes - SCRATCH_BYTES) // SLOT_BYTES
        if n == 0 or registration.raw.base != memory.address or registration.raw.length < memory.size_bytes:
            raise UsageError("a bounce arena is registered memory of a page and some slots")
        if registration.raw.n_chunks != 1:
            raise UsageError("a bounce arena is one chunk")
        self.raw = <mp_arena*>calloc(1, sizeof(mp_arena))
        if self.raw == NULL:
            raise MemoryError
        pthread_mutex_init(&self.raw.lock, NULL)
        self.raw.unused = <int32_t*>malloc(n * sizeof(int32_t))
        if self.raw.unused == NULL:
            raise OutOfMemory(f"no memory for a list of {n} bounce slots")
        self.raw.keys = registration.raw
        self.raw.scratch = memory.address
        self.raw.base = <char*><size_t>(memory.address + SCRATCH_BYTES)
        self.raw.n_slots = self.raw.n_unused = <uint32_t>n
        for k in range(<uint32_t>n):
            self.raw.unused[k] = <int32_t>(n - 1 - k)
        self.memory = memory
        self.registration = registration

    def __dealloc__(self):
        if self.raw != NULL:
            pthread_mutex_destroy(&self.raw.lock)
            free(self.raw.unused)
            free(self.raw)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.raw.n_slots

    @property
    def unused(self) -> int:
        """How many are free at this moment; all, when no batch runs."""
        cdef uint32_t n
        pthread_mutex_lock(&self.raw.lock)
        n = self.raw.n_unused
        pthread_mutex_unlock(&self.raw.lock)
        return n


def bounce_bytes(uint64_t slots) -> int:
    """Size of the memory for so many slots of `SLOT_BYTES`."""
    return SCRATCH_BYTES + slots * SLOT_BYTES
