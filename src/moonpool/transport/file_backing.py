"""The file or block device behind a region: opened, sized, preallocated; and how its descriptors are checked.

Each is open twice: `fd` with O_DIRECT for whole blocks, `edge_fd` through the page cache for the rest. Blocks
are at least a page, so that no page is written both ways but by writers whose ranges overlap.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool.errors import AccessDenied, MoonpoolError, OutOfMemory, ResourceError, UsageError
from moonpool.native.disk.disks import PAGE_BYTES, direct_alignment
from moonpool.transport.file_attribute import BLOCK_BYTES_MAX, PATH_BYTES_MAX, TAG_BYTES

PREFIX: Final = "file:"
#: Name of the extended attribute that proves to another host that a path leads to the owner's file.
TAG_NAME: Final = "user.moonpool."
SYNC_CHOICES: Final = ("none", "data", "fua")
#: linux/fs.h
_BLKSSZGET: Final = 0x1268
_BLKGETSIZE64: Final = 0x80081272
#: fcntl(2): a lock of the open file, not of the process.
_F_OFD_SETLK: Final = 37
_READ_ONLY_ERRORS: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ETXTBSY})
_SIZE_MAX: Final = 1 << 62


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """How a file is offered; see docs/transports/file.md. UsageError names a wrong field."""

    offset: int = 0
    create: bool = True
    direct: bool = True
    sync: str = "none"
    preallocate: bool = True
    shared: bool = False
    exclusive: bool = True

    def __post_init__(self) -> None:
        if type(self.offset) is not int or not 0 <= self.offset < _SIZE_MAX:
            raise UsageError(f"offset={self.offset!r} must be a number of bytes", field="offset")
        for name in ("create", "direct", "preallocate", "shared", "exclusive"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name}={getattr(self, name)!r} must be True or False", field=name)
        if self.sync not in SYNC_CHOICES:
            raise UsageError(f"sync={self.sync!r} must be one of {', '.join(SYNC_CHOICES)}", field="sync")

    @classmethod
    def of(cls, how: Mapping[str, Any]) -> FileOptions:
        """From the arguments of `Engine.offer`."""
        unknown = how.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise UsageError(
                f"a file is not offered with {min(unknown)!r}; there are "
                f"{', '.join(cls.__dataclass_fields__)}",
                field=min(unknown),
            )
        return cls(**how)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is open: its size, blocks of positions and of memory; `direct` when O_DIRECT works."""

    size_bytes: int
    block_bytes: int
    memory_block_bytes: int
    direct: bool
    is_device: bool


