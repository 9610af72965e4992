"""Completion queues with a channel of their own, and reliable queue pairs.

The run loop uses `raw` of both without the GIL; the methods here are for the control path, for probes and for tests.
A closed queue pair may leave completions behind in its queue: who polls must not trust a number it does not know.
"""

import errno as errno_codes
import os

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset
from moonpool.native.io.guard cimport mp_deadline_ns
from moonpool.native.verbs.devices cimport (
    LIVE_COMPLETION_QUEUES,
    LIVE_QUEUE_PAIRS,
    Device,
    count_live,
    is_freed,
)
from moonpool.native.verbs.ibverbs cimport (
    IBV_QP_STATE,
    IBV_QPS_ERR,
    IBV_QPS_RESET,
    IBV_QPT_RC,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    ibv_post_send,
    ibv_qp,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_send_wr,
    ibv_sge,
    ibv_wc,
    mp_cq,
    mp_cq_arm,
    mp_cq_poll,
    mp_cq_wait,
    mp_qp_to_init,
    mp_qp_to_rtr,
    mp_qp_to_rts,
    mp_qp_to_state,
    mp_route,
    mp_wr_fill,
)

from moonpool.errors import LimitExceeded, ResourceError, UsageError
from moonpool.native.verbs.attributes import Completion
from moonpool.native.verbs.problems import call_problem

cdef extern from "unistd.h" nogil:
    int getpid()

cdef enum:
    PIECES_MAX = 32
    POLL_MAX = 64

GID_BYTES = 16
STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
# Field of a Route and its largest value: what a field of the wire or of ibv_qp_attr can hold.
ROUTE_BOUNDS = (
    ("remote_qp", 0xFFFFFF), ("remote_lid", 0xFFFF), ("local_psn", 0xFFFFFF), ("remote_psn", 0xFFFFFF), ("port", 255),
    ("gid_index", 255), ("mtu", 5), ("traffic_class", 255), ("service_level", 15), ("hop_limit", 255), ("timeout", 31),
    ("retry_count", 7), ("rnr_retry", 7), ("min_rnr_timer", 31), ("rd_atomic", 255), ("dest_rd_atomic", 255),
)


@cython.no_gc_clear
cdef class CompletionQueue:
    """A completion queue of at least `depth` entries (`depth` says how many it has) and its channel.

    Whoever posts must leave room: an overrun ends the queue and all its queue pairs.
    """

    def __cinit__(self, Device device not None, int depth, int vector=0):
        device.check_open()
        self.device = device
        self.raw.calls = device.calls
        if depth < 1:
            raise UsageError("a completion queue has at least one entry", value=str(depth))
        with nogil:
            self.raw.channel = device.calls.create_comp_channel(device.context)
        if self.raw.channel == NULL:
            raise call_problem(errno, "making a completion channel", device.name)
        os.set_blocking(self.raw.channel.fd, False)
        with nogil:
            self.raw.cq = device.calls.create_cq(device.context, depth, NULL, self.raw.channel, vector)
        if self.raw.cq == NULL:
            raise call_problem(errno, f"making a completion queue of {depth}", device.name)
        self.raw.depth = self.raw.cq.cqe
        count_live(LIVE_COMPLETION_QUEUES, 1)
        device.adopt(self)

    def __dealloc__(self):
        self.release()

    cdef int release(self) noexcept:
        """Free it: 0 or an errno. What cannot be freed stays, to be tried again; a forked child only forgets it."""
        cdef mp_cq raw = self.raw
        cdef bint ours = self.device.pid == getpid()
        cdef int rc = 0
        self.raw.cq = NULL
        if raw.cq != NULL:
            if ours:
                with nogil:
                    rc = raw.calls.destroy_cq(raw.cq)
            if not is_freed(rc):
                self.raw.cq = raw.cq
                return rc
            count_live(LIVE_COMPLETION_QUEUES, -1)
        self.raw.channel = NULL
        if raw.channel != NULL and ours:
            with nogil:
                raw.calls.destroy_comp_channel(raw.channel)
        return rc

    _rank = 2

    def close(self) -> None:
        """Frees the queue; UsageError while queue pairs use it. Again: nothing."""
        if self.users:
            raise UsageError(f"{self.users} queue pairs still use the completion queue: close them first")
        failure = self.release()
        if not is_freed(failure):
            raise call_problem(failure, "closing a completion queue", self.device.name)

    cdef int check_open(self) except -1:
        if self.raw.cq == NULL:
            raise ResourceError("the completion queue is closed", errno=errno_codes.EBADF)
        return 0

    @property
    def depth(self) -> int:
        return self.raw.depth

    @property
    def fd(self) -> int:
        """The channel's descriptor: readable after `arm` once a completion came."""
        self.check_open()
        return self.raw.channel.fd

    def arm(self) -> None:
        """Ask for one notification; poll once more afterwards, for what came in between rings no bell."""
        self.check_open()
        failure = mp_cq_arm(&self.raw)
        if failure:
            raise call_problem(failure, "arming a completion queue", self.device.name)

    def wait(self, double timeout_s) -> bool:
        """Wait for a notification; False when the time is up."""
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int n
        self.check_open()
        with nogil:
            n = mp_cq_wait(&self.raw, deadline)
        return n > 0

    def poll(self, int n_max=64) -> list:
        """The completions that are there, at most min(n_max, 64)."""
        cdef ibv_wc[64] found
        cdef int n, i
        self.check_open()
        n_max = max(0, min(n_max, POLL_MAX))
        with nogil:
            n = mp_cq_poll(&self.raw, n_max, found)
        if n < 0:
            raise call_problem(errno_codes.EIO, "polling a completion queue", self.device.name)
        return [
            Completion(found[i].wr_id, found[i].status,
                       (<bytes>self.device.calls.wc_status_str(found[i].status)).decode(errors="replace"),
                       found[i].qp_num)
            for i in range(n)
        ]


