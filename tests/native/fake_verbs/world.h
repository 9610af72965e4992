/* The fabric that the fake libibverbs pretends: devices, regions and queue pairs in memory that processes may share.
 *
 * One lock guards all of it. It is robust: a process that is killed while it holds the lock leaves nobody waiting. */
#ifndef FAKE_WORLD_H
#define FAKE_WORLD_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { DEVICES = 16, REGIONS = 16384, PAIRS = 8192, CONTEXTS = 256, EVENTS = 64, RULES = 32, LOST = -1 };

typedef struct {
    int up, cut, held, removed, infiniband;
    uint64_t rate, busy_until;
    uint32_t latency_us;
    uint64_t requests, bytes, completions, lost, overruns, failures, flushed;
} f_device;
typedef struct {
    int pid, device, context, access;   /* pid 0: free */
    uint32_t tag;                       /* of the latest use, upper part of the key */
    uint64_t address, length;
    char *host;                         /* where the byte at `address` is in that process */
} f_region;
typedef struct {
    int pid, device, context, state, access, far_device;
    uint32_t far_pair, psn, far_psn;
} f_pair;
typedef struct {
    int pid, device, fatal;
    uint32_t bell;                      /* futex: rung whenever its worker should look */
    uint32_t head, tail;
    struct { int type; uint32_t about; } events[EVENTS];
} f_context;
typedef struct {
    char call[24];                      /* "": about completions */
    int device, code, after, times;     /* device -1: any */
} f_rule;
typedef struct {
    pthread_mutex_t lock;
    int ready, n_devices;
    uint32_t tag, retry_ms, waiting;
    uint64_t max_mr_bytes;
    uint32_t max_wr, max_cqe;
    f_device devices[DEVICES];
    f_region regions[REGIONS];
    f_pair pairs[PAIRS];
    f_context contexts[CONTEXTS];
    f_rule rules[RULES];
} f_world;

