/* The fake's queue pairs and asynchronous events; a part of fake_verbs.c. */
enum {
    TO_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    TO_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
    TO_RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC
};

static int free_pair(void) {
    /* Numbers are not used again soon: a late request must not meet a new pair of the same number. */
    static uint32_t turn;
    for (int tries = 0; tries < PAIRS; tries++) {
        turn = (turn + 1) % PAIRS;
        if (turn && !world->pairs[turn].pid) return (int)turn;
    }
    return -1;
}
CALL struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a) {
    fake_context *c = context_of(pd->context);
    fake_pair *p = calloc(1, sizeof *p);
    int code, slot = -1;
    enter();
    code = refused("create_qp", c);
    if (!code && (a->qp_type != IBV_QPT_RC || a->cap.max_send_wr > world->max_wr || !a->cap.max_send_wr ||
                  a->cap.max_send_sge > PIECES || !a->cap.max_send_sge || !a->send_cq || !a->recv_cq))
        code = EINVAL;
    if (!code && (slot = free_pair()) < 0) code = ENOMEM;
    if (p && !code) {
        f_pair *s = &world->pairs[slot];
        memset(s, 0, sizeof *s);
        s->device = c->device;
        s->context = c->slot;
        s->pid = getpid();
        p->depth = a->cap.max_send_wr;
        p->pieces_max = a->cap.max_send_sge;
        p->requests = calloc(p->depth, sizeof *p->requests);
        p->qp.context = pd->context;
        p->qp.qp_context = a->qp_context;
        p->qp.pd = pd;
        p->qp.send_cq = a->send_cq;
        p->qp.recv_cq = a->recv_cq;
        p->qp.handle = p->qp.qp_num = (uint32_t)slot;
        p->qp.qp_type = a->qp_type;
        pthread_mutex_init(&p->qp.mutex, 0);
        pthread_cond_init(&p->qp.cond, 0);
        p->next = c->pairs;
        c->pairs = p;
    }
    leave();
    if (!code) return &p->qp;
    free(p);
    return gone(code);
}
static void forget_entries(fake_pair *p) {
    fake_queue *q = (fake_queue *)p->qp.send_cq;
    for (uint32_t i = q->head; i != q->tail; i++)
        if (q->entries[i % q->size].pair == p) q->entries[i % q->size].pair = 0;
}
CALL int ibv_destroy_qp(struct ibv_qp *qp) {
    fake_context *c = context_of(qp->context);
    fake_pair *p = (fake_pair *)qp, **at = &c->pairs;
    int code;
    enter();
    code = ruled("destroy_qp", c->device);
    if (!code) {
        while (*at != p) at = &(*at)->next;
        *at = p->next;
        forget_entries(p);
        shared_of(p)->pid = 0;
    }
    leave();
    if (code) return code;
    pthread_mutex_lock(&qp->mutex);
    while (p->told != p->acknowledged) pthread_cond_wait(&qp->cond, &qp->mutex);
    pthread_mutex_unlock(&qp->mutex);
    free(p->requests);
    free(p);
    return 0;
}
/* The device that an address names: by GID, or by LID on InfiniBand. -1: nobody. */
static int find_device(const struct ibv_ah_attr *ah) {
    for (int i = 0; i < world->n_devices; i++) {
        union ibv_gid gid;
        if (!ah->is_global && world->devices[i].infiniband && ah->dlid == i + 1) return i;
        for (int k = 0; ah->is_global && k < n_gids(i); k++) {
            gid_at(i, k, &gid);
            if (!memcmp(gid.raw, ah->grh.dgid.raw, 16)) return i;
        }
    }
    return -1;
}
static int connect_pair(fake_context *c, f_pair *s, struct ibv_qp_attr *a, int mask) {
    if (s->state != IBV_QPS_INIT || mask != TO_RTR) return EINVAL;
    if (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096 || a->ah_attr.port_num != 1) return EINVAL;
    if (!a->ah_attr.is_global && !device_of(c)->infiniband) return EINVAL;
    if (a->ah_attr.is_global && a->ah_attr.grh.sgid_index >= n_gids(c->device)) return EINVAL;
    s->far_device = find_device(&a->ah_attr);
    if (s->far_device < 0) return ETIMEDOUT;
    s->far_pair = a->dest_qp_num;
    s->far_psn = a->rq_psn;
    s->state = IBV_QPS_RTR;
    return 0;
}
static int change(fake_context *c, fake_pair *p, struct ibv_qp_attr *a, int mask) {
    f_pair *s = shared_of(p);
    if (!(mask & IBV_QP_STATE)) return EINVAL;
    switch (a->qp_state) {
    case IBV_QPS_INIT:
        if (s->state != IBV_QPS_RESET || mask != TO_INIT || a->port_num != 1) return EINVAL;
        s->access = (int)a->qp_access_flags;
        s->state = IBV_QPS_INIT;
        return 0;
    case IBV_QPS_RTR:
        return connect_pair(c, s, a, mask);
    case IBV_QPS_RTS:
        if (s->state != IBV_QPS_RTR || mask != TO_RTS) return EINVAL;
        s->psn = a->sq_psn;
        s->state = IBV_QPS_RTS;
        return 0;
    case IBV_QPS_ERR:
        s->state = IBV_QPS_ERR;
        return 0;
    case IBV_QPS_RESET:
        s->state = IBV_QPS_RESET;
        forget_entries(p);
        p->posted = p->done = p->retired = 0;
        p->moved = p->not_before = 0;
        p->begun = p->lose = p->retrying = 0;
        return 0;
    default:
        return EINVAL;
    }
}
CALL int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask) {
    fake_context *c = context_of(qp->context);
    int code;
    enter();
    code = refused("modify_qp", c);
    if (!code) code = change(c, (fake_pair *)qp, a, mask);
    qp->state = (enum ibv_qp_state)shared_of((fake_pair *)qp)->state;
    ring(&world->contexts[c->slot]);
    leave();
    return code;
}
CALL int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *init) {
    fake_pair *p = (fake_pair *)qp;
    (void)mask;
    memset(a, 0, sizeof *a);
    memset(init, 0, sizeof *init);
    enter();
    a->qp_state = a->cur_qp_state = (enum ibv_qp_state)shared_of(p)->state;
    leave();
    a->cap.max_send_wr = p->depth;
    a->cap.max_send_sge = p->pieces_max;
    return 0;
}

