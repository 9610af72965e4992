/* A stand-in for a device runtime, for tests: calls of the CUDA driver API and of HIP over memory of the host.
 *
 * An allocation's device address is a range that nobody may touch (PROT_NONE), so code that takes it for host memory
 * crashes; its bytes lie elsewhere, in a memfd. Copies are carried out by a thread of their stream, late if told so, at
 * the moment when they are said to end. What a test wants to go wrong it says by the stub_* functions.
 *
 * gcc -shared -fPIC -O1 -pthread -o libstubdevice.so stub_device.c */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { INVALID = 1, NO_MEMORY = 2, NOT_READY = 600, ALREADY_PINNED = 712, NOT_PINNED = 713, NOT_SUPPORTED = 801,
       INVALID_CONTEXT = 201, GONE = 999 };
enum { ALLOCATIONS = 4096, PINS = 256, DEVICES = 2, FAILS = 8 };

typedef struct {
    uint64_t base;
    size_t size;
    int device, fd, imported;
    char *bytes;
} allocation;

typedef struct op {
    struct op *next;
    uint64_t to, from, n;
    int how;
} op;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    op *first, *last;
    uint64_t asked, done;
    int error, ending;
} stream;

typedef struct {
    stream *of;
    uint64_t at;
} event;

static struct {
    pthread_mutex_t lock;
    allocation all[ALLOCATIONS];
    struct { char *start; size_t n; } pins[PINS];
    struct { char call[48]; int after, code, once; } fails[FAILS];
    size_t pin_limit, pinned;
    int streams, events, contexts, imports, allocations, pins_live;
    uint64_t copies, copied;
    volatile int gone, hang, peers;
    volatile long delay_ns;
} stub = {.lock = PTHREAD_MUTEX_INITIALIZER, .pin_limit = (size_t)-1, .peers = 1};

static __thread int current[16];
static __thread int depth;
static __thread int device_now;

/* ---- what tests say ---- */

void stub_reset(void) {
    pthread_mutex_lock(&stub.lock);
    memset(stub.fails, 0, sizeof stub.fails);
    stub.pin_limit = (size_t)-1;
    stub.gone = stub.hang = 0;
    stub.peers = 1;
    stub.delay_ns = 0;
    stub.copies = stub.copied = 0;
    pthread_mutex_unlock(&stub.lock);
}
void stub_delay(long ns) { stub.delay_ns = ns; }
void stub_hang(int on) { stub.hang = on; }
void stub_gone(int on) { stub.gone = on; }
void stub_peers(int on) { stub.peers = on; }
void stub_pin_limit(size_t n) { stub.pin_limit = n; }
/* After `after` more calls of `call` ("copy", "register", "ipc_open", ...) one fails with `code`, and so do the next. */
void stub_fail(const char *call, int after, int code) {
    pthread_mutex_lock(&stub.lock);
    for (int k = 0; k < FAILS; k++)
        if (!stub.fails[k].call[0] || strcmp(stub.fails[k].call, call) == 0) {
            snprintf(stub.fails[k].call, sizeof stub.fails[k].call, "%s", call);
            stub.fails[k].after = after;
            stub.fails[k].code = code;
            break;
        }
    pthread_mutex_unlock(&stub.lock);
}
/* The next call of `call` fails, and no other. */
void stub_fail_once(const char *call, int code) {
    stub_fail(call, 0, code);
    pthread_mutex_lock(&stub.lock);
    for (int k = 0; k < FAILS; k++)
        if (strcmp(stub.fails[k].call, call) == 0)
            stub.fails[k].once = 1;
    pthread_mutex_unlock(&stub.lock);
}
long stub_count(const char *what) {
    long n = -1;
    pthread_mutex_lock(&stub.lock);
    if (strcmp(what, "allocations") == 0) n = stub.allocations;
    if (strcmp(what, "streams") == 0) n = stub.streams;
    if (strcmp(what, "events") == 0) n = stub.events;
    if (strcmp(what, "contexts") == 0) n = stub.contexts;
    if (strcmp(what, "imports") == 0) n = stub.imports;
    if (strcmp(what, "pins") == 0) n = stub.pins_live;
    if (strcmp(what, "copies") == 0) n = (long)stub.copies;
    if (strcmp(what, "copied") == 0) n = (long)stub.copied;
    pthread_mutex_unlock(&stub.lock);
    return n;
}

