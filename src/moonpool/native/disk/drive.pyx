"""The loop that carries a batch's transfers to and from files and devices.

Theory of operation. A transfer is cut into pieces; each piece is one I/O. A disk that takes whole blocks only
(O_DIRECT) gets whole blocks, straight from and into the caller's memory where that is aligned, through a bounce slot
where it is not. What is no whole block:

- of a READ, the blocks around it are read into a bounce slot and the wanted bytes copied out;
- of a WRITE, the edge goes through the page cache of `edge_fd`, so that the kernel merges it into its page under the
  inode's lock: neighbours' bytes survive, whoever writes them. Blocks are at least a page, so that no page is ever
  written both ways at once but by writers whose ranges overlap.

States of a transfer: not begun, in work (an mp_work, pieces in flight), ended. A batch that is interrupted (cancel,
deadline, dead segment) is cut no further; what is in flight is cancelled and then waited for, because the device may
write into memory until its completion is here. Only then are the statuses of what is left set.
"""

from libc.errno cimport (
    EACCES,
    EAGAIN,
    EBADF,
    EDQUOT,
    EFAULT,
    EFBIG,
    EINTR,
    EINVAL,
    EIO,
    ENODEV,
    ENOMEM,
    ENOSPC,
    ENXIO,
    EPERM,
    EROFS,
)
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from moonpool.native.disk.rings cimport (
    BOUNCE_BYTES,
    BOUNCE_INDEX,
    BOUNCE_SLOTS,
    DIRECT_REFUSED,
    ERRORS_ACCESS,
    ERRORS_DEVICE,
    ERRORS_END,
    ERRORS_OTHER,
    ERRORS_SPACE,
    IOS_AGAIN,
    IOS_BOUNCED,
    IOS_CACHED,
    IOS_CANCELLED,
    IOS_FIXED,
    IOS_SHORT,
    bounce_memory,
    file_index,
    forget_window,
    mp_disk,
    mp_io,
    mp_ring,
    mp_ring_pool,
    mp_work,
    pool_give,
    pool_take,
    window_index,
)
from moonpool.native.disk.uring cimport (
    IOSQE_FIXED_FILE,
    __kernel_timespec,
    io_uring_cqe,
    io_uring_cqe_seen,
    io_uring_get_sqe,
    io_uring_peek_cqe,
    io_uring_prep_cancel64,
    io_uring_prep_read,
    io_uring_prep_read_fixed,
    io_uring_prep_write,
    io_uring_prep_write_fixed,
    io_uring_sqe,
    io_uring_sqe_set_data64,
    io_uring_submit,
    io_uring_submit_and_wait_timeout,
)
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    COMPLETE,
    INTERNAL,
    NO_MEMORY,
    NOT_REGISTERED,
    OP_READ,
    OUT_OF_RANGE,
    PEER_GONE,
    PENDING,
    STALE_HANDLE,
    UNSUPPORTED,
    batch_interrupted,
    mp_batch,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.copying cimport digest_chunks
from moonpool.native.io.guard cimport (
    mp_count,
    mp_guard_lock,
    mp_guard_unlock,
    mp_load32,
    mp_now_ns,
    mp_store32,
    mp_tally,
)
from moonpool.native.io.regions cimport mp_region, regions_find
from moonpool.native.io.segment cimport mp_path, mp_path_record, mp_remote_region, mp_segment, path_takes

cdef extern from "errno.h" nogil:
    int EBUSY, ECANCELED, ENOMEDIUM, ENOTBLK, EOPNOTSUPP, EREMOTEIO, ESHUTDOWN, ESTALE, ETIME, ETXTBSY

cdef extern from *:
    """
    #include <linux/fs.h>
    #include <sys/ioctl.h>
    """
    unsigned long BLKGETSIZE64
    int ioctl(int fd, unsigned long request, ...) nogil

cdef extern from "unistd.h" nogil:
    int usleep(unsigned int microseconds)

cdef extern from *:
    int __builtin_ctzll(unsigned long long value) nogil

