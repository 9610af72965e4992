/* What a process holds of the fake fabric, and the worker of each opened device, which moves the bytes. */
#ifndef FAKE_OBJECTS_H
#define FAKE_OBJECTS_H
#include "world.h"

enum { PIECES = 32, PIECE_BYTES = 256 << 10 };

typedef struct fake_context fake_context;
typedef struct fake_pair fake_pair;
typedef struct {
    uint64_t id, remote, total, posted_ns;
    int opcode, flags, n;
    uint32_t rkey;
    struct ibv_sge pieces[PIECES];
} fake_request;
typedef struct {
    struct ibv_comp_channel channel;
    int write_end;
} fake_channel;
typedef struct {
    struct ibv_wc wc;
    fake_pair *pair;        /* NULL once it is destroyed */
    uint64_t position;      /* requests of the pair that are done with */
} fake_entry;
typedef struct fake_queue {
    struct ibv_cq cq;
    fake_entry *entries;
    uint32_t head, tail, size;
    int armed, broken, told, acknowledged;
    struct fake_queue *next;
} fake_queue;
struct fake_pair {
    struct ibv_qp qp;
    fake_request *requests;
    uint32_t depth, pieces_max;
    uint64_t posted, done, retired;       /* counts of requests: `retired` is what polling gave back */
    uint64_t moved, not_before;           /* of the request being worked on */
    int begun, lose, retrying;
    int told, acknowledged;
    fake_pair *next;
};
struct fake_context {
    int slot, device, event_write, stop;
    pthread_t worker;
    fake_pair *pairs;
    fake_queue *queues;
    struct verbs_context verbs;           /* ends with the ibv_context, as the header wants it */
};
typedef struct {
    struct ibv_mr mr;
    int slot;
    void *mapped;           /* of a dma-buf */
} fake_region;

static fake_context *context_of(struct ibv_context *c) {
    return (fake_context *)((char *)c - offsetof(fake_context, verbs) - offsetof(struct verbs_context, context));
}
static f_pair *shared_of(fake_pair *p) { return &world->pairs[p->qp.handle]; }
static f_device *device_of(fake_context *c) { return &world->devices[c->device]; }
static void count(uint64_t *what, uint64_t n) { __atomic_fetch_add(what, n, __ATOMIC_RELAXED); }

