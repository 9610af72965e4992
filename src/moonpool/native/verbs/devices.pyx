"""libibverbs opened at run time, and its devices: one context and one protection domain each.

A device owns what is made on it: closing it closes queue pairs, then regions, then completion queues, then itself.
"""

import errno as errno_codes
import os
import socket
import weakref

from libc.errno cimport EIO, ENODEV, errno
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free
from moonpool.native.io.guard cimport mp_add32, mp_load32
from moonpool.native.verbs.ibverbs cimport (
    IBV_EVENT_CQ_ERR,
    IBV_EVENT_DEVICE_FATAL,
    IBV_EVENT_GID_CHANGE,
    IBV_EVENT_LID_CHANGE,
    IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR,
    IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR,
    IBV_LINK_LAYER_ETHERNET,
    IBV_LINK_LAYER_INFINIBAND,
    IBV_ODP_SUPPORT,
    ibv_context,
    ibv_device,
    ibv_device_attr_ex,
    ibv_gid,
    ibv_gid_entry,
    ibv_pd,
    ibv_port_attr,
    mp_async,
    mp_async_take,
    mp_query_device,
    mp_query_port,
    mp_verbs,
    mp_verbs_load,
)

from moonpool.errors import MoonpoolError, OutOfMemory, ResourceError, TransportUnavailable, UsageError
from moonpool.native.verbs.attributes import (
    AsyncEvent,
    DeviceAttributes,
    EventKind,
    GidEntry,
    GidKind,
    LinkLayer,
    PortAttributes,
)
from moonpool.native.verbs.problems import call_problem

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char* path, int flags)
    const char* dlerror()
    int RTLD_NOW
    int RTLD_LOCAL

cdef extern from "unistd.h" nogil:
    int getpid()

cdef extern from "endian.h" nogil:
    uint64_t be64toh(uint64_t value)

LIBRARY = "libibverbs.so.1"
HOW_TO_GET_IT = "apt-get install libibverbs1 ibverbs-providers"
# What listing the devices says on a kernel without RDMA.
NO_RDMA = (errno_codes.ENOSYS, errno_codes.ENOENT)
# Entries of a GID table that are looked at; tables of hosts with many VLANs hold some hundreds. The kernel takes a
# buffer of at most 65,535 bytes for them, which is 2047 entries.
GIDS_MAX = 2047
# Events that one call takes, so that a device in distress cannot hold its watcher.
EVENTS_AT_ONCE = 64
KINDS = ("devices", "completion_queues", "queue_pairs", "regions")

cdef int32_t live[4]
cdef dict opened = {}
cdef str chosen_path = ""


cdef void count_live(int kind, int change) noexcept nogil:
    mp_add32(&live[kind], change)


cdef bint is_freed(int rc) noexcept nogil:
    """True when an object is no more after a call gave this: freed, or gone with its device."""
    return rc == 0 or rc == EIO or rc == ENODEV


def live_objects() -> dict:
    """How many objects of libibverbs this process holds through this binding, by kind; all 0 when all are closed."""
    return {name: mp_load32(&live[i]) for i, name in enumerate(KINDS)}


def use_library(str path) -> None:
    """Let `default_library` open another library with libibverbs's calls; "" goes back to the system's."""
    global chosen_path
    chosen_path = path


def default_library() -> VerbsLibrary:
    """The library that transports use: opened once. TransportUnavailable when it cannot be."""
    path = chosen_path or LIBRARY
    library = opened.get(path)
    if library is None:
        library = opened[path] = VerbsLibrary(path)
    return library


