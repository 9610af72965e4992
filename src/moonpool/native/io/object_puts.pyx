"""Many puts out of the reply to `put_start`: one batch a segment, the digests, and what to tell `put_end`."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from moonpool.native.io.batch cimport COMPLETE, OP_WRITE, Batch
from moonpool.native.io.copying cimport DIGEST_CHUNK, digest_chunks, root_of
from moonpool.native.io.object_batch cimport entrust
from moonpool.native.io.rpc_codec cimport PutReply, place_entry, reply_entry

from moonpool.errors import OutOfMemory, UsageError

cdef enum:
    ROOT_BYTES = 16
    GRANT_BYTES = 24
    GROUPS_MAX = 64
    # Of a place that no batch carries.
    UNPOSTED = 254

NOT_POSTED = UNPOSTED

cdef struct put_group:
    uint32_t segment
    uint32_t n
    uint32_t filled
    bint reachable
    uint64_t data


cdef class PutPlan:
    """Where each copy of each key goes. The keys, in the order of the request, are one piece of memory each.

    Keys that the reply refused are left out. `statuses` has one byte for each place of the reply, in its order.
    """

    cdef PutReply reply
    cdef list targets
    cdef list batches
    cdef list members                  # of each group: bytearray of uint32, the places of its transfers
    cdef put_group groups[GROUPS_MAX]
    cdef uint32_t n_groups
    cdef uint32_t* group_at            # of each place; n_groups for none
    cdef uint64_t* address
    cdef uint64_t* length
    cdef readonly bytearray statuses

    def __cinit__(self, PutReply reply not None):
        self.reply = reply
        self.targets = []
        self.batches = []
        self.members = []
        self.statuses = bytearray([UNPOSTED]) * reply.n_places
        self.group_at = <uint32_t*>calloc(reply.n_places + 1, sizeof(uint32_t))
        self.address = <uint64_t*>calloc(2 * <size_t>reply.n_entries + 1, 8)
        if self.group_at == NULL or self.address == NULL:
            raise OutOfMemory("no memory for a plan")
        self.length = self.address + reply.n_entries

    def __dealloc__(self):
        free(self.group_at)
        free(self.address)

    cdef int group_of(self, uint32_t segment, resolve) except -2:
        """The group of a segment, asked of `resolve` when it is new; -1 when there are too many."""
        cdef uint32_t g
        cdef put_group* group
        for g in range(self.n_groups):
            if self.groups[g].segment == segment:
                return g
        if self.n_groups == GROUPS_MAX:
            return -1
        target = resolve(segment)
        group = &self.groups[self.n_groups]
        group.segment = segment
        group.n = group.filled = 0
        group.reachable = target is not None
        group.data = target.data if target is not None else 0
        self.targets.append(target)
        self.n_groups += 1
        return self.n_groups - 1

    def prepare(self, resolve, address, length, things, uint64_t stop_ns) -> list:
        """Plan all keys: `[(target, batch), ...]`. `resolve(segment)` gives a target or None.

        `address` and `length` (64-bit integers) are those of each key's bytes, which `things` own. Nothing is begun
        after `stop_ns` (CLOCK_MONOTONIC).
        """
        take_words(address, self.address, self.reply.n_entries)
        take_words(length, self.length, self.reply.n_entries)
        cdef uint32_t i, at
        cdef int g
        cdef reply_entry* entry
        for i in range(self.reply.n_entries):
            entry = &self.reply.entries[i]
            for at in range(entry.first_place, entry.first_place + entry.n_places):
                g = self.group_of(self.reply.places[at].segment, resolve) if entry.code == 0 else -1
                self.group_at[at] = GROUPS_MAX
                if g >= 0 and self.groups[g].reachable:
                    self.group_at[at] = <uint32_t>g
                    self.groups[g].n += 1
        for g in range(<int>self.n_groups):
            self.open_group(g, things, stop_ns)
        for i in range(self.reply.n_entries):
            entry = &self.reply.entries[i]
            for at in range(entry.first_place, entry.first_place + entry.n_places):
                if self.group_at[at] != GROUPS_MAX:
                    self.add(i, at)
        return [(target, batch) for target, batch in zip(self.targets, self.batches) if batch is not None]

    cdef open_group(self, int g, things, uint64_t stop_ns):
        """The batch of a group, with room for its transfers."""
        cdef put_group* group = &self.groups[g]
        cdef Batch batch
        if group.n == 0:
            self.batches.append(None)
            self.members.append(None)
            return
        batch = Batch(OP_WRITE, group.n)
        batch.fill(0, group.data, 0, 0, None, False)
        entrust(batch, things, stop_ns)
        batch.raw.grants = <uint8_t*>malloc(<size_t>group.n * GRANT_BYTES)
        if batch.raw.grants == NULL:
            raise OutOfMemory("no memory for grants")
        self.batches.append(batch)
        self.members.append(bytearray(group.n * 4))

    cdef add(self, uint32_t key, uint32_t at):
        cdef put_group* group = &self.groups[self.group_at[at]]
        cdef Batch batch = self.batches[self.group_at[at]]
        cdef bytearray members = self.members[self.group_at[at]]
        cdef place_entry* place = &self.reply.places[at]
        (<uint32_t*><char*>members)[group.filled] = at
        batch.raw.local[group.filled] = self.address[key]
        batch.raw.length[group.filled] = self.length[key]
        batch.raw.offset[group.filled] = place.offset
        memcpy(batch.raw.grants + group.filled * GRANT_BYTES, place.grant, GRANT_BYTES)
        group.filled += 1

    def judge(self) -> bool:
        """After all batches ended: fills `statuses`. True when every copy of every key was written."""
        cdef uint32_t g, i
        cdef bint whole = True
        cdef Batch batch
        cdef bytearray members
        cdef uint8_t* statuses = self.statuses
        for g in range(self.n_groups):
            batch = self.batches[g]
            if batch is None:
                continue
            members = self.members[g]
            for i in range(self.groups[g].n):
                statuses[(<uint32_t*><char*>members)[i]] = batch.raw.status[i]
        for i in range(self.reply.n_entries):
            for g in range(self.reply.entries[i].n_places if self.reply.entries[i].code == 0 else 0):
                whole = whole and statuses[self.reply.entries[i].first_place + g] == COMPLETE
        return whole

    def statuses_of(self, uint32_t key) -> bytes:
        """The status of each of a key's places, in the reply's order."""
        if key >= self.reply.n_entries:
            raise UsageError(f"there is no key {key}", index=key)
        cdef uint32_t first = self.reply.entries[key].first_place
        return bytes(self.statuses[first: first + self.reply.entries[key].n_places])

    def hashes(self) -> tuple:
        """Of the keys that the reply took, in order: their numbers, their roots joined, and a list of chunk digests.

        An object of one chunk has b"" there, for its digest says as much.
        """
        cdef list numbers = []
        cdef list chunks = []
        cdef uint64_t most = 0, n
        cdef uint32_t i
        cdef uint64_t root[2]
        for i in range(self.reply.n_entries):
            if self.reply.entries[i].code == 0:
                numbers.append(i)
                most = self.length[i] if self.length[i] > most else most
        roots = bytearray(len(numbers) * ROOT_BYTES)
        cdef char* out = roots
        cdef uint64_t* room = <uint64_t*>malloc((most // DIGEST_CHUNK + 2) * 8)
        if room == NULL:
            raise OutOfMemory("no memory for digests")
        for i in numbers:
            n = (self.length[i] + DIGEST_CHUNK - 1) // DIGEST_CHUNK
            with nogil:
                digest_chunks(<const void*><size_t>self.address[i], self.length[i], room)
            root_of(room, n, root)
            memcpy(out, root, ROOT_BYTES)
            out += ROOT_BYTES
            chunks.append((<const char*>room)[: n * 8] if n > 1 else b"")
        free(room)
        return numbers, bytes(roots), chunks


cdef int take_words(value, uint64_t* target, uint32_t n) except -1:
    """Copy n 64-bit integers out of a buffer."""
    cdef Py_buffer view
    PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
    try:
        if view.len != <Py_ssize_t>n * 8:
            raise UsageError(f"{n} keys need as many 64-bit integers, not {view.len // 8}")
        memcpy(target, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return 0
