"""Who is writing into our regions over lanes at this moment, and what keeps others from it: the owner's side of grants.

A lane says that it is about to check a WRITE before it reads the clock (server.pyx, grants.pyx). So whoever finds that
a grant is over, or has made it wrong, and asks here afterwards, hears of every lane that was let in before.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy
from moonpool.native.io.batch cimport pthread_mutex_lock, pthread_mutex_unlock
from moonpool.native.io.grants cimport (
    GRANT_ABSENT,
    GRANT_DENIED,
    GRANT_OUTSIDE,
    GRANT_OVER,
    GRANT_WRONG,
    grants_deny,
    grants_set,
)
from moonpool.native.io.guard cimport mp_count, mp_guard_lock, mp_guard_unlock, mp_load32
from moonpool.native.io.regions cimport LocalRegions
from moonpool.native.io.server cimport LANE_CHECKING, LANE_WRITING, TargetServer, mp_connection

from moonpool.errors import StaleHandle, UsageError

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    int SHUT_RDWR


cdef bint writes_there(mp_connection* c, uint64_t group, char* base, uint64_t length) noexcept nogil:
    """True when the lane may be writing into the range. The server's lock is held, so the lane stays allocated."""
    cdef uint32_t k
    cdef int state = mp_load32(&c.inside)
    if state != LANE_CHECKING and state != LANE_WRITING:
        return False
    if state == LANE_WRITING:
        for k in range(c.count if c.count < 256 else 256):
            if c.where[k] != NULL and c.where[k] < base + length and base < c.where[k] + c.length[k]:
                return True
        # What was read while the lane went on to its next group says nothing.
        return mp_count(&c.group) != group
    return True


def writes_into(TargetServer server not None, LocalRegions regions not None, uint64_t region, uint64_t offset,
                uint64_t length) -> set:
    """(lane, number of its group) of the WRITEs that may be touching the range at this moment.

    Numbers are never used twice: when none of them is found again later, those WRITEs are over. Nothing is missed;
    a lane whose entries are just being checked counts as writing everywhere. StaleHandle for a region that is none.
    """
    cdef mp_connection* c
    cdef uint32_t slot = <uint32_t>region
    cdef uint64_t group
    cdef char* base
    found = set()
    if region == 0 or slot >= regions.table.capacity or regions.table.slots[slot].handle != region:
        raise StaleHandle(region=region)
    base = <char*><size_t>(regions.table.slots[slot].base + offset)
    # Who entered before this moment has said so; who enters later reads the clock later.
    mp_guard_lock(&regions.table.guard)
    mp_guard_unlock(&regions.table.guard)
    pthread_mutex_lock(&server.raw.lock)
    c = server.raw.connections
    while c != NULL:
        group = mp_count(&c.group)
        if writes_there(c, group, base, length):
            found.add((c.serial, group))
        c = c.next
    pthread_mutex_unlock(&server.raw.lock)
    return found


def kick_lanes(TargetServer server not None, lanes) -> int:
    """Shut down the lanes that are still in these (lane, group): how many. Their initiators see PEER_GONE."""
    cdef mp_connection* c
    cdef int n = 0
    pthread_mutex_lock(&server.raw.lock)
    try:
        c = server.raw.connections
        while c != NULL:
            if (c.serial, mp_count(&c.group)) in lanes:
                shutdown(c.stream.fd, SHUT_RDWR)
                n += 1
            c = c.next
    finally:
        pthread_mutex_unlock(&server.raw.lock)
    return n


def set_grant_key(LocalRegions regions not None, bytes key, uint64_t zero_ns) -> None:
    """From now on grants are right that were made with this key (16 bytes).

    Their deadlines count milliseconds from `zero_ns` of CLOCK_BOOTTIME. What was denied is forgotten.
    """
    cdef uint64_t k0, k1
    cdef const char* data = key
    if len(key) != 16:
        raise UsageError(f"a grant key has 16 bytes, not {len(key)}", field="grant_key")
    memcpy(&k0, data, 8)
    memcpy(&k1, data + 8, 8)
    grants_set(&regions.table.grants, k0, k1, zero_ns)


def deny_grants(LocalRegions regions not None, uint64_t region, uint64_t start, unsigned int tag,
                uint64_t until_ns) -> bool:
    """Refuse grants that show `tag` for an extent that starts there, until `until_ns` of CLOCK_BOOTTIME.

    False when so many are denied already that there is no room: then nothing was changed.
    """
    if tag > 0xFFFF:
        raise UsageError(f"a tag has 16 bits: {tag}", field="tag")
    return grants_deny(&regions.table.grants, region, start, <unsigned short>tag, until_ns)


def grant_counters(LocalRegions regions not None) -> dict:
    """How many WRITEs a grant let in, and how many were refused and why."""
    cdef uint64_t* refused = &regions.table.grants.refused[0]
    return {
        "grants_accepted": mp_count(&regions.table.grants.accepted),
        "grants_absent": mp_count(&refused[GRANT_ABSENT]),
        "grants_wrong": mp_count(&refused[GRANT_WRONG]),
        "grants_over": mp_count(&refused[GRANT_OVER]),
        "grants_outside": mp_count(&refused[GRANT_OUTSIDE]),
        "grants_denied": mp_count(&refused[GRANT_DENIED]),
    }
