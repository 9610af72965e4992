"""Device runtimes as C structures (see runtime.h), and the object that owns one (see runtime.pyx)."""

from libc.stdint cimport int32_t, uint8_t, uint64_t

cdef extern from "runtime.h" nogil:
    enum:
        MP_DEVICE_OK
        MP_DEVICE_NOT_READY
        MP_DEVICE_NO_CALL
        MP_DEVICE_GONE
        MP_DEVICES_MAX
        MP_IPC_BYTES
        MP_UUID_BYTES
        MP_TO_DEVICE
        MP_TO_HOST
        MP_ON_DEVICE
        MP_POINTER_HOST
        MP_POINTER_DEVICE
        MP_POINTER_MANAGED
        MP_REGISTER
        MP_UNREGISTER
        MP_IPC_EXPORT
        MP_IPC_OPEN
        MP_IPC_CLOSE
        MP_DMA_BUF
        MP_CAN_PEER
    ctypedef struct mp_device_row:
        const char* name
        int no_memory
        const char* libraries[3]
    ctypedef struct mp_pointer:
        int kind
        int device
        uint64_t base
        uint64_t size
    ctypedef struct mp_current:
        int device
        int before
    ctypedef struct mp_runtime:
        const mp_device_row* row
        void* call[1]      # MP_DEVICE_CALLS of them
        int devices
        int32_t last_error
        void* context[16]
        int (*enter)(mp_runtime* rt, int device, mp_current* saved) noexcept nogil
        void (*leave)(mp_runtime* rt, mp_current* saved) noexcept nogil
        int (*classify)(mp_runtime* rt, uint64_t address, mp_pointer* out) noexcept nogil
        int (*pin)(mp_runtime* rt, void* start, size_t n) noexcept nogil
        int (*unpin)(mp_runtime* rt, void* start) noexcept nogil
        int (*copy)(mp_runtime* rt, int how, uint64_t to, int to_device, uint64_t source, int from_device, size_t n,
                    void* stream) noexcept nogil
        int (*stream_new)(mp_runtime* rt, void** stream) noexcept nogil
        int (*stream_end)(mp_runtime* rt, void* stream) noexcept nogil
        int (*stream_sync)(mp_runtime* rt, void* stream) noexcept nogil
        int (*event_new)(mp_runtime* rt, void** event) noexcept nogil
        int (*event_end)(mp_runtime* rt, void* event) noexcept nogil
        int (*event_record)(mp_runtime* rt, void* event, void* stream) noexcept nogil
        int (*event_query)(mp_runtime* rt, void* event) noexcept nogil
        int (*ipc_export)(mp_runtime* rt, uint64_t address, uint8_t* handle) noexcept nogil
        int (*ipc_open)(mp_runtime* rt, const uint8_t* handle, uint64_t* address) noexcept nogil
        int (*ipc_close)(mp_runtime* rt, uint64_t address) noexcept nogil
        int (*dma_buf)(mp_runtime* rt, uint64_t address, size_t n, int* fd) noexcept nogil
        int (*can_peer)(mp_runtime* rt, int device, int other) noexcept nogil
        int (*uuid)(mp_runtime* rt, int device, uint8_t* uuid) noexcept nogil
    const mp_device_row* mp_device_row_named(const char* name)
    const mp_device_row* mp_device_row_at(int n)
    int mp_runtime_open(mp_runtime* rt, const mp_device_row* row, const char* path, char* why, size_t why_bytes)
    void mp_runtime_release(mp_runtime* rt)
    const char* mp_runtime_error(mp_runtime* rt, int code)

cdef class DeviceRuntime:
    cdef mp_runtime* raw
    cdef int check(self, int code, str doing) except -1
