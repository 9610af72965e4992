"""Which holders have which blocks, in which tier: the flat core of the prefix index.

A block is a 64-bit key in a context (a number that stands for tenant, model, LoRA, salt and block size); a holder is a
number below `holders_max`. Storing, removing and looking up one block is O(1) in blocks and in holders. Numbers are
given out by moonpool.conductor.index; the plain twin is moonpool.native.table.reference.

Thread rule: any thread may call; one mutex covers the table, and the GIL is released for RELEASE_FROM keys and more.
"""

cimport cython
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memset

from moonpool.native.table.holder_sets cimport (
    ALL_TIERS, EMPTY_SET, HOLD, HOLDERS_PER_CHUNK, NO_SET, RELEASE, TIERS, Chunk, HolderSet, HolderSets, require,
)
from moonpool.native.table.integer_arrays cimport Keys, close_keys, open_keys
from moonpool.native.table.matching cimport Alive, Match, Walk
from moonpool.native.table.slots cimport LOOK_AHEAD, NO_SLOT, Scope, Slot, SlotMap, stands_at

from moonpool.errors import LimitExceeded, OutOfMemory, UsageError

cdef extern from "mixing.h" nogil:
    int mp_lowest_bit(uint64_t x)

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

#: As a tier: every tier. As a context: every context.
EVERY_TIER = 3
EVERY_CONTEXT = 0xFFFFFFFF

cdef enum:
    RELEASE_FROM = 4096   # keys in one call from which the GIL is released: some tens of microseconds of work
    ANY_CONTEXT = 0xFFFFFFFF


