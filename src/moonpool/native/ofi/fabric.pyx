"""The owner's side of libfabric: a domain of one provider, the endpoints that peers reach, and memory they may touch.

Each control session gets an endpoint of its own, so that closing it ends what that peer can reach. A provider whose
memory belongs to one endpoint (FI_MR_ENDPOINT) has a single one for all. A thread drives the provider, also where that
says that it moves by itself, for not all do; it sleeps on the queue's descriptor, or for a short time without one.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport close, write
from moonpool.native.io.batch cimport (
    mp_join_thread,
    mp_start_thread,
    pthread_cond_destroy,
    pthread_cond_t,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    mp_sync_init,
)
from moonpool.native.io.guard cimport mp_count, mp_load32, mp_store32
from moonpool.native.ofi.library cimport (
    FI_MR_ENDPOINT,
    FI_MR_LOCAL,
    FI_MR_PROV_KEY,
    FI_MR_VIRT_ADDR,
    FI_ENOMEM,
    FI_READ,
    FI_REMOTE_READ,
    FI_REMOTE_WRITE,
    FI_WRITE,
    MP_OFI_BOUNCE,
    MP_OFI_FLUSH,
    MP_OFI_SHARED,
    fi_cq_entry,
    fi_cq_err_entry,
    fi_cq_read,
    fi_cq_readerr,
    fi_domain,
    fi_info,
    fi_mr_desc,
    fi_mr_enable,
    fi_mr_key,
    fi_mr_reg,
    fid_domain,
    fid_mr,
    mp_ofi_bind,
    mp_ofi_calls,
    mp_ofi_close,
    mp_ofi_is_ip,
    mp_ofi_may_sleep,
    mp_ofi_name,
    mp_ofi_open_addresses,
    mp_ofi_open_endpoint,
    mp_ofi_open_queue,
    mp_ofi_query,
    ofi_calls,
    ofi_error,
)

import os
import secrets

from moonpool.errors import EngineClosed, LimitExceeded, ResourceError, TransportUnavailable

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <stdint.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    #include <time.h>
    #include <unistd.h>
    /* Until a queue has something, somebody wakes us, or the time is over. */
    static inline void mp_ofi_sleep(int epoll_fd, int wake_fd, int ms) {
        struct epoll_event some[16];
        uint64_t n;
        if (epoll_wait(epoll_fd, some, 16, ms) > 0 && read(wake_fd, &n, 8) < 0) return;
    }
    static inline int mp_ofi_watch(int epoll_fd, int fd) {
        struct epoll_event event = {.events = EPOLLIN};
        return fd < 0 ? 0 : epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
    static inline void mp_ofi_unwatch(int epoll_fd, int fd) {
        if (fd >= 0) epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, 0);
    }
    static inline void mp_ofi_nap(unsigned us) {
        struct timespec t = {0, (long)us * 1000};
        nanosleep(&t, 0);
    }
    """
    int eventfd(unsigned int initial, int flags) nogil
    int EFD_CLOEXEC
    int EFD_NONBLOCK
    int epoll_create1(int flags) nogil
    int EPOLL_CLOEXEC
    void mp_ofi_sleep(int epoll_fd, int wake_fd, int ms) nogil
    int mp_ofi_watch(int epoll_fd, int fd) nogil
    void mp_ofi_unwatch(int epoll_fd, int fd) nogil
    void mp_ofi_nap(unsigned int us) nogil

cdef enum:
    # A sleep on the queue's descriptor is bounded, in case a provider forgets to wake us.
    SLEEP_MS = 50
    NAP_US_MIN = 20
    NAP_US_MAX = 1000
    ENDS_MAX = 4096

BOUNCE, FLUSH, SHARED = MP_OFI_BOUNCE, MP_OFI_FLUSH, MP_OFI_SHARED


cdef int drive(mp_own_end* end) noexcept nogil:
    """One step of progress for an endpoint that a peer reaches; whether there was something. Lock held."""
    cdef fi_cq_entry entries[16]
    cdef fi_cq_err_entry problem
    if fi_cq_read(end.queue, &entries[0], 16) > 0:
        return 1
    memset(&problem, 0, sizeof(problem))
    # Peers' accesses leave no entries; one of a failed connection is taken out so that it holds up nothing.
    return fi_cq_readerr(end.queue, &problem, 0) > 0