static int fails(const char *call) {
    int code = stub.gone ? GONE : 0;
    pthread_mutex_lock(&stub.lock);
    for (int k = 0; k < FAILS && !code; k++)
        if (strcmp(stub.fails[k].call, call) == 0 && stub.fails[k].code && stub.fails[k].after-- <= 0)
        {
            code = stub.fails[k].code;
            if (stub.fails[k].once)
                stub.fails[k].code = stub.fails[k].once = 0;
        }
    pthread_mutex_unlock(&stub.lock);
    return code;
}

/* ---- memory ---- */

static allocation *find(uint64_t address) {
    for (int k = 0; k < ALLOCATIONS; k++)
        if (stub.all[k].base && address >= stub.all[k].base && address < stub.all[k].base + stub.all[k].size)
            return &stub.all[k];
    return NULL;
}

static char *bytes_of(uint64_t address, size_t n) {
    allocation *of;
    char *found = NULL;
    pthread_mutex_lock(&stub.lock);
    of = find(address);
    if (of != NULL && n <= of->size - (address - of->base))
        found = of->bytes + (address - of->base);
    pthread_mutex_unlock(&stub.lock);
    return found;
}

static int enter_allocation(int device, size_t size, int fd, int imported, uint64_t *out) {
    char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *face = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bytes == MAP_FAILED || face == MAP_FAILED)
        return NO_MEMORY;
    pthread_mutex_lock(&stub.lock);
    for (int k = 0; k < ALLOCATIONS; k++)
        if (!stub.all[k].base) {
            stub.all[k] = (allocation){(uint64_t)(uintptr_t)face, size, device, fd, imported, bytes};
            *out = stub.all[k].base;
            if (imported) stub.imports++; else stub.allocations++;
            pthread_mutex_unlock(&stub.lock);
            return 0;
        }
    pthread_mutex_unlock(&stub.lock);
    munmap(bytes, size);
    munmap(face, size);
    return NO_MEMORY;
}

static int leave_allocation(uint64_t address, int imported) {
    allocation gone;
    pthread_mutex_lock(&stub.lock);
    allocation *of = find(address);
    if (of == NULL || of->base != address || of->imported != imported) {
        pthread_mutex_unlock(&stub.lock);
        return INVALID;
    }
    gone = *of;
    of->base = 0;
    if (imported) stub.imports--; else stub.allocations--;
    pthread_mutex_unlock(&stub.lock);
    munmap(gone.bytes, gone.size);
    munmap((void *)(uintptr_t)gone.base, gone.size);
    close(gone.fd);
    return 0;
}

