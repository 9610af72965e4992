"""What batches and rails share: pieces, chains, queue pairs and links, as C structures (see queues.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport mp_batch, pthread_cond_t, pthread_mutex_t
from moonpool.native.io.segment cimport mp_path, mp_segment
from moonpool.native.paths.rails cimport mp_rails
from moonpool.native.rdma.bounce cimport mp_arena
from moonpool.native.verbs.ibverbs cimport ibv_mr, ibv_pd, ibv_qp, ibv_send_wr, ibv_sge, ibv_wc, mp_cq, mp_registration
from moonpool.native.verbs.ibverbs cimport mp_verbs

cdef enum:
    PAIRS_MAX = 32
    NICS_MAX = 16
    CHAIN_MAX = 16           # requests that share a doorbell and a signal, besides the READ of the mark
    SGES_MAX = 16
    LANDED_MAX = 32          # bounce slots that one batch may hold

cdef enum:
    PAIR_NONE = 0            # no queue pair yet
    PAIR_UP = 1
    PAIR_PROBING = 2         # carries one READ that shows whether the rail works
    PAIR_BROKEN = 3          # in error: first drained, then replaced

cdef enum:
    BROKE_ASIDE = 1          # ended with a batch, or by somebody's forbidden access: the rail itself is fine
    BROKE_FAILED = 2         # the rail does not work: PATHS says when to try again
    BROKE_PORT = 3           # the port of our NIC is down, until an event says otherwise
    BROKE_FATAL = 4          # our NIC is gone

cdef enum:
    NOT_MINE = 0xFFFFFFFFFFFFFFFF   # in mp_run.left: carried by another path
    FAILED = 0xFFFFFFFFFFFFFFFE     # has its final status

cdef struct mp_piece:
    # What one work request moves: a range of one transfer, or several small whole ones that are remote neighbours.
    uint32_t first
    uint32_t count           # 0: has its final status, nothing is left of it
    uint64_t start           # of the range in its transfer, when count is 1
    uint64_t length
    int32_t slot             # in the bounce arena, or -1
    uint32_t spare

cdef struct mp_run:
    # One batch on its way, on its thread's stack. Changed under the link's lock.
    mp_batch* batch
    mp_segment* segment
    mp_path* path
    mp_link* link
    uint64_t* left           # by transfer: bytes that have not arrived, NOT_MINE or FAILED
    uint64_t one_left
    uint64_t next            # where cutting goes on: transfer, and bytes of it
    uint64_t at
    uint64_t backlog         # bytes not cut yet
    mp_piece* redo           # pieces that a broken rail gave back
    uint32_t n_redo
    uint32_t redo_room
    mp_piece landed[32]      # READ into bounce slots, to be copied by this run's thread
    uint32_t n_landed
    uint32_t n_slots
    uint32_t chains          # posted and not ended
    uint32_t breaks          # rails that broke under it
    uint64_t carried
    uint64_t n_bytes
    int stopping             # 0, or the status with which it ends early
    uint64_t stop_ns         # when to break the rails that still carry some of it
    bint broke_off
    uint64_t dry_ns          # since when no rail could carry anything
    uint64_t hashed          # transfers before it have their digests
    const mp_registration* near
    bint in_own              # inside the guard of the own regions
    uint32_t own_ticket
    mp_registration passing  # a held buffer, registered for this batch only
    ibv_mr* passing_regions[16]
    uint32_t passing_keys[16]

cdef struct mp_chain:
    mp_run* run              # NULL: a probe
    uint64_t first_piece     # running number in the ring of pieces
    uint32_t n_pieces
    uint32_t n_requests
    uint64_t bytes

cdef struct mp_pair:
    int state
    int cause
    uint32_t local_nic
    uint32_t remote_nic
    ibv_qp* qp
    mp_cq* cq
    uint32_t depth
    uint32_t used            # requests posted and not ended
    uint64_t bytes           # of those
    mp_chain* chains         # rings of `depth`
    mp_piece* pieces
    uint64_t head            # running numbers of chains
    uint64_t tail
    uint64_t next_piece
    uint64_t last_id         # of the newest posted request: its completion says that nothing is left
    uint64_t progress_ns     # last completion, or when it began to be busy
    uint64_t drain_ns        # BROKEN: when to reset what did not drain
    uint64_t mark_address    # a byte of the peer's: READ behind WRITEs, and as a probe
    uint32_t mark_rkey
    uint64_t scratch         # where it is READ to
    uint32_t scratch_lkey
    uint32_t open_n          # requests prepared and not posted
    uint64_t open_bytes
    ibv_send_wr requests[17]
    ibv_sge sges[257]
    uint64_t moved[2]        # counters: bytes READ and written, and so on
    uint64_t completions
    uint64_t breaks
    uint64_t repairs

cdef struct mp_nic:
    const mp_verbs* calls
    ibv_pd* pd

cdef struct mp_link:
    pthread_mutex_t lock
    pthread_cond_t news
    mp_pair* pairs[32]       # fixed once set
    uint32_t n_pairs
    mp_rails rails           # of PATHS: which rail carries the next slice
    mp_nic nics[16]
    uint32_t n_nics
    mp_arena* arena
    uint32_t sges_max
    bint leader              # somebody sleeps on the completion channels
    uint32_t waiters         # on `news`
    uint32_t runs            # batches inside
    bint closing
    int wake_fd              # eventfd of who repairs rails
    void (*discard)(void* owner, uint32_t k) noexcept nogil   # destroys a queue pair that takes no other order
    void* owner              # the Link
    uint64_t spin_ns
    uint64_t silence_ns      # a rail without a completion for so long has failed
    uint64_t stall_ns        # with no other path: how long to wait for a rail
    uint64_t access_errors
    uint64_t resets          # queue pairs that did not drain in time

cdef int link_poll(mp_link* link, uint64_t now) noexcept nogil
cdef void pair_break(mp_link* link, uint32_t k, int cause, uint64_t now) noexcept nogil
cdef void pair_post(mp_link* link, uint32_t k, mp_run* run, bint marked, uint64_t now) noexcept nogil
cdef void pair_drained(mp_link* link, uint32_t k, uint64_t now) noexcept nogil
cdef void run_settle(mp_run* run, mp_piece* piece) noexcept nogil
cdef void run_redo(mp_run* run, mp_piece* piece) noexcept nogil
cdef void run_fail(mp_run* run, uint64_t i, int status) noexcept nogil