cdef enum:
    TICK_NS = 10000000
    CANCEL_TAG = 0xFFFFFFFF
    FSYNC_TAG = 0xFFFFFFFE
    NONE = 0xFFFFFFFF

cdef struct mp_run:              # one batch on its way
    mp_path* path
    mp_segment* segment
    mp_batch* batch
    mp_disk_path* context
    mp_ring_pool* pool
    mp_ring* ring
    uint64_t i                   # the transfer that is cut, or the next one
    uint64_t at                  # how much of it is cut
    uint32_t work                # its place in ring.works, or NONE when it is not begun
    uint64_t own_handle          # of the own region that was looked up last, and where it lies
    uint64_t own_base
    uint64_t own_length
    uint64_t carried
    uint64_t n_bytes
    uint32_t stopped             # a status: nothing is cut any more


cdef bint is_gone(mp_io* io) noexcept nogil:
    """True when an I/O met the end of a block device, which the kernel makes empty when it is taken away."""
    cdef uint64_t size = 0
    if not io.disk.is_device:
        return False
    return ioctl(io.disk.edge_fd if io.disk.edge_fd >= 0 else io.disk.fd, BLKGETSIZE64, &size) != 0 or (
        size < io.at + io.want
    )


cdef int status_of(mp_run* run, mp_io* io, int error) noexcept nogil:
    """The status of a failed I/O, counted by its kind; 0 is the end of the file."""
    cdef uint64_t* counters = &run.pool.counters[0]
    if error in (0, ENOSPC) and is_gone(io):
        error = ENODEV
    if error == 0 and run.batch.op == OP_READ:
        mp_tally(&counters[ERRORS_END], 1)
        return OUT_OF_RANGE
    if error in (0, ENOSPC, EDQUOT, EFBIG):
        mp_tally(&counters[ERRORS_SPACE], 1)
        return NO_MEMORY
    if error in (EROFS, EACCES, EPERM, EBADF, ETXTBSY):
        mp_tally(&counters[ERRORS_ACCESS], 1)
        return ACCESS_DENIED
    if error in (EIO, ENODEV, ENXIO, ESTALE, EREMOTEIO, ENOMEDIUM, ESHUTDOWN):
        mp_tally(&counters[ERRORS_DEVICE], 1)
        return PEER_GONE
    mp_tally(&counters[ERRORS_OTHER], 1)
    if error == EFAULT:
        return NOT_REGISTERED
    if error == ENOMEM:
        return NO_MEMORY
    return UNSUPPORTED if error in (EINVAL, EOPNOTSUPP) else INTERNAL


cdef void end_transfer(mp_run* run, uint64_t i, int status) noexcept nogil:
    """Give a transfer its status; of a complete one the digest first."""
    cdef mp_batch* batch = run.batch
    if status == COMPLETE:
        if batch.digest != NULL:
            digest_chunks(<void*><size_t>batch.local[i], batch.length[i], batch.digest + batch.digest_at[i])
        run.carried += 1
        run.n_bytes += batch.length[i]
    else:
        mp_tally(&run.path.stats.errors[batch.op != OP_READ][status & 15], 1)
    batch.status[i] = <uint8_t>status


cdef void settle_work(mp_run* run, uint32_t place) noexcept nogil:
    """End a transfer of which nothing is in flight and nothing is left to cut."""
    cdef mp_work* work = &run.ring.works[place]
    if work.pieces or not (work.all_cut or work.failed or run.stopped):
        return
    if run.work == place:
        run.work = NONE
        run.i += 1
    end_transfer(run, work.transfer, work.failed if work.failed else (COMPLETE if work.all_cut else run.stopped))
    work.next = run.ring.free_work
    run.ring.free_work = place


cdef void fail_work(mp_run* run, uint32_t place, int status) noexcept nogil:
    if not run.ring.works[place].failed:
        run.ring.works[place].failed = <uint32_t>status


