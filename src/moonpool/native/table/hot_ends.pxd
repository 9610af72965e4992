"""The hot method `put_end` (see hot_ends.pyx)."""

from moonpool.native.io.rpc_hot cimport HotCall, HotOut
from moonpool.native.table.hot_state cimport HotState

cdef int hot_put_end(HotState state, const HotCall* call, HotOut* out) noexcept nogil
