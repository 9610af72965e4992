"""A client's connection as an object: calls from any thread, pushes, and the hot methods without Python's own codec."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from moonpool.native.io.batch cimport CANCELLED, STALLED, TIMED_OUT
from moonpool.native.io.guard cimport mp_deadline_ns
from moonpool.native.io.rpc_msgpack cimport mp_pack_str, mp_pack_uint, mp_rpc_length
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
    UsageError,
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

    def call(self, str method not None, bytes params not None, double timeout_s) -> bytes:
        """Asks and waits: the MessagePack of the result. `params` is the MessagePack of a list.

        Raises what `make_error` makes of an error reply, `TransferTimeout`, `PeerGone` and other `PeerError`s when the
        connection ended, `LimitExceeded` for a request above `frame_bytes_max`.
        """
        cdef rpc_waiter w
        cdef bytes name = method.encode()
        cdef size_t size
        cdef uint64_t message_id = self.next_id
        cdef uint8_t* frame
        cdef uint8_t* p
        self.next_id += 1
        frame = <uint8_t*>malloc(32 + PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(params))
        if frame == NULL:
            raise MemoryError
        try:
            p = frame + 4
            p[0] = 0x94
            p[1] = 0
            p = mp_pack_str(mp_pack_uint(p + 2, message_id), PyBytes_GET_SIZE(name))
            memcpy(p, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            p += PyBytes_GET_SIZE(name)
            memcpy(p, PyBytes_AS_STRING(params), PyBytes_GET_SIZE(params))
            size = p + PyBytes_GET_SIZE(params) - frame
            self._exchange(frame, size, message_id, &w, timeout_s, method)
        finally:
            free(frame)
        try:
            return (<char*>w.body)[:w.body_bytes]
        finally:
            free(w.frame)

    cdef int _exchange(self, uint8_t* frame, size_t size, uint64_t message_id, rpc_waiter* w, double timeout_s,
                       str method) except -1:
        """Sends a request and waits for its answer, whose bytes (w.frame) are the caller's then."""
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int status
        if size - 4 > self.stream.frame_bytes_max:
            raise LimitExceeded("the request is larger than a frame; ask for less at once", field="frame_bytes_max",
                                limit=self.stream.frame_bytes_max, length_bytes=size - 4)
        mp_rpc_length(frame, size - 4)
        self._enter_call()
        try:
            enter(&self.stream, w, message_id)
            try:
                with nogil:
                    status = send_frame(&self.stream, frame, size, deadline)
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
        """Ends the connection: calls in progress raise `PeerGone`, and the last one closes the descriptor. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            stream_fail(&self.stream, CANCELLED)
            if self.inside == 0:
                stream_let_go(&self.stream)