cdef int own_window(mp_run* run, uint64_t address, uint64_t n) noexcept nogil:
    """The registered buffer that holds a range of this process's memory, or -1."""
    cdef mp_region* region
    if run.batch.trusted:
        return -1
    if run.own_handle == 0 or address < run.own_base or address + n > run.own_base + run.own_length:
        mp_guard_lock(&run.segment.own.guard)
        region = regions_find(run.segment.own, address, n)
        if region == NULL:
            run.own_handle = 0
        else:
            run.own_handle = region.handle
            run.own_base = region.base
            run.own_length = region.length
        mp_guard_unlock(&run.segment.own.guard)
        if run.own_handle == 0:
            return -1
    return window_index(run.pool, run.ring, run.own_handle, run.own_base, run.own_length, address, n)


cdef uint32_t take_bounce(mp_ring* ring) noexcept nogil:
    """A free bounce slot, or BOUNCE_SLOTS when all are in flight. The slots exist."""
    cdef uint32_t slot
    if ring.bounce_free == 0:
        return BOUNCE_SLOTS
    slot = <uint32_t>__builtin_ctzll(ring.bounce_free)
    ring.bounce_free &= ~(<uint64_t>1 << slot)
    return slot


cdef void post(mp_run* run, mp_io* io) noexcept nogil:
    """Prepare the entry of an I/O, or of what is left of it. There is room for one."""
    cdef mp_ring* ring = run.ring
    cdef mp_disk* disk = io.disk
    cdef io_uring_sqe* sqe
    cdef char* memory = io.memory + io.done
    cdef uint64_t at = io.at + io.done
    cdef uint32_t n = io.want - io.done
    cdef int index, fd = disk.edge_fd if io.by_edge else disk.fd
    cdef int writing = run.batch.op != OP_READ
    index = file_index(ring, disk)  # may submit, so before the entry is taken
    sqe = io_uring_get_sqe(&ring.uring)
    if sqe == NULL:  # entries of cancels fill the queue
        io_uring_submit(&ring.uring)
        sqe = io_uring_get_sqe(&ring.uring)
    if io.fixed >= 0 and writing:
        io_uring_prep_write_fixed(sqe, fd, memory, n, at, io.fixed)
    elif io.fixed >= 0:
        io_uring_prep_read_fixed(sqe, fd, memory, n, at, io.fixed)
    elif writing:
        io_uring_prep_write(sqe, fd, memory, n, at)
    else:
        io_uring_prep_read(sqe, fd, memory, n, at)
    if index >= 0:
        sqe.fd = index + <int>(io.by_edge != 0)
        sqe.flags |= IOSQE_FIXED_FILE
    if writing:
        sqe.rw_flags = disk.write_flags
    io_uring_sqe_set_data64(sqe, <uint64_t>(io - ring.ios))


cdef bint begin(mp_run* run) noexcept nogil:
    """Move on to the next transfer of this path: True when there is one, with a work of its own."""
    cdef mp_batch* batch = run.batch
    cdef mp_remote_region* region
    cdef mp_disk* disk
    while run.i < batch.n:
        if path_takes(run.path, batch, run.i):
            region = &run.segment.slots[<uint32_t>batch.region[run.i]]
            disk = <mp_disk*>region.extra[run.context.which]
            if disk == NULL:
                pass
            elif mp_count(&region.handle) != batch.region[run.i]:
                end_transfer(run, run.i, STALE_HANDLE)
            elif batch.op != OP_READ and not disk.writable:
                end_transfer(run, run.i, ACCESS_DENIED)
            elif batch.op != OP_READ and disk.edge_fd < 0 and (
                (disk.start + batch.offset[run.i]) | batch.length[run.i]
            ) & (disk.block - 1):
                mp_tally(&run.path.stats.fallbacks, 1)  # an edge that only another path can write
            else:
                break
        run.i += 1
    if run.i >= batch.n:
        return False
    run.work = run.ring.free_work
    run.ring.free_work = run.ring.works[run.work].next
    run.ring.works[run.work].transfer = run.i
    run.ring.works[run.work].pieces = 0
    run.ring.works[run.work].all_cut = 0
    run.ring.works[run.work].failed = 0
    run.at = 0
    return True


