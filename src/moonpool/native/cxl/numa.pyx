"""Memory of one numa node: binding a fresh mapping to it, and looking where its pages are (mbind(2), move_pages(2)).

System calls by number: libnuma would be one more library for two calls.
"""

from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

import os

from moonpool.errors import ResourceError, UsageError

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <sys/syscall.h>
    #include <unistd.h>
    #include <linux/mempolicy.h>
    static long mp_mbind(void *start, unsigned long n, int mode, const unsigned long *nodes, unsigned long bits,
                         unsigned flags) {
        return syscall(SYS_mbind, start, n, mode, nodes, bits, flags);
    }
    static long mp_move_pages(unsigned long count, void **pages, int *status) {
        return syscall(SYS_move_pages, 0, count, pages, NULL, status, 0);
    }
    """
    long mp_mbind(void* start, unsigned long n, int mode, const unsigned long* nodes, unsigned long bits,
                  unsigned int flags) nogil
    long mp_move_pages(unsigned long count, void** pages, int* status) nogil
    int MPOL_BIND
    unsigned int MPOL_MF_STRICT

cdef enum:
    NODES_MAX = 4096
    WORD_BITS = 64
    PAGE = 4096
    SAMPLES_MAX = 4096


def bind_memory(uint64_t address, uint64_t size_bytes, unsigned int node) -> None:
    """Bind an untouched mapping (whole pages) to a numa node: its pages come from there, or not at all.

    ResourceError with errno: EINVAL for a node that is not there or has no memory, EPERM where a container forbids it.
    """
    cdef unsigned long nodes[64]
    cdef long rc
    if node >= NODES_MAX:
        raise UsageError(f"there is no numa node {node}")
    memset(nodes, 0, sizeof(nodes))
    nodes[node // WORD_BITS] |= <unsigned long>1 << (node % WORD_BITS)
    with nogil:
        # The kernel takes one bit less than it is told.
        rc = mp_mbind(<void*><size_t>address, size_bytes, MPOL_BIND, nodes, NODES_MAX + 1, MPOL_MF_STRICT)
    if rc != 0:
        raise ResourceError(f"binding {size_bytes} bytes to numa node {node} failed: {os.strerror(errno)}", errno=errno)


def pages_by_node(uint64_t address, uint64_t size_bytes) -> dict:
    """How many of at most 4096 evenly spread pages are on which node: {node: pages}; -1 counts those not there yet."""
    cdef uint64_t pages = (size_bytes + PAGE - 1) // PAGE
    cdef uint64_t n = pages if pages < SAMPLES_MAX else SAMPLES_MAX
    cdef uint64_t i
    cdef long rc
    cdef void** where = <void**>malloc(n * sizeof(void*) + 1)
    cdef int* status = <int*>malloc(n * sizeof(int) + 1)
    found = {}
    try:
        if where == NULL or status == NULL:
            raise MemoryError
        for i in range(n):
            where[i] = <void*><size_t>((address & ~(<uint64_t>PAGE - 1)) + i * pages // n * PAGE)
        with nogil:
            rc = mp_move_pages(n, where, status)
        if rc < 0:
            raise ResourceError(f"asking where pages are failed: {os.strerror(errno)}", errno=errno)
        for i in range(n):
            node = status[i] if status[i] >= 0 else -1
            found[node] = found.get(node, 0) + 1
    finally:
        free(where)
        free(status)
    return found
