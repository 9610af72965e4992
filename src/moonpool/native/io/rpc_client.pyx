"""A client's connection as an object: calls from any thread, pushes, and the hot methods without Python's own codec."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from moonpool.native.io.batch cimport CANCELLED, STALLED, TIMED_OUT
from moonpool.native.io.guard cimport mp_deadline_ns
from moonpool.native.io.rpc_codec cimport (
    EndReply,
    LookupReply,
    PutReply,
    as_number,
    frame_buffer,
    listed,
    read_exists,
    write_call,
    write_exists,
    write_lookup,
    write_put_end,
    write_put_start,
)
from moonpool.native.io.rpc_stream cimport (
    WOKEN,
    enter,
    leave,
    rpc_push,
    rpc_stream,
    rpc_waiter,
    send_frame,
    stream_fail,
    stream_free,
    stream_init,
    stream_let_go,
    take_push,
    wait_done,
)

from moonpool.errors import (
    LimitExceeded,
    PeerGone,
    PeerStalled,
    TransferTimeout,
    error_from_status,
)


cdef class RpcConnection:
    """One connection to a server, for any number of threads at once.

    `limits` is a `moonpool.rpc.limits.ClientLimits`. `make_error(error: bytes) -> Exception` makes what a call raises
    from the MessagePack of a reply's error. The descriptor belongs to the connection from then on.
    """

    cdef rpc_stream stream
    cdef bint is_made
    cdef uint64_t next_id
    cdef uint32_t inside
    cdef bint is_closed
    cdef str peer
    cdef object make_error

    def __cinit__(self, int fd, limits, *, str peer="", make_error):
        self.stream.fd = -1
        self.peer = peer
        self.make_error = make_error
        self.next_id = 1
        self.stream.frame_bytes_max = limits.frame_bytes_max
        self.stream.pushes_max = limits.pushes_max
        self.stream.push_bytes_max = limits.push_bytes_max
        self.stream.spin_ns = limits.spin_us * 1000
        self.is_made = True
        if not stream_init(&self.stream, fd):
            self.stream.fd = -1  # still the caller's
            raise MemoryError

    def __dealloc__(self):
        if self.is_made:
            stream_free(&self.stream)

    @property
    def closed_reason(self) -> int:
        """0 while it is open, else the `Status` with which it ended."""
        return self.stream.status

    @property
    def unclaimed(self) -> int:
        """Answers that came after their calls had given up."""
        return self.stream.unclaimed

    def fileno(self) -> int:
        """The descriptor, borrowed; -1 once it is closed."""
        return self.stream.fd

    # Calls. All raise what `make_error` makes of an error reply, `TransferTimeout`, `PeerGone` and other `PeerError`s
    # when the connection ended, `LimitExceeded` for a request above `frame_bytes_max`, `UsageError` for what cannot be
    # asked.

    def call(self, str method not None, bytes params not None, double timeout_s) -> bytes:
        """Asks for any method and waits: the MessagePack of the result. `params` is the MessagePack of a list."""
        cdef frame_buffer f = frame_buffer(NULL, 0, 0)
        cdef rpc_waiter w
        cdef uint64_t message_id = self._id()
        w.frame = NULL
        try:
            write_call(&f, message_id, method, params)
            self._exchange(&f, message_id, &w, timeout_s, method)
            return (<char*>w.body)[:w.body_bytes]
        finally:
            free(f.data)
            free(w.frame)

    def exists(self, keys, lease_ms, double timeout_s) -> bytes:
        """One byte for each key (str or bytes): 1 when it is there. A lease is given with `lease_ms`; 0: none."""
        cdef frame_buffer f = frame_buffer(NULL, 0, 0)
        cdef rpc_waiter w
        cdef uint64_t message_id = self._id()
        w.frame = NULL
        keys = listed(keys)
        try:
            write_exists(&f, message_id, keys, as_number(lease_ms))
            self._exchange(&f, message_id, &w, timeout_s, "exists")
            return read_exists(w.body, w.body_bytes, len(keys))
        finally:
            free(f.data)
            free(w.frame)

    def lookup(self, keys, lease_ms, double timeout_s) -> LookupReply:
        """Where objects are; keys are str or bytes."""
        cdef frame_buffer f = frame_buffer(NULL, 0, 0)
        cdef rpc_waiter w
        cdef LookupReply reply = LookupReply()
        cdef uint64_t message_id = self._id()
        w.frame = NULL
        keys = listed(keys)
        try:
            write_lookup(&f, message_id, keys, as_number(lease_ms))
            self._exchange(&f, message_id, &w, timeout_s, "lookup")
            reply.read(w.body, w.body_bytes, len(keys))
            return reply
        finally:
            free(f.data)
            free(w.frame)

    def put_start(self, keys, sizes, bytes policy, wait_ms, double timeout_s) -> PutReply:
        """Extents for new objects; `policy` is the MessagePack of a map, or None."""
        cdef frame_buffer f = frame_buffer(NULL, 0, 0)
        cdef rpc_waiter w
        cdef PutReply reply = PutReply()
        cdef uint64_t message_id = self._id()
        w.frame = NULL
        keys = listed(keys)
        try:
            write_put_start(&f, message_id, keys, listed(sizes), policy, as_number(wait_ms))
            self._exchange(&f, message_id, &w, timeout_s, "put_start")
            reply.read(w.body, w.body_bytes, len(keys))
            return reply
        finally:
            free(f.data)
            free(w.frame)

    def put_end(self, put_id, indexes, digests, chunks, double timeout_s) -> EndReply:
        """Ends entries of a put; `digests` holds 16 bytes for each, `chunks` a bytes-like for each, or is None."""
        cdef frame_buffer f = frame_buffer(NULL, 0, 0)
        cdef rpc_waiter w
        cdef EndReply reply = EndReply()
        cdef uint64_t message_id = self._id()
        w.frame = NULL
        indexes = listed(indexes)
        try:
            write_put_end(&f, message_id, as_number(put_id), indexes, digests,
                          None if chunks is None else listed(chunks))
            self._exchange(&f, message_id, &w, timeout_s, "put_end")
            reply.read(w.body, w.body_bytes, len(indexes))
            return reply
        finally:
            free(f.data)
            free(w.frame)

    cdef uint64_t _id(self) noexcept:
        cdef uint64_t message_id = self.next_id
        self.next_id += 1
        return message_id

    cdef int _exchange(self, frame_buffer* f, uint64_t message_id, rpc_waiter* w, double timeout_s,
                       str method) except -1:
        """Sends a request and waits for its answer, whose bytes (w.frame) are the caller's then."""
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int status = 0
        cdef size_t size = f.length
        if size - 4 > self.stream.frame_bytes_max:
            raise LimitExceeded("the request is larger than a frame; ask for less at once", field="frame_bytes_max",
                                limit=self.stream.frame_bytes_max, length_bytes=size - 4)
        self._enter_call()
        try:
            enter(&self.stream, w, message_id)
            try:
                with nogil:
                    status = send_frame(&self.stream, f.data, size, deadline)
                    if status == 0:
                        status = wait_done(&self.stream, w, deadline)
                while status == WOKEN:
                    PyErr_CheckSignals()
                    with nogil:
                        status = wait_done(&self.stream, w, deadline)
            finally:
                leave(&self.stream, w)
                if status != 0:
                    free(w.frame)
                    w.frame = NULL
        finally:
            self._leave_call()
        if status:
            raise self._failure(status, method, timeout_s)
        if w.error != NULL:
            told = (<char*>w.error)[:w.error_bytes]
            free(w.frame)
            w.frame = NULL
            raise self.make_error(told)
        return 0

    cdef int _enter_call(self) except -1:
        if self.is_closed:
            raise self._failure(CANCELLED, "", 0)
        self.inside += 1
        return 0

    cdef void _leave_call(self) noexcept:
        self.inside -= 1
        if self.inside == 0 and self.is_closed:
            stream_let_go(&self.stream)

    cdef object _failure(self, int status, str method, double timeout_s):
        if self.is_closed or status == CANCELLED:
            return PeerGone("the rpc connection is closed on this end; make a new one", peer=self.peer)
        if status == TIMED_OUT:
            return TransferTimeout(f"the server did not answer {method} in time", peer=self.peer,
                                   timeout_ms=timeout_s * 1e3)
        if status == STALLED:
            return PeerStalled("the server took only a part of a request, so the connection was closed", peer=self.peer)
        return error_from_status(status, peer=self.peer)

    def next_push(self, double timeout_s) -> tuple | None:
        """The oldest push as `(method, params)` (params as MessagePack), or None when none came in time.

        Any thread may wait, also while others call. Raises as `call` when the connection has ended.
        """
        cdef rpc_waiter w
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int status = 0
        cdef rpc_push* push
        self._enter_call()
        try:
            push = take_push(&self.stream)
            while push == NULL:
                enter(&self.stream, &w, 0)
                try:
                    with nogil:
                        status = wait_done(&self.stream, &w, deadline)
                finally:
                    leave(&self.stream, &w)
                push = take_push(&self.stream)
                if push != NULL:
                    break
                if status == TIMED_OUT:
                    return None
                if status != 0 and status != WOKEN:
                    raise self._failure(status, "", timeout_s)
                PyErr_CheckSignals()
        finally:
            self._leave_call()
        return self._take(push)

    cdef tuple _take(self, rpc_push* push):
        cdef char* data = <char*>(push + 1)
        try:
            return (data[:push.method_bytes].decode("utf-8", "replace"),
                    data[push.method_bytes:push.method_bytes + push.params_bytes])
        finally:
            free(push)

    def close(self) -> None:
        """Ends the connection: calls in progress raise `PeerGone`, the last one closes the descriptor. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            stream_fail(&self.stream, CANCELLED)
            if self.inside == 0:
                stream_let_go(&self.stream)