cdef uint64_t shape(mp_run* run, mp_disk* disk, mp_io* io, uint64_t at, char* here, uint64_t rest) noexcept nogil:
    """Decide how the next piece goes: fills io but its memory, and returns how many of the wanted bytes it brings.

    `bounce` is 0 when it needs a slot, BOUNCE_SLOTS when not.
    """
    cdef uint64_t head = at & (disk.block - 1), n
    cdef bint aligned = (<size_t>here & (disk.memory_block - 1)) == 0
    io.bounce = BOUNCE_SLOTS
    io.by_edge = 0
    io.skip = 0
    io.at = at
    if disk.fd < 0 or mp_load32(&disk.buffered):
        io.by_edge = 1
        n = rest if rest < disk.piece_bytes else disk.piece_bytes
        io.want = <uint32_t>n
        return n
    if run.batch.op != OP_READ:
        if head or rest < disk.block:
            io.by_edge = 1
            n = disk.block - head
            n = n if n < rest else rest
        else:
            n = rest - (rest & (disk.block - 1))
            if not aligned:
                io.bounce = 0
            n = min(n, <uint64_t>(disk.piece_bytes if aligned else BOUNCE_BYTES))
        io.want = <uint32_t>n
        return n
    if head == 0 and aligned and rest >= disk.block:
        n = min(rest - (rest & (disk.block - 1)), <uint64_t>disk.piece_bytes)
        io.want = <uint32_t>n
        return n
    io.bounce = 0
    io.skip = <uint32_t>head
    io.at = at - head
    n = min(rest, <uint64_t>BOUNCE_BYTES - head)
    if head and ((<size_t>here + (disk.block - head)) & (disk.memory_block - 1)) == 0:
        n = min(n, disk.block - head)  # only the head: the blocks behind it go straight into place
    io.useful = <uint32_t>n
    io.want = <uint32_t>((head + n + disk.block - 1) & ~(<uint64_t>disk.block - 1))
    return n


cdef bint give_memory(mp_run* run, mp_io* io, uint64_t n) noexcept nogil:
    """Give a piece the memory that the disk reads or writes: False when it needs a bounce slot and there is none."""
    cdef mp_ring* ring = run.ring
    if io.bounce == BOUNCE_SLOTS:
        io.memory = io.user
        io.fixed = own_window(run, <uint64_t><size_t>io.user, n)
        io.need = io.want
        if io.fixed >= 0:
            mp_tally(&run.pool.counters[IOS_FIXED], 1)
        if io.by_edge:
            mp_tally(&run.pool.counters[IOS_CACHED], 1)
        return True
    if bounce_memory(ring) == NULL:
        fail_work(run, run.work, NO_MEMORY)
        return False
    io.bounce = take_bounce(ring)
    if io.bounce == BOUNCE_SLOTS:
        return False
    io.memory = ring.bounce + io.bounce * <uint64_t>BOUNCE_BYTES
    io.fixed = BOUNCE_INDEX if ring.bounce_fixed else -1
    io.need = io.skip + io.useful if run.batch.op == OP_READ else io.want
    mp_tally(&run.pool.counters[IOS_BOUNCED], 1)
    if run.batch.op != OP_READ:
        memcpy(io.memory, io.user, n)
    return True


