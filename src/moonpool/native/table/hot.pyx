"""The native core: hot methods for the rpc loop, on the tables of a leader.

A leader makes one for its tables, uses its `counters` instead of its own, tells it at the end of each turn what else
it needs to know (`set_*`), and takes what hot methods made at the start of the next turn (`take`). In between the
loop's thread serves `exists`, `lookup`, `put_start` and `put_end` here, without the GIL. What such a method answers,
and the bytes of facts and effects, are those of the leader's Python methods; what it will not answer goes there.

Rates and costs: tests/perf/test_store_hot.py.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawRealloc
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from moonpool.native.io.rpc_hot cimport (
    HOT_ANSWERED, HOT_CAPSULE, HOT_COLD, HOT_EXISTS, HOT_LOOKUP, HOT_METHODS, HOT_PUT_END, HOT_PUT_START, HotBinding,
    HotCall, HotOut, hot_function,
)
from moonpool.native.table.directory_slots cimport DirectorySlots
from moonpool.native.table.extents cimport Extents
from moonpool.native.table.hot_ends cimport hot_put_end
from moonpool.native.table.hot_reads cimport hot_exists, hot_lookup
from moonpool.native.table.hot_starts cimport hot_put_start
from moonpool.native.table.hot_state cimport UNSEEN, HotCounters, HotSegment, HotState, mp_byte_log
from moonpool.native.table.objects cimport ObjectTable
from moonpool.native.table.open_puts cimport OpenPuts

from moonpool.errors import InternalError, OutOfMemory, UsageError

cdef extern from "byte_log.h" nogil:
    void mp_log_clear(mp_byte_log* log, size_t kept_bytes)

cdef enum:
    KEPT_BYTES = 1 << 20      # of the buffers of facts and effects between turns
    GRANT_KEY_BYTES = 16


cdef int serve(HotState state, int method, const HotCall* call, HotOut* out) noexcept nogil:
    if not state.told:
        return HOT_COLD
    if method == HOT_EXISTS:
        return hot_exists(state, call, out)
    if method == HOT_LOOKUP:
        return hot_lookup(state, call, out)
    if method == HOT_PUT_START:
        return hot_put_start(state, call, out)
    if method == HOT_PUT_END:
        return hot_put_end(state, call, out)
    return HOT_COLD


@cython.final
cdef class HotCore:
    """The native core of a leader with these tables.

    `counters`: what the leader gave last. Limits, as in MasterConfig: `batch_keys_max`, `lease_ms_max`, `put_ms`,
    `put_bytes_per_ms`, `facts_waiting_max`; `waiting_bytes_max` bounds facts and effects that no turn has taken.
    """

    cdef HotState state
    cdef HotBinding binding

    def __cinit__(self, ObjectTable objects not None, OpenPuts puts not None, HotCounters counters not None, *,
                  batch_keys_max, lease_ms_max, put_ms, put_bytes_per_ms, facts_waiting_max,
                  waiting_bytes_max=64 << 20):
        if not 1 <= batch_keys_max <= 1 << 20 or put_bytes_per_ms < 1:
            raise UsageError("batch_keys_max must be from 1 to 2^20, put_bytes_per_ms above 0", field="batch_keys_max")
        self.state = HotState(objects.stored, puts, counters, batch_keys_max)
        self.state.lease_ms_max = lease_ms_max
        self.state.put_ms = put_ms
        self.state.put_bytes_per_ms = put_bytes_per_ms
        self.state.facts_waiting_max = facts_waiting_max
        self.state.waiting_bytes_max = waiting_bytes_max
        self.binding.function = <hot_function><void*>serve
        self.binding.core = <void*>self.state

    @property
    def counters(self) -> HotCounters:
        return self.state.counters

    def hot_binding(self):
        """A capsule for the rpc loop, good while this object lives."""
        return PyCapsule_New(&self.binding, HOT_CAPSULE, NULL)

    def set_turn(self, now_ms, durable, segments_version, *, may_change, may_end) -> None:
        """Cluster time, the last durable fact, the version of the segments; whether facts may be made, and whether
        new objects may be confirmed before their facts are durable. Before the first call everything goes to Python.
        """
        self.state.now_ms = max(self.state.now_ms, <uint64_t>now_ms)
        self.state.told = True
        self.state.durable = durable
        self.state.segments_version = segments_version
        self.state.may_change = may_change
        self.state.may_end = may_end

    def set_segment(self, segment_id, extents, slots, *, data_handle, rank, node_id) -> None:
        """A segment that the table of objects has. `rank`: 0 read first, 1 read last, None not seen by readers."""
        cdef uint32_t number = self.state.objects.recency.number_of(segment_id)
        cdef HotSegment* segment
        if not (isinstance(extents, Extents) and isinstance(slots, DirectorySlots)):
            raise UsageError("a native core works on native extents and slots", field="extents")
        if not (rank is None or 0 <= rank <= 1):
            raise UsageError("a rank is 0, 1 or None", field="rank")
        if self.state.numbers.get(segment_id, number) != number:
            raise InternalError(f"segment {segment_id} went and came back without drop_segment")
        if segment_id not in self.state.numbers:
            if number >= self.state.objects.recency.segments_used:
                raise InternalError(f"there is no segment {segment_id} in the table of objects")
            self.state.grow_segments(number)
            memset(&self.state.segments[number], 0, sizeof(HotSegment))
            self.state.numbers[segment_id] = number
        segment = &self.state.segments[number]
        self.state.kept[segment_id] = (extents, slots)
        segment.extents = <void*>extents
        segment.slots = <void*>slots
        segment.segment_id = segment_id
        segment.data_handle = data_handle
        segment.node_id = node_id
        segment.rank = UNSEEN if rank is None else <uint8_t>rank

    def set_floor(self, segment_id, *, resolved, floor, slot_floor) -> None:
        """What may be free of a segment: everything, or only what lies from these floors on."""
        cdef HotSegment* segment = self.segment(segment_id)
        segment.resolved = resolved
        segment.floor = floor
        segment.slot_floor = slot_floor

    def set_join(self, segment_id, grant_key, clock_ms, clock_at_ms) -> None:
        """The grant key of the segment's node, and its clock: `clock_ms` at cluster time `clock_at_ms`.

        A `grant_key` of None: the node is away, it gets no effects, and grants for it are void.
        """
        cdef HotSegment* segment = self.segment(segment_id)
        cdef const uint8_t* key
        segment.joined = grant_key is not None
        segment.grant_k0 = segment.grant_k1 = 0
        if grant_key is not None:
            if len(grant_key) != GRANT_KEY_BYTES:
                raise UsageError("a grant key has 16 bytes", field="grant_key")
            key = grant_key
            memcpy(&segment.grant_k0, key, 8)
            memcpy(&segment.grant_k1, key + 8, 8)
        segment.clock_ms = clock_ms
        segment.clock_at_ms = clock_at_ms

    def drop_segment(self, segment_id) -> None:
        """Forgets a segment, which the table of objects may have forgotten already."""
        number = self.state.numbers.pop(segment_id, None)
        if number is None:
            raise InternalError(f"this core has no segment {segment_id}")
        memset(&self.state.segments[<uint32_t>number], 0, sizeof(HotSegment))
        self.state.schedule_count = 0
        del self.state.kept[segment_id]

    def set_schedule(self, segment_ids, largest_segment) -> None:
        """Where puts go (see moonpool.store.placement), and the capacity of the largest segment there."""
        cdef uint32_t at, count = len(segment_ids)
        cdef uint32_t* grown
        numbers = [self.state.numbers.get(segment_id) for segment_id in segment_ids]
        if None in numbers:
            raise InternalError("the schedule names a segment that this core does not have")
        grown = <uint32_t*>PyMem_RawRealloc(self.state.schedule, max(count, 1) * sizeof(uint32_t))
        if grown == NULL:
            raise OutOfMemory("no memory for the schedule of segments")
        self.state.schedule = grown
        for at in range(count):
            grown[at] = numbers[at]
        self.state.schedule_count = count
        self.state.largest_segment = largest_segment

    def set_quotas(self, tenants) -> None:
        """The tenants that have a quota: their puts go to Python."""
        cdef uint32_t at = 0
        cdef uint32_t* grown
        wanted = set(tenants)
        if wanted == self.state.quota_tenants:
            return
        grown = <uint32_t*>PyMem_RawRealloc(self.state.quotas, (len(wanted) + 1) * sizeof(uint32_t))
        if grown == NULL:
            raise OutOfMemory("no memory for the tenants with quotas")
        self.state.quotas = grown
        for tenant in wanted:
            grown[at] = tenant
            at += 1
        self.state.quota_count = at
        self.state.quota_tenants = wanted

    @property
    def has_changes(self) -> bool:
        """Whether `take` has anything to give."""
        return self.state.facts.count > 0 or self.state.freed

    def take(self) -> tuple:
        """What hot methods did since the last call: facts in order, the number of the first, effects in order as
        (node id, number of the fact they wait for, bytes), and whether space became free.
        """
        cdef uint64_t first = self.state.facts.marks[0].sequence if self.state.facts.count else 0
        cdef list facts = [fact for _, _, fact in records_of(&self.state.facts)]
        cdef list effects = records_of(&self.state.effects)
        cdef bint freed = self.state.freed
        mp_log_clear(&self.state.facts, KEPT_BYTES)
        mp_log_clear(&self.state.effects, KEPT_BYTES)
        self.state.freed = False
        return facts, first, effects, freed

    def call(self, int method, uint32_t client, uint32_t tenant, uint64_t now_ms, bytes params not None):
        """One request as the loop would make it, for tests and measurements: the reply's bytes, None for Python.

        `method`: 0 exists, 1 lookup, 2 put_start, 3 put_end.
        """
        cdef HotCall call
        cdef HotOut out
        cdef int answered
        if not 0 <= method < HOT_METHODS:
            raise UsageError("there is no such hot method", field="method", value=str(method))
        memset(&out, 0, sizeof(out))
        out.limit = 16 << 20
        call.connection = 0
        call.client, call.tenant, call.now_ms = client, tenant, now_ms
        call.params = params
        call.params_bytes = len(params)
        with nogil:
            answered = serve(self.state, method, &call, &out)
        try:
            if answered == HOT_ANSWERED:
                return PyBytes_FromStringAndSize(<char*>out.data, out.length)
            if answered == HOT_COLD:
                return None
            raise OutOfMemory("no memory for a hot request")
        finally:
            free(out.data)

    cdef HotSegment* segment(self, segment_id) except NULL:
        number = self.state.numbers.get(segment_id)
        if number is None:
            raise InternalError(f"this core has no segment {segment_id}")
        return &self.state.segments[<uint32_t>number]


cdef list records_of(mp_byte_log* log):
    """(node, sequence, bytes) of each record."""
    cdef size_t at = 0
    cdef uint32_t i
    cdef list found = []
    for i in range(log.count):
        record = PyBytes_FromStringAndSize(<char*>log.data + at, log.marks[i].end - at)
        found.append((log.marks[i].node, log.marks[i].sequence, record))
        at = log.marks[i].end
    return found
