"""`file`: regions that lie in plain files and block devices, by io_uring straight from and into memory.

A peer on the owner's host is passed descriptors over the unix session that proves who asks; one on another
host opens a shared file by its path where its own config allows, and believes only the tag that the owner put
on the file. Guide: docs/transports/file.md.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    ProtocolError,
    ResourceError,
    TransferTimeout,
    TransportUnavailable,
    UnsupportedOperation,
)
from moonpool.native.disk.disks import Disk, add_disk_path
from moonpool.native.disk.rings import DiskRings, probe_rings
from moonpool.operations import Access
from moonpool.transport.base import (
    Answer,
    Answered,
    Availability,
    Backing,
    Capabilities,
    Host,
    OwnerSession,
    OwnMethod,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.file_attribute import FileAttribute, FileFlag
from moonpool.transport.file_backing import (
    PREFIX,
    TAG_NAME,
    FileBacking,
    FileOptions,
    close_all,
    look_at,
    open_backing,
    reopen,
)
from moonpool.transport.plain import PlainTransport

#: EXTRA_FILE of native/io/regions.pxd.
PLACE: Final = 1
OPEN: Final = "file.open"
_FLAG_OF_SYNC: Final = {"none": FileFlag(0), "data": FileFlag.SYNCED, "fua": FileFlag.DURABLE}


def available() -> Availability:
    """Whether this process may open an io_uring."""
    problem = probe_rings()
    if problem == 0:
        return Availability(True)
    return Availability(
        False,
        f"the kernel gives this process no io_uring ({os.strerror(problem)})",
        "use Linux 5.19 or newer, set the sysctl kernel.io_uring_disabled to 0, and allow io_uring_setup in "
        "the container's seccomp profile",
    )


@dataclass(slots=True)
class _Reached:
    """A region as this process reaches it; the lock orders flushes, so that each waits for the one before."""

    disk: Disk
    flushed: bool
    lock: threading.Lock = field(default_factory=threading.Lock)


@final
class FileTransport(PlainTransport):
    """One path a segment; the rings are shared by all segments of the engine."""

    name = "file"
    gauges = frozenset({"rings", "rings_busy"})
    capabilities = Capabilities(same_process=True, same_host=True, other_hosts=True, over_unix=True)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._host: Host | None = None
        self._rings: DiskRings | None = None
        self._reached: weakref.WeakKeyDictionary[SegmentSide, list[_Reached]] = weakref.WeakKeyDictionary()
        self._not_direct = 0
        self._refused_opens = 0

    def open(self, host: Host) -> None:
        """Opens the first ring, so that an engine that cannot have one says so at once."""
        self._host = host
        try:
            self._rings = DiskRings(self.config.disk_rings, self.config.disk_queue_depth)
        except ResourceError as problem:
            state = available()
            raise TransportUnavailable(
                state.reason or str(problem), state.how_to_get_it, transport=self.name
            ) from problem

    # Of the owner's side

    def takes(self, location: str) -> bool:
        """file:<path>"""
        return location.startswith(PREFIX)

    def offer(self, location: str, size_bytes: int | None, how: Mapping[str, Any]) -> Backing:
        """Opens or makes the file; see `FileOptions` for `how`."""
        options = FileOptions.of(how)
        backing = open_backing(location, size_bytes, options)
        self._not_direct += options.direct and not backing.geometry.direct
        return backing

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Where in which file the region lies."""
        backing = region.backing
        if not isinstance(backing, FileBacking):
            return None
        about, options = backing.geometry, backing.options
        flags = _FLAG_OF_SYNC[options.sync]
        flags |= FileFlag.DIRECT if about.direct else FileFlag(0)
        flags |= FileFlag.DEVICE if about.is_device else FileFlag(0)
        flags |= FileFlag.SHARED if options.shared else FileFlag(0)
        return FileAttribute(
            flags=flags,
            block_bytes=about.block_bytes,
            start=options.offset,
            size_bytes=backing.size_bytes,
            tag=backing.tag,
            path=backing.path if options.shared else "",
        ).encode()

    def methods(self) -> Mapping[str, OwnMethod]:
        """Passing a region's descriptors."""
        return {OPEN: self._pass_descriptors}

    def _pass_descriptors(self, session: OwnerSession, params: Mapping[str, Any]) -> Answered:
        """The file of a region, for reading only unless the region may be written. On the control thread.

        Another host, which cannot be passed anything, gets leave to open a shared file by its path.
        """
        assert self._host is not None
        handle, access = params.get("handle"), params.get("access")
        if type(handle) is not int or type(access) is not int or not 0 < access <= int(Access.READ_WRITE):
            raise UnsupportedOperation("a file is asked for by an integer handle and access bits")
        region = self._host.region(handle)
        backing = region.backing
        if not isinstance(backing, FileBacking):
            raise UnsupportedOperation("the region is not in a file", region=handle)
        if not session.is_unix and not backing.options.shared:
            raise UnsupportedOperation("files are passed over unix sockets only", region=handle)
        if access & ~int(region.access):
            raise AccessDenied(f"the region does not allow access {access}", region=handle)
        writes = bool(access & Access.WRITE)
        fds: tuple[int, ...] = ()
        if session.is_unix:
            fds = (backing.fd, backing.edge_fd) if writes else backing.read_only()
        self._host.given(handle, session, writes=writes)
        return Answered({"writable": writes}, [fd for fd in fds if fd >= 0])

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """Our own memory is unpinned; peers let go of a file's descriptors when they are asked to."""
        if self._rings is not None:
            self._rings.drop_region(region.handle)
        return True

    # Of the initiator's side

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """One path, where descriptors can be had: ours, a same-host peer's, or by path where allowed."""
        if self._rings is None or not (peer.is_self or peer.session.is_unix or self.config.file_roots):
            return ()
        path = add_disk_path(segment.native, self._rings, PLACE)
        return (PathInfo(path, self.name, "io_uring", peer.endpoint),)

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Gets descriptors of the region's file, and proves that they are of what was published."""
        raw = region.attributes.get(self.name)
        if raw is None or self._rings is None:
            return False
        try:
            about = FileAttribute.decode(raw)
            disk = self._disk(peer, region, about)
            if disk is None:
                return False
            disk.reach(segment.native, region.handle, PLACE)
            segment.hold(region.handle, disk)
        except (MoonpoolError, OSError) as problem:
            self._refused_opens += 1
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        reached = [one for one in self._reached.get(segment, ()) if not one.disk.closed]
        flushed = bool(about.flags & (FileFlag.SYNCED | FileFlag.SHARED))
        self._reached[segment] = [*reached, _Reached(disk, flushed)]
        return True

    def _disk(self, peer: PeerSide, region: RemoteRegionSide, about: FileAttribute) -> Disk | None:
        if about.size_bytes != region.size_bytes:
            raise ProtocolError(
                f"a region of {region.size_bytes} bytes is not {about.size_bytes} in its file"
            )
        if peer.is_self:
            assert self._host is not None
            own = self._host.region(region.handle).backing
            if not isinstance(own, FileBacking):
                raise ProtocolError("a region of our own is not in a file")
            writes = own.writable and bool(region.access & Access.WRITE)
            flags = os.O_RDWR if writes else os.O_RDONLY
            fds = [reopen(own.edge_fd, flags)]
            try:
                fds += [reopen(own.fd, flags | os.O_DIRECT)] if own.geometry.direct else []
            except BaseException:
                close_all(*fds)
                raise
            return self._made(fds[1] if len(fds) > 1 else -1, fds[0], about, writes)
        if peer.session.is_unix:
            with peer.request(OPEN, {"handle": region.handle, "access": int(region.access)}) as answer:
                return self._checked(answer, region, about)
        if about.flags & FileFlag.SHARED and self.config.file_roots:
            fd = self._by_path(region, about)
            try:
                # Only now: the owner waits at each revoke for whoever it gave leave.
                peer.request(OPEN, {"handle": region.handle, "access": int(region.access)}).close()
            except BaseException:
                close_all(fd)
                raise
            return self._made(fd, -1, about, bool(region.access & Access.WRITE))
        return None

    def _checked(self, answer: Answer, region: RemoteRegionSide, about: FileAttribute) -> Disk:
        """The disk of the descriptors that an owner passed; nothing that it says leads outside the file."""
        said = answer.value if isinstance(answer.value, Mapping) else {}
        if not 1 <= len(answer.fds) <= 2:
            raise ProtocolError("the answer to file.open is one descriptor or two")
        writes = said.get("writable") is True
        fds = answer.take_fds()
        try:
            modes = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in fds]
            wanted = os.O_RDWR if writes else os.O_RDONLY
            if any(mode & os.O_ACCMODE != wanted or mode & os.O_APPEND for mode in modes):
                raise ProtocolError("the owner passed a descriptor that is not for what it says")
            identities = {(s.st_dev, s.st_ino, s.st_rdev) for s in map(os.fstat, fds)}
            direct = [fd for fd, mode in zip(fds, modes, strict=True) if mode & os.O_DIRECT]
            edges = [fd for fd, mode in zip(fds, modes, strict=True) if not mode & os.O_DIRECT]
            if len(identities) != 1 or len(edges) != 1:
                raise ProtocolError("the owner passed descriptors of different files, or none for edges")
        except BaseException:
            close_all(*fds)
            raise
        return self._made(direct[0] if direct else -1, edges[0], about, writes)

    def _by_path(self, region: RemoteRegionSide, about: FileAttribute) -> int:
        """Opens a shared file under one of `file_roots`; its tag proves that it is the owner's."""
        flags = os.O_RDWR if region.access & Access.WRITE else os.O_RDONLY
        fd = _open_beneath(about.path, self.config.file_roots, flags | os.O_DIRECT)
        try:
            if TAG_NAME + about.tag.hex() not in os.listxattr(fd):
                raise AccessDenied(f"{about.path} is another file here than at its owner's host")
        except BaseException:
            close_all(fd)
            raise
        return fd

    def _made(self, fd: int, edge_fd: int, about: FileAttribute, writes: bool) -> Disk:
        """A disk that owns the descriptors, once they hold what was published; closes them otherwise."""
        assert self._rings is not None
        if about.flags & FileFlag.SHARED:
            # Hosts would merge edges into one page each in its own page cache: nobody writes any.
            close_all(edge_fd)
            edge_fd = -1
        try:
            if fd < 0 and edge_fd < 0:
                raise ProtocolError("a shared file is open with O_DIRECT, this one is not")
            found = look_at(fd, edge_fd)
            if found.size_bytes < about.start + about.size_bytes:
                end = about.start + about.size_bytes
                raise ProtocolError(f"the region ends at {end}, its file has {found.size_bytes} bytes")
            block = max(found.block_bytes, about.block_bytes)
            if found.direct and about.start % block:
                raise ProtocolError(f"a region at {about.start} does not begin with a block of {block} bytes")
            if fd >= 0 and not found.direct:
                if edge_fd < 0:
                    raise UnsupportedOperation("the file takes no direct I/O on this host")
                os.close(fd)
                fd = -1
            return Disk(
                self._rings,
                fd,
                edge_fd,
                about.start,
                block,
                found.memory_block_bytes,
                writes,
                bool(about.flags & FileFlag.DURABLE),
                found.is_device,
            )
        except BaseException:
            close_all(fd, edge_fd)
            raise

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """fdatasync of the files whose policy asks for it, where they were written since the last one."""
        assert self._rings is not None
        deadline = time.monotonic() + timeout_s
        for one in self._reached.get(segment, ()):
            if not one.flushed or one.disk.closed:
                continue
            left = max(0.0, deadline - time.monotonic())
            if not one.lock.acquire(timeout=left):
                raise TransferTimeout(
                    "another flush of a file was not done in time", timeout_ms=timeout_s * 1e3
                )
            try:
                if one.disk.take_dirty():
                    try:
                        self._rings.sync(one.disk.any_fd, left)
                    except BaseException:
                        one.disk.mark_dirty()
                        raise
            finally:
                one.lock.release()

    def counters(self) -> Mapping[str, int]:
        """Of the rings, and what could not be direct or opened; gauges of rings."""
        if self._rings is None:
            return {}
        return {
            **self._rings.counters(),
            "rings": self._rings.rings,
            "rings_busy": self._rings.busy,
            "opens_not_direct": self._not_direct,
            "opens_refused": self._refused_opens,
        }

    def close(self) -> None:
        """Closes the rings."""
        if self._rings is not None:
            self._rings.close()


def _open_beneath(path: str, roots: Sequence[str], flags: int) -> int:
    """Opens a path that leads to a place beneath one of the roots, whatever links it goes by.

    AccessDenied when it leads elsewhere, or nowhere.
    """
    real_roots = [Path(root).resolve() for root in roots]
    if not any(Path(path).resolve().is_relative_to(root) for root in real_roots):
        raise AccessDenied(f"{path} is not beneath any of file_roots")
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as problem:
        raise AccessDenied(f"{path} cannot be opened: {problem.strerror}") from problem
    # Asked again of what is open: a link may have changed since.
    opened = Path(os.readlink(f"/proc/self/fd/{fd}"))
    if not any(opened.is_relative_to(root) for root in real_roots):
        os.close(fd)
        raise AccessDenied(f"{path} is not beneath any of file_roots")
    return fd
