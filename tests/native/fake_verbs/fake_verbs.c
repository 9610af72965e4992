/* A libibverbs without devices: the calls that Moonpool uses, over the fabric of world.h, moved by the workers of objects.h.
 *
 *     gcc -shared -fPIC -O1 -pthread fake_verbs.c -o libfake.so      (tests/native/fake_library.py does it)
 *
 * It checks what hardware checks (keys, bounds, access, states, packet numbers, depth of queues) and answers with the same
 * codes; fake_* functions in world.h script failures. It is for tests only, and makes no claim on speed. */
#include "objects.h"
#undef ibv_reg_mr
#undef ibv_query_port
#define CALL __attribute__((visibility("default")))
#ifdef FAKE_OLD /* a library of before rdma-core 28: without the newer calls, and without the extended context */
#define NEWER_CALL __attribute__((visibility("hidden")))
#else
#define NEWER_CALL CALL
#endif

static struct ibv_device fakes[DEVICES];

/* Lock held: 0, or the errno that a rule, or the removal of the device, gives the call. */
static int refused(const char *call, fake_context *c) {
    int code = ruled(call, c->device);
    return code ? code : world->contexts[c->slot].fatal ? EIO : 0;
}
static void *gone(int code) {
    errno = code;
    return 0;
}
static int device_number(const struct ibv_device *d) { return (int)(d - fakes); }
static void gid_at(int device, int index, union ibv_gid *gid) {
    memset(gid, 0, sizeof *gid);
    if (index < 2 || world->devices[device].infiniband) {
        gid->raw[0] = 0xfe;
        gid->raw[1] = 0x80;
        gid->raw[8] = 2;
    } else {
        gid->raw[10] = gid->raw[11] = 0xff;
        gid->raw[12] = 10;
        gid->raw[13] = 98;
    }
    gid->raw[15] = (uint8_t)(device + 1);
}
static int n_gids(int device) { return world->devices[device].infiniband ? 1 : 4; }

CALL struct ibv_device **ibv_get_device_list(int *n) {
    struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
    int found = 0, code;
    the_world();
    enter();
    code = ruled("get_device_list", -1);
    for (int i = 0; i < world->n_devices; i++) {
        snprintf(fakes[i].name, sizeof fakes[i].name, "fake%d", i);
        snprintf(fakes[i].dev_name, sizeof fakes[i].dev_name, "uverbs%d", i);
        fakes[i].node_type = IBV_NODE_CA;
        fakes[i].transport_type = IBV_TRANSPORT_IB;
        if (!world->devices[i].removed) list[found++] = &fakes[i];
    }
    leave();
    if (!code) {
        if (n) *n = found;
        return list;
    }
    free(list);
    return gone(code);
}
CALL void ibv_free_device_list(struct ibv_device **list) { free(list); }
CALL const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }
CALL __be64 ibv_get_device_guid(struct ibv_device *device) { return htobe64(0x0200000000000001ull + (uint64_t)device_number(device)); }

