"""libfabric, opened when it is first asked for; which providers of it could carry one-sided reads and writes here."""

from libc.stdint cimport uint32_t

from moonpool.errors import TransportUnavailable

LIBRARY = "libfabric.so.1"
#: Older ones lack memory registration modes that providers ask for.
OLDEST = (1, 11)
HOW_TO_GET_IT = "install libfabric 1.11 or later (Debian and Ubuntu: `apt-get install libfabric1`)"

cdef mp_ofi_calls calls
calls.handle = NULL


cdef mp_ofi_calls* ofi_calls() except NULL:
    """The library's functions; TransportUnavailable when it cannot be opened. GIL held."""
    if calls.handle == NULL:
        open_library(LIBRARY)
    return &calls


cdef open_library(str name):
    global calls
    cdef mp_ofi_calls opened
    cdef const char* problem = NULL
    cdef bytes path = name.encode()
    cdef const char* path_bytes = path
    cdef uint32_t version
    if mp_ofi_load(&opened, path_bytes, &problem) != 0:
        raise TransportUnavailable((<bytes>problem).decode(errors="replace"), HOW_TO_GET_IT, transport="ofi")
    version = opened.version()
    if (version >> 16, version & 0xFFFF) < OLDEST:
        raise TransportUnavailable(
            f"{name} is version {version >> 16}.{version & 0xFFFF}", HOW_TO_GET_IT, transport="ofi"
        )
    calls = opened


cdef str ofi_error(int code):
    """The library's sentence for a (positive or negative) error."""
    cdef mp_ofi_calls* known = ofi_calls()
    return (<bytes>known.strerror(code if code > 0 else -code)).decode(errors="replace")


def library_version(str name=LIBRARY) -> tuple[int, int]:
    """Major and minor version of libfabric; TransportUnavailable when it is not there, or too old."""
    if calls.handle == NULL:
        open_library(name)
    cdef uint32_t version = calls.version()
    return version >> 16, version & 0xFFFF


def providers() -> list[str]:
    """Names of the providers that could carry reads and writes on this machine, in the library's order."""
    cdef mp_ofi_calls* known = ofi_calls()
    cdef fi_info* found = NULL
    cdef fi_info* each
    cdef int delivery
    names = {}
    for delivery in (1, 0):
        with nogil:
            rc = mp_ofi_query(known, NULL, NULL, delivery, &found)
        if rc != 0:
            continue
        each = found
        while each != NULL:
            names[(<bytes>each.fabric_attr.prov_name).decode(errors="replace")] = None
            each = each.next
        known.freeinfo(found)
    return list(names)
