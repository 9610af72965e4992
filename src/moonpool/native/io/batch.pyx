"""Batches: transfers submitted together, their status, and the worker threads for batches nobody waits on.

A batch is NEW, then QUEUED (for a worker) or straight RUNNING (its caller drives it), then ENDED. Whoever moves it to
RUNNING by compare-and-swap drives it, so a waiter can take a queued batch over and no thread is woken for nothing.
One whose class has a cap is HELD instead of QUEUED: a waiter takes it over only to end it, cancelled or late. When
it has ended, no thread touches its memory: that is why only the driver ends it.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer
from cpython.buffer cimport PyObject_GetBuffer, Py_buffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.number cimport PyNumber_Index
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from moonpool.native.io.copying cimport DIGEST_CHUNK
from moonpool.native.io.guard cimport (
    mp_add32,
    mp_deadline_ns,
    mp_load32,
    mp_now_ns,
    mp_store32,
    mp_swap_if32,
    mp_tick_before,
)
from moonpool.native.io.memory cimport BufferHold

from array import array

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "sys/eventfd.h" nogil:
    int eventfd(unsigned int initial, int flags)
    int EFD_CLOEXEC, EFD_NONBLOCK

cdef extern from "unistd.h" nogil:
    ssize_t write(int fd, const void* data, size_t n)
    int close(int fd)

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    int SHUT_RDWR

cdef enum:
    GRANT_BYTES = 24

OPERATIONS = {OP_READ: "READ", OP_WRITE: "WRITE"}
# Transfers are counted in 32 bits where a path lists those that it carries.
TRANSFERS_MAX = 0xFFFFFFFF


cdef void batch_release(mp_batch* batch) noexcept nogil:
    if mp_add32(&batch.references, -1) != 0:
        return
    if batch.event_fd >= 0:
        close(batch.event_fd)
    if not batch.one_region:
        free(batch.local)
    free(batch.digest)
    free(batch.digest_at)
    free(batch.grants)
    free(batch.notice)
    pthread_mutex_destroy(&batch.lock)
    pthread_cond_destroy(&batch.ended)
    free(batch)


cdef void batch_on_stack(mp_batch* batch, int op, uint8_t* status) noexcept nogil:
    """Prepare a batch of one transfer that its caller drives at once and no other thread ever sees."""
    memset(batch, 0, sizeof(mp_batch))
    mp_sync_init(&batch.lock, &batch.ended)
    batch.event_fd = batch.lane_fd = -1
    batch.op = <uint8_t>op
    batch.n = 1
    batch.status = status
    batch.state = STATE_RUNNING


cdef void batch_off_stack(mp_batch* batch) noexcept nogil:
    pthread_mutex_destroy(&batch.lock)
    pthread_cond_destroy(&batch.ended)


cdef void batch_settle(mp_batch* batch) noexcept nogil:
    """Set `worst` to the first failure and `bytes` to what arrived."""
    cdef uint64_t i, total = 0
    cdef uint8_t worst = COMPLETE
    for i in range(batch.n):
        if batch.status[i] == COMPLETE:
            total += batch.length[i]
        elif worst == COMPLETE:
            worst = batch.status[i]
    batch.worst = worst
    batch.bytes = total


cdef void batch_fail_pending(mp_batch* batch, uint8_t status) noexcept nogil:
    cdef uint64_t i
    for i in range(batch.n):
        if batch.status[i] == PENDING:
            batch.status[i] = status


cdef mp_batch* batch_whole(mp_batch* batch) noexcept nogil:
    """The batch that callers know and cancel: itself, unless it carries a part of another one."""
    return batch.whole if batch.whole != NULL else batch


cdef bint batch_on_device(mp_batch* batch, uint64_t i) noexcept nogil:
    """True when the local side of transfer i is memory of a device, which the CPU must not touch."""
    return batch.device != LOCAL_HOST and (batch.device == LOCAL_DEVICE or batch.on_device[i])


cdef int batch_interrupted(mp_batch* batch) noexcept nogil:
    """Why to stop (CANCELLED, what its segment died of, TIMED_OUT), or 0: asked between pieces of long work."""
    cdef int32_t dead
    if mp_load32(&batch_whole(batch).cancel):
        return CANCELLED
    if batch.segment_dead != NULL:
        dead = mp_load32(batch.segment_dead)
        if dead:
            return dead
    if batch.deadline_ns and mp_now_ns() >= batch.deadline_ns:
        return TIMED_OUT
    return 0


cdef void batch_finish(mp_batch* batch) noexcept nogil:
    cdef uint64_t one = 1
    batch_settle(batch)
    batch.ended_ns = mp_now_ns()
    pthread_mutex_lock(&batch.lock)
    mp_store32(&batch.state, STATE_ENDED)
    if batch.event_fd >= 0:
        write(batch.event_fd, &one, 8)
    pthread_cond_broadcast(&batch.ended)
    pthread_mutex_unlock(&batch.lock)


cdef void batch_drive(mp_batch* batch) noexcept nogil:
    """Run a batch that the caller has moved to RUNNING, to its end."""
    cdef int early = batch_interrupted(batch)
    if early:
        batch_fail_pending(batch, early)
    elif batch.run == NULL:
        batch_fail_pending(batch, INTERNAL)  # never bound to a segment
    else:
        batch.run(batch.segment, batch)
        batch_fail_pending(batch, UNSUPPORTED)  # what no path took
        if batch.announce != NULL:
            batch_settle(batch)
            if batch.worst == COMPLETE:
                batch.announce(batch.segment, batch)
    batch_finish(batch)


cdef fill_u64(uint64_t* target, uint64_t n, value, str name):
    """Fill n words from a scalar, any 8-byte integer buffer, or a sequence of ints."""
    cdef Py_buffer view
    cdef uint64_t i, scalar
    if isinstance(value, int) or not (PyObject_CheckBuffer(value) or isinstance(value, (list, tuple))):
        scalar = PyNumber_Index(value)  # a float would be cut to an integer without a word
        for i in range(n):
            target[i] = scalar
        return
    if isinstance(value, (list, tuple)):
        value = array("Q", value)
    PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    try:
        if view.itemsize != 8 or view.format == NULL or view.format[0] not in b"QqLl":
            raise UsageError(f"{name} must be 64-bit integers (numpy.uint64), got format {view.format!r}", field=name)
        if <uint64_t>view.len != n * 8:
            raise UsageError(f"{name} has {view.len // 8} entries, the batch has {n}", field=name)
        memcpy(target, view.buf, n * 8)
    finally:
        PyBuffer_Release(&view)


cdef int64_t words_of(value, Py_buffer* view) except -2:
    """Take a one-dimensional buffer of 8-byte integers: how many; -1, and nothing taken, when it is none."""
    if not PyObject_CheckBuffer(value):
        return -1
    try:
        PyObject_GetBuffer(value, view, PyBUF_FORMAT | PyBUF_ND)
    except (BufferError, ValueError):  # numpy raises the latter
        return -1
    if view.ndim != 1 or view.itemsize != 8 or view.format == NULL or view.format[0] not in b"QqLl":
        PyBuffer_Release(view)
        return -1
    return view.len // 8


cdef Batch plain_batch(int op, local, region, offset, length, uint64_t n_max):
    """A batch from vectors `local` and `offset` and numbers `region` and `length`; None when they are not just that.

    The common call of those who move many blocks, without a Python object more than needed.
    """
    cdef Py_buffer here, there
    cdef int64_t n, m
    cdef uint64_t i, handle, size
    cdef Batch batch
    if type(region) is not int or type(length) is not int:
        return None
    handle = region
    size = length
    n = words_of(local, &here)
    if n <= 0:
        if n == 0:
            PyBuffer_Release(&here)
        return None
    try:
        m = words_of(offset, &there)
        if m < 0:
            return None
        try:
            if m != n or <uint64_t>n > n_max:
                return None
            batch = Batch(op, n)
            memcpy(batch.raw.local, here.buf, n * 8)
            memcpy(batch.raw.offset, there.buf, n * 8)
        finally:
            PyBuffer_Release(&there)
    finally:
        PyBuffer_Release(&here)
    for i in range(batch.raw.n):
        batch.raw.region[i] = handle
        batch.raw.length[i] = size
    return batch


cdef fill_u16(uint16_t* target, uint64_t n, value):
    cdef uint64_t i
    cdef uint16_t scalar
    cdef const uint16_t[::1] view
    if isinstance(value, int):
        scalar = value
        for i in range(n):
            target[i] = scalar
        return
    view = value if not isinstance(value, (list, tuple)) else array("H", value)
    if <uint64_t>view.shape[0] != n:
        raise UsageError(f"path has {view.shape[0]} entries, the batch has {n}", field="path")
    for i in range(n):
        target[i] = view[i]


cdef class Batch:
    """One batch. Made by the engine; see `moonpool.engine.batch` for the face that users hold."""

    def __cinit__(self, int op, uint64_t n):
        if n == 0 or n > TRANSFERS_MAX:
            raise UsageError(f"a batch has 1 to {TRANSFERS_MAX} transfers, not {n}", limit=TRANSFERS_MAX)
        if op not in OPERATIONS:
            raise UsageError(f"a batch reads (1) or writes (2); there is no operation {op}")
        self.raw = <mp_batch*>calloc(1, sizeof(mp_batch))
        if self.raw == NULL:
            raise MemoryError
        cdef mp_batch* batch = self.raw
        mp_sync_init(&batch.lock, &batch.ended)
        batch.references = 1
        batch.event_fd = -1
        batch.lane_fd = -1
        batch.op = op
        batch.n = n
        if n == 1:
            batch.one_region = 1
            batch.local = &batch.single[0]
            batch.region = &batch.single[1]
            batch.offset = &batch.single[2]
            batch.length = &batch.single[3]
            batch.status = <uint8_t*>&batch.single[4]
        else:
            batch.local = <uint64_t*>malloc(n * 35)
            if batch.local == NULL:
                raise OutOfMemory(f"no memory for a batch of {n} transfers")
            batch.region = batch.local + n
            batch.offset = batch.region + n
            batch.length = batch.offset + n
            batch.status = <uint8_t*>(batch.length + n) + 2 * n
        memset(batch.status, PENDING, n)
        self.operation = OPERATIONS[op]

    def __dealloc__(self):
        if self.raw != NULL:
            batch_release(self.raw)

    def fill(self, local, region, offset, length, path, bint digest) -> None:
        """Set the transfer arrays: scalars are broadcast, buffers and sequences are copied."""
        cdef mp_batch* batch = self.raw
        cdef uint64_t i, chunks = 0
        if batch.digest_at != NULL:
            raise UsageError("a batch is filled once")
        if isinstance(local, BufferHold):
            fill_u64(batch.local, batch.n, local.address, "local")
        else:
            fill_u64(batch.local, batch.n, local, "local")
        fill_u64(batch.region, batch.n, region, "region")
        fill_u64(batch.offset, batch.n, offset, "offset")
        fill_u64(batch.length, batch.n, length, "length")
        if isinstance(local, BufferHold):
            self._trust(local)
        if path is not None:
            batch.path = <uint16_t*>&batch.single[5] if batch.n == 1 else <uint16_t*>(batch.length + batch.n)
            fill_u16(batch.path, batch.n, path)
        if not digest:
            return
        batch.digest_at = <uint64_t*>malloc((batch.n + 1) * 8)
        if batch.digest_at == NULL:
            raise OutOfMemory("no memory for digests")
        for i in range(batch.n):
            batch.digest_at[i] = chunks
            if batch.length[i] > <uint64_t>1 << 40:
                raise UsageError(f"length {batch.length[i]} is over the limit of {1 << 40} bytes", index=i)
            chunks += (batch.length[i] + DIGEST_CHUNK - 1) // DIGEST_CHUNK
        batch.digest_at[batch.n] = chunks
        batch.digest = <uint64_t*>calloc(chunks + 1, 8)
        if batch.digest == NULL:
            raise OutOfMemory("no memory for digests")

    def _trust(self, BufferHold held):
        """Let the transfers use a held buffer without a look-up, once all are known to lie inside it."""
        cdef mp_batch* batch = self.raw
        cdef uint64_t i, start
        if batch.op == OP_READ and not held.writable:
            raise UsageError("this buffer is read-only, but the transfer would write into it")
        for i in range(batch.n):
            start = batch.local[i] - held.address
            if start > held.size_bytes or batch.length[i] > held.size_bytes - start:
                raise UsageError(
                    f"length {batch.length[i]} is more than the buffer's {held.size_bytes} bytes",
                    field="length", index=i,
                )
        self.holds = held
        batch.trusted = 1
        batch.device = LOCAL_DEVICE if held.on_device else LOCAL_HOST

    def attach_grants(self, grants) -> None:
        """Show these grants, 24 bytes for each transfer, with the batch's WRITEs. A buffer, which is copied."""
        cdef const uint8_t[::1] given = grants
        if self.raw.op != OP_WRITE or self.raw.grants != NULL:
            raise UsageError("grants are shown by a WRITE, and attached once", field="grants")
        if <uint64_t>given.shape[0] != self.raw.n * GRANT_BYTES:
            raise UsageError(
                f"{self.raw.n} transfers show {self.raw.n * GRANT_BYTES} bytes of grants, not {given.shape[0]}",
                field="grants",
            )
        self.raw.grants = <uint8_t*>malloc(self.raw.n * GRANT_BYTES)
        if self.raw.grants == NULL:
            raise OutOfMemory("no memory for grants")
        memcpy(self.raw.grants, &given[0], self.raw.n * GRANT_BYTES)

    @property
    def grants(self):
        """A copy of the attached grants, or None."""
        return None if self.raw.grants == NULL else (<const char*>self.raw.grants)[: self.raw.n * GRANT_BYTES]

    def attach_notice(self, bytes message) -> None:
        """Send this notification to the segment's owner once every transfer completed."""
        cdef const char* data = message
        cdef size_t size = len(message)
        free(self.raw.notice)
        self.raw.notice = malloc(size + 1)
        if self.raw.notice == NULL:
            raise OutOfMemory("no memory for a notification")
        memcpy(self.raw.notice, data, size)
        self.raw.notice_bytes = <uint32_t>size

    def set_timeout(self, timeout_s) -> None:
        """Deadline from now; None for none."""
        self.raw.started_ns = mp_now_ns()
        self.raw.deadline_ns = 0 if timeout_s is None else mp_deadline_ns(timeout_s)

    def end_at(self, uint64_t deadline_ns) -> None:
        """Deadline at a reading of CLOCK_MONOTONIC: it stays where it is however long it takes until the batch runs."""
        self.raw.deadline_ns = deadline_ns

    cdef void bind(self, void* segment, int (*run)(void*, mp_batch*) noexcept nogil, object owner):
        self.raw.segment = segment
        self.raw.run = run
        self.segment = owner

    def drive_here(self) -> None:
        """Run to the end in the calling thread; the GIL is released. Does nothing when another thread drives it."""
        cdef mp_batch* batch = self.raw
        if mp_swap_if32(&batch.state, STATE_NEW, STATE_RUNNING) or mp_swap_if32(
            &batch.state, STATE_QUEUED, STATE_RUNNING
        ):
            with nogil:
                batch_drive(batch)

    def wait(self, timeout_s=None) -> bool:
        """Wait until the batch has ended, driving it here when no thread does yet; False when the wait ran out."""
        cdef mp_batch* batch = self.raw
        cdef uint64_t deadline = 0, until = 1
        if mp_load32(&batch.state) == STATE_ENDED:
            return True
        if timeout_s is None:
            self.drive_here()
        else:
            deadline = mp_deadline_ns(timeout_s)
        while mp_load32(&batch.state) != STATE_ENDED and until != deadline:
            if batch.deadline_ns and mp_now_ns() >= batch.deadline_ns:
                self._end_held()
            until = mp_tick_before(deadline)
            with nogil:
                pthread_mutex_lock(&batch.lock)
                while mp_load32(&batch.state) != STATE_ENDED:
                    if mp_cond_wait_until(&batch.ended, &batch.lock, until) != 0:
                        break
                pthread_mutex_unlock(&batch.lock)
            PyErr_CheckSignals()  # so that Ctrl-C ends the wait
        return mp_load32(&batch.state) == STATE_ENDED

    def cancel(self) -> None:
        """Ask the batch to end as CANCELLED; it has ended when `wait` says so. Its lane, if any, is torn down."""
        cdef mp_batch* batch = self.raw
        mp_store32(&batch.cancel, 1)
        if self._end_held():
            return
        if mp_swap_if32(&batch.state, STATE_NEW, STATE_RUNNING) or mp_swap_if32(
            &batch.state, STATE_QUEUED, STATE_RUNNING
        ):
            with nogil:
                batch_drive(batch)
            return
        with nogil:
            pthread_mutex_lock(&batch.lock)
            if batch.lane_fd >= 0:
                shutdown(batch.lane_fd, SHUT_RDWR)
            pthread_mutex_unlock(&batch.lock)

    cdef bint _end_held(self):
        """End a batch that a cap holds up and that is cancelled or late; False when it is not held."""
        cdef mp_batch* batch = self.raw
        if not mp_swap_if32(&batch.state, STATE_HELD, STATE_RUNNING):
            return False
        with nogil:
            batch_drive(batch)
        return True

    def event(self) -> int:
        """An eventfd that becomes readable when the batch has ended; owned by the batch."""
        cdef mp_batch* batch = self.raw
        cdef uint64_t one = 1
        cdef int fd
        if batch.event_fd < 0:
            fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            if fd < 0:
                raise OutOfMemory("no file descriptor for an eventfd: raise RLIMIT_NOFILE")
            pthread_mutex_lock(&batch.lock)
            batch.event_fd = fd
            if batch.state == STATE_ENDED:
                write(fd, &one, 8)
            pthread_mutex_unlock(&batch.lock)
        return batch.event_fd

    @property
    def op(self) -> int:
        return self.raw.op

    @property
    def total_bytes(self) -> int:
        """Bytes asked for, over all transfers."""
        cdef uint64_t i, total = 0
        for i in range(self.raw.n):
            total += self.raw.length[i]
        return total

    def arrays(self) -> tuple:
        """Copies of local, region, offset and length: n little-endian u64 each."""
        cdef mp_batch* batch = self.raw
        cdef size_t size = batch.n * 8
        return (
            (<const char*>batch.local)[:size],
            (<const char*>batch.region)[:size],
            (<const char*>batch.offset)[:size],
            (<const char*>batch.length)[:size],
        )

    def be_part_of(self, Batch whole not None) -> None:
        """Carry pieces of another batch: take over its start, its deadline and the buffer it holds."""
        self.raw.started_ns = whole.raw.started_ns
        self.raw.deadline_ns = whole.raw.deadline_ns
        if whole.holds is not None:
            self._trust(whole.holds)

    def settle_as(self, failed) -> None:
        """End a batch that was carried as parts: `failed` maps transfer index to status, all others are COMPLETE."""
        cdef uint64_t place
        memset(self.raw.status, COMPLETE, self.raw.n)
        for index, status in failed.items():
            place = index
            if place >= self.raw.n:
                raise UsageError(f"the batch has {self.raw.n} transfers and no {index}")
            self.raw.status[place] = status
        batch_finish(self.raw)

    @property
    def done(self) -> bool:
        """True once the batch has ended."""
        return mp_load32(&self.raw.state) == STATE_ENDED

    @property
    def n(self) -> int:
        return self.raw.n

    @property
    def worst(self) -> int:
        """First failing status in transfer order, COMPLETE when there is none. Meaningful once ended."""
        return self.raw.worst

    @property
    def bytes_done(self) -> int:
        return self.raw.bytes

    @property
    def elapsed_ns(self) -> int:
        """From submission to end; 0 while it runs."""
        return self.raw.ended_ns - self.raw.started_ns if self.raw.ended_ns else 0

    def statuses(self) -> bytes:
        """One status byte per transfer, as it stands now."""
        return (<const char*>self.raw.status)[: self.raw.n]

    def first_failure(self) -> int:
        """Index of the first transfer that is not COMPLETE, or -1."""
        cdef uint64_t i
        for i in range(self.raw.n):
            if self.raw.status[i] != COMPLETE:
                return i
        return -1

    def digests(self) -> list:
        """A list of chunk digests (ints) per transfer; None when they were not asked for."""
        cdef mp_batch* batch = self.raw
        if batch.digest == NULL:
            return None
        return [
            [batch.digest[k] for k in range(batch.digest_at[i], batch.digest_at[i + 1])] for i in range(batch.n)
        ]

    def let_go(self) -> None:
        """Drop the buffer held for the transfer, and the segment. Only when ended."""
        if not self.done:
            return
        self.segment = None  # its tables are megabytes, and an ended batch may be kept for long
        if self.holds is not None:
            self.holds.release()
            self.holds = None