int cuMemAlloc_v2(uint64_t *out, size_t n) {
    size_t size = (n + 4095) & ~(size_t)4095;
    int fd = memfd_create("stub-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
        return NO_MEMORY;
    return enter_allocation(depth ? current[depth - 1] : device_now, size, fd, 0, out);
}
int cuMemFree_v2(uint64_t address) { return leave_allocation(address, 0); }
/* An allocation of a device, and its bytes behind the runtime's back. */
uint64_t stub_alloc(int device, size_t n) {
    uint64_t out = 0;
    int before = device_now, was = depth;
    depth = 0;
    device_now = device;
    if (cuMemAlloc_v2(&out, n) != 0)
        out = 0;
    depth = was;
    device_now = before;
    return out;
}
int stub_store(uint64_t address, const void *from, size_t n) {
    char *bytes = bytes_of(address, n);
    if (bytes != NULL) memcpy(bytes, from, n);
    return bytes != NULL ? 0 : INVALID;
}
int stub_load(uint64_t address, void *to, size_t n) {
    char *bytes = bytes_of(address, n);
    if (bytes != NULL) memcpy(to, bytes, n);
    return bytes != NULL ? 0 : INVALID;
}
/* Where the bytes are: to look at them only. */
void *stub_bytes(uint64_t address) { return bytes_of(address, 1); }

/* ---- streams ---- */

static int carry_out(op *one) {
    char *to = bytes_of(one->to, one->n), *from = bytes_of(one->from, one->n);
    if ((one->how != 2 && to == NULL) || (one->how != 1 && from == NULL))
        return 700; /* an illegal address */
    if ((one->how == 2 && to != NULL) || (one->how == 1 && from != NULL))
        return INVALID; /* a device address where the host's was said to be */
    memcpy(to != NULL ? to : (char *)(uintptr_t)one->to, from != NULL ? from : (char *)(uintptr_t)one->from, one->n);
    pthread_mutex_lock(&stub.lock);
    stub.copied += one->n;
    pthread_mutex_unlock(&stub.lock);
    return 0;
}

static void *work(void *arg) {
    stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->first == NULL && !s->ending)
            pthread_cond_wait(&s->change, &s->lock);
        if (s->first == NULL)
            break;
        op *one = s->first;
        s->first = one->next;
        if (s->first == NULL) s->last = NULL;
        pthread_mutex_unlock(&s->lock);
        if (stub.delay_ns)
            nanosleep(&(struct timespec){stub.delay_ns / 1000000000, stub.delay_ns % 1000000000}, NULL);
        while (stub.hang && !s->ending)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        int error = stub.hang ? GONE : carry_out(one);
        free(one);
        pthread_mutex_lock(&s->lock);
        if (error && !s->error)
            s->error = error;
        s->done++;
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int cuStreamCreate(void **out, unsigned flags) {
    int code = fails("stream");
    stream *s = code ? NULL : calloc(1, sizeof *s);
    (void)flags;
    if (s == NULL)
        return code ? code : NO_MEMORY;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    if (pthread_create(&s->thread, NULL, work, s) != 0) {
        free(s);
        return NO_MEMORY;
    }
    pthread_mutex_lock(&stub.lock);
    stub.streams++;
    pthread_mutex_unlock(&stub.lock);
    *out = s;
    return 0;
}
int cuStreamDestroy_v2(void *handle) {
    stream *s = handle;
    pthread_mutex_lock(&s->lock);
    s->ending = 1;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
    pthread_mutex_lock(&stub.lock);
    stub.streams--;
    pthread_mutex_unlock(&stub.lock);
    return 0;
}
int cuStreamSynchronize(void *handle) {
    stream *s = handle;
    if (s == NULL)
        return stub.gone ? GONE : 0;
    pthread_mutex_lock(&s->lock);
    while (s->done < s->asked)
        pthread_cond_wait(&s->change, &s->lock);
    int error = s->error;
    pthread_mutex_unlock(&s->lock);
    return stub.gone ? GONE : error;
}
static int enqueue(int how, uint64_t to, uint64_t from, size_t n, void *handle) {
    stream *s = handle;
    int code = fails("copy");
    op *one = code ? NULL : malloc(sizeof *one);
    if (one == NULL)
        return code ? code : NO_MEMORY;
    *one = (op){NULL, to, from, n, how};
    pthread_mutex_lock(&stub.lock);
    stub.copies++;
    pthread_mutex_unlock(&stub.lock);
    pthread_mutex_lock(&s->lock);
    if (s->last) s->last->next = one; else s->first = one;
    s->last = one;
    s->asked++;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *s) {
    return enqueue(1, to, (uint64_t)(uintptr_t)from, n, s);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) {
    return enqueue(2, (uint64_t)(uintptr_t)to, from, n, s);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void *s) { return enqueue(3, to, from, n, s); }
int cuMemcpyPeerAsync(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t n, void *s) {
    return to_context && from_context ? enqueue(3, to, from, n, s) : INVALID_CONTEXT;
}
int cuEventCreate(void **out, unsigned flags) {
    (void)flags;
    *out = calloc(1, sizeof(event));
    pthread_mutex_lock(&stub.lock);
    stub.events++;
    pthread_mutex_unlock(&stub.lock);
    return *out ? 0 : NO_MEMORY;
}
int cuEventDestroy_v2(void *e) {
    free(e);
    pthread_mutex_lock(&stub.lock);
    stub.events--;
    pthread_mutex_unlock(&stub.lock);
    return 0;
}
int cuEventRecord(void *handle, void *of) {
    event *e = handle;
    int code = fails("record");
    if (code)
        return code;
    e->of = of;
    pthread_mutex_lock(&e->of->lock);
    e->at = e->of->asked;
    pthread_mutex_unlock(&e->of->lock);
    return 0;
}
int cuEventQuery(void *handle) {
    event *e = handle;
    if (stub.gone)
        return GONE;
    pthread_mutex_lock(&e->of->lock);
    int code = e->of->done < e->at ? NOT_READY : e->of->error;
    pthread_mutex_unlock(&e->of->lock);
    return code;
}

/* ---- devices, pointers, pinning, sharing ---- */

int cuInit(unsigned flags) { (void)flags; return fails("init"); }
int cuDeviceGetCount(int *n) { *n = DEVICES; return fails("count"); }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return ordinal < DEVICES ? 0 : 101; }
int cuDeviceGetUuid(void *uuid, int device) {
    memset(uuid, 0xA0 + device, 16);
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    int code = fails("context");
    *context = (void *)(uintptr_t)(device + 1);
    pthread_mutex_lock(&stub.lock);
    stub.contexts += !code;
    pthread_mutex_unlock(&stub.lock);
    return code;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    pthread_mutex_lock(&stub.lock);
    stub.contexts--;
    pthread_mutex_unlock(&stub.lock);
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    if (stub.gone)
        return GONE;
    if (depth >= 16)
        return INVALID;
    current[depth++] = (int)(uintptr_t)context - 1;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    if (depth == 0)
        return INVALID_CONTEXT;
    depth--;
    *context = NULL;
    return 0;
}
int stub_depth(void) { return depth; }