cdef class VerbsLibrary:
    """The calls of one libibverbs. It stays loaded: providers start threads that cannot be unloaded."""

    def __cinit__(self, str path=LIBRARY):
        cdef bytes encoded = os.fsencode(path)
        cdef const char* name = encoded
        cdef const char* missing
        cdef const char* why
        cdef void* handle
        with nogil:
            handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)
        if handle == NULL:
            why = dlerror()
            reason = (<bytes>why).decode(errors="replace") if why != NULL else path
            raise TransportUnavailable(reason, HOW_TO_GET_IT, transport="rdma")
        self.calls = <mp_verbs*>calloc(1, sizeof(mp_verbs))
        if self.calls == NULL:
            raise MemoryError
        missing = mp_verbs_load(self.calls, handle)
        if missing != NULL:
            free(self.calls)
            self.calls = NULL
            raise TransportUnavailable(
                f"{path} lacks {(<bytes>missing).decode()}", "install rdma-core 22 or newer", transport="rdma"
            )
        self.path = path

    @property
    def has_dmabuf(self) -> bool:
        """True when the library can register dma-bufs (rdma-core 34 or newer); the device may still refuse."""
        return self.calls.reg_dmabuf_mr != NULL

    cdef int check_listing(self, int failure) except -1:
        if failure not in NO_RDMA:
            raise call_problem(failure, "listing the RDMA devices", self.path)
        return 0

    def device_names(self) -> list:
        """The RDMA devices of this machine, in the library's order; ResourceError when they cannot be listed."""
        cdef int n = 0, i
        cdef ibv_device** devices
        with nogil:
            devices = self.calls.get_device_list(&n)
        if devices == NULL:
            self.check_listing(errno)
            return []
        try:
            return [(<bytes>self.calls.get_device_name(devices[i])).decode() for i in range(n)]
        finally:
            self.calls.free_device_list(devices)


