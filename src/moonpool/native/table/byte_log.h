/* Records of bytes one behind another, each with a sequence number and a node: what a core made and Python has not
   taken yet. Room is asked for before anything is changed, so that writing cannot fail. */
#ifndef MOONPOOL_BYTE_LOG_H
#define MOONPOOL_BYTE_LOG_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t end;
    uint64_t sequence;
    uint32_t node;
} mp_log_mark;

typedef struct {
    uint8_t *data;
    mp_log_mark *marks;
    size_t length, room;
    uint32_t count, marks_room;
} mp_byte_log;

static inline void mp_log_release(mp_byte_log *log) {
    free(log->data);
    free(log->marks);
    memset(log, 0, sizeof *log);
}

/* Room for so many records with so many bytes together; false without memory. */
static inline int mp_log_reserve(mp_byte_log *log, uint32_t records, size_t bytes) {
    if (log->length + bytes > log->room) {
        const size_t room = (log->length + bytes) * 2;
        uint8_t *data = realloc(log->data, room);
        if (!data) return 0;
        log->data = data;
        log->room = room;
    }
    if (log->count + records > log->marks_room) {
        const uint32_t room = (log->count + records) * 2;
        mp_log_mark *marks = realloc(log->marks, room * sizeof *marks);
        if (!marks) return 0;
        log->marks = marks;
        log->marks_room = room;
    }
    return 1;
}

/* Ends the record that was written from data + length up to `end`. */
static inline void mp_log_close(mp_byte_log *log, const uint8_t *end, uint64_t sequence, uint32_t node) {
    log->length = (size_t)(end - log->data);
    log->marks[log->count].end = log->length;
    log->marks[log->count].sequence = sequence;
    log->marks[log->count].node = node;
    log->count++;
}

/* Forgets the records; keeps a little room, gives back more. */
static inline void mp_log_clear(mp_byte_log *log, size_t kept_bytes) {
    if (log->room > kept_bytes) {
        mp_log_release(log);
        return;
    }
    log->length = log->count = 0;
}
#endif
