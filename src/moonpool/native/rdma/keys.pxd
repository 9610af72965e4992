"""Remote keys of a peer's region (see keys.pyx)."""

from moonpool.native.verbs.ibverbs cimport mp_registration


cdef class RemoteKeys:
    cdef mp_registration raw
