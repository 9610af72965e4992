"""The hot methods that read (see hot_reads.pyx)."""

from moonpool.native.io.rpc_hot cimport HotCall, HotOut
from moonpool.native.table.hot_state cimport HotState

cdef int hot_exists(HotState state, const HotCall* call, HotOut* out) noexcept nogil
cdef int hot_lookup(HotState state, const HotCall* call, HotOut* out) noexcept nogil