cdef void* progress(void* context) noexcept nogil:
    cdef mp_fabric* fabric = <mp_fabric*>context
    cdef mp_own_end* end
    cdef unsigned int nap = NAP_US_MIN
    cdef int busy
    while not mp_load32(&fabric.stop):
        busy = 0
        pthread_mutex_lock(&fabric.lock)
        end = fabric.ends
        while end != NULL:
            busy |= drive(end)
            if end.wait_fd >= 0 and not busy:
                busy = mp_ofi_may_sleep(fabric.fabric, end.queue) != 0
            end = end.next
        pthread_mutex_unlock(&fabric.lock)
        if busy:
            nap = NAP_US_MIN
        elif fabric.napping and fabric.ends != NULL:
            mp_ofi_nap(nap)
            nap = nap * 2 if nap * 2 < NAP_US_MAX else NAP_US_MAX
        else:
            mp_ofi_sleep(fabric.epoll_fd, fabric.wake_fd, SLEEP_MS)
    return NULL


cdef bytes text_of(const char* name):
    return <bytes>name if name != NULL else b""


cdef class Fabric:
    """A domain of one provider. Methods are called with the GIL held; those that may take long release it.

    `node` is the address that endpoints listen on, for providers that have such; `limits` makes it act as one that
    requires bounce buffers (BOUNCE), has no delivery completion (FLUSH), or one endpoint for all (SHARED).
    """

    def __cinit__(self):
        memset(&self.raw, 0, sizeof(self.raw))
        self.raw.epoll_fd = self.raw.wake_fd = -1

    def __init__(self, str provider not None, str node not None, unsigned int limits=0):
        cdef pthread_cond_t unused
        mp_sync_init(&self.raw.lock, &unused)
        pthread_cond_destroy(&unused)
        self.open_now = True
        self.process = os.getpid()
        self.raw.limits = limits
        try:
            self._find(provider, node)
            self._open()
        except BaseException:
            self.close()
            raise

    def _find(self, str provider, str node):
        """The provider's first offer; with completion upon delivery if it has that."""
        cdef mp_ofi_calls* calls = ofi_calls()
        cdef fi_info* found = NULL
        cdef bytes name = provider.encode()
        cdef bytes where = node.encode()
        cdef const char* name_bytes = name
        cdef const char* where_bytes = where
        cdef int delivery = 0, rc = 0
        for delivery in [0] if self.raw.limits & MP_OFI_FLUSH else [1, 0]:
            with nogil:
                rc = mp_ofi_query(calls, name_bytes, NULL, delivery, &found)
                if rc == 0 and mp_ofi_is_ip(found):
                    calls.freeinfo(found)
                    rc = mp_ofi_query(calls, name_bytes, where_bytes, delivery, &found)
            if rc == 0:
                break
        if rc != 0:
            raise TransportUnavailable(
                f"libfabric's provider {provider!r} offers no one-sided access here, on {node} ({ofi_error(rc)})",
                "see `fi_info` for the providers of this machine, set ofi_provider to one of them, and bind_host to "
                "an address of its device", transport="ofi",
            )
        self.raw.info = calls.dupinfo(found)
        calls.freeinfo(found)
        if self.raw.info == NULL:
            raise ResourceError("no memory for a provider's description")
        self.raw.delivery = delivery
        self.raw.mr_mode = <uint32_t>self.raw.info.domain_attr.mr_mode
        self.raw.piece_bytes = PIECE_BYTES
        if self.raw.info.ep_attr.max_msg_size < PIECE_BYTES:
            self.raw.piece_bytes = self.raw.info.ep_attr.max_msg_size
        if self.raw.mr_mode & FI_MR_ENDPOINT:
            self.raw.limits |= MP_OFI_SHARED
        if self.raw.mr_mode & FI_MR_LOCAL and self.raw.mr_mode & FI_MR_ENDPOINT:
            self.raw.limits |= MP_OFI_BOUNCE

    def _open(self):
        cdef mp_ofi_calls* calls = ofi_calls()
        cdef mp_fabric* raw = &self.raw
        raw.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        raw.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
        if raw.wake_fd < 0 or raw.epoll_fd < 0 or mp_ofi_watch(raw.epoll_fd, raw.wake_fd) != 0:
            raise ResourceError("no file descriptors for libfabric's progress: raise RLIMIT_NOFILE")
        check(calls.fabric(raw.info.fabric_attr, &raw.fabric, NULL), "opening the fabric")
        with nogil:
            rc = fi_domain(raw.fabric, raw.info, &raw.domain, NULL)
        check(rc, "opening the domain")
        if raw.limits & MP_OFI_SHARED:
            self.shared = OwnEnd(self)

    @property
    def provider(self) -> str:
        """The library's full name of the provider."""
        return text_of(self.raw.info.fabric_attr.prov_name).decode(errors="replace")

    @property
    def device(self) -> str:
        """The provider's name of the domain: an interface or a device."""
        return text_of(self.raw.info.domain_attr.name).decode(errors="replace")

    @property
    def address_format(self) -> int:
        """How addresses of endpoints look, by the library's number."""
        return self.raw.info.addr_format

    @property
    def needs_local(self) -> bool:
        """True when this process's own buffers must be registered too."""
        return self.raw.mr_mode & FI_MR_LOCAL != 0 and not self.raw.limits & MP_OFI_BOUNCE

    @property
    def is_shared(self) -> bool:
        """True when all peers reach one endpoint, which then cannot be closed for one of them."""
        return self.raw.limits & MP_OFI_SHARED != 0

    @property
    def completes_on_delivery(self) -> bool:
        """True when a WRITE completes in the target's memory; otherwise a READ follows each batch of WRITEs."""
        return self.raw.delivery != 0

    def counters(self) -> dict:
        """Endpoints open now, for peers and of ours, and totals of what happened on the way."""
        cdef mp_fabric* raw = &self.raw
        return {
            "peer_endpoints_open": self.opened,
            "endpoints_open": mp_count(&raw.ends_opened) - mp_count(&raw.ends_closed),
            "torn_down": mp_count(&raw.torn),
            "retries": mp_count(&raw.retries),
            "renewals": mp_count(&raw.renewals),
            "bounced_bytes": mp_count(&raw.bounced_bytes),
            "flushes": mp_count(&raw.flushes),
        }

    def listen(self) -> OwnEnd:
        """A new endpoint for a peer; LimitExceeded when there are too many."""
        if not self.open_now:
            raise EngineClosed("the fabric is closed")
        if self.shared is not None:
            return self.shared
        if self.opened >= ENDS_MAX:
            raise LimitExceeded(f"an engine has at most {ENDS_MAX} endpoints for peers", limit=ENDS_MAX)
        return OwnEnd(self)

    def register(self, uint64_t address, uint64_t length, bint writable_here, bint readable,
                 bint writable) -> OwnMemory:
        """Let the device at a range: for this process's transfers, and for peers' READs and WRITEs as said."""
        if not self.open_now:
            raise EngineClosed("the fabric is closed")
        cdef OwnMemory made = OwnMemory(self)
        cdef uint64_t rights = FI_WRITE | (FI_READ if writable_here else 0)
        cdef uint64_t wanted = 0
        cdef void* start = <void*><size_t>address
        cdef fid_mr* mr = NULL
        cdef fid_domain* domain = self.raw.domain
        rights |= (FI_REMOTE_READ if readable else 0) | (FI_REMOTE_WRITE if writable else 0)
        if not self.raw.mr_mode & FI_MR_PROV_KEY:
            wanted = secrets.randbits(8 * min(<int>self.raw.info.domain_attr.mr_key_size, 8))
        with nogil:
            rc = fi_mr_reg(domain, start, length, rights, 0, wanted, 0, &mr, NULL)
        check(rc, f"registering {length} bytes")
        made.raw.mr = mr
        try:
            if self.raw.mr_mode & FI_MR_ENDPOINT:
                check(mp_ofi_bind(mr, (<OwnEnd>self.shared).raw.ep), "binding memory to the endpoint")
                check(fi_mr_enable(mr), "enabling memory")
        except BaseException:
            made.close()
            raise
        made.raw.desc = fi_mr_desc(mr)
        made.raw.key = fi_mr_key(mr)
        made.raw.base = address if self.raw.mr_mode & FI_MR_VIRT_ADDR else 0
        return made

    cdef bint is_mine(self):
        """False in a forked child: what it closed would end the parent's connections."""
        return self.process == os.getpid()

    cdef start_progress(self):
        if self.running:
            return
        if mp_start_thread(&self.raw.thread, progress, &self.raw, b"moonpool-ofi") != 0:
            raise ResourceError("the system gives no thread for libfabric's progress")
        self.running = True

    def close(self) -> None:
        """End the progress thread and free the domain; idempotent. Endpoints and memory must be closed before."""
        cdef mp_fabric* raw = &self.raw
        if not self.open_now or not self.is_mine():
            return
        self.open_now = False
        if self.shared is not None:
            (<OwnEnd>self.shared)._end()
            self.shared = None
        if self.running:
            mp_store32(&raw.stop, 1)
            wake(raw)
            with nogil:
                mp_join_thread(raw.thread)
            self.running = False
        with nogil:
            mp_ofi_close(raw.domain)
            mp_ofi_close(raw.fabric)
        raw.domain = NULL
        raw.fabric = NULL
        for fd in (raw.wake_fd, raw.epoll_fd):
            if fd >= 0:
                close(fd)
        raw.wake_fd = raw.epoll_fd = -1
        pthread_mutex_destroy(&raw.lock)

    def __dealloc__(self):
        # Closed by its transport; what a forgotten one holds goes with the process, for its thread may be running.
        if self.raw.info != NULL and not self.running:
            ofi_calls().freeinfo(self.raw.info)