static f_world *world;
static char shared_path[PATH_MAX];
static pthread_mutex_t world_once = PTHREAD_MUTEX_INITIALIZER;
static int live_pds, live_channels, live_cqs;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static void take_lock(void) {
    if (pthread_mutex_lock(&world->lock) == EOWNERDEAD) pthread_mutex_consistent(&world->lock);
}
/* For callers: the workers stand back while somebody waits. */
static void enter(void) {
    __atomic_fetch_add(&world->waiting, 1, __ATOMIC_RELAXED);
    take_lock();
    __atomic_fetch_sub(&world->waiting, 1, __ATOMIC_RELAXED);
}
static void leave(void) { pthread_mutex_unlock(&world->lock); }
static void ring(f_context *c) {
    __atomic_fetch_add(&c->bell, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &c->bell, FUTEX_WAKE, 1, 0, 0, 0);
}
static void ring_all(void) {
    for (int i = 0; i < CONTEXTS; i++)
        if (world->contexts[i].pid) ring(&world->contexts[i]);
}
static int is_dead(int pid) { return pid != getpid() && kill(pid, 0) != 0 && errno == ESRCH; }
/* What killed processes left behind. */
static void bury(void) {
    for (int i = 0; i < REGIONS; i++)
        if (world->regions[i].pid && is_dead(world->regions[i].pid)) world->regions[i].pid = 0;
    for (int i = 0; i < PAIRS; i++)
        if (world->pairs[i].pid && is_dead(world->pairs[i].pid)) world->pairs[i].pid = 0;
    for (int i = 0; i < CONTEXTS; i++)
        if (world->contexts[i].pid && is_dead(world->contexts[i].pid)) world->contexts[i].pid = 0;
}
static void reset_scripts(void) {
    world->n_devices = world->n_devices ? world->n_devices : 2;
    world->retry_ms = 30;
    world->max_mr_bytes = UINT64_MAX;
    world->max_wr = 4096;
    world->max_cqe = 65535;
    memset(world->rules, 0, sizeof world->rules);
    for (int i = 0; i < DEVICES; i++) {
        f_device *d = &world->devices[i];
        d->up = 1;
        d->cut = d->held = d->removed = d->infiniband = 0;
        d->rate = d->busy_until = d->latency_us = 0;
    }
}
/* Maps the world, once. Whoever makes the file first sets it up under the file's lock. */
static f_world *the_world(void) {
    pthread_mutex_lock(&world_once);
    if (!world) {
        int fd = -1;
        const char *path = *shared_path ? shared_path : getenv("FAKE_VERBS_SHARE");
        if (path && *path) {
            struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
            fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            if (fd < 0 || fcntl(fd, F_SETLKW, &whole) || ftruncate(fd, sizeof(f_world))) abort();
        }
        world = mmap(0, sizeof(f_world), PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
        if (world == MAP_FAILED) abort();
        if (!world->ready) {
            pthread_mutexattr_t a;
            pthread_mutexattr_init(&a);
            pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
            pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
            pthread_mutex_init(&world->lock, &a);
            reset_scripts();
            world->ready = 1;
        }
        take_lock();
        bury();
        leave();
        if (fd >= 0) close(fd);
    }
    pthread_mutex_unlock(&world_once);
    return world;
}
/* Lock held: queue an event for a context's worker to deliver. */
static void tell(f_context *c, int type, uint32_t about) {
    if (c->tail - c->head < EVENTS) {
        c->events[c->tail % EVENTS].type = type;
        c->events[c->tail % EVENTS].about = about;
        c->tail++;
    }
    ring(c);
}
static void tell_device(int device, int type, uint32_t about) {
    for (int i = 0; i < CONTEXTS; i++)
        if (world->contexts[i].pid && world->contexts[i].device == device && !world->contexts[i].fatal)
            tell(&world->contexts[i], type, about);
}
/* Lock held: what a rule says of this call ("" for completions): its code, or 0. */
static int ruled(const char *call, int device) {
    for (int i = 0; i < RULES; i++) {
        f_rule *r = &world->rules[i];
        if (r->times <= 0 || strcmp(r->call, call) || (r->device >= 0 && r->device != device)) continue;
        if (r->after > 0) {
            r->after--;
            continue;
        }
        r->times--;
        return r->code;
    }
    return 0;
}
static int add_rule(const char *call, int device, int code, int after, int times) {
    int rc = -1;
    the_world();
    enter();
    for (int i = 0; i < RULES && rc; i++) {
        f_rule *r = &world->rules[i];
        if (r->times > 0) continue;
        snprintf(r->call, sizeof r->call, "%s", call);
        r->device = device;
        r->code = code;
        r->after = after;
        r->times = times;
        rc = 0;
    }
    leave();
    return rc;
}

/* What tests call. All act on every process of a shared world, from the next request on. */
#define SCRIPT __attribute__((visibility("default")))
#define CHANGE(device, change)                          \
    do {                                                \
        if ((device) < 0 || (device) >= DEVICES) return; \
        f_device *d = &the_world()->devices[device];    \
        enter();                                        \
        change;                                         \
        ring_all();                                     \
        leave();                                        \
    } while (0)

SCRIPT void fake_share(const char *path);
SCRIPT void fake_devices(int n);
SCRIPT void fake_clear(void);
SCRIPT void fake_port(int device, int up);
SCRIPT void fake_cut(int device, int cut);
SCRIPT void fake_hold(int device, int held);
SCRIPT void fake_remove(int device);
SCRIPT void fake_restore(int device);
SCRIPT void fake_rate(int device, uint64_t bytes_per_s);
SCRIPT void fake_latency(int device, uint32_t us);
SCRIPT void fake_link_layer(int device, int infiniband);
SCRIPT void fake_retry_ms(uint32_t ms);
SCRIPT void fake_limits(uint64_t max_mr_bytes, uint32_t max_wr, uint32_t max_cqe);
SCRIPT int fake_complete(int device, int status, int after, int times);
SCRIPT int fake_fail(const char *call, int device, int code, int after, int times);
SCRIPT void fake_kill_pair(uint32_t number);
SCRIPT int fake_live(const char *kind);
SCRIPT uint64_t fake_count(int device, const char *what);

void fake_share(const char *path) { snprintf(shared_path, sizeof shared_path, "%s", path); }
void fake_devices(int n) { CHANGE(0, ((void)d, world->n_devices = n < 0 ? 0 : n > DEVICES ? DEVICES : n)); }
void fake_clear(void) { CHANGE(0, ((void)d, reset_scripts())); }
void fake_port(int device, int up) {
    CHANGE(device, if (d->up != up) tell_device(device, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, 1); d->up = up);
}
void fake_cut(int device, int cut) { CHANGE(device, d->cut = cut); }
void fake_hold(int device, int held) { CHANGE(device, d->held = held); }
void fake_remove(int device) {
    CHANGE(device, d->removed = 1; tell_device(device, IBV_EVENT_DEVICE_FATAL, 0);
           for (int i = 0; i < CONTEXTS; i++)
               if (world->contexts[i].pid && world->contexts[i].device == device) world->contexts[i].fatal = 1;
           for (int i = 0; i < PAIRS; i++)
               if (world->pairs[i].pid && world->pairs[i].device == device) world->pairs[i].state = IBV_QPS_ERR);
}
void fake_restore(int device) { CHANGE(device, d->removed = 0); }
void fake_rate(int device, uint64_t bytes_per_s) { CHANGE(device, d->rate = bytes_per_s; d->busy_until = 0); }
void fake_latency(int device, uint32_t us) { CHANGE(device, d->latency_us = us); }
void fake_link_layer(int device, int infiniband) { CHANGE(device, d->infiniband = infiniband); }
void fake_retry_ms(uint32_t ms) { CHANGE(0, ((void)d, world->retry_ms = ms)); }
void fake_limits(uint64_t max_mr_bytes, uint32_t max_wr, uint32_t max_cqe) {
    CHANGE(0, (void)d; if (max_mr_bytes) world->max_mr_bytes = max_mr_bytes; if (max_wr) world->max_wr = max_wr;
           if (max_cqe) world->max_cqe = max_cqe);
}
int fake_complete(int device, int status, int after, int times) { return add_rule("", device, status, after, times); }
int fake_fail(const char *call, int device, int code, int after, int times) {
    return add_rule(call, device, code, after, times);
}
void fake_kill_pair(uint32_t number) {
    CHANGE(0, (void)d; f_pair *p = &world->pairs[number % PAIRS]; if (p->pid) {
        p->state = IBV_QPS_ERR;
        tell(&world->contexts[p->context], IBV_EVENT_QP_FATAL, number);
    });
}
/* Objects of this process. */
int fake_live(const char *kind) {
    int n = 0, pid = getpid();
    the_world();
    enter();
    for (int i = 0; i < CONTEXTS; i++) n += !strcmp(kind, "contexts") && world->contexts[i].pid == pid;
    for (int i = 0; i < REGIONS; i++) n += !strcmp(kind, "regions") && world->regions[i].pid == pid;
    for (int i = 0; i < PAIRS; i++) n += !strcmp(kind, "pairs") && world->pairs[i].pid == pid;
    n += !strcmp(kind, "domains") ? live_pds : !strcmp(kind, "channels") ? live_channels
       : !strcmp(kind, "queues") ? live_cqs : 0;
    leave();
    return n;
}
uint64_t fake_count(int device, const char *what) {
    static const char *const names[] = {"requests", "bytes", "completions", "lost", "overruns", "failures", "flushed"};
    const uint64_t *first = &the_world()->devices[device & (DEVICES - 1)].requests;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(what, names[i])) return __atomic_load_n(first + i, __ATOMIC_RELAXED);
    return UINT64_MAX;
}
#endif
