"""The hot method `put_start` (see hot_starts.pyx)."""

from moonpool.native.io.rpc_hot cimport HotCall, HotOut
from moonpool.native.table.hot_state cimport HotState

cdef int hot_put_start(HotState state, const HotCall* call, HotOut* out) noexcept nogil