@final
class FileBacking:
    """A file or block device behind one region; owns two descriptors until `close`."""

    def __init__(
        self, path: str, size_bytes: int, options: FileOptions, opened: tuple[int, int, bool]
    ) -> None:
        self.path = path
        self.options = options
        self._size_bytes = size_bytes
        self.fd, self.edge_fd, self._writable = opened
        self.geometry = look_at(self.fd, self.edge_fd)
        self.tag = secrets.token_bytes(TAG_BYTES)
        self._read_only: tuple[int, int] | None = None
        self._tagged = False
        self._claim = -1

    @property
    def address(self) -> int:
        """0: no process maps it."""
        return 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the region."""
        return self._size_bytes

    @property
    def writable(self) -> bool:
        """False where the file could be opened for reading only."""
        return self._writable

    @property
    def location(self) -> str:
        """file:<path>"""
        return PREFIX + self.path

    def read_only(self) -> tuple[int, int]:
        """Descriptors of the same file that cannot write; borrowed. ResourceError without free ones."""
        if self._read_only is None:
            direct = reopen(self.fd, os.O_RDONLY | os.O_DIRECT) if self.fd >= 0 else -1
            try:
                self._read_only = (direct, reopen(self.edge_fd, os.O_RDONLY))
            except BaseException:
                close_all(direct)
                raise
        return self._read_only

    def mark(self) -> None:
        """Put the tag on the file, by which other hosts know it; ResourceError where that cannot be."""
        try:
            os.setxattr(self.edge_fd, TAG_NAME + self.tag.hex(), b"")
        except OSError as problem:
            raise ResourceError(
                f"{self.path} cannot be shared: its file system keeps no extended attributes, or no more "
                f"({problem.strerror}); offer it with shared=False",
                errno=problem.errno or 0,
            ) from problem
        self._tagged = True

    def claim(self) -> None:
        """Keep others from offering these bytes while we do; UsageError when somebody does already.

        The lock is that of a descriptor of its own, which no peer gets: it ends with this process.
        """
        if not self.options.exclusive:
            return
        self._claim = reopen(self.edge_fd, os.O_RDWR if self._writable else os.O_RDONLY)
        kind = fcntl.F_WRLCK if self._writable else fcntl.F_RDLCK
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, self.options.offset, self._size_bytes, 0)
        try:
            fcntl.fcntl(self._claim, _F_OFD_SETLK, lock)
        except OSError as problem:
            if problem.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(
                    f"bytes of {self.path} from {self.options.offset} on are offered already, here or by "
                    "another process: take others, end that one, or give exclusive=False",
                    field="location",
                ) from problem
            # Some network file systems have no locks: then nobody is kept out.

    def close(self) -> None:
        """Closes the descriptors; idempotent."""
        if self._tagged:
            self._tagged = False
            with contextlib.suppress(OSError):
                os.removexattr(self.edge_fd, TAG_NAME + self.tag.hex())
        close_all(self.fd, self.edge_fd, self._claim, *(self._read_only or ()))
        self.fd = self.edge_fd = self._claim = -1
        self._read_only = None


def open_backing(location: str, size_bytes: int | None, options: FileOptions) -> FileBacking:
    """Opens, and with `create` makes and extends, what a location names; leaves nothing behind when it fails.

    UsageError for what is no file or block device, or too small; OutOfMemory on a full disk; AccessDenied and
    ResourceError as the system says.
    """
    path = location.removeprefix(PREFIX)
    if not path.startswith("/") or "\0" in path:
        raise UsageError(f"{location!r} names no file: write file: and an absolute path", field="location")
    if options.shared and len(path.encode()) > PATH_BYTES_MAX:
        raise UsageError(f"the path of a shared file has at most {PATH_BYTES_MAX} bytes", field="location")
    if size_bytes is not None and (type(size_bytes) is not int or not 0 < size_bytes < _SIZE_MAX):
        raise UsageError(f"size_bytes={size_bytes!r} must be a positive number of bytes", field="size_bytes")
    fresh = not os.path.exists(path)
    if fresh and (not options.create or size_bytes is None):
        raise UsageError(f"there is no {path}: create it by create=True and size_bytes", field="location")
    edge_fd, writable = _open_either(path, options.create)
    fd, before = -1, -1
    try:
        before = _size_of(edge_fd)
        size = _make_room(edge_fd, path, size_bytes, options, before, writable)
        if options.direct:
            fd = _open_direct(edge_fd, writable)
        backing = FileBacking(path, size, options, (fd, edge_fd, writable))
    except BaseException:
        _undo(path, edge_fd, before, fresh)
        close_all(fd, edge_fd)
        raise
    try:
        backing.claim()
        _check_start(backing)
        if options.shared:
            backing.mark()
    except BaseException:
        _undo(path, edge_fd, before, fresh)
        backing.close()
        raise
    return backing


def _check_start(backing: FileBacking) -> None:
    if backing.options.shared and not backing.geometry.direct:
        raise UsageError(f"{backing.path} cannot be shared: its file system has no O_DIRECT", field="shared")
    block = backing.geometry.block_bytes
    if backing.geometry.direct and backing.options.offset % block:
        raise UsageError(
            f"offset={backing.options.offset} must be a multiple of {block}, or direct=False", field="offset"
        )


def look_at(fd: int, edge_fd: int) -> Geometry:
    """What two descriptors of one file (-1: none) are good for. UsageError when it is no file or device."""
    any_fd = edge_fd if edge_fd >= 0 else fd
    about = os.fstat(any_fd)
    is_device = stat.S_ISBLK(about.st_mode)
    if not is_device and not stat.S_ISREG(about.st_mode):
        raise UsageError("this is neither a file nor a block device", field="location")
    size = _size_of(any_fd)
    if fd < 0:
        return Geometry(size, 1, 1, False, is_device)
    told = direct_alignment(fd)
    if told is None:
        logical = _logical_block(any_fd) if is_device else PAGE_BYTES
        told = (logical, logical)
    memory, positions = told
    block = max(positions, PAGE_BYTES)
    if memory == 0 or block > BLOCK_BYTES_MAX:
        return Geometry(size, 1, 1, False, is_device)
    return Geometry(size, block, memory, True, is_device)


def reopen(fd: int, flags: int) -> int:
    """A new descriptor of the same file with other flags; the caller closes it."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as problem:
        raise ResourceError(
            f"opening a file again failed: {problem.strerror}", errno=problem.errno or 0
        ) from problem