@cython.no_gc_clear
cdef class QueuePair:
    """A reliable (RC) queue pair in RESET, for one-sided requests of up to `pieces_max` local pieces each.

    Only requests that ask for it make a completion, and failed ones; `send_depth` and `pieces_max` are what the device
    granted, at least what was asked for.
    """

    def __cinit__(self, CompletionQueue queue not None, uint32_t send_depth, uint32_t pieces_max=1):
        cdef ibv_qp_init_attr attr
        queue.check_open()
        self.device = queue.device
        self.queue = queue
        self.calls = queue.device.calls
        memset(&attr, 0, sizeof(attr))
        attr.send_cq = attr.recv_cq = queue.raw.cq
        attr.qp_type = IBV_QPT_RC
        attr.cap.max_send_wr = send_depth
        attr.cap.max_send_sge = pieces_max
        # Nothing is received, but some providers refuse a queue of none.
        attr.cap.max_recv_wr = 1
        attr.cap.max_recv_sge = 1
        with nogil:
            self.raw = self.calls.create_qp(self.device.pd, &attr)
        if self.raw == NULL:
            raise call_problem(errno, f"making a queue pair of {send_depth} x {pieces_max}", self.device.name)
        self.number = self.raw.qp_num
        self.send_depth = attr.cap.max_send_wr
        self.pieces_max = attr.cap.max_send_sge
        queue.users += 1
        count_live(LIVE_QUEUE_PAIRS, 1)
        self.device.adopt(self)

    def __dealloc__(self):
        self.release()

    cdef int release(self) noexcept:
        """Free it: 0 or an errno. What cannot be freed stays, to be tried again; a forked child only forgets it."""
        cdef ibv_qp* raw = self.raw
        cdef int rc = 0
        self.raw = NULL
        if raw == NULL:
            return 0
        if self.device.pid == getpid():
            with nogil:
                rc = self.calls.destroy_qp(raw)
        if not is_freed(rc):
            self.raw = raw
            return rc
        self.queue.users -= 1
        count_live(LIVE_QUEUE_PAIRS, -1)
        return rc

    _rank = 0

    def close(self) -> None:
        """Destroys the queue pair: nothing of it can land any more when this returns. Again: nothing."""
        failure = self.release()
        if not is_freed(failure):
            raise call_problem(failure, f"destroying queue pair {self.number}", self.device.name)

    cdef int check_open(self) except -1:
        if self.raw == NULL:
            raise ResourceError(f"the queue pair {self.number} is closed", errno=errno_codes.EBADF)
        return 0

    cdef int changed(self, int rc, str doing) except -1:
        if rc:
            raise call_problem(rc if rc > 0 else errno, f"{doing} of queue pair {self.number}", self.device.name)
        return 0

    def to_init(self, int port, unsigned int remote_access, int pkey_index=0) -> None:
        """RESET to INIT: the port it goes by, and what the peer may do (REMOTE_READ, REMOTE_WRITE)."""
        cdef int rc
        self.check_open()
        with nogil:
            rc = mp_qp_to_init(self.calls, self.raw, port, pkey_index, remote_access)
        self.changed(rc, "setting up (INIT)")

    def to_ready(self, route) -> None:
        """INIT to RTR to RTS: connected as `route` (a Route) says. A peer must be ready before the first request."""
        cdef mp_route raw
        cdef int rc
        self.check_open()
        fill_route(&raw, route)
        with nogil:
            rc = mp_qp_to_rtr(self.calls, self.raw, &raw)
        self.changed(rc, "connecting (RTR)")
        with nogil:
            rc = mp_qp_to_rts(self.calls, self.raw, &raw)
        self.changed(rc, "connecting (RTS)")

    def to_error(self) -> None:
        """Ends all that is posted: each request makes a completion, with IBV_WC_WR_FLUSH_ERR for the unfinished."""
        self.to_state(IBV_QPS_ERR, "ending")

    def to_reset(self) -> None:
        """Back to RESET; requests that are still posted are forgotten, so drain first."""
        self.to_state(IBV_QPS_RESET, "resetting")

    cdef int to_state(self, int state, str doing) except -1:
        cdef int rc
        self.check_open()
        with nogil:
            rc = mp_qp_to_state(self.calls, self.raw, state)
        return self.changed(rc, doing)

    @property
    def state(self) -> str:
        """RESET, INIT, RTR, RTS, SQD, SQE or ERR, as the device knows it."""
        cdef ibv_qp_attr attr
        cdef ibv_qp_init_attr init
        cdef int rc
        self.check_open()
        with nogil:
            rc = self.calls.query_qp(self.raw, &attr, IBV_QP_STATE, &init)
        self.changed(rc, "asking for the state")
        return STATES[attr.qp_state] if 0 <= attr.qp_state < 7 else str(attr.qp_state)

    def post(self, uint64_t id, bint write, pieces, uint64_t remote_address, uint32_t rkey,
             bint signalled=True) -> None:
        """One WRITE or READ; pieces are (address, length, lkey). Raises ResourceError when the queue is full."""
        cdef ibv_sge[PIECES_MAX] local
        cdef ibv_send_wr request
        cdef ibv_send_wr* bad = NULL
        cdef int n = 0, rc
        self.check_open()
        if len(pieces) > PIECES_MAX:
            raise LimitExceeded(f"a request has at most {PIECES_MAX} pieces", limit=PIECES_MAX)
        for address, length, lkey in pieces:
            local[n].addr = address
            local[n].length = length
            local[n].lkey = lkey
            n += 1
        memset(&request, 0, sizeof(request))
        mp_wr_fill(&request, id, IBV_WR_RDMA_WRITE if write else IBV_WR_RDMA_READ, local, n, remote_address, rkey,
                   signalled, NULL)
        with nogil:
            rc = ibv_post_send(self.raw, &request, &bad)
        self.changed(rc, "posting a request")


