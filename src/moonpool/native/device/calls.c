#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include "rows.h"

/* Every function pointer is cast here to the type that its library's header gives it. */
#define CALL(rt, which, types) ((int (*) types)(rt)->call[which])
#define HAS(rt, which) ((rt)->call[which] != NULL)
#define AS_POINTER(address) ((void *)(uintptr_t)(address))

enum { CU_TYPE = 2, CU_MANAGED = 8, CU_ORDINAL = 9 };       /* CUpointer_attribute */
enum { CU_DEVICE_MEMORY = 2, CU_UNIFIED_MEMORY = 4 };       /* CUmemorytype */
enum { PORTABLE = 1, LAZY_PEER_ACCESS = 1, NO_TIMING = 2, DMA_BUF_FD = 1 };
enum { HIP_VERSION_6 = 60000000 };

/* What a runtime says, in our words. */
static int said(mp_runtime *rt, int code) {
    if (code == 0)
        return MP_DEVICE_OK;
    if (code == rt->row->not_ready)
        return MP_DEVICE_NOT_READY;
    __atomic_store_n(&rt->last_error, code, __ATOMIC_RELAXED);
    return code > 0 ? code : 1;
}

/* ---- drivers with contexts: CUDA, MUSA ---- */

static int driver_enter(mp_runtime *rt, int device, mp_current *saved) {
    saved->device = -1;
    if (device < 0 || device >= rt->devices)
        return MP_DEVICE_GONE;
    void *context = __atomic_load_n(&rt->context[device], __ATOMIC_ACQUIRE);
    if (context == NULL) {
        void *none = NULL;
        int handle, rc = said(rt, CALL(rt, MP_DEVICE_OF, (int *, int))(&handle, device));
        if (rc == 0)
            rc = said(rt, CALL(rt, MP_RETAIN, (void **, int))(&context, handle));
        if (rc != 0)
            return rc;
        /* Two threads may have retained it: the count of one is given back. */
        if (!__atomic_compare_exchange_n(&rt->context[device], &none, context, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            CALL(rt, MP_RELEASE, (int))(handle);
    }
    int rc = said(rt, CALL(rt, MP_PUSH, (void *))(context));
    if (rc == 0)
        saved->device = device;
    return rc;
}

static void driver_leave(mp_runtime *rt, mp_current *saved) {
    void *context;
    if (saved->device >= 0)
        CALL(rt, MP_POP, (void **))(&context);
}

static int driver_classify(mp_runtime *rt, uint64_t address, mp_pointer *out) {
    int type = 0, device = -1, managed = 0;
    size_t size = 0;
    int (*ask)(void *, int, uint64_t) = CALL(rt, MP_POINTER, (void *, int, uint64_t));
    *out = (mp_pointer){MP_POINTER_HOST, -1, 0, 0};
    if (ask(&type, CU_TYPE, address) != 0)
        return MP_DEVICE_OK; /* the driver does not know it: memory of the host */
    ask(&managed, CU_MANAGED, address);
    if (type != CU_DEVICE_MEMORY && !managed && type != CU_UNIFIED_MEMORY)
        return MP_DEVICE_OK;
    int rc = said(rt, ask(&device, CU_ORDINAL, address));
    if (rc != 0)
        return rc;
    out->kind = managed ? MP_POINTER_MANAGED : MP_POINTER_DEVICE;
    out->device = device;
    if (HAS(rt, MP_RANGE)) {
        mp_current saved;
        if (rt->enter(rt, device, &saved) == 0) {
            if (CALL(rt, MP_RANGE, (uint64_t *, size_t *, uint64_t))(&out->base, &size, address) == 0)
                out->size = size;
            else
                out->base = 0;
        }
        rt->leave(rt, &saved);
    }
    return MP_DEVICE_OK;
}

static int driver_copy(mp_runtime *rt, int how, uint64_t to, int to_device, uint64_t from, int from_device, size_t n,
                       void *stream) {
    if (how == MP_TO_DEVICE)
        return said(rt, CALL(rt, MP_COPY_UP, (uint64_t, const void *, size_t, void *))(to, AS_POINTER(from), n,
                                                                                    stream));
    if (how == MP_TO_HOST)
        return said(rt, CALL(rt, MP_COPY_DOWN, (void *, uint64_t, size_t, void *))(AS_POINTER(to), from, n, stream));
    if (to_device != from_device && HAS(rt, MP_COPY_PEER)) {
        mp_current saved;
        int rc = rt->enter(rt, from_device, &saved); /* so that its context is there */
        rt->leave(rt, &saved);
        if (rc != 0)
            return rc;
        return said(rt, CALL(rt, MP_COPY_PEER, (uint64_t, void *, uint64_t, void *, size_t, void *))(
                            to, rt->context[to_device], from, rt->context[from_device], n, stream));
    }
    return said(rt, CALL(rt, MP_COPY_ON, (uint64_t, uint64_t, size_t, void *))(to, from, n, stream));
}

static int driver_can_peer(mp_runtime *rt, int device, int other) {
    int can = 0, a, b;
    if (device == other)
        return 1;
    if (!HAS(rt, MP_CAN_PEER) || CALL(rt, MP_DEVICE_OF, (int *, int))(&a, device) != 0 ||
        CALL(rt, MP_DEVICE_OF, (int *, int))(&b, other) != 0)
        return 0;
    return CALL(rt, MP_CAN_PEER, (int *, int, int))(&can, a, b) == 0 && can;
}

static int driver_uuid(mp_runtime *rt, int device, uint8_t *uuid) {
    int handle, rc;
    if (!HAS(rt, MP_UUID))
        return MP_DEVICE_NO_CALL;
    rc = said(rt, CALL(rt, MP_DEVICE_OF, (int *, int))(&handle, device));
    return rc ? rc : said(rt, CALL(rt, MP_UUID, (void *, int))(uuid, handle));
}

static int driver_stream_new(mp_runtime *rt, void **stream) {
    /* 0: ordered with the device's default stream, where most frameworks work. */
    return said(rt, CALL(rt, MP_STREAM, (void **, unsigned))(stream, 0));
}

static int flagged_event_new(mp_runtime *rt, void **event) {
    return said(rt, CALL(rt, MP_EVENT, (void **, unsigned))(event, NO_TIMING));
}

static int flagged_pin(mp_runtime *rt, void *start, size_t n) {
    if (!HAS(rt, MP_REGISTER) || !HAS(rt, MP_UNREGISTER))
        return MP_DEVICE_NO_CALL;
    return said(rt, CALL(rt, MP_REGISTER, (void *, size_t, unsigned))(start, n, PORTABLE));
}

static int any_unpin(mp_runtime *rt, void *start) {
    return HAS(rt, MP_UNREGISTER) ? said(rt, CALL(rt, MP_UNREGISTER, (void *))(start)) : MP_DEVICE_NO_CALL;
}

static int any_stream_end(mp_runtime *rt, void *stream) { return said(rt, CALL(rt, MP_STREAM_END, (void *))(stream)); }
static int any_stream_sync(mp_runtime *rt, void *s) { return said(rt, CALL(rt, MP_STREAM_SYNC, (void *))(s)); }
static int any_event_end(mp_runtime *rt, void *event) { return said(rt, CALL(rt, MP_EVENT_END, (void *))(event)); }
static int any_event_query(mp_runtime *rt, void *event) { return said(rt, CALL(rt, MP_EVENT_QUERY, (void *))(event)); }
static int any_event_record(mp_runtime *rt, void *event, void *stream) {
    return said(rt, CALL(rt, MP_EVENT_RECORD, (void *, void *))(event, stream));
}

/* CUipcMemHandle and hipIpcMemHandle_t are structures of 64 bytes, passed by value. */
typedef struct {
    uint8_t data[MP_IPC_BYTES];
} ipc_handle;

static int handled_ipc_export(mp_runtime *rt, uint64_t address, uint8_t *handle) {
    if (!HAS(rt, MP_IPC_EXPORT) || !HAS(rt, MP_IPC_OPEN) || !HAS(rt, MP_IPC_CLOSE))
        return MP_DEVICE_NO_CALL;
    return said(rt, CALL(rt, MP_IPC_EXPORT, (void *, uint64_t))(handle, address));
}

static int handled_ipc_open(mp_runtime *rt, const uint8_t *handle, uint64_t *address) {
    ipc_handle value;
    if (!HAS(rt, MP_IPC_OPEN) || !HAS(rt, MP_IPC_CLOSE))
        return MP_DEVICE_NO_CALL;
    memcpy(value.data, handle, sizeof value.data);
    return said(rt, CALL(rt, MP_IPC_OPEN, (uint64_t *, ipc_handle, unsigned))(address, value, LAZY_PEER_ACCESS));
}

static int any_ipc_close(mp_runtime *rt, uint64_t address) {
    return HAS(rt, MP_IPC_CLOSE) ? said(rt, CALL(rt, MP_IPC_CLOSE, (uint64_t))(address)) : MP_DEVICE_NO_CALL;
}

static int ranged_dma_buf(mp_runtime *rt, uint64_t address, size_t n, int *fd) {
    *fd = -1;
    if (!HAS(rt, MP_DMA_BUF))
        return MP_DEVICE_NO_CALL;
    return said(rt, CALL(rt, MP_DMA_BUF, (void *, uint64_t, size_t, int, unsigned long long))(fd, address, n,
                                                                                            DMA_BUF_FD, 0));
}

/* ---- runtimes with a current device: HIP, MACA; partly CANN and CNRT ---- */

static int runtime_enter(mp_runtime *rt, int device, mp_current *saved) {
    saved->device = -1;
    if (device < 0 || device >= rt->devices)
        return MP_DEVICE_GONE;
    saved->before = -1;
    CALL(rt, MP_CURRENT, (int *))(&saved->before);
    int rc = said(rt, CALL(rt, MP_SET_DEVICE, (int))(device));
    if (rc == 0)
        saved->device = device;
    return rc;
}

static void runtime_leave(mp_runtime *rt, mp_current *saved) {
    if (saved->device >= 0 && saved->before >= 0 && saved->before != saved->device)
        CALL(rt, MP_SET_DEVICE, (int))(saved->before);
}

static int runtime_classify(mp_runtime *rt, uint64_t address, mp_pointer *out) {
    struct { /* hipPointerAttribute_t, cudaPointerAttributes: type and device come first; room for what may follow */
        int type, device;
        uint64_t rest[14];
    } about;
    int version = HIP_VERSION_6, device_type = 2, managed_type = 3;
    size_t size = 0;
    *out = (mp_pointer){MP_POINTER_HOST, -1, 0, 0};
    memset(&about, 0, sizeof about);
    if (CALL(rt, MP_POINTER, (void *, const void *))(&about, AS_POINTER(address)) != 0)
        return MP_DEVICE_OK;
    if (HAS(rt, MP_VERSION))
        CALL(rt, MP_VERSION, (int *))(&version);
    if (version < HIP_VERSION_6) {
        device_type = 1; /* the numbers of hipMemoryType changed with ROCm 6 */
        managed_type = 3;
    }
    if (about.type != device_type && about.type != managed_type)
        return MP_DEVICE_OK;
    out->kind = about.type == device_type ? MP_POINTER_DEVICE : MP_POINTER_MANAGED;
    out->device = about.device;
    if (HAS(rt, MP_RANGE) && CALL(rt, MP_RANGE, (uint64_t *, size_t *, uint64_t))(&out->base, &size, address) == 0)
        out->size = size;
    else
        out->base = 0;
    return MP_DEVICE_OK;
}

/* hipMemcpyKind, mcMemcpyKind: up 1, down 2, on the device 3, as MP_TO_DEVICE and the others. */
static int runtime_copy(mp_runtime *rt, int how, uint64_t to, int to_device, uint64_t from, int from_device, size_t n,
                        void *stream) {
    if (how == MP_ON_DEVICE && to_device != from_device && HAS(rt, MP_COPY_PEER))
        return said(rt, CALL(rt, MP_COPY_PEER, (void *, int, const void *, int, size_t, void *))(
                            AS_POINTER(to), to_device, AS_POINTER(from), from_device, n, stream));
    return said(rt, CALL(rt, MP_COPY_ON, (void *, const void *, size_t, int, void *))(AS_POINTER(to), AS_POINTER(from),
                                                                                    n, how, stream));
}

static int runtime_can_peer(mp_runtime *rt, int device, int other) {
    int can = 0;
    if (device == other)
        return 1;
    return HAS(rt, MP_CAN_PEER) && CALL(rt, MP_CAN_PEER, (int *, int, int))(&can, device, other) == 0 && can;
}

static int runtime_uuid(mp_runtime *rt, int device, uint8_t *uuid) {
    return HAS(rt, MP_UUID) ? said(rt, CALL(rt, MP_UUID, (void *, int))(uuid, device)) : MP_DEVICE_NO_CALL;
}

static int plain_stream_new(mp_runtime *rt, void **stream) {
    return said(rt, CALL(rt, MP_STREAM, (void **))(stream));
}

static int plain_event_new(mp_runtime *rt, void **event) { return said(rt, CALL(rt, MP_EVENT, (void **))(event)); }

/* ---- what CANN does its own way ---- */

static int acl_classify(mp_runtime *rt, uint64_t address, mp_pointer *out) {
    struct { /* aclrtPtrAttributes: location {id, type}, page size, four reserved words; room for more */
        uint32_t id, type, page_size, reserved[13];
    } about;
    enum { ON_DEVICE = 1 };
    *out = (mp_pointer){MP_POINTER_HOST, -1, 0, 0};
    memset(&about, 0, sizeof about);
    if (!HAS(rt, MP_POINTER))
        return MP_DEVICE_NO_CALL; /* CANN before 8.1 */
    if (CALL(rt, MP_POINTER, (const void *, void *))(AS_POINTER(address), &about) == 0 && about.type == ON_DEVICE) {
        out->kind = MP_POINTER_DEVICE;
        out->device = (int)about.id;
    }
    return MP_DEVICE_OK;
}

static int acl_pin(mp_runtime *rt, void *start, size_t n) {
    void *mapped;
    if (!HAS(rt, MP_REGISTER) || !HAS(rt, MP_UNREGISTER))
        return MP_DEVICE_NO_CALL;
    return said(rt, CALL(rt, MP_REGISTER, (void *, uint64_t, int, void **))(start, n, 0, &mapped));
}

static int acl_copy(mp_runtime *rt, int how, uint64_t to, int to_device, uint64_t from, int from_device, size_t n,
                    void *stream) {
    (void)to_device;
    (void)from_device;
    return said(rt, CALL(rt, MP_COPY_ON, (void *, size_t, const void *, size_t, int, void *))(
                        AS_POINTER(to), n, AS_POINTER(from), n, how, stream));
}

static int acl_event_query(mp_runtime *rt, void *event) {
    int status = 0;
    int rc = said(rt, CALL(rt, MP_EVENT_QUERY, (void *, int *))(event, &status));
    return rc ? rc : (status == 1 ? MP_DEVICE_OK : MP_DEVICE_NOT_READY);
}

static int no_ipc_export(mp_runtime *rt, uint64_t address, uint8_t *handle) {
    (void)rt;
    (void)address;
    (void)handle;
    return MP_DEVICE_NO_CALL;
}

static int no_ipc_open(mp_runtime *rt, const uint8_t *handle, uint64_t *address) {
    (void)rt;
    (void)handle;
    (void)address;
    return MP_DEVICE_NO_CALL;
}

/* ---- what CNRT does its own way ---- */

static int cnrt_classify(mp_runtime *rt, uint64_t address, mp_pointer *out) {
    struct { /* cnrtPointerAttributes_t */
        int type, device;
        size_t size;
        void *device_pointer, *host_pointer;
        int cache_mode;
        void *base;
        uint64_t rest[8];
    } about;
    enum { OF_DEVICE = 2 };
    *out = (mp_pointer){MP_POINTER_HOST, -1, 0, 0};
    memset(&about, 0, sizeof about);
    if (CALL(rt, MP_POINTER, (void *, const void *))(&about, AS_POINTER(address)) == 0 && about.type == OF_DEVICE) {
        out->kind = MP_POINTER_DEVICE;
        out->device = about.device;
        out->base = (uint64_t)(uintptr_t)about.base;
        out->size = about.size;
    }
    return MP_DEVICE_OK;
}

static int cnrt_copy(mp_runtime *rt, int how, uint64_t to, int to_device, uint64_t from, int from_device, size_t n,
                     void *stream) {
    enum { HOST_TO_DEV = 0, DEV_TO_DEV = 1, DEV_TO_HOST = 2, PEER_TO_PEER = 4 };
    int dir = how == MP_TO_DEVICE ? HOST_TO_DEV : how == MP_TO_HOST ? DEV_TO_HOST : DEV_TO_DEV;
    if (how == MP_ON_DEVICE && to_device != from_device)
        dir = PEER_TO_PEER;
    return said(rt, CALL(rt, MP_COPY_ON, (void *, void *, size_t, void *, int))(AS_POINTER(to), AS_POINTER(from), n,
                                                                             stream, dir));
}

/* cnrtIpcMemHandle is a pointer-sized value. */
static int cnrt_ipc_export(mp_runtime *rt, uint64_t address, uint8_t *handle) {
    void *value = NULL;
    if (!HAS(rt, MP_IPC_EXPORT) || !HAS(rt, MP_IPC_OPEN) || !HAS(rt, MP_IPC_CLOSE))
        return MP_DEVICE_NO_CALL;
    int rc = said(rt, CALL(rt, MP_IPC_EXPORT, (void **, void *))(&value, AS_POINTER(address)));
    memset(handle, 0, MP_IPC_BYTES);
    memcpy(handle, &value, sizeof value);
    return rc;
}

static int cnrt_ipc_open(mp_runtime *rt, const uint8_t *handle, uint64_t *address) {
    void *value, *mapped = NULL;
    if (!HAS(rt, MP_IPC_OPEN) || !HAS(rt, MP_IPC_CLOSE))
        return MP_DEVICE_NO_CALL;
    memcpy(&value, handle, sizeof value);
    int rc = said(rt, CALL(rt, MP_IPC_OPEN, (void **, void *, int))(&mapped, value, 0));
    *address = (uint64_t)(uintptr_t)mapped;
    return rc;
}

/* ---- opening ---- */

static const mp_runtime shape_driver = {
    .enter = driver_enter, .leave = driver_leave, .classify = driver_classify, .pin = flagged_pin, .unpin = any_unpin,
    .copy = driver_copy, .stream_new = driver_stream_new, .stream_end = any_stream_end, .stream_sync = any_stream_sync,
    .event_new = flagged_event_new, .event_end = any_event_end, .event_record = any_event_record,
    .event_query = any_event_query, .ipc_export = handled_ipc_export, .ipc_open = handled_ipc_open,
    .ipc_close = any_ipc_close, .dma_buf = ranged_dma_buf, .can_peer = driver_can_peer, .uuid = driver_uuid,
};
static const mp_runtime shape_runtime = {
    .enter = runtime_enter, .leave = runtime_leave, .classify = runtime_classify, .pin = flagged_pin,
    .unpin = any_unpin, .copy = runtime_copy, .stream_new = plain_stream_new, .stream_end = any_stream_end,
    .stream_sync = any_stream_sync, .event_new = flagged_event_new, .event_end = any_event_end,
    .event_record = any_event_record, .event_query = any_event_query, .ipc_export = handled_ipc_export,
    .ipc_open = handled_ipc_open, .ipc_close = any_ipc_close, .dma_buf = ranged_dma_buf, .can_peer = runtime_can_peer,
    .uuid = runtime_uuid,
};
static const mp_runtime shape_acl = {
    .enter = runtime_enter, .leave = runtime_leave, .classify = acl_classify, .pin = acl_pin, .unpin = any_unpin,
    .copy = acl_copy, .stream_new = plain_stream_new, .stream_end = any_stream_end, .stream_sync = any_stream_sync,
    .event_new = plain_event_new, .event_end = any_event_end, .event_record = any_event_record,
    .event_query = acl_event_query, .ipc_export = no_ipc_export, .ipc_open = no_ipc_open, .ipc_close = any_ipc_close,
    .dma_buf = ranged_dma_buf, .can_peer = runtime_can_peer, .uuid = runtime_uuid,
};
static const mp_runtime shape_cnrt = {
    .enter = runtime_enter, .leave = runtime_leave, .classify = cnrt_classify, .pin = flagged_pin, .unpin = any_unpin,
    .copy = cnrt_copy, .stream_new = plain_stream_new, .stream_end = any_stream_end, .stream_sync = any_stream_sync,
    .event_new = plain_event_new, .event_end = any_event_end, .event_record = any_event_record,
    .event_query = any_event_query, .ipc_export = cnrt_ipc_export, .ipc_open = cnrt_ipc_open,
    .ipc_close = any_ipc_close, .dma_buf = ranged_dma_buf, .can_peer = runtime_can_peer, .uuid = runtime_uuid,
};
/* Without these a row is of no use. */
static const int needed[] = {MP_COUNT, MP_COPY_ON, MP_STREAM, MP_STREAM_END, MP_STREAM_SYNC, MP_EVENT, MP_EVENT_END,
                             MP_EVENT_RECORD, MP_EVENT_QUERY};
static const int needed_of_drivers[] = {MP_INIT, MP_DEVICE_OF, MP_RETAIN, MP_RELEASE, MP_PUSH, MP_POP, MP_POINTER,
                                        MP_COPY_UP, MP_COPY_DOWN};
static const int needed_of_runtimes[] = {MP_SET_DEVICE, MP_CURRENT, MP_POINTER};

const mp_device_row *mp_device_row_at(int n) { return n >= 0 && n < MP_DEVICE_ROWS ? &mp_device_rows[n] : NULL; }

const mp_device_row *mp_device_row_named(const char *name) {
    for (int k = 0; k < MP_DEVICE_ROWS; k++)
        if (strcmp(mp_device_rows[k].name, name) == 0)
            return &mp_device_rows[k];
    return NULL;
}

static void *symbol_of(mp_runtime *rt, const char *name) {
    char newer[96];
    void *found = NULL;
    if (rt->row->newest) {
        snprintf(newer, sizeof newer, "%s_v2", name);
        found = dlsym(rt->library, newer);
    }
    return found != NULL ? found : dlsym(rt->library, name);
}

static const char *missing_of(mp_runtime *rt, const int *calls, size_t n) {
    for (size_t k = 0; k < n; k++)
        if (!HAS(rt, calls[k]))
            return rt->row->calls[calls[k]] != NULL ? rt->row->calls[calls[k]] : "a call that it needs";
    return NULL;
}

static int start(mp_runtime *rt, char *why, size_t why_bytes) {
    int rc = 0, n = 0;
    if (HAS(rt, MP_INIT)) {
        rc = rt->row->shape == MP_SHAPE_ACL ? CALL(rt, MP_INIT, (const char *))(NULL)
                                            : CALL(rt, MP_INIT, (unsigned))(0);
        if (rc == rt->row->started_already)
            rc = 0;
    }
    if (rc != 0) {
        snprintf(why, why_bytes, "the %s runtime does not start: %s (%d)", rt->row->name, mp_runtime_error(rt, rc),
                 rc);
        return -1;
    }
    rc = CALL(rt, MP_COUNT, (int *))(&n);
    if (rc != 0 || n <= 0) {
        snprintf(why, why_bytes, "the %s runtime finds no device%s%s", rt->row->name, rc ? ": " : "",
                 rc ? mp_runtime_error(rt, rc) : "");
        return -1;
    }
    rt->devices = n < MP_DEVICES_MAX ? n : MP_DEVICES_MAX;
    return 0;
}

int mp_runtime_open(mp_runtime *rt, const mp_device_row *row, const char *path, char *why, size_t why_bytes) {
    const mp_runtime *shapes[] = {&shape_driver, &shape_runtime, &shape_acl, &shape_cnrt};
    const char *missing;
    *rt = *shapes[row->shape];
    rt->row = row;
    if (path != NULL && path[0])
        rt->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int k = 0; k < MP_ROW_LIBRARIES && rt->library == NULL && (path == NULL || !path[0]); k++)
        if (row->libraries[k] != NULL)
            rt->library = dlopen(row->libraries[k], RTLD_NOW | RTLD_LOCAL);
    if (rt->library == NULL) {
        snprintf(why, why_bytes, "%s cannot be opened", path != NULL && path[0] ? path : row->libraries[0]);
        return -1;
    }
    for (int k = 0; k < MP_DEVICE_CALLS; k++)
        rt->call[k] = row->calls[k] != NULL ? symbol_of(rt, row->calls[k]) : NULL;
    missing = missing_of(rt, needed, sizeof needed / sizeof needed[0]);
    if (missing == NULL && row->shape == MP_SHAPE_DRIVER)
        missing = missing_of(rt, needed_of_drivers, sizeof needed_of_drivers / sizeof needed_of_drivers[0]);
    if (missing == NULL && row->shape != MP_SHAPE_DRIVER)
        missing = missing_of(rt, needed_of_runtimes, sizeof needed_of_runtimes / sizeof needed_of_runtimes[0]);
    if (missing != NULL)
        snprintf(why, why_bytes, "the library of the %s runtime has no %s: it is too old", row->name, missing);
    if (missing != NULL || start(rt, why, why_bytes) != 0) {
        dlclose(rt->library);
        rt->library = NULL;
        return -1;
    }
    return 0;
}

void mp_runtime_release(mp_runtime *rt) {
    int handle;
    /* The library stays: others of this process may use it, and a driver that is unloaded takes its threads along. */
    for (int k = 0; k < rt->devices; k++)
        if (__atomic_exchange_n(&rt->context[k], NULL, __ATOMIC_ACQ_REL) != NULL &&
            CALL(rt, MP_DEVICE_OF, (int *, int))(&handle, k) == 0)
            CALL(rt, MP_RELEASE, (int))(handle);
}

const char *mp_runtime_error(mp_runtime *rt, int code) {
    const char *text = NULL;
    if (!HAS(rt, MP_ERROR_TEXT))
        return "an error that it gives no text for";
    if (rt->row->shape == MP_SHAPE_DRIVER)
        CALL(rt, MP_ERROR_TEXT, (int, const char **))(code, &text);
    else
        text = ((const char *(*)(int))rt->call[MP_ERROR_TEXT])(code);
    return text != NULL ? text : "an unknown error";
}