int cuPointerGetAttribute(void *data, int what, uint64_t address) {
    int code = stub.gone ? GONE : 0, host = 0;
    pthread_mutex_lock(&stub.lock);
    allocation *of = find(address);
    for (int k = 0; k < PINS; k++)
        host |= stub.pins[k].start != NULL && (char *)(uintptr_t)address >= stub.pins[k].start &&
                (char *)(uintptr_t)address < stub.pins[k].start + stub.pins[k].n;
    if (!code && of == NULL && !host)
        code = INVALID;
    if (!code && what == 2) *(int *)data = of != NULL ? 2 : 1;
    if (!code && what == 8) *(int *)data = 0;
    if (!code && what == 9) *(int *)data = of != NULL ? of->device : 0;
    pthread_mutex_unlock(&stub.lock);
    return code;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    int code = INVALID;
    pthread_mutex_lock(&stub.lock);
    allocation *of = find(address);
    if (of != NULL) {
        *base = of->base;
        *size = of->size;
        code = 0;
    }
    pthread_mutex_unlock(&stub.lock);
    return code;
}
int cuMemHostRegister_v2(void *start, size_t n, unsigned flags) {
    int code = fails("register");
    (void)flags;
    pthread_mutex_lock(&stub.lock);
    if (!code && stub.pinned + n > stub.pin_limit)
        code = NO_MEMORY;
    for (int k = 0; k < PINS && !code; k++)
        if (stub.pins[k].start == start)
            code = ALREADY_PINNED;
    int placed = code;
    for (int k = 0; k < PINS && !placed; k++)
        if (stub.pins[k].start == NULL) {
            stub.pins[k].start = start;
            stub.pins[k].n = n;
            stub.pinned += n;
            stub.pins_live++;
            placed = 1;
        }
    pthread_mutex_unlock(&stub.lock);
    return code;
}
int cuMemHostUnregister(void *start) {
    int code = NOT_PINNED;
    pthread_mutex_lock(&stub.lock);
    for (int k = 0; k < PINS; k++)
        if (stub.pins[k].start == start && start != NULL) {
            stub.pins[k].start = NULL;
            stub.pinned -= stub.pins[k].n;
            stub.pins_live--;
            code = 0;
        }
    pthread_mutex_unlock(&stub.lock);
    return code;
}

typedef struct {
    char data[64];
} shared;
typedef struct {
    int pid, fd, device, used;
    uint64_t size;
} shared_as;