cdef class Device:
    """An opened RDMA device with its protection domain.

    Not for several threads at once, but for `take_events`. Raises ResourceError (with errno) when it cannot be
    opened, UsageError for a name that is not there.
    """

    def __cinit__(self, VerbsLibrary library not None, str name not None):
        cdef int n = 0, i, chosen = -1
        cdef ibv_device** devices
        self.library = library
        self.calls = library.calls
        self.name = name
        self.async_fd = -1
        self.pid = getpid()
        # Queue pairs, regions, completion queues: they are closed in this order.
        self.children = (weakref.WeakSet(), weakref.WeakSet(), weakref.WeakSet())
        with nogil:
            devices = self.calls.get_device_list(&n)
        if devices == NULL:
            library.check_listing(errno)
            n = 0
        names = [(<bytes>self.calls.get_device_name(devices[i])).decode() for i in range(n)]
        if name in names:
            chosen = names.index(name)
        failure = 0
        if chosen >= 0:
            with nogil:
                self.context = self.calls.open_device(devices[chosen])
            failure = errno
        if devices != NULL:
            self.calls.free_device_list(devices)
        if chosen < 0:
            raise UsageError(f"no RDMA device {name!r}; there are: {', '.join(names) or 'none'}", value=name)
        if self.context == NULL:
            raise call_problem(failure or errno_codes.ENODEV, "opening the device", name)
        count_live(LIVE_DEVICES, 1)
        self.async_fd = self.context.async_fd
        os.set_blocking(self.async_fd, False)
        with nogil:
            self.pd = self.calls.alloc_pd(self.context)
        if self.pd == NULL:
            raise call_problem(errno, "making a protection domain", name)

    def __dealloc__(self):
        self.release()

    cdef int release(self) noexcept:
        """Free what the device itself holds: the first errno, or 0. A forked child only forgets it."""
        cdef ibv_context* context = self.context
        cdef ibv_pd* pd = self.pd
        cdef bint ours = self.pid == getpid()
        cdef int rc = 0, second
        # First, so that another thread meets a closed device and not one that is being freed.
        self.context = NULL
        self.pd = NULL
        self.async_fd = -1
        if context == NULL:
            return 0
        count_live(LIVE_DEVICES, -1)
        if ours:
            with nogil:
                rc = self.calls.dealloc_pd(pd) if pd != NULL else 0
                second = self.calls.close_device(context)
            rc = rc if rc else second
        return rc

    cdef object adopt(self, object child):
        """Remember a child, to be closed before the device."""
        self.children[child._rank].add(child)

    cdef int check_open(self) except -1:
        if self.context == NULL:
            raise ResourceError(f"the RDMA device {self.name} is closed", errno=errno_codes.EBADF)
        return 0

    def close(self) -> None:
        """Closes all that was made on the device, then the device. Again: nothing. Raises what could not be freed."""
        problems = []
        for kind in self.children:
            for child in list(kind):
                try:
                    child.close()
                except MoonpoolError as exc:
                    problems.append(exc)
        if problems:
            raise problems[0]  # the device stays open under what could not be freed: close it again
        failure = self.release()
        if not is_freed(failure):
            raise call_problem(failure, "closing the device", self.name)

    def abandon_after_fork(self) -> None:
        """In a forked child, at once: close its copies of the descriptors, which would keep the parent's objects alive.

        All else of the parent's is forgotten and not freed, as by `close` and by dropping it.
        """
        if self.context == NULL or self.pid == getpid():
            return
        for queue in list(self.children[2]):
            os.close(queue.fd)
        os.close(self.context.async_fd)
        if self.context.cmd_fd >= 0:
            os.close(self.context.cmd_fd)
        self.close()

    def attributes(self) -> DeviceAttributes:
        """The device's bounds."""
        cdef ibv_device_attr_ex attr
        cdef int rc
        self.check_open()
        with nogil:
            rc = mp_query_device(self.calls, self.context, &attr)
        if rc:
            raise call_problem(rc if rc > 0 else errno, "asking for attributes", self.name)
        return DeviceAttributes(
            name=self.name,
            firmware=(<bytes>attr.orig_attr.fw_ver).decode(errors="replace"),
            guid=be64toh(self.calls.get_device_guid(self.context.device)),
            vendor_id=attr.orig_attr.vendor_id,
            vendor_part_id=attr.orig_attr.vendor_part_id,
            ports=attr.orig_attr.phys_port_cnt,
            max_mr_bytes=attr.orig_attr.max_mr_size,
            max_mr=attr.orig_attr.max_mr,
            max_qp=attr.orig_attr.max_qp,
            max_qp_wr=attr.orig_attr.max_qp_wr,
            max_sge=attr.orig_attr.max_sge,
            max_sge_rd=attr.orig_attr.max_sge_rd,
            max_cq=attr.orig_attr.max_cq,
            max_cqe=attr.orig_attr.max_cqe,
            max_qp_rd_atom=attr.orig_attr.max_qp_rd_atom,
            max_qp_init_rd_atom=attr.orig_attr.max_qp_init_rd_atom,
            on_demand_paging=bool(attr.odp_caps.general_caps & IBV_ODP_SUPPORT),
        )

    def port(self, int number) -> PortAttributes:
        """A port (from 1) as it is now."""
        cdef ibv_port_attr attr
        cdef int rc
        self.check_open()
        if not 1 <= number <= 255:
            raise UsageError(f"ports are numbered from 1; {number} is none")
        with nogil:
            rc = mp_query_port(self.calls, self.context, number, &attr)
        if rc:
            raise call_problem(rc if rc > 0 else errno, f"asking for port {number}", self.name)
        layer = LinkLayer.UNKNOWN
        if attr.link_layer == IBV_LINK_LAYER_ETHERNET:
            layer = LinkLayer.ETHERNET
        elif attr.link_layer == IBV_LINK_LAYER_INFINIBAND or attr.link_layer == 0:
            layer = LinkLayer.INFINIBAND  # drivers from before RoCE leave it unspecified
        return PortAttributes(
            number=number,
            state=attr.state,
            link_layer=layer,
            active_mtu=attr.active_mtu,
            max_mtu=attr.max_mtu,
            lid=attr.lid,
            lmc=attr.lmc,
            gids=attr.gid_tbl_len,
            pkeys=attr.pkey_tbl_len,
            max_message_bytes=attr.max_msg_sz,
            active_width=attr.active_width,
            active_speed=attr.active_speed,
        )

    def gids(self, int port) -> list:
        """The valid entries of a port's GID table, by index."""
        self.check_open()
        if self.calls.query_gid_table == NULL:
            return self.gids_one_by_one(port)
        cdef size_t n_max = GIDS_MAX
        cdef ssize_t n, i
        cdef ibv_gid_entry* entries = <ibv_gid_entry*>calloc(n_max, sizeof(ibv_gid_entry))
        if entries == NULL:
            raise OutOfMemory("no memory for a GID table")
        try:
            with nogil:
                n = self.calls.query_gid_table(self.context, entries, n_max, 0, sizeof(ibv_gid_entry))
            if n < 0:
                raise call_problem(<int>-n, "reading the GID table", self.name)
            found = [
                GidEntry(
                    entries[i].gid_index,
                    (<char*>entries[i].gid.raw)[:16],
                    (GidKind.INFINIBAND, GidKind.ROCE_1, GidKind.ROCE_2)[min(entries[i].gid_type, 2)],
                    interface_name(entries[i].ndev_ifindex),
                )
                for i in range(n) if entries[i].port_num == <unsigned int>port
            ]
        finally:
            free(entries)
        return sorted(found, key=lambda entry: entry.index)

    def gids_one_by_one(self, int port) -> list:
        """`gids` for libraries that cannot give the table at once: kinds and interfaces come from sysfs."""
        cdef ibv_gid gid
        cdef int index, rc
        found = []
        attributes = self.port(port)
        where = f"/sys/class/infiniband/{self.name}/ports/{port}/gid_attrs"
        for index in range(min(attributes.gids, GIDS_MAX)):
            with nogil:
                rc = self.calls.query_gid(self.context, port, index, &gid)
            raw = (<char*>gid.raw)[:16]
            if rc or not any(raw):
                continue
            kind = GidKind.INFINIBAND
            if attributes.link_layer is LinkLayer.ETHERNET:
                kind = GidKind.ROCE_2 if "v2" in first_line(f"{where}/types/{index}") else GidKind.ROCE_1
            found.append(GidEntry(index, raw, kind, first_line(f"{where}/ndevs/{index}")))
        return found

    def take_events(self) -> list:
        """The asynchronous events that wait, at most 64; never waits itself. Poll `async_fd` to learn of them."""
        cdef mp_async event
        found = []
        while self.context != NULL and len(found) < EVENTS_AT_ONCE:
            if not mp_async_take(self.calls, self.context, &event):
                break
            text = (<bytes>self.calls.event_type_str(event.type)).decode(errors="replace")
            found.append(AsyncEvent(event_kind(event.type), text, event.port, event.qp_num))
        return found

    @property
    def closed(self) -> bool:
        return self.context == NULL


cdef object event_kind(int kind):
    if kind == IBV_EVENT_PORT_ACTIVE:
        return EventKind.PORT_ACTIVE
    if kind == IBV_EVENT_PORT_ERR:
        return EventKind.PORT_ERROR
    if kind == IBV_EVENT_DEVICE_FATAL:
        return EventKind.DEVICE_FATAL
    if kind == IBV_EVENT_QP_FATAL or kind == IBV_EVENT_QP_REQ_ERR:
        return EventKind.QP_FATAL
    if kind == IBV_EVENT_QP_ACCESS_ERR:
        return EventKind.QP_ACCESS
    if kind == IBV_EVENT_CQ_ERR:
        return EventKind.CQ_ERROR
    if kind == IBV_EVENT_GID_CHANGE or kind == IBV_EVENT_LID_CHANGE:
        return EventKind.ADDRESS_CHANGE
    return EventKind.OTHER


cdef str interface_name(unsigned int index):
    """"" for none, or for one that is not in this network namespace."""
    if index == 0:
        return ""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return ""


cdef str first_line(str path):
    try:
        with open(path) as file:
            return file.readline(256).strip()
    except (OSError, UnicodeDecodeError):
        return ""
