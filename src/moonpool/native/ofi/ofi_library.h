/* libfabric by dlopen: the five functions that are not in the header's operation tables, and the query for a provider. */
#ifndef MOONPOOL_OFI_LIBRARY_H
#define MOONPOOL_OFI_LIBRARY_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

typedef struct {
    void *handle;
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const char *(*strerror)(int);
    uint32_t (*version)(void);
} mp_ofi_calls;

/* What a provider may require of its user (Fabric: "act as one that does" for tests). */
enum { MP_OFI_BOUNCE = 1, MP_OFI_FLUSH = 2, MP_OFI_SHARED = 4 };

/* Library and providers must not keep the process's signals: libfabric's shm provider takes four over as it loads. */
static const int mp_ofi_signals[4] = {SIGBUS, SIGINT, SIGTERM, SIGSEGV};

/* 0, or -1 with the loader's sentence. */
static inline int mp_ofi_load(mp_ofi_calls *calls, const char *path, const char **problem) {
    memset(calls, 0, sizeof *calls);
    calls->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!calls->handle) { *problem = dlerror(); return -1; }
    *(void **)&calls->getinfo = dlsym(calls->handle, "fi_getinfo");
    *(void **)&calls->freeinfo = dlsym(calls->handle, "fi_freeinfo");
    *(void **)&calls->dupinfo = dlsym(calls->handle, "fi_dupinfo");
    *(void **)&calls->fabric = dlsym(calls->handle, "fi_fabric");
    *(void **)&calls->strerror = dlsym(calls->handle, "fi_strerror");
    *(void **)&calls->version = dlsym(calls->handle, "fi_version");
    if (calls->getinfo && calls->freeinfo && calls->dupinfo && calls->fabric && calls->strerror && calls->version)
        return 0;
    *problem = "it lacks a function that every libfabric has";
    dlclose(calls->handle);
    calls->handle = 0;
    return -1;
}

/* One-sided reads and writes over reliable datagram endpoints of one provider, or of all (provider NULL or empty).
   With `node`, endpoints listen on that address. 0 and a list, or a negative error. */
static inline int mp_ofi_query(const mp_ofi_calls *calls, const char *provider, const char *node, int delivery,
                               struct fi_info **found) {
    struct sigaction kept[4];
    struct fi_info *hints = calls->dupinfo(0);
    char *name = 0;
    int rc, i;
    if (!hints) return -FI_ENOMEM;
    hints->caps = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    if (delivery) hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    else hints->tx_attr->msg_order = FI_ORDER_RAW;
    if (provider && *provider) {
        name = strdup(provider);
        if (!name) { calls->freeinfo(hints); return -FI_ENOMEM; }
        hints->fabric_attr->prov_name = name;
    }
    for (i = 0; i < 4; i++) sigaction(mp_ofi_signals[i], 0, &kept[i]);
    rc = calls->getinfo(FI_VERSION(1, 11), node, 0, node ? FI_SOURCE : 0, hints, found);
    for (i = 0; i < 4; i++) sigaction(mp_ofi_signals[i], &kept[i], 0);
    calls->freeinfo(hints); /* and the name with it */
    return rc;
}

static inline int mp_ofi_is_ip(const struct fi_info *info) {
    return info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN ||
           info->addr_format == FI_SOCKADDR_IN6;
}

/* A completion queue of contexts; with a descriptor to wait on where the provider has one (`fd`, else -1). */
static inline int mp_ofi_open_queue(struct fid_domain *domain, size_t size, struct fid_cq **queue, int *fd) {
    struct fi_cq_attr attr;
    int rc;
    memset(&attr, 0, sizeof attr);
    attr.size = size;
    attr.format = FI_CQ_FORMAT_CONTEXT;
    attr.wait_obj = FI_WAIT_FD;
    *fd = -1;
    rc = fi_cq_open(domain, &attr, queue, 0);
    if (rc == 0) {
        if (fi_control(&(*queue)->fid, FI_GETWAIT, fd) == 0) return 0;
        *fd = -1;
        return 0;
    }
    attr.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(domain, &attr, queue, 0);
}

static inline int mp_ofi_open_addresses(struct fid_domain *domain, struct fid_av **av) {
    struct fi_av_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.type = FI_AV_UNSPEC;
    attr.count = 4;
    return fi_av_open(domain, &attr, av, 0);
}

/* An enabled endpoint bound to a queue and an address vector; NULL in `ep` when it failed. */
static inline int mp_ofi_open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_cq *queue,
                                       struct fid_av *av, struct fid_ep **ep) {
    int rc = fi_endpoint(domain, info, ep, 0);
    if (rc) { *ep = 0; return rc; }
    rc = fi_ep_bind(*ep, &av->fid, 0);
    if (!rc) rc = fi_ep_bind(*ep, &queue->fid, FI_TRANSMIT | FI_RECV);
    if (!rc) rc = fi_enable(*ep);
    if (rc) { fi_close(&(*ep)->fid); *ep = 0; }
    return rc;
}

/* 0 when it is right to sleep on the queue's descriptor. */
static inline int mp_ofi_may_sleep(struct fid_fabric *fabric, struct fid_cq *queue) {
    struct fid *one = &queue->fid;
    return fi_trywait(fabric, &one, 1);
}

static inline int mp_ofi_name(struct fid_ep *ep, void *address, size_t *n) { return fi_getname(&ep->fid, address, n); }

static inline int mp_ofi_bind(struct fid_mr *memory, struct fid_ep *ep) { return fi_mr_bind(memory, &ep->fid, 0); }

static inline int mp_ofi_close(void *object) { return object ? fi_close((struct fid *)object) : 0; }

/* One READ or WRITE of one piece. */
static inline ssize_t mp_ofi_post(struct fid_ep *ep, int write, uint64_t flags, void *buffer, size_t n, void *desc,
                                  fi_addr_t peer, uint64_t address, uint64_t key, void *context) {
    struct iovec here = {buffer, n};
    struct fi_rma_iov there = {address, n, key};
    struct fi_msg_rma message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &here;
    message.desc = &desc;
    message.iov_count = 1;
    message.addr = peer;
    message.rma_iov = &there;
    message.rma_iov_count = 1;
    message.context = context;
    return write ? fi_writemsg(ep, &message, flags) : fi_readmsg(ep, &message, flags);
}
#endif
