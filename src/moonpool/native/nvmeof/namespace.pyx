"""Namespaces: their devices, opened by identity, and opened again when they went and came back.

A namespace's devices are closed under no command: each command takes a reference to the pair that it goes to, and gives
it back when the kernel has answered. When a way is lost, whoever noticed asks `look` (Python, rarely) where the
namespace is now, and exchanges the pair.
"""

from cpython.exc cimport PyErr_SetInterrupt
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from moonpool.native.io.batch cimport (
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_count, mp_tally
from moonpool.native.disk.rings cimport BOUNCE_BYTES
from moonpool.native.io.regions cimport EXTRA_NVMEOF
from moonpool.native.io.segment cimport NativeSegment

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "<unistd.h>" nogil:
    int close(int fd)

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t* lock, void* attributes)

cdef enum:
    PAGE = 4096
    # Nothing longer is asked for at once, so that a cancel is seen soon.
    PIECE_MAX = 524288

COUNTERS = (
    "commands", "requests", "tried_again", "ways_lost", "ways_found", "bounced", "edge_blocks", "flushes",
    "device_errors",
)


cdef mp_ns_files* files_take(mp_ns* ns) noexcept nogil:
    """The devices of the namespace as it is now, or NULL; give them back."""
    cdef mp_ns_files* files
    pthread_mutex_lock(&ns.lock)
    files = ns.files
    if files != NULL:
        files.references += 1
    pthread_mutex_unlock(&ns.lock)
    return files


cdef void files_give(mp_ns* ns, mp_ns_files* files) noexcept nogil:
    cdef bint last
    pthread_mutex_lock(&ns.lock)
    files.references -= 1
    last = files.references == 0
    pthread_mutex_unlock(&ns.lock)
    if last:
        if files.generic >= 0:
            close(files.generic)
        if files.block >= 0:
            close(files.block)
        free(files)


cdef void files_set(mp_ns* ns, mp_ns_files* files) noexcept nogil:
    """Exchange the devices; the old ones are closed when no command uses them any more."""
    cdef mp_ns_files* old
    pthread_mutex_lock(&ns.lock)
    old = ns.files
    ns.files = files
    pthread_mutex_unlock(&ns.lock)
    if old != NULL:
        files_give(ns, old)


cdef int namespace_look(mp_ns* ns) noexcept nogil:
    """NS_LIVE with the right devices open, or why not, as sysfs shows it now."""
    cdef int state
    with gil:
        state = (<NativeNamespace>ns.finder).find_again()
    if state == NS_LIVE:
        mp_tally(&ns.counters[N_FOUND], 1)
    return state


cdef class NativeNamespace:
    """One namespace of this host.

    `look(devices)` returns (state, devices): 0 gone, 1 coming back, 2 live; and the devices as (generic fd, block fd,
    anything that tells this pair from another), those given when they are still right. It owns no descriptor that it
    returned.
    """

    def __cinit__(self, uint32_t nsid, uint32_t block_bytes, uint32_t memory_align, uint64_t command_bytes_max,
                  uint32_t segments_max, uint64_t away_ns, uint32_t command_ms, look):
        cdef uint64_t longest = (<uint64_t>segments_max - 1) * PAGE
        if block_bytes < 512 or block_bytes > BOUNCE_BYTES or block_bytes & (block_bytes - 1):
            raise UsageError(f"a namespace has no blocks of {block_bytes} bytes")
        self.ns = <mp_ns*>calloc(1, sizeof(mp_ns))
        if self.ns == NULL:
            raise MemoryError
        pthread_mutex_init(&self.ns.lock, NULL)
        pthread_mutex_init(&self.ns.edge, NULL)
        longest = min(longest, command_bytes_max, <uint64_t>PIECE_MAX)
        self.ns.piece_bytes_max = max(longest // block_bytes * block_bytes, <uint64_t>block_bytes)
        self.ns.nsid = nsid
        self.ns.block_bytes = block_bytes
        self.ns.memory_align = max(memory_align, 1)
        self.ns.away_ns = away_ns
        self.ns.command_ms = command_ms
        self.ns.finder = <void*>self
        self.look = look

    def __dealloc__(self):
        if self.ns != NULL:
            files_set(self.ns, NULL)
            pthread_mutex_destroy(&self.ns.lock)
            pthread_mutex_destroy(&self.ns.edge)
            free(self.ns)

    cdef int find_again(self):
        """NS_GONE, NS_COMING_BACK or NS_LIVE with the right devices open. Never raises."""
        try:
            return self.open_devices()
        except KeyboardInterrupt:
            PyErr_SetInterrupt()  # for whoever waits for this batch: nothing can be raised from here
            return NS_COMING_BACK
        except BaseException:
            return NS_COMING_BACK  # short of descriptors, say: as good as away for now

    def open_devices(self) -> int:
        """Ask `look` where the namespace is and take the devices that it opened; its state."""
        cdef mp_ns_files* files
        state, devices = self.look(self._devices)
        if devices is not self._devices:
            files = NULL
            if devices is not None:
                files = <mp_ns_files*>calloc(1, sizeof(mp_ns_files))
                if files == NULL:
                    raise OutOfMemory("no memory for the devices of a namespace")
                files.references = 1
                files.generic, files.block = devices[0], devices[1]
            files_set(self.ns, files)
            self._devices = devices
        return state

    @property
    def devices(self) -> tuple | None:
        """What `look` gave last."""
        return self._devices

    @property
    def piece_bytes_max(self) -> int:
        """The longest command, in bytes."""
        return self.ns.piece_bytes_max

    @property
    def counters(self) -> dict[str, int]:
        """Totals by name."""
        return {name: mp_count(&self.ns.counters[i]) for i, name in enumerate(COUNTERS)}

    def close(self) -> None:
        """Close the devices, once no command uses them; a later transfer looks for them again."""
        files_set(self.ns, NULL)
        self._devices = None


cdef class NamespaceRegion:
    """A range of a namespace that a segment's region is: made known to a native segment with `attach`."""

    def __cinit__(self, NativeNamespace namespace not None, uint64_t start, uint64_t length, *, bint fua, str way,
                  bint writable):
        if start % namespace.ns.block_bytes:
            raise UsageError(f"a range begins with a block, not at {start}")
        self.region.ns = namespace.ns
        self.region.start = start
        self.region.length = length
        self.region.fua = fua
        self.region.way = WAYS[way]
        self.region.writable = writable
        self.namespace = namespace

    def attach(self, NativeSegment segment not None, uint64_t handle) -> None:
        """From now on transfers of that region go to this range."""
        segment.set_extra(handle, EXTRA_NVMEOF, &self.region, self)

    def close(self) -> None:
        """Nothing of its own: the namespace is shared."""


WAYS = {"auto": WAY_ANY, "yes": WAY_PASSTHROUGH, "no": WAY_BLOCK}