CALL int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    fake_context *c = context_of(context);
    uint32_t record[2];
    for (;;) {
        fake_pair *p = 0;
        if (read(context->async_fd, record, sizeof record) != sizeof record) return -1;
        memset(event, 0, sizeof *event);
        event->event_type = (enum ibv_event_type)record[0];
        if (record[0] == IBV_EVENT_PORT_ACTIVE || record[0] == IBV_EVENT_PORT_ERR) {
            event->element.port_num = (int)record[1];
            return 0;
        }
        if (record[0] != IBV_EVENT_QP_FATAL && record[0] != IBV_EVENT_QP_ACCESS_ERR) return 0;
        enter();
        for (p = c->pairs; p && p->qp.qp_num != record[1]; p = p->next) continue;
        if (p) {
            pthread_mutex_lock(&p->qp.mutex);
            p->told++;
            pthread_mutex_unlock(&p->qp.mutex);
        }
        leave();
        if (!p) continue; /* destroyed since */
        event->element.qp = &p->qp;
        return 0;
    }
}
CALL void ibv_ack_async_event(struct ibv_async_event *event) {
    struct ibv_qp *qp = event->element.qp;
    if (event->event_type != IBV_EVENT_QP_FATAL && event->event_type != IBV_EVENT_QP_ACCESS_ERR) return;
    pthread_mutex_lock(&qp->mutex);
    ((fake_pair *)qp)->acknowledged++;
    pthread_cond_signal(&qp->cond);
    pthread_mutex_unlock(&qp->mutex);
}
CALL const char *ibv_wc_status_str(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_SUCCESS: return "success";
    case IBV_WC_LOC_PROT_ERR: return "local protection error";
    case IBV_WC_WR_FLUSH_ERR: return "Work Request Flushed Error";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error";
    case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "RNR retry counter exceeded";
    default: return "another error";
    }
}
CALL const char *ibv_event_type_str(enum ibv_event_type event) {
    switch (event) {
    case IBV_EVENT_PORT_ACTIVE: return "port active";
    case IBV_EVENT_PORT_ERR: return "port error";
    case IBV_EVENT_DEVICE_FATAL: return "local catastrophic error";
    case IBV_EVENT_QP_FATAL: return "local work queue catastrophic error";
    case IBV_EVENT_QP_ACCESS_ERR: return "local access violation work queue error";
    case IBV_EVENT_CQ_ERR: return "CQ error";
    default: return "another event";
    }
}