cdef bint cut(mp_run* run) noexcept nogil:
    """Cut one piece and prepare it: False when there is nothing to cut, or no room for it now."""
    cdef mp_ring* ring = run.ring
    cdef mp_batch* batch = run.batch
    cdef mp_work* work
    cdef mp_io* io
    cdef mp_disk* disk
    cdef mp_remote_region* region
    cdef uint64_t n
    if ring.free_io >= ring.depth or (run.work == NONE and not begin(run)):
        return False
    work = &ring.works[run.work]
    region = &run.segment.slots[<uint32_t>batch.region[run.i]]
    if mp_count(&region.handle) != batch.region[run.i]:
        fail_work(run, run.work, STALE_HANDLE)  # taken back meanwhile
    if work.failed:
        if work.pieces:  # it ends with the last of them
            run.work = NONE
            run.i += 1
        else:
            settle_work(run, run.work)
        return True
    disk = <mp_disk*>region.extra[run.context.which]
    io = &ring.ios[ring.free_io]
    io.user = <char*><size_t>(batch.local[run.i] + run.at)
    n = shape(run, disk, io, disk.start + batch.offset[run.i] + run.at, io.user, batch.length[run.i] - run.at)
    if not give_memory(run, io, n):
        return work.failed != 0
    ring.free_io = io.next
    io.disk = disk
    io.work = run.work
    io.done = 0
    io.busy = 1
    work.pieces += 1
    ring.in_flight += 1
    run.at += n
    if run.at == batch.length[run.i]:
        work.all_cut = 1
        run.work = NONE
        run.i += 1
    post(run, io)
    return True


cdef bint goes_on(mp_run* run, mp_io* io, int64_t moved) noexcept nogil:
    """Look at what an I/O brought: True when it has to be posted again, for the rest or in another way."""
    cdef mp_disk* disk = io.disk
    if moved > 0:
        io.done += <uint32_t>moved
        if io.done >= io.need:
            return False
        mp_tally(&run.pool.counters[IOS_SHORT], 1)
        if (io.at + io.done) & (disk.block - 1) and not io.by_edge:
            if disk.edge_fd < 0:
                fail_work(run, io.work, OUT_OF_RANGE)
                return False
            io.by_edge = 1
        return not run.stopped
    if moved == -EAGAIN or moved == -EINTR:
        mp_tally(&run.pool.counters[IOS_AGAIN], 1)
        return not run.stopped
    if moved == -ECANCELED:
        mp_tally(&run.pool.counters[IOS_CANCELLED], 1)
        return False
    if moved == -EFAULT and 0 <= io.fixed < BOUNCE_INDEX:
        pthread_mutex_lock(&run.ring.tables)
        forget_window(run.ring, io.fixed)
        pthread_mutex_unlock(&run.ring.tables)
        io.fixed = -1
        return not run.stopped
    if moved in (-EINVAL, -EOPNOTSUPP, -ENOTBLK) and not io.by_edge and disk.edge_fd >= 0:
        mp_store32(&disk.buffered, 1)  # the file system takes O_DIRECT at open and refuses it here
        mp_tally(&run.pool.counters[DIRECT_REFUSED], 1)
        io.by_edge = 1
        return not run.stopped
    fail_work(run, io.work, status_of(run, io, <int>-moved))
    return False


cdef void land(mp_run* run, io_uring_cqe* cqe) noexcept nogil:
    """One completion: post it again, or account for it."""
    cdef mp_ring* ring = run.ring
    cdef mp_io* io
    cdef mp_work* work
    if cqe.user_data >= ring.depth:
        if ring.owed and (cqe.user_data == CANCEL_TAG or cqe.user_data == FSYNC_TAG):
            ring.owed -= 1
        return
    io = &ring.ios[cqe.user_data]
    if run.batch.op != OP_READ:
        io.disk.dirty = 1
    if goes_on(run, io, cqe.res):
        post(run, io)
        return
    work = &ring.works[io.work]
    if io.done < io.need and not work.failed:
        work.failed = run.stopped if run.stopped else INTERNAL  # what failed otherwise has its status already
    if io.bounce < BOUNCE_SLOTS:
        if run.batch.op == OP_READ and not work.failed:
            memcpy(io.user, io.memory + io.skip, io.useful)
        ring.bounce_free |= <uint64_t>1 << io.bounce
    io.busy = 0
    io.next = ring.free_io
    ring.free_io = <uint32_t>(io - ring.ios)
    ring.in_flight -= 1
    work.pieces -= 1
    settle_work(run, io.work)


