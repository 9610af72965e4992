/* libibverbs without linking to it: the calls of the control path by dlsym, those of the data path by the header's own
 * inlines, which go through the context. See ibv_*(3) of rdma-core. */
#ifndef MOONPOOL_VERBS_CALLS_H
#define MOONPOOL_VERBS_CALLS_H
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include "atomics.h"

typedef struct {
    struct ibv_device **(*get_device_list)(int *n);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    __be64 (*get_device_guid)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
    int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attr);
    int (*query_port)(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr);
    int (*query_gid)(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
    int (*query_pkey)(struct ibv_context *context, uint8_t port, int index, __be16 *pkey);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *address, size_t length, int access);
    int (*dereg_mr)(struct ibv_mr *mr);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
    int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
    struct ibv_cq *(*create_cq)(struct ibv_context *context, int depth, void *user, struct ibv_comp_channel *channel,
                                int vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user);
    void (*ack_cq_events)(struct ibv_cq *cq, unsigned int n);
    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
    int (*query_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init);
    int (*destroy_qp)(struct ibv_qp *qp);
    int (*get_async_event)(struct ibv_context *context, struct ibv_async_event *event);
    void (*ack_async_event)(struct ibv_async_event *event);
    const char *(*wc_status_str)(enum ibv_wc_status status);
    const char *(*event_type_str)(enum ibv_event_type event);
    /* Those of newer libraries; NULL where the library does not have them. */
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
    ssize_t (*query_gid_table)(struct ibv_context *context, struct ibv_gid_entry *entries, size_t n_max, uint32_t flags,
                               size_t entry_bytes);
} mp_verbs;

/* NULL, or the name of a symbol that the library lacks. */
static inline const char *mp_verbs_load(mp_verbs *v, void *library) {
    static const char *const needed[] = {
        "ibv_get_device_list", "ibv_free_device_list", "ibv_get_device_name", "ibv_get_device_guid", "ibv_open_device",
        "ibv_close_device", "ibv_query_device", "ibv_query_port", "ibv_query_gid", "ibv_query_pkey", "ibv_alloc_pd",
        "ibv_dealloc_pd", "ibv_reg_mr", "ibv_dereg_mr", "ibv_create_comp_channel", "ibv_destroy_comp_channel",
        "ibv_create_cq", "ibv_destroy_cq", "ibv_get_cq_event", "ibv_ack_cq_events", "ibv_create_qp", "ibv_modify_qp",
        "ibv_query_qp", "ibv_destroy_qp", "ibv_get_async_event", "ibv_ack_async_event", "ibv_wc_status_str",
        "ibv_event_type_str"};
    static const char *const newer[] = {"ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr", "_ibv_query_gid_table"};
    const size_t n = sizeof needed / sizeof *needed, n_newer = sizeof newer / sizeof *newer;
    void *found[sizeof needed / sizeof *needed + sizeof newer / sizeof *newer];
    size_t i;
    /* The table is these pointers in this order: POSIX lets a function pointer and a void* be one thing for dlsym. */
    _Static_assert(sizeof(mp_verbs) == sizeof found, "a call without its symbol");
    for (i = 0; i < n; i++)
        if (!(found[i] = dlsym(library, needed[i]))) return needed[i];
    for (i = 0; i < n_newer; i++) found[n + i] = dlsym(library, newer[i]);
    memcpy(v, found, sizeof *v);
    return 0;
}

/* 0 or an errno. Older libraries fill in `orig_attr` only; the rest is then 0. */
static inline int mp_query_device(const mp_verbs *v, struct ibv_context *context, struct ibv_device_attr_ex *attr) {
    struct verbs_context *extended = verbs_get_ctx_op(context, query_device_ex);
    memset(attr, 0, sizeof *attr);
    if (extended && extended->query_device_ex(context, 0, attr, sizeof *attr) == 0) return 0;
    memset(attr, 0, sizeof *attr);
    return v->query_device(context, &attr->orig_attr);
}
static inline int mp_query_port(const mp_verbs *v, struct ibv_context *context, uint8_t port,
                                struct ibv_port_attr *attr) {
    struct verbs_context *extended = verbs_get_ctx_op(context, query_port);
    memset(attr, 0, sizeof *attr);
    if (extended) return extended->query_port(context, port, attr, sizeof *attr);
    return v->query_port(context, port, (struct _compat_ibv_port_attr *)attr);
}

