/* A grace period: readers enter and leave cheaply; a revoker waits until all readers that entered before it have left.
 *
 * Two user counts, indexed by the parity of an epoch, as in sleepable RCU: the revoker flips the epoch, so that new readers
 * count elsewhere, and waits for the old count to reach zero. Steady traffic therefore cannot starve a revoke. */
#ifndef MOONPOOL_GUARD_H
#define MOONPOOL_GUARD_H
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include "atomics.h"

typedef struct {
    pthread_mutex_t lock;    /* also guards the table that the owner keeps beside this */
    pthread_mutex_t turn;    /* one revoker at a time */
    pthread_cond_t left;
    uint32_t epoch;
    uint32_t users[2];
} mp_guard;

static inline void mp_guard_init(mp_guard *g) {
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->lock, 0);
    pthread_mutex_init(&g->turn, 0);
    pthread_cond_init(&g->left, &a);
    pthread_condattr_destroy(&a);
    g->epoch = 0;
    g->users[0] = g->users[1] = 0;
}
static inline void mp_guard_destroy(mp_guard *g) {
    pthread_cond_destroy(&g->left);
    pthread_mutex_destroy(&g->lock);
    pthread_mutex_destroy(&g->turn);
}
static inline void mp_guard_lock(mp_guard *g) { pthread_mutex_lock(&g->lock); }
static inline void mp_guard_unlock(mp_guard *g) { pthread_mutex_unlock(&g->lock); }
/* Call with the lock held: the look-up and the entry must be one step. Returns the ticket for mp_guard_leave. */
static inline uint32_t mp_guard_enter_locked(mp_guard *g) {
    uint32_t ticket = g->epoch & 1;
    g->users[ticket]++;
    return ticket;
}
static inline void mp_guard_leave(mp_guard *g, uint32_t ticket) {
    pthread_mutex_lock(&g->lock);
    if (--g->users[ticket] == 0)
        pthread_cond_broadcast(&g->left);
    pthread_mutex_unlock(&g->lock);
}
static inline void mp_guard_timespec(uint64_t deadline_ns, struct timespec *t) {
    t->tv_sec = (time_t)(deadline_ns / 1000000000u);
    t->tv_nsec = (long)(deadline_ns % 1000000000u);
}
/* Waits until every reader that entered before this call has left. 0, or -1 when the deadline came first (then the old
 * readers may still be inside). Both parities are drained, because an earlier wait may have given up on one of them. */
static inline int mp_guard_drain(mp_guard *g, uint64_t deadline_ns) {
    struct timespec t;
    int pass, rc = 0;
    mp_guard_timespec(deadline_ns, &t);
    /* Someone else may be draining: try in short steps, so that the deadline holds without a clock of the mutex's own. */
    while (pthread_mutex_trylock(&g->turn) != 0) {
        if (mp_now_ns() >= deadline_ns)
            return -1;
        nanosleep(&(struct timespec){0, 200000}, 0);
    }
    pthread_mutex_lock(&g->lock);
    for (pass = 0; pass < 2 && rc == 0; pass++) {
        uint32_t old = g->epoch & 1;
        g->epoch++;
        while (g->users[old] != 0 && rc == 0) {
            if (pthread_cond_timedwait(&g->left, &g->lock, &t) == ETIMEDOUT)
                rc = g->users[old] ? -1 : 0;
        }
    }
    pthread_mutex_unlock(&g->lock);
    pthread_mutex_unlock(&g->turn);
    return rc;
}
static inline uint32_t mp_guard_users(mp_guard *g) {
    uint32_t n;
    pthread_mutex_lock(&g->lock);
    n = g->users[0] + g->users[1];
    pthread_mutex_unlock(&g->lock);
    return n;
}
#endif