def _open_either(path: str, create: bool) -> tuple[int, bool]:
    """Opens for reading and writing, or for reading where that is refused."""
    flags = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o600), True
    except OSError as problem:
        if problem.errno not in _READ_ONLY_ERRORS:
            raise _explain(path, problem) from problem
    try:
        return os.open(path, flags | os.O_RDONLY), False
    except OSError as problem:
        raise _explain(path, problem) from problem


def _open_direct(edge_fd: int, writable: bool) -> int:
    """The same file with O_DIRECT; -1 where its file system refuses that."""
    try:
        return reopen(edge_fd, os.O_DIRECT | (os.O_RDWR if writable else os.O_RDONLY))
    except ResourceError as problem:
        if problem.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return -1
        raise


def _make_room(
    fd: int, path: str, size_bytes: int | None, options: FileOptions, before: int, writable: bool
) -> int:
    """Sees to it that the region is inside the file; returns its size."""
    size = before - options.offset if size_bytes is None else size_bytes
    end = options.offset + size
    if size <= 0:
        raise UsageError(f"{path} has {before} bytes, none from {options.offset} on", field="offset")
    if end > _SIZE_MAX:
        raise UsageError(f"no file ends at {end}", field="size_bytes")
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    if end > before and not (is_file and options.create and writable):
        raise UsageError(
            f"{path} has {before} bytes, the region ends at {end}: offer less, or a file with create=True",
            field="size_bytes",
        )
    if is_file and writable and options.create:
        if options.preallocate:
            _check_room(fd, path, end)
        try:
            if options.preallocate:
                os.posix_fallocate(fd, options.offset, size)
            elif end > before:
                os.ftruncate(fd, end)
        except OSError as problem:
            raise _explain(path, problem) from problem
    return size


def _check_room(fd: int, path: str, end: int) -> None:
    """A disk that is too small must not be filled before that shows."""
    about, system = os.fstat(fd), os.fstatvfs(fd)
    wanted = end - about.st_blocks * 512
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and wanted > free:
        raise OutOfMemory(
            f"there is no room for the region in {path}: {wanted} bytes are wanted, {free} are free",
            errno=errno.ENOSPC,
        )


def _undo(path: str, fd: int, before: int, fresh: bool) -> None:
    with contextlib.suppress(OSError):
        if fresh:
            os.unlink(os.path.realpath(path))
        elif 0 <= before < _size_of(fd):
            os.ftruncate(fd, before)


def _size_of(fd: int) -> int:
    about = os.fstat(fd)
    if not stat.S_ISBLK(about.st_mode):
        return about.st_size
    size: int = struct.unpack("=Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0]
    return size


def _logical_block(fd: int) -> int:
    size: int = struct.unpack("=i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))[0]
    return size


def _explain(path: str, problem: OSError) -> MoonpoolError:
    """The error of the taxonomy that says what to do."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutOfMemory(
            f"there is no room for the region in {path} ({problem.strerror}): free some, or offer less",
            errno=problem.errno or 0,
        )
    if problem.errno in _READ_ONLY_ERRORS:
        return AccessDenied(f"{path} may not be opened: {problem.strerror}", errno=problem.errno or 0)
    if problem.errno in (errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG):
        return UsageError(
            f"{path} is not a file: {problem.strerror}", field="location", errno=problem.errno or 0
        )
    return ResourceError(f"{path} cannot be opened: {problem.strerror}", errno=problem.errno or 0)


def close_all(*fds: int) -> None:
    """Closes those that are open."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)