/* Of queue pairs. Everything a connection needs is said; nothing is left to a provider's defaults. */
typedef struct {
    uint8_t remote_gid[16];
    uint32_t remote_qpn, local_psn, remote_psn;
    uint16_t remote_lid;
    uint8_t port, sgid_index;
    uint8_t with_grh;                       /* always on Ethernet; between subnets on InfiniBand */
    uint8_t mtu;                            /* IBV_MTU_* */
    uint8_t traffic_class, service_level, hop_limit;
    uint8_t timeout, retry_cnt, rnr_retry;  /* timeout: 4.096 us * 2^timeout between tries */
    uint8_t min_rnr_timer, rd_atomic, dest_rd_atomic;
} mp_route;

static inline int mp_qp_to_init(const mp_verbs *v, struct ibv_qp *qp, uint8_t port, uint16_t pkey_index,
                                unsigned int remote_access) {
    struct ibv_qp_attr a;
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_INIT;
    a.pkey_index = pkey_index;
    a.port_num = port;
    a.qp_access_flags = remote_access;
    return v->modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}
static inline int mp_qp_to_rtr(const mp_verbs *v, struct ibv_qp *qp, const mp_route *r) {
    struct ibv_qp_attr a;
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = (enum ibv_mtu)r->mtu;
    a.dest_qp_num = r->remote_qpn;
    a.rq_psn = r->remote_psn & 0xffffff;
    a.max_dest_rd_atomic = r->dest_rd_atomic;
    a.min_rnr_timer = r->min_rnr_timer;
    a.ah_attr.dlid = r->remote_lid;
    a.ah_attr.sl = r->service_level;
    a.ah_attr.port_num = r->port;
    a.ah_attr.is_global = r->with_grh != 0;
    if (r->with_grh) {
        memcpy(a.ah_attr.grh.dgid.raw, r->remote_gid, 16);
        a.ah_attr.grh.sgid_index = r->sgid_index;
        a.ah_attr.grh.hop_limit = r->hop_limit;
        a.ah_attr.grh.traffic_class = r->traffic_class;
    }
    return v->modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}
static inline int mp_qp_to_rts(const mp_verbs *v, struct ibv_qp *qp, const mp_route *r) {
    struct ibv_qp_attr a;
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_RTS;
    a.timeout = r->timeout;
    a.retry_cnt = r->retry_cnt;
    a.rnr_retry = r->rnr_retry;
    a.sq_psn = r->local_psn & 0xffffff;
    a.max_rd_atomic = r->rd_atomic;
    return v->modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                    IBV_QP_MAX_QP_RD_ATOMIC);
}
/* ERR ends all that is posted with flush errors, RESET forgets it. */
static inline int mp_qp_to_state(const mp_verbs *v, struct ibv_qp *qp, int state) {
    struct ibv_qp_attr a;
    memset(&a, 0, sizeof a);
    a.qp_state = (enum ibv_qp_state)state;
    return v->modify_qp(qp, &a, IBV_QP_STATE);
}

/* One work request. `op` is IBV_WR_RDMA_WRITE or IBV_WR_RDMA_READ; `next` chains, NULL ends the chain. */
static inline void mp_wr_fill(struct ibv_send_wr *wr, uint64_t id, int op, struct ibv_sge *pieces, int n_pieces,
                              uint64_t remote_address, uint32_t rkey, int signalled, struct ibv_send_wr *next) {
    wr->wr_id = id;
    wr->next = next;
    wr->sg_list = pieces;
    wr->num_sge = n_pieces;
    wr->opcode = (enum ibv_wr_opcode)op;
    wr->send_flags = signalled ? IBV_SEND_SIGNALED : 0;
    wr->imm_data = 0;
    wr->wr.rdma.remote_addr = remote_address;
    wr->wr.rdma.rkey = rkey;
}

/* Of completion queues. The channel is non-blocking and belongs to this queue alone. */
typedef struct {
    const mp_verbs *calls;
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    int depth;
} mp_cq;

