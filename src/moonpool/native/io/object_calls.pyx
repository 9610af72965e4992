"""One object in one native step: transfer, digest, comparison; and many at once out of the reply to a look-up.

What the plain reads and writes of a pool need, with no Python object made for each key (bench/pool: 4 KiB gets).
Anything out of the ordinary is left to the caller, who does it the long way.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp
from moonpool.native.io.batch cimport (
    COMPLETE,
    OP_READ,
    OP_WRITE,
    PENDING,
    UNSUPPORTED,
    Batch,
    batch_off_stack,
    batch_on_stack,
    mp_batch,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, digest_chunks, root_of
from moonpool.native.io.guard cimport mp_now_ns
from moonpool.native.io.object_batch cimport entrust
from moonpool.native.io.rpc_codec cimport LookupReply, reply_entry
from moonpool.native.io.segment cimport NativeSegment, segment_run

from moonpool.errors import OutOfMemory, UsageError

cdef enum:
    ROOT_BYTES = 16
    GRANT_BYTES = 24
    # As in segment.pyx: shorter than giving the GIL up and getting it back.
    QUICK_BYTES = 16384
    SMALL_CHUNKS = 64
    WRONG_ROOT = 255
    # Of a key in `plan_reads`.
    PLAN_MISS = 1
    PLAN_LEFT = 2

# An odd number of many bits, to mix others with.
cdef uint64_t MIX = <uint64_t>0x5851F42D4C957F2D


cdef int carry_one(NativeSegment segment, mp_batch* batch, uint64_t deadline_ns) except -1:
    """Drive a batch of trusted transfers that lies on the stack: the status of the first."""
    cdef uint32_t index = <uint32_t>batch.region[0]
    batch.trusted = 1
    batch.started_ns = mp_now_ns()
    batch.deadline_ns = deadline_ns
    if batch.length[0] <= QUICK_BYTES and index < segment.raw.capacity and segment.raw.slots[index].map != NULL:
        segment_run(segment.raw, batch)
    else:
        with nogil:
            segment_run(segment.raw, batch)
    return UNSUPPORTED if batch.status[0] == PENDING else batch.status[0]


cdef int compare_root(uint64_t local, uint64_t length, bytes root) except -1:
    """COMPLETE when the bytes have that root, else WRONG_ROOT."""
    cdef uint64_t small[SMALL_CHUNKS]
    cdef uint64_t* chunk = small
    cdef uint64_t n = (length + DIGEST_CHUNK - 1) // DIGEST_CHUNK
    cdef uint64_t found[2]
    cdef const char* wanted = root
    if len(root) != ROOT_BYTES:
        raise UsageError(f"a root has {ROOT_BYTES} bytes", field="root")
    if n > SMALL_CHUNKS:
        chunk = <uint64_t*>malloc(n * 8)
        if chunk == NULL:
            raise OutOfMemory("no memory for digests")
    if length <= QUICK_BYTES:
        digest_chunks(<const void*><size_t>local, length, chunk)
    else:
        with nogil:
            digest_chunks(<const void*><size_t>local, length, chunk)
    root_of(chunk, n, found)
    if chunk != small:
        free(chunk)
    return COMPLETE if memcmp(found, wanted, ROOT_BYTES) == 0 else WRONG_ROOT


def read_object(NativeSegment segment not None, uint64_t local, uint64_t region, uint64_t offset, uint64_t length,
                bytes root, uint64_t timeout_ns) -> int:
    """Read one object into memory of the caller's and check it against its root (None: do not): a status, or MISMATCH.

    The bytes are hashed where they arrived, so what is right stays right whatever happens to the copy they came from.
    """
    cdef mp_batch batch
    cdef uint8_t mark = PENDING
    cdef int status
    batch_on_stack(&batch, OP_READ, &mark)
    batch.local = &local
    batch.region = &region
    batch.offset = &offset
    batch.length = &length
    status = carry_one(segment, &batch, mp_now_ns() + timeout_ns)
    batch_off_stack(&batch)
    if status != COMPLETE or root is None:
        return status
    return compare_root(local, length, root)


def read_confirmed(NativeSegment segment not None, uint64_t local, uint64_t region, uint64_t offset, uint64_t length,
                   bytes root, uint64_t directory, uint64_t word_at, uint64_t object_id, uint64_t timeout_ns) -> int:
    """As `read_object`, and then the state word at `word_at` of the directory: MISMATCH unless it is the object's id.

    The word is read after the bytes, so they were the object's as long as they were read.
    """
    cdef mp_batch batch
    cdef uint8_t marks[2]
    cdef uint64_t word = 0
    cdef uint64_t locals[2]
    cdef uint64_t regions[2]
    cdef uint64_t offsets[2]
    cdef uint64_t lengths[2]
    cdef int status
    marks[0] = marks[1] = PENDING
    locals[0], locals[1] = local, <uint64_t><size_t>&word
    regions[0], regions[1] = region, directory
    offsets[0], offsets[1] = offset, word_at
    lengths[0], lengths[1] = length, sizeof(word)
    batch_on_stack(&batch, OP_READ, marks)
    batch.n = 2
    batch.local, batch.region, batch.offset, batch.length = locals, regions, offsets, lengths
    status = carry_one(segment, &batch, mp_now_ns() + timeout_ns)
    batch_off_stack(&batch)
    if status != COMPLETE or marks[1] != COMPLETE:
        return status or marks[1]
    if word != object_id:
        return WRONG_ROOT
    return COMPLETE if root is None else compare_root(local, length, root)


def read_word(NativeSegment segment not None, uint64_t directory, uint64_t word_at, uint64_t timeout_ns):
    """A state word as it is now, or None when it cannot be read."""
    cdef mp_batch batch
    cdef uint8_t mark = PENDING
    cdef uint64_t word = 0, local = <uint64_t><size_t>&word, length = sizeof(word)
    batch_on_stack(&batch, OP_READ, &mark)
    batch.local = &local
    batch.region = &directory
    batch.offset = &word_at
    batch.length = &length
    carry_one(segment, &batch, mp_now_ns() + timeout_ns)
    batch_off_stack(&batch)
    return word if mark == COMPLETE else None


def write_object(NativeSegment segment not None, uint64_t local, uint64_t region, uint64_t offset, uint64_t length,
                 bytes grant not None, uint64_t deadline_ns) -> tuple:
    """Write one object from memory of the caller's: (status, root, chunk digests), hashed in the copy.

    `grant` has 24 bytes, or none. Nothing is begun after `deadline_ns` (CLOCK_MONOTONIC).
    """
    cdef mp_batch batch
    cdef uint8_t mark = PENDING
    cdef uint64_t small[SMALL_CHUNKS]
    cdef uint64_t* chunk = small
    cdef uint64_t n = (length + DIGEST_CHUNK - 1) // DIGEST_CHUNK
    cdef uint64_t at[2]
    cdef uint64_t root[2]
    cdef char* shown = grant
    cdef int status
    if len(grant) not in (0, GRANT_BYTES):
        raise UsageError(f"a grant has {GRANT_BYTES} bytes", field="grant")
    if n > SMALL_CHUNKS:
        chunk = <uint64_t*>malloc(n * 8)
        if chunk == NULL:
            raise OutOfMemory("no memory for digests")
    at[0] = 0
    at[1] = n
    batch_on_stack(&batch, OP_WRITE, &mark)
    batch.local = &local
    batch.region = &region
    batch.offset = &offset
    batch.length = &length
    batch.digest = chunk
    batch.digest_at = at
    if len(grant):
        batch.grants = <uint8_t*>shown
    status = carry_one(segment, &batch, deadline_ns)
    batch_off_stack(&batch)
    root_of(chunk, n, root)
    try:
        return status, (<const char*>root)[:ROOT_BYTES], (<const char*>chunk)[: n * 8]
    finally:
        if chunk != small:
            free(chunk)


cdef struct plan_group:
    uint32_t segment
    uint32_t n
    uint32_t filled
    int nearness             # -1: no way to it
    uint64_t data
    uint64_t total

cdef enum:
    GROUPS_MAX = 64


cdef class Plan:
    """Which copy of each key of a reply is read, in one batch for each segment; then which bytes were right.

    `marks` has one byte a key: 0 right (or still to be read), 1 a miss, 2 left to the caller, WRONG_ROOT, or a status.
    """

    cdef LookupReply reply
    cdef readonly bytearray marks
    cdef list targets
    cdef list batches
    cdef list keys                     # of each group: bytes of uint32, the keys of its transfers
    cdef plan_group groups[GROUPS_MAX]
    cdef uint32_t n_groups
    cdef uint32_t n
    cdef bint hashed

    def __cinit__(self, LookupReply reply not None):
        self.reply = reply
        self.n = reply.n_entries
        self.marks = bytearray(self.n)
        self.targets = []
        self.batches = []
        self.keys = []

    cdef reply_entry* entry_of(self, uint32_t key) noexcept nogil:
        """Keys are asked for last first (see `Reader.locate`)."""
        return &self.reply.entries[self.n - 1 - key]

    cdef int group_of(self, uint32_t segment, resolve) except -2:
        """The group of a segment, asked of `resolve` when it is new; -1 when there are too many."""
        cdef uint32_t g
        cdef plan_group* group
        for g in range(self.n_groups):
            if self.groups[g].segment == segment:
                return g
        if self.n_groups == GROUPS_MAX:
            return -1
        target = resolve(segment)
        group = &self.groups[self.n_groups]
        group.segment = segment
        group.n = group.filled = 0
        group.total = 0
        group.nearness = -1
        if target is not None:
            group.nearness = target.nearness
            group.data = target.data
        self.targets.append(target)
        self.n_groups += 1
        return self.n_groups - 1

    cdef int choose(self, reply_entry* entry, resolve, uint32_t* place) except -2:
        """The group and the place of the nearest copy; of equally near ones another for each object. -1: none."""
        # Mixed, for the master too lets the first places of objects in a row alternate.
        cdef uint32_t i, at, n = entry.n_places, turn = <uint32_t>((entry.object_id * MIX) >> 40)
        cdef int g, best = -1
        for i in range(n):
            at = entry.first_place + (i + turn) % n
            g = self.group_of(self.reply.places[at].segment, resolve)
            if g < 0 or self.groups[g].nearness < 0:
                continue
            if best < 0 or self.groups[g].nearness < self.groups[best].nearness:
                best = g
                place[0] = at
        return best

    def prepare(self, resolve, address, capacity, things, bint hash_in_copy, uint64_t timeout_ns) -> list:
        """Plan all keys: `[(target, batch), ...]`. `resolve(segment)` gives a target or None.

        `address` and `capacity` (64-bit integers) say where each key's bytes may go; `things` own that memory.
        """
        cdef Py_buffer where, room
        PyObject_GetBuffer(address, &where, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(capacity, &room, PyBUF_SIMPLE)
            try:
                if where.len != <Py_ssize_t>self.n * 8 or room.len != where.len:
                    raise UsageError("address and capacity have one 64-bit integer for each key")
                self.hashed = hash_in_copy
                return self.fill(resolve, <uint64_t*>where.buf, <uint64_t*>room.buf, things, timeout_ns)
            finally:
                PyBuffer_Release(&room)
        finally:
            PyBuffer_Release(&where)

    cdef list fill(self, resolve, const uint64_t* address, const uint64_t* capacity, things, uint64_t timeout_ns):
        cdef uint32_t* place = <uint32_t*>malloc(self.n * 8 + 8)
        cdef uint32_t* chosen = place + self.n
        cdef uint32_t i
        cdef int g
        cdef reply_entry* entry
        cdef uint8_t* marks = self.marks
        if place == NULL:
            raise OutOfMemory("no memory for a plan")
        try:
            for i in range(self.n):
                entry = self.entry_of(i)
                if entry.object_id == 0:
                    marks[i] = PLAN_MISS
                    continue
                g = self.choose(entry, resolve, &place[i]) if entry.size <= capacity[i] else -1
                if g < 0:
                    marks[i] = PLAN_LEFT
                    continue
                chosen[i] = <uint32_t>g
                self.groups[g].n += 1
                self.groups[g].total += entry.size
            for g in range(<int>self.n_groups):
                self.open_group(g, things, timeout_ns)
            for i in range(self.n):
                if marks[i] == 0:
                    self.add(i, chosen[i], place[i], address[i])
        finally:
            free(place)
        return [(target, batch) for target, batch in zip(self.targets, self.batches) if batch is not None]

    cdef open_group(self, int g, things, uint64_t timeout_ns):
        """The batch of a group, with room for its transfers."""
        cdef plan_group* group = &self.groups[g]
        cdef Batch batch
        if group.n == 0:
            self.batches.append(None)
            self.keys.append(None)
            return
        batch = Batch(OP_READ, group.n)
        batch.fill(0, group.data, 0, 0, None, False)
        entrust(batch, things, mp_now_ns() + timeout_ns)
        if self.hashed:
            batch.raw.digest_at = <uint64_t*>malloc((<size_t>group.n + 1) * 8)
            batch.raw.digest = <uint64_t*>malloc((group.total // DIGEST_CHUNK + group.n + 1) * 8)
            if batch.raw.digest_at == NULL or batch.raw.digest == NULL:
                raise OutOfMemory("no memory for digests")
            batch.raw.digest_at[0] = 0
        self.batches.append(batch)
        self.keys.append(bytearray(group.n * 4))

    cdef add(self, uint32_t key, uint32_t g, uint32_t place, uint64_t address):
        cdef plan_group* group = &self.groups[g]
        cdef Batch batch = self.batches[g]
        cdef bytearray keys = self.keys[g]
        cdef uint32_t at = group.filled
        cdef reply_entry* entry = self.entry_of(key)
        (<uint32_t*><char*>keys)[at] = key
        batch.raw.local[at] = address
        batch.raw.offset[at] = self.reply.places[place].offset
        batch.raw.length[at] = entry.size
        if self.hashed:
            batch.raw.digest_at[at + 1] = batch.raw.digest_at[at] + (entry.size + DIGEST_CHUNK - 1) // DIGEST_CHUNK
        group.filled += 1

    def members(self, Batch batch not None) -> bytes:
        """The keys that one of the plan's batches reads, in its order: uint32 each."""
        for known, keys in zip(self.batches, self.keys):
            if known is batch:
                return bytes(keys)
        raise UsageError("this batch is of another plan")

    def judge(self, bint verify, bint trust_copy) -> bool:
        """After all batches ended: marks every key. True when every one that was read is right.

        `trust_copy` False: digests that were computed in the copy do not count.
        """
        cdef uint32_t g, i, key
        cdef bint right = True
        cdef Batch batch
        cdef bytearray keys
        cdef uint8_t* marks = self.marks
        cdef uint8_t status
        cdef uint32_t* key_of
        cdef uint64_t* room = NULL
        cdef bint in_copy = self.hashed and trust_copy
        for g in range(self.n_groups):
            batch = self.batches[g]
            if batch is None:
                continue
            keys = self.keys[g]
            key_of = <uint32_t*><char*>keys
            if verify and not in_copy:
                room = <uint64_t*>malloc((self.groups[g].total // DIGEST_CHUNK + 2) * 8)
                if room == NULL:
                    raise OutOfMemory("no memory for digests")
            with nogil:
                for i in range(self.groups[g].n):
                    key = key_of[i]
                    status = batch.raw.status[i]
                    if status == COMPLETE and verify and not self.matches(batch.raw, i, key, room):
                        status = WRONG_ROOT
                    # 1 and 2 have a meaning of their own here: any other failure is told as the worst there is.
                    marks[key] = status if status in (0, WRONG_ROOT) or status > PLAN_LEFT else UNSUPPORTED
                    if status:
                        right = False
            free(room)
            room = NULL
        return right

    cdef bint matches(self, mp_batch* batch, uint32_t i, uint32_t key, uint64_t* room) noexcept nogil:
        """True when transfer i brought the bytes of the key's object; hashes them into `room`, if that is given."""
        cdef reply_entry* entry = self.entry_of(key)
        cdef uint64_t root[2]
        cdef uint64_t n = (entry.size + DIGEST_CHUNK - 1) // DIGEST_CHUNK
        cdef uint64_t* chunk = room
        if room != NULL:
            digest_chunks(<const void*><size_t>batch.local[i], entry.size, room)
        else:
            chunk = batch.digest + batch.digest_at[i]
        root_of(chunk, n, root)
        return memcmp(root, entry.digest, ROOT_BYTES) == 0
