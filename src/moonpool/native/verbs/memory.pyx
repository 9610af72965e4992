"""Registered memory: one range on several devices, in chunks that each device can hold, pinned in parallel.

Registration pins every page, which takes about a second for some ten GB, so it runs without the GIL and with several
threads over (device, chunk). When one fails, those that succeeded are undone.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from moonpool.native.io.batch cimport mp_join_thread, mp_start_thread, pthread_t
from moonpool.native.io.guard cimport mp_add32, mp_load32, mp_swap_if32
from moonpool.native.verbs.devices cimport LIVE_REGIONS, Device, count_live, is_freed
from moonpool.native.verbs.ibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_WRITE,
    ibv_mr,
    ibv_pd,
    mp_chunk_room,
    mp_lkey_of,
    mp_registered,
    mp_registration,
    mp_rkey_of,
    mp_verbs,
)

from moonpool.errors import LimitExceeded, OutOfMemory, UnsupportedOperation, UsageError
from moonpool.native.verbs.attributes import RegistrationPlan
from moonpool.native.verbs.problems import call_problem, registration_problem

# Regions of one registration, over all devices.
REGIONS_MAX = 65_536
DEVICES_MAX = 64
DEFAULT_PLAN = RegistrationPlan()
HUGE_PAGE = 2 << 20
PAGE = 4096

cdef extern from "unistd.h" nogil:
    int getpid()

cdef enum:
    THREADS_MAX = 32

cdef ibv_mr* pin_one(mp_pinning* p, int32_t job, int* failure) noexcept nogil:
    cdef uint32_t device = <uint32_t>job // p.range.n_chunks
    cdef uint64_t start = (<uint32_t>job % p.range.n_chunks) * p.range.chunk_bytes
    cdef uint64_t length = p.range.length - start
    cdef uint64_t address = p.range.base + start
    cdef mp_verbs* calls = p.calls[device]
    cdef ibv_mr* made
    if length > p.range.chunk_bytes:
        length = p.range.chunk_bytes
    if p.fd >= 0:
        made = calls.reg_dmabuf_mr(p.domains[device], p.fd_offset + start, length, address, p.fd, <int>p.access)
    elif p.access & IBV_ACCESS_RELAXED_ORDERING and calls.reg_mr_iova2 != NULL:
        made = calls.reg_mr_iova2(p.domains[device], <void*><size_t>address, length, address, p.access)
    else:
        made = calls.reg_mr(p.domains[device], <void*><size_t>address, length,
                            <int>(p.access & ~<unsigned int>IBV_ACCESS_RELAXED_ORDERING))
    failure[0] = errno
    return made


cdef void* pin_jobs(void* context) noexcept nogil:
    """Take job after job until there is none left or one failed."""
    cdef mp_pinning* p = <mp_pinning*>context
    cdef int32_t job
    cdef int failure = 0
    while not mp_load32(&p.failure):
        job = mp_add32(&p.next, 1) - 1
        if job >= p.n_jobs:
            break
        p.regions[job] = pin_one(p, job, &failure)
        if p.regions[job] == NULL:
            if mp_swap_if32(&p.failure, 0, failure if failure > 0 else 12):
                p.failed_job = job
            break
        count_live(LIVE_REGIONS, 1)
    return NULL


cdef int unpin(mp_pinning* p) noexcept nogil:
    """Undo what is registered: the first errno, or 0. What cannot be undone stays, to be tried again."""
    cdef int32_t job
    cdef int rc = 0, failure = 0
    cdef bint ours = p.pid == getpid()
    for job in range(p.n_jobs):
        if p.regions[job] == NULL:
            continue
        if ours:  # a forked child only forgets them
            rc = p.calls[<uint32_t>job // p.range.n_chunks].dereg_mr(p.regions[job])
        if is_freed(rc):
            p.regions[job] = NULL
            count_live(LIVE_REGIONS, -1)
        elif not failure:
            failure = rc
    return failure


cdef void pin(mp_pinning* p, int n_threads) noexcept nogil:
    """Run all jobs on n_threads threads, this one among them."""
    cdef pthread_t[THREADS_MAX] threads
    cdef int started = 0, i
    while started < n_threads - 1 and started < THREADS_MAX:
        if mp_start_thread(&threads[started], pin_jobs, p, b"moonpool-pin") != 0:
            break  # fewer threads do the same
        started += 1
    pin_jobs(p)
    for i in range(started):
        mp_join_thread(threads[i])


def chunk_bytes_of(uint64_t length, uint64_t bound) -> int:
    """How a range is cut when one region holds at most `bound` bytes: chunks end at huge pages, else at pages."""
    if length <= bound:
        return length
    for step in (HUGE_PAGE, PAGE):
        if bound >= step:
            return bound // step * step
    return bound


@cython.no_gc_clear
cdef class MemoryRegistration:
    """A registered range, made by `register` or `register_dmabuf`; keeps the devices.

    `close` unpins it: from then on no device can touch it, and a request that names its keys fails.
    """

    _rank = 1

    def __cinit__(self):
        self.devices = []

    def __dealloc__(self):
        self.release()
        if self.pinning.range != NULL:
            free(self.pinning.range.lkeys)
            free(self.pinning.range.rkeys)
            free(self.pinning.range)
        free(self.pinning.regions)
        free(self.pinning.calls)
        free(self.pinning.domains)

    cdef int release(self) noexcept:
        cdef int rc = 0
        if self.pinning.regions != NULL:
            with nogil:
                rc = unpin(&self.pinning)
        return rc

    def close(self) -> None:
        """Unpins all chunks on all devices, without the GIL. Again: nothing. The keys stay readable, but are void."""
        failure = self.release()
        self.live = not is_freed(failure)
        if not is_freed(failure):
            raise call_problem(failure, "unregistering memory", self.devices[0].name)

    cdef int prepare(self, list devices, uint64_t address, uint64_t length, uint64_t chunk_bytes) except -1:
        """Make the tables, all empty."""
        cdef uint64_t n_chunks = (length + chunk_bytes - 1) // chunk_bytes
        cdef uint64_t n_jobs = n_chunks * len(devices)
        cdef uint32_t i
        cdef Device device
        if n_jobs > <uint64_t>REGIONS_MAX:
            raise LimitExceeded(
                f"{length} bytes need {n_jobs} memory regions of {chunk_bytes} bytes; at most {REGIONS_MAX}: raise "
                "the bound of a region, or register less at once", length_bytes=length, limit=REGIONS_MAX,
            )
        cdef mp_registration* raw = <mp_registration*>calloc(1, sizeof(mp_registration))
        if raw == NULL:
            raise MemoryError
        self.raw = self.pinning.range = raw
        raw.base = address
        raw.length = length
        raw.chunk_bytes = chunk_bytes
        raw.n_chunks = <uint32_t>n_chunks
        raw.n_devices = <uint32_t>len(devices)
        raw.lkeys = <uint32_t*>calloc(n_jobs, sizeof(uint32_t))
        raw.rkeys = <uint32_t*>calloc(n_jobs, sizeof(uint32_t))
        self.pinning.pid = getpid()
        self.pinning.n_jobs = <int32_t>n_jobs
        self.pinning.regions = <ibv_mr**>calloc(n_jobs, sizeof(void*))
        self.pinning.calls = <mp_verbs**>calloc(len(devices), sizeof(void*))
        self.pinning.domains = <ibv_pd**>calloc(len(devices), sizeof(void*))
        if (raw.lkeys == NULL or raw.rkeys == NULL or self.pinning.regions == NULL or self.pinning.calls == NULL
                or self.pinning.domains == NULL):
            raise OutOfMemory("no memory for the tables of a registration")
        for i in range(raw.n_devices):
            device = devices[i]
            self.pinning.calls[i] = device.calls
            self.pinning.domains[i] = device.pd
        self.devices = devices
        return 0

    cdef int run(self, int n_threads) except -1:
        """Register all; on failure undo what succeeded and raise."""
        cdef int32_t job
        cdef Device device
        with nogil:
            pin(&self.pinning, n_threads)
        if self.pinning.failure:
            with nogil:
                unpin(&self.pinning)
            device = self.devices[<uint32_t>self.pinning.failed_job // self.raw.n_chunks]
            raise registration_problem(
                self.pinning.failure, device.name, self.raw.base, self.raw.length, self.pinning.fd >= 0
            )
        for job in range(self.pinning.n_jobs):
            self.raw.lkeys[job] = self.pinning.regions[job].lkey
            self.raw.rkeys[job] = self.pinning.regions[job].rkey
        self.live = True
        for device in self.devices:
            device.adopt(self)
        return 0

    @property
    def closed(self) -> bool:
        return not self.live

    @property
    def address(self) -> int:
        return self.raw.base

    @property
    def length_bytes(self) -> int:
        return self.raw.length

    @property
    def chunk_bytes(self) -> int:
        """Bytes of each chunk but the last; no request may cross the end of one."""
        return self.raw.chunk_bytes

    def rkeys(self, uint32_t device) -> list:
        """What peers use, by chunk, on the device with that place in the list given to `register`."""
        self.check_place(device)
        return [self.raw.rkeys[device * self.raw.n_chunks + i] for i in range(self.raw.n_chunks)]

    def lkeys(self, uint32_t device) -> list:
        """What own requests use, by chunk."""
        self.check_place(device)
        return [self.raw.lkeys[device * self.raw.n_chunks + i] for i in range(self.raw.n_chunks)]

    def keys_at(self, uint32_t device, uint64_t address) -> tuple:
        """(lkey, rkey, bytes from there to the chunk's end) of an address inside, as the run loop looks them up."""
        self.check_place(device)
        if not mp_registered(self.raw, address, 1):
            raise UsageError("the address is not inside the registered range", address=address)
        return (mp_lkey_of(self.raw, device, address), mp_rkey_of(self.raw, device, address),
                mp_chunk_room(self.raw, address))

    cdef int check_place(self, uint32_t device) except -1:
        if device >= self.raw.n_devices:
            raise UsageError(f"the range is registered on {self.raw.n_devices} devices; there is no {device}")
        return 0


cdef MemoryRegistration prepared(devices, uint64_t address, uint64_t length, unsigned int access, plan):
    """Check the arguments and make the tables."""
    cdef MemoryRegistration made = MemoryRegistration()
    cdef Device device
    members = list(devices)
    if not 1 <= len(members) <= DEVICES_MAX:
        raise UsageError(f"memory is registered on 1 to {DEVICES_MAX} devices; {len(members)} were given")
    if length == 0 or address + length < address:
        raise UsageError("memory to register has at least one byte", address=address, length_bytes=length)
    if access & IBV_ACCESS_REMOTE_WRITE and not access & IBV_ACCESS_LOCAL_WRITE:
        raise UsageError("REMOTE_WRITE needs LOCAL_WRITE too")
    bound = plan.chunk_bytes_max
    for device in members:
        device.check_open()
        bound = min(bound, device.attributes().max_mr_bytes or bound)
    if bound < 1:
        raise UsageError("a memory region has at least one byte", field="chunk_bytes_max")
    made.prepare(members, address, length, chunk_bytes_of(length, bound))
    made.pinning.access = access | (<unsigned int>IBV_ACCESS_RELAXED_ORDERING if plan.relaxed_ordering else 0)
    made.pinning.fd = -1
    return made


def register(devices, uint64_t address, uint64_t length, unsigned int access, plan=DEFAULT_PLAN) -> MemoryRegistration:
    """Registers a range on all the devices; `access` is LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE added up.

    All or nothing. Raises OutOfMemory (which names RLIMIT_MEMLOCK when that is set), UnsupportedMemory for memory that
    cannot be pinned, ResourceError for the rest. The bytes must stay mapped until `close`.
    """
    cdef MemoryRegistration made = prepared(devices, address, length, access, plan)
    made.run(min(plan.threads_max, made.pinning.n_jobs))
    return made


def register_dmabuf(devices, int fd, uint64_t offset, uint64_t length, unsigned int access, uint64_t address=0,
                    plan=DEFAULT_PLAN) -> MemoryRegistration:
    """Registers a part of a dma-buf (device memory that its driver exported); peers address it from `address` on.

    The descriptor is borrowed for the call. Raises UnsupportedOperation when libibverbs is older than dma-bufs,
    UnsupportedMemory when the device or the kernel refuses.
    """
    cdef MemoryRegistration made = prepared(devices, address, length, access, plan)
    cdef uint32_t i
    if fd < 0:
        raise UsageError("a dma-buf is given by its descriptor", value=str(fd))
    for i in range(made.raw.n_devices):
        if made.pinning.calls[i].reg_dmabuf_mr == NULL:
            raise UnsupportedOperation("this libibverbs cannot register dma-bufs; install rdma-core 34 or newer")
    made.pinning.fd = fd
    made.pinning.fd_offset = offset
    made.run(min(plan.threads_max, made.pinning.n_jobs))
    return made
