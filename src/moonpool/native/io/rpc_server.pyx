"""The object around the rpc server's loop (rpc_loop.pyx): connections by number, events, replies, counters.

Threads: `add`, `wake`, `listen` and `unlisten` may be called by any; all else belongs to the thread that calls `poll`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from moonpool.native.io.guard cimport mp_count, mp_now_ns, mp_tally
from moonpool.native.io.rpc_hot cimport HOT_CAPSULE, HOT_METHODS, HotBinding
from moonpool.native.io.rpc_loop cimport (
    CLOSED_HERE,
    KIND_REQUEST,
    LATENCY_BUCKETS,
    MALFORMED,
    REASONS,
    SLOT_BITS,
    end,
    forget,
    log2_bucket,
    loop_close,
    loop_listen,
    loop_open,
    loop_run,
    loop_wake,
    loop_watch,
    make_ready,
    next_event,
    out_room,
    rpc_connection,
    rpc_event,
    rpc_loop,
)
from moonpool.native.io.rpc_msgpack cimport mp_pack_nil, mp_rpc_begin_reply, mp_rpc_length

from moonpool.errors import InternalError, LimitExceeded, ResourceError, UsageError

#: Kinds of events.
REQUEST = 1
CLOSED = 2
#: Why a connection closed, as CLOSED events say it.
REASON_NAMES = ("peer_closed", "malformed", "frame_too_large", "stalled", "slow_frame", "overflow", "overloaded",
                "closed_here", "lease_over")
#: Methods that a native core may answer, by their number.
HOT_NAMES = ("exists", "lookup", "put_start", "put_end")


cdef class RpcServer:
    """The loop and its connections. `limits` is a `moonpool.rpc.limits.ServerLimits`; `hot` has `hot_binding()`.

    Latencies of cold methods are kept for the `methods` named here; all others count as "other".
    """

    cdef rpc_loop loop
    cdef rpc_connection** slots
    cdef list free_slots
    cdef uint32_t slots_max
    cdef uint64_t serial, polls
    cdef dict labels, open_requests, cold_latency
    cdef object hot
    cdef bint inside

    def __cinit__(self, limits, *, hot=None, methods=()):
        self.loop.epoll_fd = self.loop.wake_fd = -1
        self.slots_max = limits.connections_max
        self.slots = <rpc_connection**>calloc(self.slots_max, sizeof(void*))
        if self.slots == NULL:
            raise MemoryError
        self.free_slots = list(range(self.slots_max - 1, -1, -1))
        self.labels, self.open_requests = {}, {}
        self.cold_latency = {name: [0] * LATENCY_BUCKETS for name in (*methods, "other")}
        self.loop.frame_bytes_max = limits.frame_bytes_max
        self.loop.outbound_bytes_max = limits.outbound_bytes_max
        self.loop.buffer_bytes_max = limits.buffer_bytes_max
        self.loop.unanswered_max = limits.unanswered_max
        self.loop.events_max = limits.events_max
        self.loop.stall_ns = limits.stall_ms * 1000000
        self.loop.frame_ns = limits.frame_ms * 1000000
        self.loop.spin_ns = limits.spin_us * 1000
        self.loop.linger_ns = limits.linger_us * 1000
        self.loop.hot_until_ms = <uint64_t>-1
        self._take_hot(hot)
        if not loop_open(&self.loop):
            raise ResourceError("the rpc loop got no descriptors; raise RLIMIT_NOFILE", errno=errno)

    def __dealloc__(self):
        self._free()

    cdef _take_hot(self, hot):
        cdef HotBinding* binding
        if hot is None:
            self.loop.hot = NULL
            self.loop.core = NULL
        else:
            binding = <HotBinding*>PyCapsule_GetPointer(hot.hot_binding(), HOT_CAPSULE)
            self.loop.hot = binding.function
            self.loop.core = binding.core
        self.hot = hot

    cdef void _free(self) noexcept:
        cdef uint32_t k
        cdef rpc_event* event
        if self.slots == NULL:
            return
        for k in range(self.slots_max):
            if self.slots[k] != NULL:
                end(&self.loop, self.slots[k], CLOSED_HERE)
        event = next_event(&self.loop)
        while event != NULL:
            if event.kind == KIND_REQUEST:
                free(event)
            event = next_event(&self.loop)
        for k in range(self.slots_max):
            free(self.slots[k])
        free(self.slots)
        self.slots = NULL
        loop_close(&self.loop)

    cdef int _check(self) except -1:
        if self.inside:
            raise InternalError("the rpc loop is running: only `add` and `wake` may be called meanwhile")
        if self.slots == NULL:
            raise UsageError("the rpc server is closed; make a new one")
        return 0

    cdef rpc_connection* _find(self, uint64_t number) except? NULL:
        """The open connection of a number, or NULL."""
        cdef uint32_t slot = number & ((1 << SLOT_BITS) - 1)
        cdef rpc_connection* c
        self._check()
        if slot >= self.slots_max:
            return NULL
        c = self.slots[slot]
        return c if c != NULL and c.number == number and c.fd >= 0 and not c.closing else NULL

    # Connections

    def add(self, int fd, str label="") -> int:
        """Takes a connected, authenticated socket and returns its connection's number; any thread may call.

        The descriptor belongs to the server from then on. Raises `LimitExceeded` at `connections_max` and
        `ResourceError` when the system has no room; then the descriptor stays the caller's.
        """
        cdef rpc_connection* c
        cdef uint32_t slot
        if self.slots == NULL:
            raise UsageError("the rpc server is closed; make a new one")
        if not self.free_slots:
            raise LimitExceeded("the rpc server has connections_max connections", field="connections_max",
                                limit=self.slots_max)
        c = <rpc_connection*>calloc(1, sizeof(rpc_connection))
        if c == NULL:
            raise MemoryError
        slot = self.free_slots.pop()
        self.serial += 1
        c.number = self.serial << SLOT_BITS | slot
        c.fd = fd
        self.slots[slot] = c
        self.labels[c.number] = label
        number = c.number
        if not loop_watch(&self.loop, c):
            code = errno
            self.slots[slot] = NULL
            del self.labels[number]
            free(c)
            self.free_slots.append(slot)
            raise ResourceError("the connection cannot be watched", errno=code)
        return number

    def wake(self) -> None:
        """Makes the running or the next `poll` return; any thread may call."""
        loop_wake(&self.loop)

    def listen(self, int fd) -> None:
        """`poll` returns while this descriptor of somebody else's is readable; any thread may call.

        Its owner reads it between polls, and calls `unlisten` before closing it.
        """
        if not loop_listen(&self.loop, fd, True):
            raise ResourceError("the descriptor cannot be watched", errno=errno)

    def unlisten(self, int fd) -> None:
        """Ends `listen`; nothing happens when it was not watched."""
        loop_listen(&self.loop, fd, False)

    def stay_awake(self, uint32_t wait_us) -> None:
        """An answer is expected soon: the next `poll` looks again and again for so long before it sleeps."""
        self._check()
        self.loop.active_ns = mp_now_ns() + <uint64_t>wait_us * 1000

    def label(self, connection: int) -> str:
        """What `add` was told of a connection; "" once it is gone."""
        return self.labels.get(connection, "")

    @property
    def connections(self) -> int:
        """Connections that have not had their CLOSED event."""
        return len(self.labels)

    @property
    def has_room(self) -> bool:
        """Whether one more connection fits; any thread may ask."""
        return bool(self.free_slots)

    def bind(self, uint64_t connection, uint32_t client, uint32_t tenant) -> bool:
        """Names the client and tenant of a connection, which lets its hot methods in; False when it is gone.

        Client 0 unbinds: hot methods then come to Python.
        """
        cdef rpc_connection* c = self._find(connection)
        if c == NULL:
            return False
        c.client = client
        c.tenant = tenant
        return True

    def close_connection(self, uint64_t connection) -> bool:
        """Closes a connection once what it was sent is out; its CLOSED event follows. False when it is gone."""
        cdef rpc_connection* c = self._find(connection)
        if c == NULL:
            return False
        c.closing = True
        make_ready(&self.loop, c)
        return True

    # The loop

    def set_hot(self, hot) -> None:
        """Has another native core answer hot methods from now on; None: they all come to Python."""
        self._check()
        self._take_hot(hot)

    def set_clock(self, int64_t offset_ms) -> None:
        """Cluster time is CLOCK_BOOTTIME in ms plus this, for hot methods."""
        self._check()
        self.loop.offset_ms = offset_ms

    def set_hot_until(self, uint64_t cluster_ms) -> None:
        """From this cluster time on, hot methods come to Python: the end of the leader's lease. 0: at once.

        Their answers that are unsent by then never leave: the connections that wait for them are closed ("lease_over").
        """
        self._check()
        self.loop.hot_until_ms = cluster_ms

    def poll(self, int timeout_ms) -> list:
        """Serves until there are events, a wake-up, changes by hot methods, or the timeout; returns the events.

        Oldest first: `(REQUEST, connection, message id, method, params)` with params as checked MessagePack, and
        `(CLOSED, connection, reason)`.
        """
        cdef uint64_t deadline
        self._check()
        deadline = mp_now_ns() + <uint64_t>(timeout_ms if timeout_ms > 0 else 0) * 1000000
        self.inside = True
        with nogil:
            loop_run(&self.loop, deadline)
        self.inside = False
        self.polls += 1
        self.loop.woken = False
        self.loop.changed_ns = 0
        return self._take_events() if self.loop.first != NULL else []

    cdef list _take_events(self):
        cdef list events = []
        cdef rpc_event* event = next_event(&self.loop)
        while event != NULL:
            if event.kind == KIND_REQUEST:
                self._take_request(events, event)
            else:
                self._take_closed(events, event)
            event = next_event(&self.loop)
        return events

    cdef _take_request(self, list events, rpc_event* event):
        cdef char* data = <char*>(event + 1)
        cdef uint64_t number = event.connection, message_id = event.id
        method = data[:event.method_bytes].decode("utf-8", "replace")
        params = data[event.method_bytes:event.method_bytes + event.params_bytes]
        waiting = self.open_requests.setdefault(number, {})
        if message_id in waiting:
            # Two answers would carry one id: the client breaks the protocol.
            free(event)
            self._end(number, MALFORMED)
            return
        waiting[message_id] = (method, event.since_ns)
        free(event)
        events.append((REQUEST, number, message_id, method, params))

    cdef _end(self, uint64_t number, int reason):
        cdef rpc_connection* c = self._find(number)
        if c != NULL:
            end(&self.loop, c, reason)

    cdef _take_closed(self, list events, rpc_event* event):
        cdef uint64_t number = event.connection
        cdef uint32_t slot = number & ((1 << SLOT_BITS) - 1)
        events.append((CLOSED, number, REASON_NAMES[event.reason]))
        self.labels.pop(number, None)
        self.open_requests.pop(number, None)
        forget(&self.loop, self.slots[slot])
        free(self.slots[slot])  # the event is a part of it
        self.slots[slot] = NULL
        self.free_slots.append(slot)

    # Answers

    def reply(self, uint64_t connection, uint64_t message_id, bytes result not None, bytes error=None) -> bool:
        """Answers a request with one MessagePack value, or with an error ([code, name, message]) and nil.

        False when the connection is gone or the request is not open. Raises `LimitExceeded` for a reply above
        `frame_bytes_max`; the request is then still open. Sent by the next `poll`.
        """
        cdef rpc_connection* c = self._find(connection)
        cdef size_t start, error_bytes = PyBytes_GET_SIZE(error) if error is not None else 1
        cdef size_t size = PyBytes_GET_SIZE(result) + error_bytes + 11
        cdef uint8_t* p
        cdef dict waiting = self.open_requests.get(connection)
        if size > self.loop.frame_bytes_max:
            raise LimitExceeded("the reply is larger than a frame", field="frame_bytes_max",
                                limit=self.loop.frame_bytes_max, length_bytes=size)
        if c == NULL or waiting is None or message_id not in waiting:
            return False
        self._count_answer(waiting.pop(message_id))
        c.unanswered -= 1
        if not out_room(&self.loop, c, size + 4):
            return False
        start = c.out.length
        p = mp_rpc_begin_reply(c.out.data + start, message_id)
        if error is None:
            p = mp_pack_nil(p)
        else:
            memcpy(p, PyBytes_AS_STRING(error), error_bytes)
            p += error_bytes
        memcpy(p, PyBytes_AS_STRING(result), PyBytes_GET_SIZE(result))
        p += PyBytes_GET_SIZE(result)
        self._finish(c, start, p)
        mp_tally(&self.loop.replies, 1)
        return True

    def push(self, uint64_t connection, bytes message not None) -> bool:
        """Sends one message that nobody asked for: the MessagePack of [2, method, params]. False when it is gone.

        A connection whose unsent bytes pass `outbound_bytes_max` and a frame is closed (reason "overflow").
        """
        cdef rpc_connection* c = self._find(connection)
        cdef size_t start, size = PyBytes_GET_SIZE(message)
        if size > self.loop.frame_bytes_max or size == 0:
            raise LimitExceeded("the push is empty or larger than a frame", field="frame_bytes_max",
                                limit=self.loop.frame_bytes_max, length_bytes=size)
        if c == NULL or not out_room(&self.loop, c, size + 4):
            return False
        start = c.out.length
        memcpy(c.out.data + start + 4, PyBytes_AS_STRING(message), size)
        self._finish(c, start, c.out.data + start + 4 + size)
        mp_tally(&self.loop.pushes, 1)
        return True

    cdef void _finish(self, rpc_connection* c, size_t start, uint8_t* p) noexcept:
        c.out.length = p - c.out.data
        mp_rpc_length(c.out.data + start, c.out.length - start - 4)
        self.loop.active_ns = mp_now_ns()
        make_ready(&self.loop, c)

    cdef _count_answer(self, tuple opened):
        method, since_ns = opened
        cdef list buckets = self.cold_latency.get(method)
        cdef unsigned index = log2_bucket(mp_now_ns() - <uint64_t>since_ns)
        if buckets is None:
            buckets = self.cold_latency["other"]
        buckets[index] += 1

    # What happened

    def counters(self) -> dict:
        """Totals since the start, and the gauges `connections`, `unanswered` and `buffer_bytes`."""
        cdef rpc_loop* loop = &self.loop
        cdef int k
        counted = {
            "requests": mp_count(&loop.requests), "replies": mp_count(&loop.replies), "pushes": mp_count(&loop.pushes),
            "hot_answered": mp_count(&loop.hot_answered), "cold": mp_count(&loop.cold),
            "bad_params": mp_count(&loop.bad_params), "bytes_in": mp_count(&loop.bytes_in),
            "bytes_out": mp_count(&loop.bytes_out), "polls": self.polls, "accepted": self.serial,
            "connections": len(self.labels), "buffer_bytes": loop.buffer_bytes,
            "unanswered": sum(len(waiting) for waiting in list(self.open_requests.values())),
        }
        for k in range(REASONS):
            counted["closed_" + REASON_NAMES[k]] = mp_count(&loop.closed[k])
        return counted

    def latencies(self) -> dict:
        """For each method that was answered, `[(upper bound in us, count), ...]`: hot ones by the time in the core,
        cold ones from the arrival to `reply`."""
        cdef int method, k
        found = {}
        for name, buckets in self.cold_latency.items():
            found[name] = list(buckets)
        for method in range(HOT_METHODS):
            mine = found.setdefault(HOT_NAMES[method], [0] * LATENCY_BUCKETS)
            for k in range(LATENCY_BUCKETS):
                mine[k] += mp_count(&self.loop.latency[method][k])
        return {name: [(2.0 ** (k + 1) / 1000, n) for k, n in enumerate(buckets) if n]
                for name, buckets in found.items() if any(buckets)}

    def close(self) -> None:
        """Closes all connections and the loop; idempotent. No event follows."""
        if self.inside:
            raise InternalError("the rpc loop is running: wake it and close it from its own thread")
        self._free()
        self.labels, self.open_requests, self.free_slots = {}, {}, []
