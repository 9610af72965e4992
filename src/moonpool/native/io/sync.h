/* Threads, and waits on the monotonic clock. */
#ifndef MOONPOOL_SYNC_H
#define MOONPOOL_SYNC_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>

static inline void mp_sync_init(pthread_mutex_t *lock, pthread_cond_t *cond) {
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_mutex_init(lock, 0);
    pthread_cond_init(cond, &a);
    pthread_condattr_destroy(&a);
}
/* 0 when woken, -1 at the deadline (0: none). */
static inline int mp_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns) {
    struct timespec t = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    if (!deadline_ns) { pthread_cond_wait(cond, lock); return 0; }
    return pthread_cond_timedwait(cond, lock, &t) == ETIMEDOUT ? -1 : 0;
}
/* Signals belong to Python's main thread: a native thread that took one would hide Ctrl-C. */
static inline int mp_start_thread(pthread_t *thread, void *(*run)(void *), void *context, const char *name) {
    pthread_attr_t a;
    sigset_t all, before;
    int rc;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&a);
    pthread_attr_setstacksize(&a, 256 * 1024);
    rc = pthread_create(thread, &a, run, context);
    pthread_attr_destroy(&a);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (rc == 0) pthread_setname_np(*thread, name);
    return rc;
}
static inline int mp_join_thread(pthread_t thread) { return pthread_join(thread, 0); }
#endif
