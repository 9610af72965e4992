"""The way to one peer's endpoint, and endpoints of ours that batches use one at a time.

An endpoint has its own completion queue and belongs to one batch from its first piece to its end, so tearing it down
ends that batch's accesses and nobody else's.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from moonpool.native.io.batch cimport (
    CANCELLED,
    COMPLETE,
    INTERNAL,
    NO_MEMORY,
    PEER_GONE,
    STALLED,
    batch_interrupted,
    mp_batch,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_load32, mp_now_ns, mp_store32, mp_tally
from moonpool.native.ofi.fabric cimport ADDRESS_BYTES_MAX, Fabric, mp_fabric
from moonpool.native.ofi.library cimport (
    FI_ADDR_STR,
    FI_MR_ENDPOINT,
    FI_MR_LOCAL,
    FI_READ,
    FI_WRITE,
    fi_av_insert,
    fi_mr_desc,
    fi_mr_enable,
    fi_mr_reg,
    mp_ofi_bind,
    mp_ofi_close,
    mp_ofi_open_addresses,
    mp_ofi_open_endpoint,
    mp_ofi_open_queue,
)

import _thread
import threading

from moonpool.errors import MoonpoolError, ProtocolError, TransferTimeout

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <sys/random.h>
    static inline uint64_t mp_ofi_random(void) {
        uint64_t value = 0;
        return getrandom(&value, 8, GRND_NONBLOCK) == 8 ? value : 0;
    }
    """
    uint64_t mp_ofi_random() nogil

cdef enum:
    QUEUE_ENTRIES = 128

# Between questions to an owner that did not answer: doubled each time.
cdef uint64_t DOWN_NS_MIN = 500_000_000
cdef uint64_t DOWN_NS_MAX = 16_000_000_000


cdef void end_close(mp_fabric* fabric, mp_end* end) noexcept nogil:
    """Nothing touches this process's memory by the endpoint any more."""
    mp_tally(&fabric.ends_closed, 1)
    mp_ofi_close(end.ep)
    mp_ofi_close(end.bounce_mr)
    mp_ofi_close(end.av)
    mp_ofi_close(end.queue)
    free(end.bounce)
    free(end)


cdef mp_end* end_open(mp_link* link, const uint8_t* address, uint32_t generation) noexcept nogil:
    cdef mp_fabric* fabric = link.fabric
    cdef mp_end* end = <mp_end*>calloc(1, sizeof(mp_end))
    cdef uint32_t k
    if end == NULL:
        return NULL
    end.generation = generation
    mp_tally(&fabric.ends_opened, 1)
    if (
        mp_ofi_open_queue(fabric.domain, QUEUE_ENTRIES, &end.queue, &end.wait_fd) != 0
        or mp_ofi_open_addresses(fabric.domain, &end.av) != 0
        or mp_ofi_open_endpoint(fabric.domain, fabric.info, end.queue, end.av, &end.ep) != 0
        or fi_av_insert(end.av, address, 1, &end.peer, 0, NULL) != 1
    ):
        end_close(fabric, end)
        return NULL
    for k in range(<uint32_t>OPS):
        end.ops[k].next_free = k + 1 if k + 1 < OPS else NONE
    for k in range(<uint32_t>OPS + 1):
        end.flights[k].i = <uint64_t>-1
    return end


cdef bint end_bounce(mp_link* link, mp_end* end) noexcept nogil:
    """Make the endpoint's bounce buffer; False when there is no memory for it."""
    cdef mp_fabric* fabric = link.fabric
    cdef size_t size = <size_t>OPS * BOUNCE_PIECE
    if end.bounce != NULL:
        return True
    end.bounce = <char*>malloc(size)
    if end.bounce == NULL:
        return False
    if not fabric.mr_mode & FI_MR_LOCAL:
        return True
    if fi_mr_reg(fabric.domain, end.bounce, size, FI_READ | FI_WRITE, 0, mp_ofi_random(), 0, &end.bounce_mr, NULL):
        end.bounce_mr = NULL
    elif not fabric.mr_mode & FI_MR_ENDPOINT or (
        mp_ofi_bind(end.bounce_mr, end.ep) == 0 and fi_mr_enable(end.bounce_mr) == 0
    ):
        end.bounce_desc = fi_mr_desc(end.bounce_mr)
        return True
    mp_ofi_close(end.bounce_mr)
    end.bounce_mr = NULL
    free(end.bounce)
    end.bounce = NULL
    return False


cdef mp_end* link_take(mp_link* link, mp_batch* batch, int* status) noexcept nogil:
    """An endpoint for this batch alone; NULL with a status when there is none, or the batch was interrupted."""
    cdef mp_end* end = NULL
    cdef uint32_t generation
    cdef uint8_t address[ADDRESS_BYTES_MAX]
    pthread_mutex_lock(&link.lock)
    while True:
        status[0] = CANCELLED if mp_load32(&link.shut) else batch_interrupted(batch)
        if status[0]:
            pthread_mutex_unlock(&link.lock)
            return NULL
        if link.idle != NULL:
            end = link.idle
            link.idle = end.next
            if end.generation == <uint32_t>link.generation:
                pthread_mutex_unlock(&link.lock)
                return end
            link.n_ends -= 1
            pthread_mutex_unlock(&link.lock)
            end_close(link.fabric, end)
            pthread_mutex_lock(&link.lock)
        elif link.n_ends < link.ends_max:
            link.n_ends += 1
            break
        else:
            mp_cond_wait_until(&link.freed, &link.lock, mp_now_ns() + <uint64_t>SLEEP_MS * 1_000_000)
    generation = <uint32_t>link.generation
    memcpy(&address[0], &link.address[0], ADDRESS_BYTES_MAX)
    pthread_mutex_unlock(&link.lock)
    end = end_open(link, &address[0], generation)
    if end == NULL:
        pthread_mutex_lock(&link.lock)
        link.n_ends -= 1
        pthread_cond_signal(&link.freed)
        pthread_mutex_unlock(&link.lock)
        status[0] = NO_MEMORY
    return end