cdef check(int rc, str what):
    if rc < 0:
        raise ResourceError(f"libfabric: {what} failed ({ofi_error(rc)})", errno=-rc)


cdef int own_end_open(mp_fabric* fabric, mp_own_end* end) noexcept nogil:
    """Open the endpoint and let it be driven; an error of the library's, after which `own_end_close` cleans up."""
    cdef int rc = mp_ofi_open_queue(fabric.domain, QUEUE_SIZE, &end.queue, &end.wait_fd)
    if rc == 0:
        rc = mp_ofi_open_addresses(fabric.domain, &end.av)
    if rc == 0:
        rc = mp_ofi_open_endpoint(fabric.domain, fabric.info, end.queue, end.av, &end.ep)
    if rc == 0 and mp_ofi_watch(fabric.epoll_fd, end.wait_fd) != 0:
        rc = -FI_ENOMEM
    if rc:
        return rc
    pthread_mutex_lock(&fabric.lock)
    fabric.napping |= end.wait_fd < 0
    end.next = fabric.ends
    fabric.ends = end
    pthread_mutex_unlock(&fabric.lock)
    wake(fabric)
    return 0


cdef void own_end_close(mp_fabric* fabric, mp_own_end* end) noexcept nogil:
    """Close what is open of an endpoint: nothing lands by it any more."""
    cdef mp_own_end** place = &fabric.ends
    pthread_mutex_lock(&fabric.lock)
    while place[0] != NULL and place[0] != end:
        place = &place[0].next
    if place[0] == end:
        place[0] = end.next
    if end.queue != NULL:
        mp_ofi_unwatch(fabric.epoll_fd, end.wait_fd)
    mp_ofi_close(end.ep)
    mp_ofi_close(end.av)
    mp_ofi_close(end.queue)
    pthread_mutex_unlock(&fabric.lock)