CALL int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a) {
    (void)context;
    memset(a, 0, sizeof *a);
    strcpy(a->fw_ver, "fake");
    a->max_mr_size = world->max_mr_bytes;
    a->max_mr = REGIONS;
    a->max_qp = PAIRS;
    a->max_qp_wr = (int)world->max_wr;
    a->max_sge = a->max_sge_rd = PIECES;
    a->max_cq = 1024;
    a->max_cqe = (int)world->max_cqe;
    a->max_qp_rd_atom = a->max_qp_init_rd_atom = 16;
    a->phys_port_cnt = 1;
    return 0;
}
static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *a, size_t size) {
    (void)input;
    memset(a, 0, size);
    return ibv_query_device(context, &a->orig_attr);
}
static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *a, size_t size) {
    fake_context *c = context_of(context);
    f_device *d = device_of(c);
    int code;
    if (port != 1) return EINVAL;
    memset(a, 0, size);
    enter();
    code = refused("query_port", c);
    a->state = d->up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    a->max_mtu = IBV_MTU_4096;
    a->active_mtu = IBV_MTU_4096;
    a->gid_tbl_len = 8;
    a->pkey_tbl_len = 1;
    a->max_msg_sz = 1u << 30;
    a->lid = d->infiniband ? (uint16_t)(c->device + 1) : 0;
    a->link_layer = d->infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    leave();
    return code;
}
CALL int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *a) {
    return query_port(context, port, (struct ibv_port_attr *)a, offsetof(struct ibv_port_attr, flags));
}
CALL int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
    if (port != 1 || index < 0 || index >= 8) return -1;
    memset(gid, 0, sizeof *gid);
    if (index < n_gids(context_of(context)->device)) gid_at(context_of(context)->device, index, gid);
    return 0;
}
NEWER_CALL ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t n_max, uint32_t flags,
                                  size_t entry_bytes) {
    fake_context *c = context_of(context);
    size_t n = 0;
    if (flags || entry_bytes != sizeof *entries) return -EINVAL;
    for (; n < (size_t)n_gids(c->device) && n < n_max; n++) {
        memset(&entries[n], 0, sizeof entries[n]);
        gid_at(c->device, (int)n, &entries[n].gid);
        entries[n].gid_index = (uint32_t)n;
        entries[n].port_num = 1;
        entries[n].gid_type = world->devices[c->device].infiniband ? 0 : n % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
        entries[n].ndev_ifindex = world->devices[c->device].infiniband ? 0 : 1;
    }
    return (ssize_t)n;
}
CALL int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey) {
    (void)context;
    if (port != 1 || index != 0) return -1;
    *pkey = htobe16(0xffff);
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int n_max, struct ibv_wc *wc) {
    fake_queue *q = (fake_queue *)cq;
    int n = 0;
    if (q->broken) return -1;
    if (__atomic_load_n(&q->tail, __ATOMIC_ACQUIRE) == q->head) return 0;
    enter();
    for (; n < n_max && q->head != q->tail; n++) {
        fake_entry *e = &q->entries[q->head % q->size];
        wc[n] = e->wc;
        if (e->pair && e->position > e->pair->retired) e->pair->retired = e->position;
        q->head++;
    }
    leave();
    return n;
}
static int req_notify_cq(struct ibv_cq *cq, int solicited_only) {
    fake_queue *q = (fake_queue *)cq;
    int code;
    enter();
    code = ruled("req_notify_cq", context_of(cq->context)->device); /* a doorbell: rung for a lost device too */
    q->armed = !solicited_only;
    leave();
    return code;
}
static int post_one(fake_context *c, fake_pair *p, struct ibv_send_wr *wr) {
    fake_request *r = &p->requests[p->posted % p->depth];
    int code = refused("post_send", c);
    if (code) return code;
    if (shared_of(p)->state != IBV_QPS_RTS && shared_of(p)->state != IBV_QPS_ERR) return EINVAL;
    if (p->posted - p->retired >= p->depth) return ENOMEM;
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > p->pieces_max) return EINVAL;
    if (wr->opcode != IBV_WR_RDMA_WRITE && wr->opcode != IBV_WR_RDMA_READ) return EINVAL;
    memset(r, 0, sizeof *r);
    for (int i = 0; i < wr->num_sge; i++) {
        r->pieces[i] = wr->sg_list[i];
        r->total += wr->sg_list[i].length;
    }
    if (r->total > 1u << 30) return EINVAL;
    r->id = wr->wr_id;
    r->opcode = (int)wr->opcode;
    r->flags = (int)wr->send_flags;
    r->n = wr->num_sge;
    r->remote = wr->wr.rdma.remote_addr;
    r->rkey = wr->wr.rdma.rkey;
    r->posted_ns = now_ns();
    p->posted++;
    return 0;
}
static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    fake_context *c = context_of(qp->context);
    int code = 0;
    enter();
    for (; wr && !code; wr = code ? wr : wr->next) code = post_one(c, (fake_pair *)qp, wr);
    if (code) *bad = wr;
    ring(&world->contexts[c->slot]);
    leave();
    return code;
}