cdef void link_give(mp_link* link, mp_end* end, bint sound) noexcept nogil:
    """Give an endpoint back; one with pieces in flight, or that failed, is closed first."""
    if not sound:
        end_close(link.fabric, end)
        mp_tally(&link.fabric.torn, 1)
        end = NULL
    pthread_mutex_lock(&link.lock)
    if end != NULL and not mp_load32(&link.shut):
        end.next = link.idle
        link.idle = end
        end = NULL
    else:
        link.n_ends -= 1
    pthread_cond_signal(&link.freed)
    pthread_mutex_unlock(&link.lock)
    if end != NULL:
        end_close(link.fabric, end)


cdef int link_settle(mp_link* link, uint32_t generation) noexcept nogil:
    with gil:
        return (<Link>link.owner).settle(generation)


cdef class Link:
    """The way to one peer's endpoint: its address, and our endpoints that talk to it.

    `ask(previous)` asks the owner for an endpoint in place of the one with that number (None at first) and returns
    its number, address, and the key and base of 8 readable bytes. Bounds are nanoseconds.
    """

    def __cinit__(self):
        memset(&self.raw, 0, sizeof(self.raw))
        mp_sync_init(&self.raw.lock, &self.raw.freed)

    def __init__(self, Fabric fabric not None, ask, *, uint32_t ends_max, uint64_t spin_ns, uint64_t spin_max_bytes,
                 uint64_t stall_ns, uint64_t connect_ns):
        self.fabric = fabric
        self.ask = ask
        self.asking = threading.Lock()
        self.raw.fabric = &fabric.raw
        self.raw.owner = <void*>self
        self.raw.ends_max = ends_max
        self.raw.spin_ns = spin_ns
        self.raw.spin_max_bytes = spin_max_bytes
        self.raw.stall_ns = stall_ns
        self.raw.connect_ns = connect_ns
        self.down_ns = DOWN_NS_MIN

    def __dealloc__(self):
        self._close_idle()
        pthread_mutex_destroy(&self.raw.lock)
        pthread_cond_destroy(&self.raw.freed)

    def connect(self) -> None:
        """Ask the owner for an endpoint; raises its error."""
        with self.asking:
            self._renew()

    def _renew(self):
        cdef const char* name
        cdef uint32_t size
        cdef bint as_text
        number, address, key, base = self.ask(self.number)
        size = <uint32_t>len(address)
        as_text = self.fabric.raw.info.addr_format == FI_ADDR_STR
        usual = self.fabric.raw.info.src_addrlen  # 0 where the provider does not say
        if not 1 <= size <= <uint32_t>ADDRESS_BYTES_MAX or (usual != 0 and size != usual and not as_text):
            raise ProtocolError(f"an address of {size} bytes is none of this provider's")
        if as_text and address.find(0) != <int>size - 1:
            raise ProtocolError("an address that is text ends with its only zero")
        name = address
        self.number = number
        self.last_generation += 1
        pthread_mutex_lock(&self.raw.lock)
        memset(&self.raw.address[0], 0, ADDRESS_BYTES_MAX)
        memcpy(&self.raw.address[0], name, size)
        self.raw.flush_key = key
        self.raw.flush_base = base
        mp_store32(&self.raw.generation, self.last_generation)
        pthread_mutex_unlock(&self.raw.lock)

    cdef int settle(self, uint32_t generation) noexcept:
        """Make sure that nothing lands at the owner by the endpoint of that generation: a status. GIL held."""
        try:
            with self.asking:
                if self.raw.generation != 0 and <uint32_t>self.raw.generation != generation:
                    return COMPLETE  # another batch has asked meanwhile
                if self.raw.shut:
                    return CANCELLED
                if self.raw.generation == 0 and mp_now_ns() < self.down_until_ns:
                    return self.down_status
                mp_store32(&self.raw.generation, 0)
                self.down_status = self._try_renew()
                if self.down_status == COMPLETE:
                    self.down_ns = DOWN_NS_MIN
                    mp_tally(&self.fabric.raw.renewals, 1)
                else:
                    self.down_until_ns = mp_now_ns() + self.down_ns
                    self.down_ns = min(self.down_ns * 2, DOWN_NS_MAX)
                return self.down_status
        except KeyboardInterrupt:
            _thread.interrupt_main()  # for whoever waits for the batch, which ends first
            return INTERNAL
        except BaseException:
            return INTERNAL

    cdef int _try_renew(self) except -1:
        try:
            self._renew()
        except TransferTimeout:
            return STALLED
        except MoonpoolError as problem:
            return int(problem.status) or PEER_GONE
        return COMPLETE

    def shut(self) -> bool:
        """Close our endpoints and open no more; False when a batch still uses one."""
        mp_store32(&self.raw.shut, 1)
        self._close_idle()
        return self.raw.n_ends == 0

    def _close_idle(self):
        cdef mp_end* end
        cdef mp_end* rest
        if self.fabric is None or not self.fabric.is_mine():
            return
        pthread_mutex_lock(&self.raw.lock)
        end = self.raw.idle
        self.raw.idle = NULL
        rest = end
        while rest != NULL:
            self.raw.n_ends -= 1
            rest = rest.next
        pthread_cond_broadcast(&self.raw.freed)
        pthread_mutex_unlock(&self.raw.lock)
        with nogil:
            while end != NULL:
                rest = end.next
                end_close(&self.fabric.raw, end)
                end = rest