/* Lock held. A full queue is broken for good, and takes its queue pairs with it. */
static void complete(fake_context *c, fake_pair *p, uint64_t position, int status) {
    fake_queue *q = (fake_queue *)p->qp.send_cq;
    fake_request *r = &p->requests[position % p->depth];
    fake_entry *e;
    if (q->broken) return;
    if (q->tail - q->head == q->size) {
        q->broken = 1;
        count(&device_of(c)->overruns, 1);
        for (fake_pair *other = c->pairs; other; other = other->next)
            if (other->qp.send_cq == &q->cq) shared_of(other)->state = IBV_QPS_ERR;
        tell(&world->contexts[c->slot], IBV_EVENT_CQ_ERR, 0);
        return;
    }
    e = &q->entries[q->tail % q->size];
    memset(e, 0, sizeof *e);
    e->wc.wr_id = r->id;
    e->wc.status = (enum ibv_wc_status)status;
    e->wc.opcode = r->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
    e->wc.byte_len = (uint32_t)r->total;
    e->wc.qp_num = p->qp.qp_num;
    e->pair = p;
    e->position = position + 1;
    __atomic_store_n(&q->tail, q->tail + 1, __ATOMIC_RELEASE);
    count(&device_of(c)->completions, 1);
    if (q->armed && q->cq.channel) {
        ssize_t ignored = write(((fake_channel *)q->cq.channel)->write_end, &q, sizeof q);
        (void)ignored;
        q->armed = 0;
    }
}
static void next_request(fake_pair *p) {
    p->done++;
    p->moved = p->not_before = 0;
    p->begun = p->lose = p->retrying = 0;
}
/* The request at work failed: its completion says how, and the rest is flushed. */
static void fail(fake_context *c, fake_pair *p, int status) {
    count(&device_of(c)->failures, 1);
    complete(c, p, p->done, status);
    next_request(p);
    shared_of(p)->state = IBV_QPS_ERR;
}
static void flush_all(fake_context *c, fake_pair *p) {
    while (p->done < p->posted) {
        count(&device_of(c)->flushed, 1);
        complete(c, p, p->done, IBV_WC_WR_FLUSH_ERR);
        next_request(p);
    }
}
static f_region *region_of(uint32_t key, int device, uint64_t address, uint64_t length, int access) {
    f_region *m = &world->regions[key % REGIONS];
    if (!m->pid || m->tag != key / REGIONS || m->device != device || (m->access & access) != access) return 0;
    if (address < m->address || length > m->length || address - m->address > m->length - length) return 0;
    return m;
}
/* The other end as packets find it: NULL when they find nothing. */
static f_pair *far_end(fake_context *c, fake_pair *p) {
    f_pair *own = shared_of(p), *far = &world->pairs[own->far_pair % PAIRS];
    f_device *there = &world->devices[own->far_device];
    if (!device_of(c)->up || device_of(c)->cut || !there->up || there->cut || there->removed) return 0;
    if (!far->pid || far->device != own->far_device || far->far_pair != p->qp.qp_num) return 0;
    if (far->state != IBV_QPS_RTR && far->state != IBV_QPS_RTS) return 0;
    if (far->far_psn != own->psn || own->far_psn != far->psn) return 0;
    return world->contexts[far->context].fatal || is_dead(far->pid) ? 0 : far;
}
/* Where `done` bytes into a request are in this process, and how many follow there in one piece. */
static char *local_part(fake_context *c, fake_request *r, uint64_t done, uint64_t *room) {
    for (int i = 0; i < r->n; i++) {
        if (done < r->pieces[i].length) {
            f_region *m = region_of(r->pieces[i].lkey, c->device, r->pieces[i].addr, r->pieces[i].length, 0);
            *room = r->pieces[i].length - done;
            /* Memory of a device has another address for its owner than where it is mapped. */
            return m ? m->host + (r->pieces[i].addr - m->address) + done : (char *)(uintptr_t)(r->pieces[i].addr + done);
        }
        done -= r->pieces[i].length;
    }
    *room = 0;
    return 0;
}
static int check_local(fake_context *c, fake_request *r) {
    int need = r->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
    for (int i = 0; i < r->n; i++)
        if (r->pieces[i].length &&
            !region_of(r->pieces[i].lkey, c->device, r->pieces[i].addr, r->pieces[i].length, need))
            return 0;
    return 1;
}
static int move(fake_request *r, f_region *far, char *here, uint64_t done, uint64_t n) {
    char *there = far->host + (r->remote + done - far->address);
    struct iovec local = {here, n}, remote = {there, n};
    if (far->pid == getpid()) {
        if (r->opcode == IBV_WR_RDMA_READ) memmove(here, there, n);
        else memmove(there, here, n);
        return 1;
    }
    if (r->opcode == IBV_WR_RDMA_READ) return process_vm_readv(far->pid, &local, 1, &remote, 1, 0) == (ssize_t)n;
    return process_vm_writev(far->pid, &local, 1, &remote, 1, 0) == (ssize_t)n;
}
static void refuse(fake_context *c, fake_pair *p, f_pair *far) {
    far->state = IBV_QPS_ERR;
    tell(&world->contexts[far->context], IBV_EVENT_QP_ACCESS_ERR, shared_of(p)->far_pair);
    fail(c, p, IBV_WC_REM_ACCESS_ERR);
}
/* One step of a request. Sets *wake to when to look again, when that is before now + a while. */
static int step(fake_context *c, fake_pair *p, uint64_t now, uint64_t *wake) {
    fake_request *r = &p->requests[p->done % p->depth];
    f_device *d = device_of(c);
    f_pair *far;
    f_region *there = 0;
    uint64_t n = 0, at;
    char *here;
    int status, need;
    if (p->done == p->posted) return 0;
    if (shared_of(p)->state == IBV_QPS_ERR || world->contexts[c->slot].fatal) {
        shared_of(p)->state = IBV_QPS_ERR;
        flush_all(c, p);
        return 1;
    }
    if (d->held || shared_of(p)->state != IBV_QPS_RTS) return 0;
    if (now < p->not_before) {
        *wake = p->not_before < *wake ? p->not_before : *wake;
        return 0;
    }
    if (!p->begun) {
        p->begun = 1;
        status = ruled("", c->device);
        p->lose = status == LOST;
        if (status > 0) return fail(c, p, status), 1;
        if (!check_local(c, r)) return fail(c, p, IBV_WC_LOC_PROT_ERR), 1;
    }
    far = far_end(c, p);
    if (!far) {
        if (p->retrying) return fail(c, p, IBV_WC_RETRY_EXC_ERR), 1;
        p->retrying = 1;
        p->not_before = now + world->retry_ms * 1000000ull;
        return 1;
    }
    p->retrying = 0;
    need = r->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    if (r->total) {
        there = region_of(r->rkey, far->device, r->remote, r->total, need);
        if (!there || !(far->access & need) || there->pid != far->pid) return refuse(c, p, far), 1;
    }
    if (p->moved < r->total) {
        here = local_part(c, r, p->moved, &n);
        n = n < PIECE_BYTES ? n : PIECE_BYTES;
        if (!move(r, there, here, p->moved, n)) return fail(c, p, IBV_WC_RETRY_EXC_ERR), 1;
        p->moved += n;
        count(&d->bytes, n);
        if (d->rate) {
            at = d->busy_until > now ? d->busy_until : now;
            p->not_before = d->busy_until = at + n * 1000000000ull / d->rate;
        }
        if (p->moved < r->total || p->not_before) return 1;
    }
    if (now < r->posted_ns + d->latency_us * 1000ull) {
        p->not_before = r->posted_ns + d->latency_us * 1000ull;
        return 1;
    }
    count(&d->requests, 1);
    if (p->lose) count(&d->lost, 1);
    else if (r->flags & IBV_SEND_SIGNALED) complete(c, p, p->done, IBV_WC_SUCCESS);
    next_request(p);
    return 1;
}
static void deliver(fake_context *c, f_context *shared) {
    while (shared->head != shared->tail) {
        uint32_t record[2] = {(uint32_t)shared->events[shared->head % EVENTS].type,
                              shared->events[shared->head % EVENTS].about};
        if (write(c->event_write, record, sizeof record) != sizeof record) return;
        shared->head++;
    }
}
static void *work(void *context) {
    fake_context *c = context;
    f_context *shared = &world->contexts[c->slot];
    take_lock();
    while (!c->stop) {
        uint32_t bell = __atomic_load_n(&shared->bell, __ATOMIC_ACQUIRE);
        uint64_t now = now_ns(), wake = now + 100000000u;
        int busy = 0;
        deliver(c, shared);
        for (fake_pair *p = c->pairs; p; p = p->next) busy |= step(c, p, now, &wake);
        leave();
        if (!busy && wake > now) {
            struct timespec t = {(time_t)((wake - now) / 1000000000u), (long)((wake - now) % 1000000000u)};
            syscall(SYS_futex, &shared->bell, FUTEX_WAIT, bell, &t, 0, 0);
        }
        for (int i = 0; i < 100 && __atomic_load_n(&world->waiting, __ATOMIC_RELAXED); i++) sched_yield();
        take_lock();
    }
    leave();
    return 0;
}
#endif
