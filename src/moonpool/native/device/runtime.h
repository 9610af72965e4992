/* A device runtime opened at run time: one table of calls with one meaning, whatever library stands behind it.
 *
 * Every call returns MP_DEVICE_OK, MP_DEVICE_NOT_READY, MP_DEVICE_NO_CALL (the row has no such function), or the
 * runtime's own error number, which is above zero in all of them. Addresses are numbers: what they name must never be
 * touched by the CPU. */
#ifndef MOONPOOL_DEVICE_RUNTIME_H
#define MOONPOOL_DEVICE_RUNTIME_H
#include <stddef.h>
#include <stdint.h>

enum { MP_DEVICE_OK = 0, MP_DEVICE_NOT_READY = -1, MP_DEVICE_NO_CALL = -2, MP_DEVICE_GONE = -3 };
enum { MP_DEVICES_MAX = 16, MP_IPC_BYTES = 64, MP_UUID_BYTES = 16, MP_ROW_LIBRARIES = 3 };
enum { MP_TO_DEVICE = 1, MP_TO_HOST = 2, MP_ON_DEVICE = 3 };
enum { MP_POINTER_HOST = 0, MP_POINTER_DEVICE = 1, MP_POINTER_MANAGED = 2 };

/* What a row names; optional ones may be NULL and switch their feature off. */
enum mp_device_call {
    MP_INIT, MP_COUNT, MP_DEVICE_OF, MP_RETAIN, MP_RELEASE, MP_PUSH, MP_POP, MP_SET_DEVICE, MP_CURRENT, MP_UUID,
    MP_POINTER, MP_RANGE, MP_VERSION, MP_REGISTER, MP_UNREGISTER, MP_COPY_UP, MP_COPY_DOWN, MP_COPY_ON, MP_COPY_PEER,
    MP_STREAM, MP_STREAM_END, MP_STREAM_SYNC, MP_EVENT, MP_EVENT_END, MP_EVENT_RECORD, MP_EVENT_QUERY, MP_IPC_EXPORT,
    MP_IPC_OPEN, MP_IPC_CLOSE, MP_DMA_BUF, MP_CAN_PEER, MP_ERROR_TEXT, MP_DEVICE_CALLS
};

typedef struct {
    const char *name;
    int shape;                              /* MP_SHAPE_* of rows.h */
    int not_ready;                          /* error numbers that we must know apart */
    int no_memory;
    int started_already;
    int newest;                             /* 1: a call's name with _v2 is taken where there is one */
    const char *libraries[MP_ROW_LIBRARIES];
    const char *calls[MP_DEVICE_CALLS];
} mp_device_row;

typedef struct {
    int kind;                               /* MP_POINTER_* */
    int device;                             /* -1: unknown */
    uint64_t base;                          /* of the allocation; 0: the runtime does not tell */
    uint64_t size;
} mp_pointer;

typedef struct {
    int device;                             /* the one made current, -1: none was */
    int before;
} mp_current;

typedef struct mp_runtime mp_runtime;
struct mp_runtime {
    const mp_device_row *row;
    void *library;
    void *call[MP_DEVICE_CALLS];
    int devices;
    int32_t last_error;
    void *context[MP_DEVICES_MAX];
    int (*enter)(mp_runtime *rt, int device, mp_current *saved);
    void (*leave)(mp_runtime *rt, mp_current *saved);
    int (*classify)(mp_runtime *rt, uint64_t address, mp_pointer *out);
    int (*pin)(mp_runtime *rt, void *start, size_t n);
    int (*unpin)(mp_runtime *rt, void *start);
    /* On the current device's stream; `how` is MP_TO_DEVICE, MP_TO_HOST or MP_ON_DEVICE. */
    int (*copy)(mp_runtime *rt, int how, uint64_t to, int to_device, uint64_t from, int from_device, size_t n,
                void *stream);
    int (*stream_new)(mp_runtime *rt, void **stream);
    int (*stream_end)(mp_runtime *rt, void *stream);
    int (*stream_sync)(mp_runtime *rt, void *stream);
    int (*event_new)(mp_runtime *rt, void **event);
    int (*event_end)(mp_runtime *rt, void *event);
    int (*event_record)(mp_runtime *rt, void *event, void *stream);
    int (*event_query)(mp_runtime *rt, void *event);
    int (*ipc_export)(mp_runtime *rt, uint64_t address, uint8_t *handle);
    int (*ipc_open)(mp_runtime *rt, const uint8_t *handle, uint64_t *address);
    int (*ipc_close)(mp_runtime *rt, uint64_t address);
    int (*dma_buf)(mp_runtime *rt, uint64_t address, size_t n, int *fd);
    int (*can_peer)(mp_runtime *rt, int device, int other);
    int (*uuid)(mp_runtime *rt, int device, uint8_t *uuid);
};

/* The row of that name, or NULL. */
const mp_device_row *mp_device_row_named(const char *name);
/* The n-th row, or NULL. */
const mp_device_row *mp_device_row_at(int n);
/* Opens a row's library, or the one named by `path`. 0, or -1 with a sentence in `why`. */
int mp_runtime_open(mp_runtime *rt, const mp_device_row *row, const char *path, char *why, size_t why_bytes);
/* Gives back the contexts that calls have made; later calls make them anew. */
void mp_runtime_release(mp_runtime *rt);
/* A short text for an error number of this runtime; never NULL. */
const char *mp_runtime_error(mp_runtime *rt, int code);
#endif
