/* A map of 64-bit ids to 64-bit values other than 0: open addressing, linear probing, no tombstones.

   Ids that the network chooses (put ids, tenants) are scattered under a seed. */
#ifndef MOONPOOL_ID_MAP_H
#define MOONPOOL_ID_MAP_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "mixing.h"

#define MP_ID_MAP_FIRST 16

typedef struct {
    uint64_t id;
    uint64_t value; /* 0: empty */
} mp_id_entry;

typedef struct {
    mp_id_entry *entries;
    uint64_t mask;
    uint64_t count;
    uint64_t seed;
} mp_id_map;

static inline void mp_id_map_release(mp_id_map *map) {
    free(map->entries);
    memset(map, 0, sizeof *map);
}

static inline uint64_t mp_id_home(const mp_id_map *map, uint64_t id) { return mp_scatter(id ^ map->seed) & map->mask; }

/* The value of an id, or NULL. It may be changed in place, but not to 0. */
static inline uint64_t *mp_id_find(const mp_id_map *map, uint64_t id) {
    if (!map->entries) return NULL;
    for (uint64_t at = mp_id_home(map, id); map->entries[at].value; at = (at + 1) & map->mask)
        if (map->entries[at].id == id) return &map->entries[at].value;
    return NULL;
}

static inline uint64_t mp_id_get(const mp_id_map *map, uint64_t id) {
    const uint64_t *value = mp_id_find(map, id);
    return value ? *value : 0;
}

/* Room for so many ids more. False without memory, and then nothing has changed. */
static inline int mp_id_reserve(mp_id_map *map, uint64_t more) {
    uint64_t size = map->entries ? map->mask + 1 : MP_ID_MAP_FIRST;
    while ((map->count + more) * 4 > size * 3) size *= 2;
    if (map->entries && size == map->mask + 1) return 1;
    mp_id_map grown = {calloc(size, sizeof(mp_id_entry)), size - 1, map->count, map->seed};
    if (!grown.entries) return 0;
    for (uint64_t i = 0; map->entries && i <= map->mask; i++) {
        if (!map->entries[i].value) continue;
        uint64_t at = mp_id_home(&grown, map->entries[i].id);
        while (grown.entries[at].value) at = (at + 1) & grown.mask;
        grown.entries[at] = map->entries[i];
    }
    free(map->entries);
    *map = grown;
    return 1;
}

/* Sets the value of an id, for which there is room. */
static inline void mp_id_set(mp_id_map *map, uint64_t id, uint64_t value) {
    uint64_t at = mp_id_home(map, id);
    while (map->entries[at].value && map->entries[at].id != id) at = (at + 1) & map->mask;
    map->count += map->entries[at].value == 0;
    map->entries[at].id = id;
    map->entries[at].value = value;
}

static inline void mp_id_remove(mp_id_map *map, uint64_t id) {
    uint64_t *value = mp_id_find(map, id);
    if (!value) return;
    uint64_t hole = (uint64_t)((mp_id_entry *)((char *)value - offsetof(mp_id_entry, value)) - map->entries);
    for (uint64_t at = (hole + 1) & map->mask; map->entries[at].value; at = (at + 1) & map->mask) {
        const uint64_t home = mp_id_home(map, map->entries[at].id);
        if (((at - home) & map->mask) >= ((at - hole) & map->mask)) {
            map->entries[hole] = map->entries[at];
            hole = at;
        }
    }
    map->entries[hole].value = 0;
    map->count--;
}

/* Adds to a count, for whose id there is room; counts of 0 are not kept. */
static inline void mp_id_add(mp_id_map *map, uint64_t id, uint64_t more) {
    const uint64_t sum = mp_id_get(map, id) + more;
    if (sum) mp_id_set(map, id, sum);
    else mp_id_remove(map, id);
}
#endif
