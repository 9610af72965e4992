/* The device runtimes by name. Facts of public headers and documents, gathered in docs/transports/cuda.md ("Rows"). */
#ifndef MOONPOOL_DEVICE_ROWS_H
#define MOONPOOL_DEVICE_ROWS_H
#include "runtime.h"

enum { MP_SHAPE_DRIVER, MP_SHAPE_RUNTIME, MP_SHAPE_ACL, MP_SHAPE_CNRT };

static const mp_device_row mp_device_rows[] = {
    {   /* cuda.h: the driver API, whose contexts a process shares with its other libraries (primary contexts). */
        .name = "cuda", .shape = MP_SHAPE_DRIVER, .not_ready = 600, .no_memory = 2,
        .libraries = {"libcuda.so.1", "libcuda.so"},
        .calls = {
            [MP_INIT] = "cuInit", [MP_COUNT] = "cuDeviceGetCount", [MP_DEVICE_OF] = "cuDeviceGet",
            [MP_RETAIN] = "cuDevicePrimaryCtxRetain", [MP_RELEASE] = "cuDevicePrimaryCtxRelease_v2",
            [MP_PUSH] = "cuCtxPushCurrent_v2", [MP_POP] = "cuCtxPopCurrent_v2", [MP_UUID] = "cuDeviceGetUuid",
            [MP_POINTER] = "cuPointerGetAttribute", [MP_RANGE] = "cuMemGetAddressRange_v2",
            [MP_REGISTER] = "cuMemHostRegister_v2", [MP_UNREGISTER] = "cuMemHostUnregister",
            [MP_COPY_UP] = "cuMemcpyHtoDAsync_v2", [MP_COPY_DOWN] = "cuMemcpyDtoHAsync_v2",
            [MP_COPY_ON] = "cuMemcpyDtoDAsync_v2", [MP_COPY_PEER] = "cuMemcpyPeerAsync",
            [MP_STREAM] = "cuStreamCreate", [MP_STREAM_END] = "cuStreamDestroy_v2",
            [MP_STREAM_SYNC] = "cuStreamSynchronize", [MP_EVENT] = "cuEventCreate",
            [MP_EVENT_END] = "cuEventDestroy_v2", [MP_EVENT_RECORD] = "cuEventRecord",
            [MP_EVENT_QUERY] = "cuEventQuery", [MP_IPC_EXPORT] = "cuIpcGetMemHandle",
            [MP_IPC_OPEN] = "cuIpcOpenMemHandle_v2", [MP_IPC_CLOSE] = "cuIpcCloseMemHandle",
            [MP_DMA_BUF] = "cuMemGetHandleForAddressRange", [MP_CAN_PEER] = "cuDeviceCanAccessPeer",
            [MP_ERROR_TEXT] = "cuGetErrorString",
        },
    },
    {   /* hip_runtime_api.h of ROCm. hipMemGetHandleForAddressRange came with HIP 7. */
        .name = "hip", .shape = MP_SHAPE_RUNTIME, .not_ready = 600, .no_memory = 2,
        .libraries = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"},
        .calls = {
            [MP_INIT] = "hipInit", [MP_COUNT] = "hipGetDeviceCount", [MP_SET_DEVICE] = "hipSetDevice",
            [MP_CURRENT] = "hipGetDevice", [MP_UUID] = "hipDeviceGetUuid", [MP_POINTER] = "hipPointerGetAttributes",
            [MP_RANGE] = "hipMemGetAddressRange", [MP_VERSION] = "hipRuntimeGetVersion",
            [MP_REGISTER] = "hipHostRegister", [MP_UNREGISTER] = "hipHostUnregister",
            [MP_COPY_ON] = "hipMemcpyAsync", [MP_COPY_PEER] = "hipMemcpyPeerAsync", [MP_STREAM] = "hipStreamCreate",
            [MP_STREAM_END] = "hipStreamDestroy", [MP_STREAM_SYNC] = "hipStreamSynchronize",
            [MP_EVENT] = "hipEventCreateWithFlags", [MP_EVENT_END] = "hipEventDestroy",
            [MP_EVENT_RECORD] = "hipEventRecord", [MP_EVENT_QUERY] = "hipEventQuery",
            [MP_IPC_EXPORT] = "hipIpcGetMemHandle", [MP_IPC_OPEN] = "hipIpcOpenMemHandle",
            [MP_IPC_CLOSE] = "hipIpcCloseMemHandle", [MP_DMA_BUF] = "hipMemGetHandleForAddressRange",
            [MP_CAN_PEER] = "hipDeviceCanAccessPeer", [MP_ERROR_TEXT] = "hipGetErrorString",
        },
    },
    {   /* musa.h: the driver API of Moore Threads, call by call that of CUDA; newer ones are told by _v2 as there. */
        .name = "musa", .shape = MP_SHAPE_DRIVER, .not_ready = 600, .no_memory = 2, .newest = 1,
        .libraries = {"libmusa.so.1", "libmusa.so"},
        .calls = {
            [MP_INIT] = "muInit", [MP_COUNT] = "muDeviceGetCount", [MP_DEVICE_OF] = "muDeviceGet",
            [MP_RETAIN] = "muDevicePrimaryCtxRetain", [MP_RELEASE] = "muDevicePrimaryCtxRelease",
            [MP_PUSH] = "muCtxPushCurrent", [MP_POP] = "muCtxPopCurrent", [MP_UUID] = "muDeviceGetUuid",
            [MP_POINTER] = "muPointerGetAttribute", [MP_RANGE] = "muMemGetAddressRange",
            [MP_REGISTER] = "muMemHostRegister", [MP_UNREGISTER] = "muMemHostUnregister",
            [MP_COPY_UP] = "muMemcpyHtoDAsync", [MP_COPY_DOWN] = "muMemcpyDtoHAsync",
            [MP_COPY_ON] = "muMemcpyDtoDAsync", [MP_COPY_PEER] = "muMemcpyPeerAsync", [MP_STREAM] = "muStreamCreate",
            [MP_STREAM_END] = "muStreamDestroy", [MP_STREAM_SYNC] = "muStreamSynchronize",
            [MP_EVENT] = "muEventCreate", [MP_EVENT_END] = "muEventDestroy", [MP_EVENT_RECORD] = "muEventRecord",
            [MP_EVENT_QUERY] = "muEventQuery", [MP_IPC_EXPORT] = "muIpcGetMemHandle",
            [MP_IPC_OPEN] = "muIpcOpenMemHandle", [MP_IPC_CLOSE] = "muIpcCloseMemHandle",
            [MP_DMA_BUF] = "muMemGetHandleForAddressRange", [MP_CAN_PEER] = "muDeviceCanAccessPeer",
            [MP_ERROR_TEXT] = "muGetErrorString",
        },
    },
    {   /* mc_runtime.h of MetaX: names and shapes of a CUDA runtime under mc*. */
        .name = "maca", .shape = MP_SHAPE_RUNTIME, .not_ready = 600, .no_memory = 2,
        .libraries = {"libmcruntime.so"},
        .calls = {
            [MP_INIT] = "mcInit", [MP_COUNT] = "mcGetDeviceCount", [MP_SET_DEVICE] = "mcSetDevice",
            [MP_CURRENT] = "mcGetDevice", [MP_POINTER] = "mcPointerGetAttributes",
            [MP_RANGE] = "mcMemGetAddressRange", [MP_REGISTER] = "mcHostRegister",
            [MP_UNREGISTER] = "mcHostUnregister", [MP_COPY_ON] = "mcMemcpyAsync",
            [MP_COPY_PEER] = "mcMemcpyPeerAsync", [MP_STREAM] = "mcStreamCreate", [MP_STREAM_END] = "mcStreamDestroy",
            [MP_STREAM_SYNC] = "mcStreamSynchronize", [MP_EVENT] = "mcEventCreateWithFlags",
            [MP_EVENT_END] = "mcEventDestroy", [MP_EVENT_RECORD] = "mcEventRecord",
            [MP_EVENT_QUERY] = "mcEventQuery", [MP_IPC_EXPORT] = "mcIpcGetMemHandle",
            [MP_IPC_OPEN] = "mcIpcOpenMemHandle", [MP_IPC_CLOSE] = "mcIpcCloseMemHandle",
            [MP_DMA_BUF] = "mcMemGetHandleForAddressRange", [MP_CAN_PEER] = "mcDeviceCanAccessPeer",
            [MP_ERROR_TEXT] = "mcGetErrorString",
        },
    },
    {   /* acl_rt.h of Huawei's CANN. It shares memory by keys of another shape, so there is no IPC here. */
        .name = "ascend", .shape = MP_SHAPE_ACL, .not_ready = -2147483647, .no_memory = 207001, .started_already = 100002,
        .libraries = {"libascendcl.so"},
        .calls = {
            [MP_INIT] = "aclInit", [MP_COUNT] = "aclrtGetDeviceCount", [MP_SET_DEVICE] = "aclrtSetDevice",
            [MP_CURRENT] = "aclrtGetDevice", [MP_POINTER] = "aclrtPointerGetAttributes",
            [MP_REGISTER] = "aclrtHostRegister", [MP_UNREGISTER] = "aclrtHostUnregister",
            [MP_COPY_ON] = "aclrtMemcpyAsync", [MP_STREAM] = "aclrtCreateStream",
            [MP_STREAM_END] = "aclrtDestroyStream", [MP_STREAM_SYNC] = "aclrtSynchronizeStream",
            [MP_EVENT] = "aclrtCreateEvent", [MP_EVENT_END] = "aclrtDestroyEvent",
            [MP_EVENT_RECORD] = "aclrtRecordEvent", [MP_EVENT_QUERY] = "aclrtQueryEventStatus",
            [MP_CAN_PEER] = "aclrtDeviceCanAccessPeer",
        },
    },
    {   /* cnrt.h of Cambricon (CNRT 6). It pins host memory only by allocating it itself, so staging is not pinned. */
        .name = "cambricon", .shape = MP_SHAPE_CNRT, .not_ready = 1, .no_memory = 100100,
        .libraries = {"libcnrt.so"},
        .calls = {
            [MP_COUNT] = "cnrtGetDeviceCount", [MP_SET_DEVICE] = "cnrtSetDevice", [MP_CURRENT] = "cnrtGetDevice",
            [MP_POINTER] = "cnrtPointerGetAttributes", [MP_COPY_ON] = "cnrtMemcpyAsync_V2",
            [MP_STREAM] = "cnrtQueueCreate", [MP_STREAM_END] = "cnrtQueueDestroy", [MP_STREAM_SYNC] = "cnrtQueueSync",
            [MP_EVENT] = "cnrtNotifierCreate", [MP_EVENT_END] = "cnrtNotifierDestroy",
            [MP_EVENT_RECORD] = "cnrtPlaceNotifier", [MP_EVENT_QUERY] = "cnrtQueryNotifier",
            [MP_IPC_EXPORT] = "cnrtAcquireMemHandle", [MP_IPC_OPEN] = "cnrtMapMemHandle",
            [MP_IPC_CLOSE] = "cnrtUnMapMemHandle", [MP_CAN_PEER] = "cnrtGetPeerAccessibility",
            [MP_ERROR_TEXT] = "cnrtGetErrorStr",
        },
    },
};
enum { MP_DEVICE_ROWS = sizeof mp_device_rows / sizeof mp_device_rows[0] };
#endif