@cython.final
cdef class BlockTable:
    """`blocks_max` blocks of `holders_max` holders; sets of holders take `set_bytes_max` bytes at most.

    `seed` keys the hash tables (random in service: keys come from the network); results do not depend on it.
    """

    cdef pthread_mutex_t mutex
    cdef SlotMap slots
    cdef HolderSets sets
    cdef Walk walk
    cdef uint64_t* counts          # [holders_max][TIERS]: blocks held
    cdef uint32_t holders_max
    cdef readonly uint64_t forgotten

    def __cinit__(self, *, uint64_t blocks_max, uint32_t holders_max, uint64_t set_bytes_max, uint64_t seed):
        pthread_mutex_init(&self.mutex, NULL)
        self.slots = SlotMap(blocks_max, seed)
        self.sets = HolderSets(holders_max, set_bytes_max)
        self.walk = Walk(holders_max)
        self.holders_max = holders_max
        self.counts = <uint64_t*>PyMem_RawCalloc(holders_max * TIERS, sizeof(uint64_t))
        if self.counts == NULL:
            raise OutOfMemory("no memory for the counts of blocks")

    def __dealloc__(self):
        PyMem_RawFree(self.counts)
        pthread_mutex_destroy(&self.mutex)

    def __len__(self):
        return self.slots.live

    @property
    def memory_bytes(self) -> int:
        """Bytes of everything the table holds."""
        return (self.slots.memory_bytes() + self.sets.memory_bytes() + self.holders_max * TIERS * sizeof(uint64_t)
                + (self.holders_max // HOLDERS_PER_CHUNK + 1) * sizeof(Alive))

    @property
    def holder_sets(self) -> int:
        """Distinct sets of holders in use."""
        return self.sets.live

    @property
    def idle_sets(self) -> int:
        """Sets kept although no block has them; bounded by 1025 and half of those in use."""
        return self.sets.idle

    def blocks_held(self, uint32_t holder) -> tuple:
        """How many blocks the holder has in each tier, over all contexts."""
        self.check_holder(holder, 0)
        return tuple([self.counts[holder * TIERS + tier] for tier in range(TIERS)])

    def store(self, uint32_t context, uint32_t holder, uint32_t tier, hashes) -> int:
        """The holder has these blocks in this tier. Returns how many it had not.

        Raises `LimitExceeded` when a bound is reached: the blocks before `index` are stored, the others not.
        """
        cdef Keys keys
        cdef Scope scope
        cdef Py_ssize_t done = 0, added
        self.check_holder(holder, tier)
        open_keys(hashes, &keys)
        try:
            self.lock()
            scope = self.slots.scope_of(context)
            if keys.count < RELEASE_FROM:
                added = self.hold_blocks(&scope, holder, tier, &keys, &done)
            else:
                with nogil:
                    added = self.hold_blocks(&scope, holder, tier, &keys, &done)
            pthread_mutex_unlock(&self.mutex)
            if done < keys.count:
                self.refuse(done)
        finally:
            close_keys(&keys)
        return added

    def remove(self, uint32_t context, uint32_t holder, uint32_t tier, hashes) -> int:
        """The holder has these blocks in this tier (EVERY_TIER: in none) no more. Returns how many it had.

        Needs no memory that it cannot do without: where a set cannot be made, the block is forgotten altogether.
        """
        cdef Keys keys
        cdef Scope scope
        cdef Py_ssize_t removed
        self.check_holder(holder, tier if tier != ALL_TIERS else 0)
        open_keys(hashes, &keys)
        try:
            self.lock()
            scope = self.slots.scope_of(context)
            if keys.count < RELEASE_FROM:
                removed = self.release_blocks(&scope, holder, tier, &keys)
            else:
                with nogil:
                    removed = self.release_blocks(&scope, holder, tier, &keys)
            pthread_mutex_unlock(&self.mutex)
        finally:
            close_keys(&keys)
        return removed

    def clear(self, uint32_t holder, uint32_t tier=ALL_TIERS, uint32_t context=ANY_CONTEXT) -> int:
        """The holder has nothing in this tier of this context any more. Returns how many blocks it had.

        O(blocks of the table), some ns each and some tens for each freed; O(1) for a holder without blocks.
        """
        cdef Py_ssize_t removed
        self.check_holder(holder, tier if tier != ALL_TIERS else 0)
        self.lock()
        with nogil:
            removed = self.release_everything(holder, tier, context)
        pthread_mutex_unlock(&self.mutex)
        return removed

    def drop_context(self, uint32_t context) -> int:
        """Forgets every block of a context, whoever holds it. Returns how many; O(blocks of the table)."""
        cdef Py_ssize_t removed = 0
        cdef uint32_t at
        self.lock()
        with nogil:
            for at in range(self.slots.used):
                if at + LOOK_AHEAD < self.slots.used and self.slots.slots[at + LOOK_AHEAD].context == context:
                    self.slots.look_ahead_to(at + LOOK_AHEAD)
                if self.slots.slots[at].holders and self.slots.slots[at].context == context:
                    self.forget(at)
                    removed += 1
        pthread_mutex_unlock(&self.mutex)
        return removed

    def query(self, uint32_t context, hashes, bint mixed=False) -> Match:
        """How far each holder has this chain: O(blocks + holders of the first block).

        `mixed`: a block counts for a tier when it is in that tier or a faster one.
        """
        cdef Keys keys
        cdef Match match
        cdef bint enough
        open_keys(hashes, &keys)
        try:
            match = Match(keys.count)
            self.lock()
            self.walk.mixed = mixed
            if keys.count < RELEASE_FROM:
                enough = self.match_rows(context, &keys, match)
            else:
                with nogil:
                    enough = self.match_rows(context, &keys, match)
            pthread_mutex_unlock(&self.mutex)
        finally:
            close_keys(&keys)
        if not enough:
            raise OutOfMemory("no memory for the result of a query")
        return match

    def query_into(self, uint32_t context, hashes, uint32_t[:, ::1] out, bint mixed=False) -> None:
        """The same for every holder by number: `out` is `uint32[3, width]`, one row a tier, zeros for no match.

        `width` must cover every holder that has blocks: `holders_max` always does.
        """
        cdef Keys keys
        cdef bint fits
        check_planes(out.shape[0], out.shape[1])
        open_keys(hashes, &keys)
        try:
            self.lock()
            self.walk.mixed = mixed
            fits = self.match_planes(context, keys.data, keys.count, &out[0, 0], out.shape[1])
            pthread_mutex_unlock(&self.mutex)
        finally:
            close_keys(&keys)
        if not fits:
            raise UsageError("a holder's number is outside the output; make it holders_max wide", field="out")

    def query_many(self, uint32_t context, hashes, offsets, uint32_t[:, :, ::1] out, bint mixed=False) -> None:
        """Many chains, one behind another in `hashes`, chain i from `offsets[i]` on: `out` is `uint32[n, 3, width]`."""
        cdef Keys keys, bounds
        cdef Py_ssize_t i, n = out.shape[0]
        cdef bint fits = True
        check_planes(out.shape[1], out.shape[2])
        open_keys(hashes, &keys)
        try:
            open_keys(offsets, &bounds)
            try:
                check_offsets(&bounds, n, keys.count)
                self.lock()
                self.walk.mixed = mixed
                with nogil:
                    for i in range(n):
                        fits &= self.match_planes(
                            context, keys.data + bounds.data[i], bounds.data[i + 1] - bounds.data[i],
                            &out[i, 0, 0], out.shape[2],
                        )
                pthread_mutex_unlock(&self.mutex)
            finally:
                close_keys(&bounds)
        finally:
            close_keys(&keys)
        if not fits:
            raise UsageError("a holder's number is outside the output; make it holders_max wide", field="out")

    def tiers_of(self, uint32_t context, uint64_t key, uint32_t holder) -> int:
        """The tiers, as bits, in which the holder has the block."""
        cdef Scope scope
        cdef uint32_t at, tiers = 0
        self.check_holder(holder, 0)
        self.lock()
        scope = self.slots.scope_of(context)
        at = self.slots.find(&scope, key)
        if at != NO_SLOT:
            tiers = self.sets.tiers_of(self.slots.slots[at].holders, holder)
        pthread_mutex_unlock(&self.mutex)
        return tiers

    def contexts_in_use(self) -> set:
        """The contexts that have blocks; O(blocks of the table)."""
        cdef uint32_t at
        found = set()
        self.lock()
        try:
            for at in range(self.slots.used):
                if self.slots.slots[at].holders:
                    found.add(self.slots.slots[at].context)
        finally:
            pthread_mutex_unlock(&self.mutex)
        return found

    def check(self) -> None:
        """Asserts every invariant; raises `InternalError` that names the broken one. O(blocks * holders of a set)."""
        cdef uint32_t at, i
        self.lock()
        try:
            self.slots.check()
            for i in range(self.sets.used):
                self.sets.sets[i].counted = 0
            for at in range(self.slots.used):
                i = self.slots.slots[at].holders
                if i:
                    require(i < self.sets.used and self.sets.sets[i].chunks != NULL, "a block's set was freed")
                    self.sets.sets[i].counted += 1
            self.check_counts()
            self.sets.check()
        finally:
            pthread_mutex_unlock(&self.mutex)

    cdef int check_counts(self) except -1:
        """Asserts that each holder's blocks are counted right, given how many blocks have each set."""
        cdef uint64_t* counts = <uint64_t*>PyMem_RawCalloc(self.holders_max * TIERS, sizeof(uint64_t))
        cdef uint32_t i
        if counts == NULL:
            raise OutOfMemory("no memory to count the blocks of each holder")
        for i in range(1, self.sets.used):
            if self.sets.sets[i].counted:
                add_members(counts, &self.sets.sets[i], self.sets.sets[i].counted)
        same = memcmp(counts, self.counts, self.holders_max * TIERS * sizeof(uint64_t)) == 0
        PyMem_RawFree(counts)
        return require(same, "a holder's blocks are miscounted")

    cdef int lock(self) except -1:
        # Whoever holds the mutex may be waiting for the GIL.
        if pthread_mutex_trylock(&self.mutex) != 0:
            with nogil:
                pthread_mutex_lock(&self.mutex)
        return 0

    cdef int check_holder(self, uint32_t holder, uint32_t tier) except -1:
        if holder >= self.holders_max:
            raise UsageError(f"a holder's number is below {self.holders_max}; got {holder}", field="holder")
        if tier >= TIERS:
            raise UsageError(f"a tier is 0, 1 or 2; got {tier}", field="tier")
        return 0

    cdef int refuse(self, Py_ssize_t done) except -1:
        if self.slots.live >= self.slots.blocks_max:
            raise LimitExceeded(
                "the index is full; raise blocks_max", field="blocks_max", limit=self.slots.blocks_max, index=done
            )
        if not self.sets.has_room(sizeof(Chunk) * (self.holders_max // HOLDERS_PER_CHUNK + 1)):
            raise LimitExceeded(
                "the index has too many distinct sets of holders; raise set_bytes_max",
                field="set_bytes_max", limit=self.sets.bytes_max, index=done,
            )
        raise OutOfMemory("no memory for more blocks of the index", index=done)

    cdef Py_ssize_t hold_blocks(
        self, Scope* scope, uint32_t holder, uint32_t tier, Keys* keys, Py_ssize_t* done
    ) noexcept nogil:
        cdef uint32_t at = NO_SLOT - 1, before, to
        cdef Py_ssize_t i, added = 0
        for i in range(keys.count):
            at += 1
            if not stands_at(self.slots, at, scope, keys.data[i]):
                self.slots.look_ahead(scope, keys.data, i, keys.count)
                at = self.slots.find(scope, keys.data[i])
            before = EMPTY_SET if at == NO_SLOT else self.slots.slots[at].holders
            to = self.sets.changed(before, holder, HOLD + tier)
            if to == before:
                continue
            if to != NO_SET and at == NO_SLOT:
                at = self.slots.insert(scope, keys.data[i], to)
            if to == NO_SET or at == NO_SLOT:
                break
            self.slots.slots[at].holders = to
            self.sets.take(to)
            self.sets.drop(before)
            added += 1
        else:
            i = keys.count
        done[0] = i
        self.counts[holder * TIERS + tier] += added
        return added

    cdef Py_ssize_t release_blocks(self, Scope* scope, uint32_t holder, uint32_t tier, Keys* keys) noexcept nogil:
        cdef uint32_t at = NO_SLOT - 1
        cdef Py_ssize_t i, removed = 0
        for i in range(keys.count):
            at += 1
            if not stands_at(self.slots, at, scope, keys.data[i]):
                self.slots.look_ahead(scope, keys.data, i, keys.count)
                at = self.slots.find(scope, keys.data[i])
                if at == NO_SLOT:
                    at -= 1
                    continue
            removed += self.release(at, holder, tier)
        return removed

    cdef Py_ssize_t release_everything(self, uint32_t holder, uint32_t tier, uint32_t context) noexcept nogil:
        cdef uint64_t* held = &self.counts[holder * TIERS]
        cdef Py_ssize_t removed = 0
        cdef uint32_t at, ahead
        for at in range(self.slots.used):
            # Counted down by release(): past the last block of this holder there is nothing to look for.
            if (held[0] + held[1] + held[2] if tier == ALL_TIERS else held[tier]) == 0:
                break
            ahead = at + LOOK_AHEAD
            if (ahead < self.slots.used and self.slots.slots[ahead].holders != EMPTY_SET
                    and self.sets.changed(self.slots.slots[ahead].holders, holder, RELEASE + tier) == EMPTY_SET):
                self.slots.look_ahead_to(ahead)  # it will be freed: 110 ns without this, 40 with it
            if self.slots.slots[at].holders and (context == ANY_CONTEXT or self.slots.slots[at].context == context):
                removed += self.release(at, holder, tier)
        return removed

    cdef bint release(self, uint32_t at, uint32_t holder, uint32_t tier) noexcept nogil:
        """Takes the holder off one block; frees the block with its last holder. Whether the holder had it."""
        cdef Slot* slot = &self.slots.slots[at]
        cdef uint32_t before = slot.holders, to = self.sets.changed(before, holder, RELEASE + tier), tiers
        cdef int i
        if to == before:
            return False
        if to == NO_SET:
            self.forget(at)
            self.forgotten += 1
            return True
        tiers = 1 << tier if tier != ALL_TIERS else self.sets.tiers_of(before, holder)
        for i in range(TIERS):
            self.counts[holder * TIERS + i] -= tiers >> i & 1
        self.sets.take(to)
        self.sets.drop(before)
        if to == EMPTY_SET:
            self.slots.remove(at)
        else:
            slot.holders = to
        return True

    cdef void forget(self, uint32_t at) noexcept nogil:
        """Frees a block, whoever holds it."""
        add_members(self.counts, &self.sets.sets[self.slots.slots[at].holders], <uint64_t>-1)
        self.sets.drop(self.slots.slots[at].holders)
        self.slots.remove(at)

    cdef bint match_rows(self, uint32_t context, Keys* keys, Match match) noexcept nogil:
        """Fills a match; False without memory."""
        cdef Scope scope = self.slots.scope_of(context)
        cdef uint32_t first = self.slots.find(&scope, keys.data[0]) if keys.count else NO_SLOT
        if first == NO_SLOT:
            return True
        if not match.reserve(self.walk.begin(&self.sets.sets[self.slots.slots[first].holders])):
            return False
        self.walk.list_holders(match.data)
        self.walk.depths = match.data + match.rows
        self.walk.stride = match.rows
        self.walk.by_row = True
        self.walk.follow(self.slots, self.sets, &scope, keys.data, keys.count)
        return True

    cdef bint match_planes(
        self, uint32_t context, const uint64_t* keys, Py_ssize_t count, uint32_t* out, Py_ssize_t width
    ) noexcept nogil:
        """Fills planes by holder; False when a holder's number is not below `width` (then they are zeros)."""
        cdef Scope scope = self.slots.scope_of(context)
        cdef uint32_t first = self.slots.find(&scope, keys[0]) if count else NO_SLOT
        cdef HolderSet* holders
        cdef Chunk* last
        memset(out, 0, TIERS * width * sizeof(uint32_t))
        if first == NO_SLOT:
            return True
        holders = &self.sets.sets[self.slots.slots[first].holders]
        last = &holders.chunks[holders.count - 1]
        if last.word * HOLDERS_PER_CHUNK + highest_bit(last.tiers[0] | last.tiers[1] | last.tiers[2]) >= width:
            return False
        self.walk.begin(holders)
        self.walk.depths = out
        self.walk.stride = width
        self.walk.by_row = False
        self.walk.follow(self.slots, self.sets, &scope, keys, count)
        return True


cdef inline uint32_t highest_bit(uint64_t bits) noexcept nogil:
    cdef uint32_t found = 0
    while bits > 1:
        bits >>= 1
        found += 1
    return found


cdef int check_planes(Py_ssize_t tiers, Py_ssize_t width) except -1:
    if tiers != TIERS or width < 1:
        raise UsageError(f"the output needs {TIERS} rows, one a tier, and a column a holder", field="out")
    return 0


cdef int check_offsets(Keys* bounds, Py_ssize_t chains, Py_ssize_t count) except -1:
    cdef Py_ssize_t i
    if bounds.count != chains + 1:
        raise UsageError("offsets need one number more than the output has chains", field="offsets")
    for i in range(chains):
        if bounds.data[i] > bounds.data[i + 1] or bounds.data[i + 1] > <uint64_t>count:
            raise UsageError("offsets must ascend and end inside the hashes", field="offsets", index=i + 1)
    return 0


cdef void add_members(uint64_t* counts, HolderSet* holders, uint64_t blocks) noexcept nogil:
    """Counts `blocks` more blocks for each member of the set, in its tier."""
    cdef uint32_t i
    cdef int tier
    cdef uint64_t bits
    for i in range(holders.count):
        for tier in range(TIERS):
            bits = holders.chunks[i].tiers[tier]
            while bits:
                counts[(holders.chunks[i].word * HOLDERS_PER_CHUNK + mp_lowest_bit(bits)) * TIERS + tier] += blocks
                bits &= bits - 1
