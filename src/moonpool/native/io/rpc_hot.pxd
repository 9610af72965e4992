# The seam between the rpc loop and a core that answers its hot methods without the GIL.
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc

cdef enum:
    HOT_EXISTS = 0
    HOT_LOOKUP = 1
    HOT_PUT_START = 2
    HOT_PUT_END = 3
    HOT_METHODS = 4

cdef enum:
    HOT_ANSWERED = 0       # the result (one MessagePack value) was appended to out
    HOT_COLD = 1           # nothing was changed or appended: the request goes to Python
    HOT_BAD_PARAMS = 2     # nothing was changed: reply BAD_PARAMS
    HOT_NO_MEMORY = 3      # nothing was changed

# Bytes that grow; owned by the loop. A core appends with hot_reserve and moves `length`.
ctypedef struct HotOut:
    uint8_t *data
    size_t length
    size_t capacity
    size_t limit           # never grow beyond; a core that would answers HOT_COLD

ctypedef struct HotCall:
    uint64_t connection
    uint32_t client        # 0: not bound
    uint32_t tenant
    uint64_t now_ms        # cluster time
    const uint8_t *params  # one MessagePack array, whole and well-formed in its frame
    size_t params_bytes

# Runs on the loop thread without the GIL, for at most some hundred microseconds.
ctypedef int (*hot_function)(void *core, int method, const HotCall *call, HotOut *out) noexcept nogil

# What a core hands to the loop: its Python object has a method `hot_binding()` that returns a PyCapsule named
# HOT_CAPSULE around one of these, which lives as long as the object. The loop keeps the object.
cdef extern from *:
    """
    #define HOT_CAPSULE "moonpool.rpc.hot"
    """
    const char *HOT_CAPSULE

ctypedef struct HotBinding:
    hot_function function
    void *core


cdef inline int hot_reserve(HotOut *out, size_t more) noexcept nogil:
    """Room for `more` bytes at data + length: 0, or -1 beyond the limit (nothing changed), or -2 without memory."""
    cdef size_t wanted, capacity
    cdef uint8_t *grown
    if more > out.limit or out.length > out.limit - more:
        return -1
    wanted = out.length + more
    if wanted <= out.capacity:
        return 0
    capacity = out.capacity * 2 if out.capacity else 4096
    if capacity < wanted:
        capacity = wanted
    grown = <uint8_t *>realloc(out.data, capacity)
    if grown == NULL:
        return -2
    out.data = grown
    out.capacity = capacity
    return 0