static inline int mp_cq_poll(mp_cq *q, int n_max, struct ibv_wc *wc) { return ibv_poll_cq(q->cq, n_max, wc); }
/* After arming, poll once more: what came between the last poll and the arming rings no bell. */
static inline int mp_cq_arm(mp_cq *q) { return ibv_req_notify_cq(q->cq, 0); }
/* Takes and acknowledges the notifications that are there: how many; never waits. */
static inline int mp_cq_take(mp_cq *q) {
    struct ibv_cq *cq;
    void *user;
    int n = 0;
    while (q->calls->get_cq_event(q->channel, &cq, &user) == 0) {
        q->calls->ack_cq_events(cq, 1);
        n++;
    }
    return n;
}
/* Waits for a notification until the deadline (mp_now_ns): how many were taken, 0 at the deadline. */
static inline int mp_cq_wait(mp_cq *q, uint64_t deadline_ns) {
    struct pollfd p = {q->channel->fd, POLLIN, 0};
    for (;;) {
        uint64_t now = mp_now_ns();
        int rc, n;
        if (now >= deadline_ns) return 0;
        rc = poll(&p, 1, (int)((deadline_ns - now < 1000000000u ? deadline_ns - now : 1000000000u) + 999999) / 1000000);
        if (rc > 0 && (n = mp_cq_take(q)) > 0) return n;
        if (rc > 0 && (p.revents & (POLLERR | POLLNVAL))) return 0;
    }
}

/* An asynchronous event, already acknowledged: `qp_num` is 0 unless it is about a queue pair, `port` is 0 unless it is
 * about a port. */
typedef struct {
    int type;
    int port;
    uint32_t qp_num;
} mp_async;

/* 1 and the event, or 0: none there. The context's async_fd is non-blocking. */
static inline int mp_async_take(const mp_verbs *v, struct ibv_context *context, mp_async *out) {
    struct ibv_async_event event;
    memset(&event, 0, sizeof event);
    if (v->get_async_event(context, &event) != 0) return 0;
    out->type = (int)event.event_type;
    out->port = 0;
    out->qp_num = 0;
    switch (event.event_type) {
    case IBV_EVENT_QP_FATAL: case IBV_EVENT_QP_REQ_ERR: case IBV_EVENT_QP_ACCESS_ERR: case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED: case IBV_EVENT_PATH_MIG: case IBV_EVENT_PATH_MIG_ERR: case IBV_EVENT_QP_LAST_WQE_REACHED:
        out->qp_num = event.element.qp ? event.element.qp->qp_num : 0;
        break;
    case IBV_EVENT_PORT_ACTIVE: case IBV_EVENT_PORT_ERR: case IBV_EVENT_LID_CHANGE: case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE: case IBV_EVENT_CLIENT_REREGISTER: case IBV_EVENT_GID_CHANGE:
        out->port = event.element.port_num;
        break;
    default:
        break;
    }
    /* Until it is acknowledged, destroying its queue pair would wait. */
    v->ack_async_event(&event);
    return 1;
}

/* Of memory: one range on several devices, cut into chunks of equal size (the last may be shorter), because a device
 * bounds what one region may hold. keys[device * n_chunks + chunk]. */
typedef struct {
    uint64_t base;
    uint64_t length;
    uint64_t chunk_bytes;
    uint32_t n_chunks;
    uint32_t n_devices;
    uint32_t *lkeys;
    uint32_t *rkeys;
} mp_registration;

static inline int mp_registered(const mp_registration *r, uint64_t address, uint64_t length) {
    return address >= r->base && address - r->base <= r->length && length <= r->length - (address - r->base);
}
/* Of an address inside: its chunk, and how many bytes from it on lie in that chunk. */
static inline uint32_t mp_chunk_of(const mp_registration *r, uint64_t address) {
    return (uint32_t)((address - r->base) / r->chunk_bytes);
}
static inline uint64_t mp_chunk_room(const mp_registration *r, uint64_t address) {
    uint64_t at = address - r->base, end = (at / r->chunk_bytes + 1) * r->chunk_bytes;
    return (end < r->length ? end : r->length) - at;
}
static inline uint32_t mp_lkey_of(const mp_registration *r, uint32_t device, uint64_t address) {
    return r->lkeys[(size_t)device * r->n_chunks + mp_chunk_of(r, address)];
}
static inline uint32_t mp_rkey_of(const mp_registration *r, uint32_t device, uint64_t address) {
    return r->rkeys[(size_t)device * r->n_chunks + mp_chunk_of(r, address)];
}
#endif
