/* Ghosts: hashes of what was evicted unused, oldest first, bounded in number and in bytes (see recency.pyx). */
#ifndef MOONPOOL_GHOSTS_H
#define MOONPOOL_GHOSTS_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MP_NO_GHOST UINT32_MAX
#define MP_GHOSTS_FIRST 64

typedef struct {
    uint64_t hash;
    uint64_t bytes;
    uint32_t older, newer;
    uint32_t chain; /* next of its bucket; next free one when free */
} mp_ghost;

typedef struct {
    mp_ghost *ghosts;
    uint32_t *buckets; /* `room` of them: a power of two */
    uint64_t bytes;
    uint32_t room, used, free, count, oldest, newest;
} mp_ghosts;

static inline void mp_ghosts_release(mp_ghosts *all) {
    free(all->ghosts);
    free(all->buckets);
    memset(all, 0, sizeof *all);
    all->free = all->oldest = all->newest = MP_NO_GHOST;
}

static inline size_t mp_ghosts_memory(const mp_ghosts *all) {
    return all->room * (sizeof(mp_ghost) + sizeof(uint32_t));
}

static inline void mp_ghost_out(mp_ghosts *all, uint32_t at) {
    mp_ghost *ghost = &all->ghosts[at];
    uint32_t *link = &all->buckets[ghost->hash & (all->room - 1)];
    while (*link != at) link = &all->ghosts[*link].chain;
    *link = ghost->chain;
    if (ghost->older != MP_NO_GHOST) all->ghosts[ghost->older].newer = ghost->newer;
    else all->oldest = ghost->newer;
    if (ghost->newer != MP_NO_GHOST) all->ghosts[ghost->newer].older = ghost->older;
    else all->newest = ghost->older;
    all->bytes -= ghost->bytes;
    all->count--;
    ghost->chain = all->free;
    all->free = at;
}

/* Takes a ghost out; whether there was one. */
static inline int mp_ghosts_take(mp_ghosts *all, uint64_t hash) {
    if (!all->count) return 0;
    uint32_t at = all->buckets[hash & (all->room - 1)];
    while (at != MP_NO_GHOST && all->ghosts[at].hash != hash) at = all->ghosts[at].chain;
    if (at == MP_NO_GHOST) return 0;
    mp_ghost_out(all, at);
    return 1;
}

static inline int mp_ghosts_grow(mp_ghosts *all) {
    const uint32_t room = all->room ? all->room * 2 : MP_GHOSTS_FIRST;
    uint32_t *buckets = malloc(room * sizeof *buckets);
    mp_ghost *ghosts = buckets ? realloc(all->ghosts, room * sizeof *ghosts) : NULL;
    if (!ghosts) {
        free(buckets);
        return 0;
    }
    memset(buckets, 0xFF, room * sizeof *buckets);
    for (uint32_t at = all->count ? all->oldest : MP_NO_GHOST; at != MP_NO_GHOST; at = ghosts[at].newer) {
        ghosts[at].chain = buckets[ghosts[at].hash & (room - 1)];
        buckets[ghosts[at].hash & (room - 1)] = at;
    }
    free(all->buckets);
    all->ghosts = ghosts;
    all->buckets = buckets;
    all->room = room;
    return 1;
}

/* Adds the newest ghost; the oldest go until there are at most `count_max` with `bytes_max` bytes. Without memory there
   is one ghost less. */
static inline void mp_ghosts_add(mp_ghosts *all, uint64_t hash, uint64_t bytes, uint32_t count_max, uint64_t bytes_max) {
    mp_ghosts_take(all, hash);
    while (all->count && (all->count + 1 > count_max || all->bytes + bytes > bytes_max))
        mp_ghost_out(all, all->oldest);
    if (!count_max || bytes > bytes_max) return;
    if (all->free == MP_NO_GHOST && all->used == all->room && !mp_ghosts_grow(all)) return;
    uint32_t at = all->free;
    if (at != MP_NO_GHOST) all->free = all->ghosts[at].chain;
    else at = all->used++;
    mp_ghost *ghost = &all->ghosts[at];
    ghost->hash = hash;
    ghost->bytes = bytes;
    ghost->chain = all->buckets[hash & (all->room - 1)];
    all->buckets[hash & (all->room - 1)] = at;
    ghost->older = all->newest;
    ghost->newer = MP_NO_GHOST;
    if (all->newest != MP_NO_GHOST) all->ghosts[all->newest].newer = at;
    else all->oldest = at;
    all->newest = at;
    all->bytes += bytes;
    all->count++;
}
#endif