cdef void wake(mp_fabric* fabric) noexcept nogil:
    cdef uint64_t one = 1
    write(fabric.wake_fd, &one, 8)


cdef class OwnEnd:
    """An endpoint that a peer reaches; `address` is what to tell it."""

    def __cinit__(self, Fabric fabric not None):
        cdef uint8_t name[ADDRESS_BYTES_MAX]
        cdef size_t length = ADDRESS_BYTES_MAX
        cdef mp_fabric* raw = &fabric.raw
        cdef mp_own_end* end
        self.fabric = fabric
        fabric.start_progress()
        end = <mp_own_end*>calloc(1, sizeof(mp_own_end))
        if end == NULL:
            raise MemoryError
        end.wait_fd = -1
        self.raw = end
        fabric.opened += 1
        try:
            with nogil:
                rc = own_end_open(raw, end)
            check(rc, "opening an endpoint for a peer")
            check(mp_ofi_name(end.ep, name, &length), "asking for an endpoint's address")
        except BaseException:
            self._end()
            raise
        self.address = (<const char*>name)[:min(length, <size_t>ADDRESS_BYTES_MAX)]

    def close(self) -> None:
        """Nothing of the peer that was told of it lands any more; idempotent. A shared one stays open."""
        if self.fabric.shared is not self:
            self._end()

    cdef _end(self):
        cdef mp_own_end* end = self.raw
        cdef mp_fabric* raw = &self.fabric.raw
        if end == NULL or not self.fabric.is_mine():
            return
        self.raw = NULL
        with nogil:
            own_end_close(raw, end)
        free(end)
        self.fabric.opened -= 1


cdef class OwnMemory:
    """A registered range; `key` and `base` are what peers need."""

    def __cinit__(self, Fabric fabric not None):
        self.fabric = fabric
        memset(&self.raw, 0, sizeof(self.raw))

    @property
    def key(self) -> int:
        return self.raw.key

    @property
    def base(self) -> int:
        return self.raw.base

    def close(self) -> bool:
        """Take it back from the device: True when no peer can begin to touch it any more; idempotent."""
        cdef fid_mr* mr = self.raw.mr
        if mr == NULL or not self.fabric.is_mine():
            return True
        with nogil:
            rc = mp_ofi_close(mr)
        if rc == 0:
            self.raw.mr = NULL
        return rc == 0