static int take_slot(int device) {
    for (int i = 0; i < CONTEXTS; i++) {
        f_context *s = &world->contexts[i];
        if (s->pid) continue;
        memset(s, 0, sizeof *s);
        s->pid = getpid();
        s->device = device;
        return i;
    }
    return -1;
}
CALL struct ibv_context *ibv_open_device(struct ibv_device *device) {
    int code, slot = -1, ends[2];
    fake_context *c;
    enter();
    bury();
    code = ruled("open_device", device_number(device));
    if (!code && world->devices[device_number(device)].removed) code = ENODEV;
    if (!code && (slot = take_slot(device_number(device))) < 0) code = ENOMEM;
    leave();
    if (code) return gone(code);
    c = calloc(1, sizeof *c);
    if (!c || pipe2(ends, O_CLOEXEC)) abort();
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    c->slot = slot;
    c->device = device_number(device);
    c->event_write = ends[1];
    c->verbs.sz = sizeof c->verbs;
    c->verbs.query_port = query_port;
    c->verbs.query_device_ex = query_device_ex;
    c->verbs.context.device = device;
    c->verbs.context.async_fd = ends[0];
    c->verbs.context.cmd_fd = -1;
    c->verbs.context.num_comp_vectors = 1;
#ifndef FAKE_OLD
    c->verbs.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
#endif
    c->verbs.context.ops.poll_cq = poll_cq;
    c->verbs.context.ops.req_notify_cq = req_notify_cq;
    c->verbs.context.ops.post_send = post_send;
    if (pthread_create(&c->worker, 0, work, c)) abort();
    return &c->verbs.context;
}
CALL int ibv_close_device(struct ibv_context *context) {
    fake_context *c = context_of(context);
    enter();
    if (c->pairs || c->queues) {
        leave();
        return EBUSY;
    }
    c->stop = 1;
    ring(&world->contexts[c->slot]);
    leave();
    pthread_join(c->worker, 0);
    enter();
    world->contexts[c->slot].pid = 0;
    leave();
    close(c->event_write);
    close(context->async_fd);
    free(c);
    return 0;
}
CALL struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    int code;
    enter();
    code = refused("alloc_pd", context_of(context));
    live_pds += !code;
    leave();
    if (pd && !code) {
        pd->context = context;
        return pd;
    }
    free(pd);
    return gone(code);
}
CALL int ibv_dealloc_pd(struct ibv_pd *pd) {
    int busy = 0, slot = context_of(pd->context)->slot;
    enter();
    for (int i = 0; i < REGIONS; i++) busy |= world->regions[i].pid == getpid() && world->regions[i].context == slot;
    live_pds -= !busy;
    leave();
    if (busy) return EBUSY;
    free(pd);
    return 0;
}

static int is_mapped(const char *at, size_t length, int writing) {
    char byte;
    struct iovec here = {&byte, 1}, there = {(void *)(uintptr_t)at, 1}, end = {(void *)(uintptr_t)(at + length - 1), 1};
    if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) != 1) return 0;
    if (writing && process_vm_writev(getpid(), &here, 1, &there, 1, 0) != 1) return 0;
    return process_vm_readv(getpid(), &here, 1, &end, 1, 0) == 1;
}
static struct ibv_mr *add_region(struct ibv_pd *pd, char *host, size_t length, uint64_t address, int access, void *mapped) {
    fake_context *c = context_of(pd->context);
    fake_region *made = calloc(1, sizeof *made);
    f_region *m;
    int code, slot = 0;
    enter();
    code = refused("reg_mr", c);
    if (!code && (length == 0 || length > world->max_mr_bytes)) code = EINVAL;
    if (!code && (access & IBV_ACCESS_REMOTE_WRITE) && !(access & IBV_ACCESS_LOCAL_WRITE)) code = EINVAL;
    if (!code && !is_mapped(host, length, access & IBV_ACCESS_LOCAL_WRITE)) code = EFAULT;
    while (!code && world->regions[slot].pid) code = ++slot == REGIONS ? ENOMEM : 0;
    if (!code) {
        m = &world->regions[slot];
        m->tag = world->tag = (world->tag + 1) % (UINT32_MAX / REGIONS - 1) + 1;
        m->device = c->device;
        m->context = c->slot;
        m->access = access;
        m->address = address;
        m->length = length;
        m->host = host;
        m->pid = getpid();
        made->slot = slot;
        made->mapped = mapped;
        made->mr.lkey = made->mr.rkey = m->tag * REGIONS + (uint32_t)slot;
    }
    leave();
    if (code) {
        free(made);
        return gone(code);
    }
    made->mr.context = pd->context;
    made->mr.pd = pd;
    made->mr.addr = host;
    made->mr.length = length;
    return &made->mr;
}
CALL struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    return add_region(pd, address, length, (uintptr_t)address, access, 0);
}
NEWER_CALL struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access) {
    return add_region(pd, address, length, iova, (int)(access & ~(unsigned)IBV_ACCESS_OPTIONAL_RANGE), 0);
}
/* Anything that can be mapped stands in for a dma-buf. */
NEWER_CALL struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    uint64_t skip = offset & 4095;
    char *mapped;
    struct ibv_mr *mr;
    int code;
    enter();
    code = refused("reg_dmabuf_mr", context_of(pd->context));
    leave();
    if (code) return gone(code);
    mapped = mmap(0, length + skip, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - skip));
    if (mapped == MAP_FAILED) return 0;
    mr = add_region(pd, mapped + skip, length, iova, access, mapped);
    if (!mr) {
        code = errno;
        munmap(mapped, length + skip);
        return gone(code);
    }
    return mr;
}
CALL int ibv_dereg_mr(struct ibv_mr *mr) {
    fake_region *m = (fake_region *)mr;
    int code;
    enter();
    code = ruled("dereg_mr", context_of(mr->context)->device);
    if (!code) world->regions[m->slot].pid = 0;
    leave();
    if (code) return code;
    if (m->mapped) munmap(m->mapped, mr->length + (size_t)((char *)mr->addr - (char *)m->mapped));
    free(m);
    return 0;
}