cdef void stop(mp_run* run, int status) noexcept nogil:
    """Cut no further, and ask the kernel to give up what is in flight; it may not, so that is still waited for."""
    cdef mp_ring* ring = run.ring
    cdef io_uring_sqe* sqe
    cdef uint32_t k
    run.stopped = <uint32_t>status
    if run.work != NONE:
        settle_work(run, run.work)
    for k in range(ring.depth):
        if not ring.ios[k].busy:
            continue
        sqe = io_uring_get_sqe(&ring.uring)
        if sqe == NULL:
            io_uring_submit(&ring.uring)
            sqe = io_uring_get_sqe(&ring.uring)
            if sqe == NULL:
                break
        io_uring_prep_cancel64(sqe, k, 0)
        io_uring_sqe_set_data64(sqe, CANCEL_TAG)
        ring.owed += 1


cdef void wait(mp_run* run) noexcept nogil:
    """Submit what is prepared, wait for completions or a tick, and account for all that came."""
    cdef mp_ring* ring = run.ring
    cdef io_uring_cqe* cqe = NULL
    cdef __kernel_timespec tick
    cdef uint32_t n = 1
    cdef int rc
    if not run.stopped:
        # The disk stays busy while a part of what is in flight is dealt with at once, which saves calls.
        n = ring.in_flight // 4 if run.i < run.batch.n else ring.in_flight // 2
        n = n if n else 1
    tick.tv_sec = 0
    tick.tv_nsec = TICK_NS
    rc = io_uring_submit_and_wait_timeout(&ring.uring, &cqe, n, &tick, NULL)
    cqe = NULL
    while io_uring_peek_cqe(&ring.uring, &cqe) == 0 and cqe != NULL:
        land(run, cqe)
        io_uring_cqe_seen(&ring.uring, cqe)
        rc = 0
    if rc < 0 and rc not in (-ETIME, -EINTR, -EAGAIN, -EBUSY):
        usleep(1000)  # nothing that a valid ring answers; what is in flight must be waited for all the same


cdef void drive(mp_run* run) noexcept nogil:
    cdef int status
    while True:
        if not run.stopped:
            status = batch_interrupted(run.batch)
            if status:
                stop(run, status)
        if not run.stopped:
            while cut(run):
                pass
        if run.ring.in_flight == 0:
            return
        wait(run)


cdef uint64_t survey(mp_path* path, mp_segment* segment, mp_batch* batch, int which, uint64_t* others) noexcept nogil:
    """How many pending transfers are this path's, and how many others there are."""
    cdef uint64_t i, mine = 0
    others[0] = 0
    for i in range(batch.n):
        if path_takes(path, batch, i) and segment.slots[<uint32_t>batch.region[i]].extra[which] != NULL:
            mine += 1
        elif batch.status[i] == PENDING:
            others[0] += 1
    return mine


cdef int disk_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what lies on disks. Returns whether transfers are left for other paths."""
    cdef mp_disk_path* context = <mp_disk_path*>path.context
    cdef mp_run run
    cdef uint64_t others = 0, i, started = mp_now_ns()
    cdef int status = 0
    if survey(path, segment, batch, context.which, &others) == 0:
        return <int>(others > 0)
    memset(&run, 0, sizeof(run))
    run.path = path
    run.segment = segment
    run.batch = batch
    run.context = context
    run.pool = context.pool
    run.work = NONE
    run.ring = pool_take(context.pool, batch, &status)
    if run.ring != NULL:
        drive(&run)
        pool_give(context.pool, run.ring)
        status = <int>run.stopped
    others = 0
    for i in range(batch.n):
        if batch.status[i] == PENDING:
            if status and (run.stopped or segment.slots[<uint32_t>batch.region[i]].extra[context.which] != NULL):
                end_transfer(&run, i, status)
            else:
                others += 1
    if run.carried:
        mp_path_record(&path.stats, batch.op != OP_READ, run.carried, run.n_bytes, mp_now_ns() - started)
    return <int>(others > 0)
