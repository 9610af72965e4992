"""The same-host path: a copy into or out of the peer's mapped memfd, or process_vm_readv/writev for its other memory.

The same code serves the `local` transport, whose "peer" is this process and whose regions are mapped where they are.
process_vm is used only on regions that the owner granted over a live unix-socket session; the process is held by a
pidfd, which is asked before and after, because a pid alone may have been given to somebody else.
"""

from libc.errno cimport EFAULT, ESRCH, errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from moonpool.native.io.batch cimport (
    COMPLETE,
    OP_READ,
    PEER_GONE,
    PENDING,
    STALE_HANDLE,
    ACCESS_DENIED,
    batch_interrupted,
    mp_batch,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, copy_bytes, copy_digest, digest_chunks, store_fence
from moonpool.native.io.guard cimport mp_count, mp_load32, mp_now_ns, mp_store32, mp_tally
from moonpool.native.io.segment cimport (
    NativeSegment,
    mp_path,
    mp_path_record,
    mp_remote_region,
    mp_segment,
    path_takes,
)

from moonpool.errors import UsageError

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <poll.h>
    #include <sys/uio.h>
    """
    struct iovec:
        void* iov_base
        size_t iov_len
    ssize_t process_vm_readv(int pid, const iovec* here, unsigned long n_here, const iovec* there,
                             unsigned long n_there, unsigned long flags) nogil
    ssize_t process_vm_writev(int pid, const iovec* here, unsigned long n_here, const iovec* there,
                              unsigned long n_there, unsigned long flags) nogil
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd* fds, unsigned long n, int timeout_ms) nogil
    short POLLIN

cdef enum:
    # Long copies look for cancel and deadline after each piece; a multiple of the digest chunk.
    PIECE_BYTES = 8 << 20
    # process_vm works on pinned pages; a bounded piece bounds how long a deadline waits for it.
    VM_PIECE_BYTES = 4 << 20
    VM_VECTOR = 64
    # Below it a plain copy is as quick, and likely to be of something hot.
    STREAM_PIECE_BYTES = 4096

cdef struct mp_vm:
    int pid
    int pidfd
    int32_t refused     # set when the kernel refused once: this session then goes by the next path


cdef uint64_t stream_from(mp_segment* segment, mp_batch* batch) noexcept nogil:
    """The size from which this batch's transfers are streamed past the caches.

    What counts is how much the batch moves: blocks of a small batch are likely used at once and stay in the cache.
    """
    cdef uint64_t i, total = 0
    for i in range(batch.n):
        total += batch.length[i]
        if total >= segment.stream_min_bytes:
            return STREAM_PIECE_BYTES
    return <uint64_t>-1


cdef int copy_one(mp_batch* batch, uint64_t i, mp_remote_region* region, uint64_t stream_min) noexcept nogil:
    """Copy transfer i between its local range and the mapped region; a status."""
    cdef char* here = <char*><size_t>batch.local[i]
    cdef char* there = region.map + batch.offset[i]
    cdef char* source = there if batch.op == OP_READ else here
    cdef char* target = here if batch.op == OP_READ else there
    cdef uint64_t done = 0, n = batch.length[i], piece
    cdef int early
    stream_min = 0 if n >= stream_min else <uint64_t>-1
    while done < n:
        piece = n - done if n - done < PIECE_BYTES else PIECE_BYTES
        if batch.digest != NULL:
            copy_digest(target + done, source + done, piece, stream_min,
                        batch.digest + batch.digest_at[i] + done // DIGEST_CHUNK)
        else:
            copy_bytes(target + done, source + done, piece, stream_min)
        done += piece
        if done < n:
            early = batch_interrupted(batch) or revoked(region, batch, i)
            if early:
                return early
    return COMPLETE


cdef int revoked(mp_remote_region* region, mp_batch* batch, uint64_t i) noexcept nogil:
    """STALE_HANDLE once the region was taken back, so that who revokes it need not wait for a long batch."""
    return 0 if mp_count(&region.handle) == batch.region[i] else STALE_HANDLE


cdef int mapped_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what lies in mapped regions. Returns how many transfers are left for other paths."""
    cdef uint64_t i, started = mp_now_ns(), carried = 0, n_bytes = 0, left = 0, since = 0
    cdef uint64_t stream_min = stream_from(segment, batch)
    cdef mp_remote_region* region
    cdef int status
    for i in range(batch.n):
        if not path_takes(path, batch, i):
            left += batch.status[i] == 1
            continue
        region = &segment.slots[<uint32_t>batch.region[i]]
        if region.map == NULL:
            left += 1
            continue
        if batch.op != OP_READ and not region.map_writable:
            batch.status[i] = ACCESS_DENIED
            continue
        status = revoked(region, batch, i) or copy_one(batch, i, region, stream_min)
        if status == COMPLETE:
            carried += 1
            n_bytes += batch.length[i]
        else:
            mp_tally(&path.stats.errors[batch.op != OP_READ][status], 1)
        batch.status[i] = <uint8_t>status
        since += batch.length[i]
        if since >= PIECE_BYTES and i + 1 < batch.n:
            since = 0
            status = batch_interrupted(batch)
            if status:
                break
    if carried:
        store_fence()  # non-temporal stores become visible before anybody is told
        if mp_load32(&segment.dead) == PEER_GONE:
            # The owner died while we copied: nobody will ever see a WRITE, and a READ may be of its last moments.
            for i in range(batch.n):
                if batch.status[i] == COMPLETE or batch.status[i] == PENDING:
                    batch.status[i] = PEER_GONE
            return 0
        mp_path_record(&path.stats, batch.op != OP_READ, carried, n_bytes, mp_now_ns() - started)
    if status_pending_interrupt(batch):
        return 0
    return <int>(left > 0)


cdef bint status_pending_interrupt(mp_batch* batch) noexcept nogil:
    """When cancel or deadline came, end what is pending with that status."""
    cdef int early = batch_interrupted(batch)
    cdef uint64_t i
    if not early:
        return False
    for i in range(batch.n):
        if batch.status[i] == 1:
            batch.status[i] = <uint8_t>early
    return True


cdef bint process_alive(mp_vm* vm) noexcept nogil:
    cdef pollfd watch
    watch.fd = vm.pidfd
    watch.events = POLLIN
    watch.revents = 0
    return poll(&watch, 1, 0) == 0


cdef int vm_vector(mp_path* path, mp_batch* batch, iovec* here, iovec* there, int n, uint64_t want) noexcept nogil:
    """One call for n pieces. Returns bytes moved, or minus a status; 0 means refused: try another path."""
    cdef mp_vm* vm = <mp_vm*>path.context
    cdef ssize_t moved
    if not process_alive(vm):
        return -PEER_GONE
    if batch.op == OP_READ:
        moved = process_vm_readv(vm.pid, here, n, there, n, 0)
    else:
        moved = process_vm_writev(vm.pid, here, n, there, n, 0)
    if moved == <ssize_t>want:
        # Asked after, too: had the process died and its pid been reused, the bytes were somebody else's.
        return <int>moved if process_alive(vm) else -PEER_GONE
    if moved < 0 and errno == ESRCH:
        return -PEER_GONE
    if moved < 0 and errno != EFAULT:
        mp_store32(&vm.refused, 1)
        return 0
    return -STALE_HANDLE  # the owner unmapped the range without revoking it


cdef uint64_t vm_one(mp_path* path, mp_segment* segment, mp_batch* batch, uint64_t first,
                     uint64_t* last) noexcept nogil:
    """Carry a run of small transfers from `first` on, or one large one by pieces; returns bytes. Sets statuses."""
    cdef iovec here[VM_VECTOR]
    cdef iovec there[VM_VECTOR]
    cdef uint64_t members[VM_VECTOR]
    cdef uint64_t i = first, total = 0, done = 0, piece
    cdef mp_remote_region* region
    cdef int n = 0, k, rc, early
    while i < batch.n and n < VM_VECTOR and total + batch.length[i] <= VM_PIECE_BYTES:
        if path_takes(path, batch, i):
            region = &segment.slots[<uint32_t>batch.region[i]]
            if revoked(region, batch, i):
                batch.status[i] = STALE_HANDLE
            elif region.process_vm:
                here[n].iov_base = <void*><size_t>batch.local[i]
                there[n].iov_base = <void*><size_t>(region.base + batch.offset[i])
                here[n].iov_len = there[n].iov_len = batch.length[i]
                members[n] = i
                n += 1
                total += batch.length[i]
        i += 1
    if n:
        last[0] = i - 1
        rc = vm_vector(path, batch, here, there, n, total)
        for k in range(n):
            if rc > 0:
                batch.status[members[k]] = COMPLETE
                vm_digest(batch, members[k], 0, batch.length[members[k]])
            elif rc < 0:
                batch.status[members[k]] = <uint8_t>(-rc)
        return total if rc > 0 else 0
    if i > first:
        last[0] = i - 1  # none of those seen goes this way; the next one is looked at anew
        return 0
    last[0] = first
    if not path_takes(path, batch, first):
        return 0
    region = &segment.slots[<uint32_t>batch.region[first]]
    if not region.process_vm:
        return 0
    while done < batch.length[first]:
        early = batch_interrupted(batch) or revoked(region, batch, first)
        if early:
            batch.status[first] = <uint8_t>early
            return done
        piece = batch.length[first] - done
        piece = piece if piece < VM_PIECE_BYTES else VM_PIECE_BYTES
        here[0].iov_base = <void*><size_t>(batch.local[first] + done)
        there[0].iov_base = <void*><size_t>(region.base + batch.offset[first] + done)
        here[0].iov_len = there[0].iov_len = piece
        rc = vm_vector(path, batch, here, there, 1, piece)
        if rc <= 0:
            if rc < 0:
                batch.status[first] = <uint8_t>(-rc)
            return done
        vm_digest(batch, first, done, piece)
        done += piece
    batch.status[first] = COMPLETE
    return done


cdef void vm_digest(mp_batch* batch, uint64_t i, uint64_t start, uint64_t n) noexcept nogil:
    if batch.digest != NULL:
        digest_chunks(<void*><size_t>(batch.local[i] + start), n,
                      batch.digest + batch.digest_at[i] + start // DIGEST_CHUNK)


cdef int vm_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what lies in granted regions by process_vm. Returns whether transfers are left for other paths."""
    cdef mp_vm* vm = <mp_vm*>path.context
    cdef uint64_t i = 0, last = 0, n_bytes = 0, moved, started = mp_now_ns(), before = pending(batch), after
    while i < batch.n and not mp_load32(&vm.refused):
        moved = vm_one(path, segment, batch, i, &last)
        n_bytes += moved
        i = last + 1
        if status_pending_interrupt(batch):
            return 0
    after = pending(batch)
    if mp_load32(&vm.refused):
        mp_tally(&path.stats.fallbacks, after)
    if before != after:
        mp_path_record(&path.stats, batch.op != OP_READ, before - after, n_bytes, mp_now_ns() - started)
    return <int>(after > 0)


cdef uint64_t pending(mp_batch* batch) noexcept nogil:
    cdef uint64_t i, n = 0
    for i in range(batch.n):
        n += batch.status[i] == 1
    return n


cdef class VmSession:
    """The peer process that process_vm talks to; borrows the pidfd, which its control session owns."""

    cdef mp_vm* vm

    def __cinit__(self, int pid, int pidfd):
        if pid <= 0 or pidfd < 0:
            raise UsageError("process_vm needs a pid and a pidfd of the peer")
        self.vm = <mp_vm*>calloc(1, sizeof(mp_vm))
        if self.vm == NULL:
            raise MemoryError
        self.vm.pid = pid
        self.vm.pidfd = pidfd

    def __dealloc__(self):
        free(self.vm)

    @property
    def refused(self) -> bool:
        """True once the kernel refused process_vm on this peer; everything then goes by the next path."""
        return mp_load32(&self.vm.refused) != 0

    def refuse(self) -> None:
        """Stop using process_vm on this peer."""
        mp_store32(&self.vm.refused, 1)


def add_mapped_path(NativeSegment segment not None) -> int:
    """Let a segment's mapped regions be reached by plain copies; returns the path id."""
    return segment.add_path(mapped_run, NULL, None).id


def add_vm_path(NativeSegment segment not None, VmSession session not None) -> int:
    """Let a segment's granted regions be reached by process_vm; returns the path id."""
    return segment.add_path(vm_run, session.vm, session).id