CALL struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    fake_channel *ch = calloc(1, sizeof *ch);
    int ends[2], code;
    enter();
    code = refused("create_comp_channel", context_of(context));
    live_channels += !code;
    leave();
    if (code || !ch) {
        free(ch);
        return gone(code);
    }
    if (pipe2(ends, O_CLOEXEC)) abort();
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    ch->channel.context = context;
    ch->channel.fd = ends[0];
    ch->write_end = ends[1];
    return &ch->channel;
}
CALL int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
    if (channel->refcnt) return EBUSY;
    close(((fake_channel *)channel)->write_end);
    close(channel->fd);
    free(channel);
    enter();
    live_channels--;
    leave();
    return 0;
}
CALL struct ibv_cq *ibv_create_cq(struct ibv_context *context, int depth, void *user, struct ibv_comp_channel *channel,
                                  int vector) {
    fake_context *c = context_of(context);
    fake_queue *q = calloc(1, sizeof *q);
    int code;
    enter();
    code = refused("create_cq", c);
    if (!code && (depth < 1 || (uint32_t)depth > world->max_cqe || vector < 0 || vector >= context->num_comp_vectors))
        code = EINVAL;
    if (q && !code) {
        q->entries = calloc((size_t)depth, sizeof *q->entries);
        q->size = (uint32_t)depth;
        q->cq.context = context;
        q->cq.channel = channel;
        q->cq.cq_context = user;
        q->cq.cqe = depth;
        pthread_mutex_init(&q->cq.mutex, 0);
        pthread_cond_init(&q->cq.cond, 0);
        if (channel) channel->refcnt++;
        q->next = c->queues;
        c->queues = q;
        live_cqs++;
    }
    leave();
    if (!code) return &q->cq;
    free(q);
    return gone(code);
}
CALL int ibv_destroy_cq(struct ibv_cq *cq) {
    fake_context *c = context_of(cq->context);
    fake_queue *q = (fake_queue *)cq, **at = &c->queues;
    enter();
    for (fake_pair *p = c->pairs; p; p = p->next)
        if (p->qp.send_cq == cq) {
            leave();
            return EBUSY;
        }
    while (*at != q) at = &(*at)->next;
    *at = q->next;
    if (cq->channel) cq->channel->refcnt--;
    live_cqs--;
    leave();
    pthread_mutex_lock(&cq->mutex);
    while (q->told != q->acknowledged) pthread_cond_wait(&cq->cond, &cq->mutex);
    pthread_mutex_unlock(&cq->mutex);
    free(q->entries);
    free(q);
    return 0;
}
CALL int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user) {
    fake_queue *said, *q;
    for (;;) {
        if (read(channel->fd, &said, sizeof said) != sizeof said) return -1;
        enter();
        for (q = context_of(channel->context)->queues; q && q != said; q = q->next) continue;
        if (q) {
            pthread_mutex_lock(&q->cq.mutex);
            q->told++;
            pthread_mutex_unlock(&q->cq.mutex);
        }
        leave();
        if (!q) continue; /* it was destroyed since */
        *cq = &q->cq;
        *user = q->cq.cq_context;
        return 0;
    }
}
CALL void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n) {
    pthread_mutex_lock(&cq->mutex);
    ((fake_queue *)cq)->acknowledged += (int)n;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}
#include "pairs.h"