int cuIpcGetMemHandle(void *handle, uint64_t address) {
    shared_as about = {0};
    int code = fails("ipc_export");
    if (code)
        return code;
    pthread_mutex_lock(&stub.lock);
    allocation *of = find(address);
    if (of != NULL && !of->imported)
        about = (shared_as){getpid(), of->fd, of->device, 1, of->size};
    pthread_mutex_unlock(&stub.lock);
    memset(handle, 0, 64);
    memcpy(handle, &about, sizeof about);
    return about.used ? 0 : INVALID;
}
int cuIpcOpenMemHandle_v2(uint64_t *out, shared handle, unsigned flags) {
    shared_as about;
    char path[64];
    struct stat st;
    int code = fails("ipc_open");
    (void)flags;
    memcpy(&about, handle.data, sizeof about);
    if (code)
        return code;
    if (!about.used || about.pid == getpid())
        return INVALID_CONTEXT; /* as CUDA: a process does not open what it exported itself */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", about.pid, about.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID;
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < about.size) {
        close(fd);
        return INVALID;
    }
    return enter_allocation(about.device, about.size, fd, 1, out);
}
int cuIpcCloseMemHandle(uint64_t address) { return leave_allocation(address, 1); }

int cuMemGetHandleForAddressRange(void *out, uint64_t address, size_t n, int kind, unsigned long long flags) {
    int code = fails("dma_buf"), fd = -1;
    (void)flags;
    if (code || kind != 1)
        return code ? code : INVALID;
    if ((address | n) & 4095)
        return INVALID; /* as CUDA: whole pages */
    pthread_mutex_lock(&stub.lock);
    allocation *of = find(address);
    if (of != NULL && n <= of->size - (address - of->base))
        fd = fcntl(of->fd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&stub.lock);
    *(int *)out = fd;
    return fd >= 0 ? 0 : INVALID;
}
int cuDeviceCanAccessPeer(int *can, int device, int other) {
    *can = device != other && stub.peers;
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == NO_MEMORY ? "out of memory" : code == GONE ? "the stub is gone" : "an error of the stub";
    return 0;
}

/* ---- the same by HIP's names and shapes ---- */

int hipInit(unsigned flags) { return cuInit(flags); }
int hipGetDeviceCount(int *n) { return cuDeviceGetCount(n); }
int hipSetDevice(int device) {
    if (stub.gone)
        return GONE;
    device_now = device;
    return device < DEVICES ? 0 : 101;
}
int hipGetDevice(int *device) { *device = device_now; return 0; }
int hipDeviceGetUuid(void *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int hipRuntimeGetVersion(int *version) { *version = 60200000; return 0; }
int hipPointerGetAttributes(void *out, const void *address) {
    struct { int type, device; void *on_device, *on_host; int managed; unsigned flags; } *about = out;
    memset(about, 0, sizeof *about);
    return cuPointerGetAttribute(&about->type, 2, (uint64_t)(uintptr_t)address) ||
           cuPointerGetAttribute(&about->device, 9, (uint64_t)(uintptr_t)address);
}
int hipMemGetAddressRange(uint64_t *base, size_t *size, uint64_t a) { return cuMemGetAddressRange_v2(base, size, a); }
int hipHostRegister(void *start, size_t n, unsigned flags) { return cuMemHostRegister_v2(start, n, flags); }
int hipHostUnregister(void *start) { return cuMemHostUnregister(start); }
int hipMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) {
    return enqueue(kind, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, n, s);
}
int hipMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t n, void *s) {
    (void)to_device;
    (void)from_device;
    return enqueue(3, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, n, s);
}
int hipStreamCreate(void **out) { return cuStreamCreate(out, 0); }
int hipStreamDestroy(void *s) { return cuStreamDestroy_v2(s); }
int hipStreamSynchronize(void *s) { return cuStreamSynchronize(s); }
int hipEventCreateWithFlags(void **out, unsigned flags) { return cuEventCreate(out, flags); }
int hipEventDestroy(void *e) { return cuEventDestroy_v2(e); }
int hipEventRecord(void *e, void *s) { return cuEventRecord(e, s); }
int hipEventQuery(void *e) { return cuEventQuery(e); }
int hipIpcGetMemHandle(void *handle, uint64_t address) { return cuIpcGetMemHandle(handle, address); }
int hipIpcOpenMemHandle(uint64_t *out, shared handle, unsigned f) { return cuIpcOpenMemHandle_v2(out, handle, f); }
int hipIpcCloseMemHandle(uint64_t address) { return cuIpcCloseMemHandle(address); }
int hipDeviceCanAccessPeer(int *can, int device, int other) { return cuDeviceCanAccessPeer(can, device, other); }
const char *hipGetErrorString(int code) { (void)code; return "an error of the stub"; }