cdef int fill_route(mp_route* raw, route) except -1:
    for name, bound in ROUTE_BOUNDS:
        if not 0 <= getattr(route, name) <= bound:
            raise UsageError(f"a route's {name} is from 0 to {bound}", field=name, value=str(getattr(route, name)))
    if len(route.remote_gid) != GID_BYTES:
        raise UsageError("a GID has 16 bytes", field="remote_gid")
    cdef bytes gid = route.remote_gid
    memcpy(raw.remote_gid, <const char*>gid, 16)
    raw.remote_qpn = route.remote_qp
    raw.remote_lid = route.remote_lid
    raw.local_psn = route.local_psn
    raw.remote_psn = route.remote_psn
    raw.port = route.port
    raw.sgid_index = route.gid_index
    raw.with_grh = route.with_grh
    raw.mtu = route.mtu
    raw.traffic_class = route.traffic_class
    raw.service_level = route.service_level
    raw.hop_limit = route.hop_limit
    raw.timeout = route.timeout
    raw.retry_cnt = route.retry_count
    raw.rnr_retry = route.rnr_retry
    raw.min_rnr_timer = route.min_rnr_timer
    raw.rd_atomic = route.rd_atomic
    raw.dest_rd_atomic = route.dest_rd_atomic
    return 0
