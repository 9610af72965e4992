"""Files behind regions: opened, made, extended, refused; nothing is left behind by what fails."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import pytest

from moonpool.errors import AccessDenied, OutOfMemory, ResourceError, UsageError
from moonpool.native.disk.disks import PAGE_BYTES
from moonpool.transport.file_backing import TAG_NAME, FileOptions, look_at, open_backing, reopen

MIB = 1 << 20
#: Any user but root.
ORDINARY = 12_345


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_new_file_has_room_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new"
    backing = open_backing(f"file:{path}", 3 * MIB + 1, FileOptions(offset=8192))
    try:
        about = path.stat()
        assert about.st_size == 8192 + 3 * MIB + 1
        assert about.st_blocks * 512 >= 3 * MIB, "preallocated"
        assert stat.S_IMODE(about.st_mode) & 0o077 == 0
        assert (backing.address, backing.size_bytes, backing.location) == (0, 3 * MIB + 1, f"file:{path}")
        assert backing.writable
        assert backing.geometry.block_bytes % PAGE_BYTES == 0 or not backing.geometry.direct
    finally:
        backing.close()
        backing.close()
    assert path.exists(), "the bytes outlive the region"


def test_a_sparse_file_takes_no_room(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    open_backing(f"file:{path}", 64 * MIB, FileOptions(preallocate=False)).close()
    assert path.stat().st_size == 64 * MIB
    assert path.stat().st_blocks * 512 < MIB


def test_what_is_there_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"x" * 10_000)
    for options in (FileOptions(), FileOptions(create=False), FileOptions(preallocate=False)):
        backing = open_backing(f"file:{path}", None, options)
        assert backing.size_bytes == 10_000
        backing.close()
    open_backing(f"file:{path}", 20_000, FileOptions()).close()
    assert path.read_bytes() == b"x" * 10_000 + bytes(10_000)


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("absent", 4096, FileOptions(create=False)),
        ("absent", None, FileOptions()),
        ("small", 8192, FileOptions(create=False)),
        ("small", None, FileOptions(offset=4096)),
        ("small", None, FileOptions(offset=5000)),
        ("small", 4096, FileOptions(offset=100)),  # with O_DIRECT, a region begins with a block
        ("small", 0, FileOptions()),
        ("small", -1, FileOptions()),
        ("small", 1 << 62, FileOptions()),
        ("small", (1 << 62) - 1, FileOptions(offset=4096)),
        ("folder", 4096, FileOptions()),
        ("pipe", 4096, FileOptions()),
        ("small/below", 4096, FileOptions()),
        ("no/such/folder", 4096, FileOptions()),
    ],
)
def test_what_is_no_region_is_a_usage_error(
    tmp_path: Path, name: str, size: int | None, options: FileOptions
) -> None:
    (tmp_path / "small").write_bytes(b"x" * 4096)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    with pytest.raises(UsageError):
        open_backing(f"file:{tmp_path / name}", size, options)
    assert descriptors() == before
    assert not (tmp_path / "absent").exists()
    assert (tmp_path / "small").read_bytes() == b"x" * 4096


@pytest.mark.parametrize("location", ["file:", "file:relative", "file:/zero\0byte", "file:/dev/null"])
def test_a_location_names_a_file(location: str) -> None:
    with pytest.raises(UsageError):
        open_backing(location, 4096, FileOptions())


def test_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * 100)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        for name in ("new", "old"):
            for options in (FileOptions(), FileOptions(preallocate=False)):
                with pytest.raises(OutOfMemory) as caught:
                    open_backing(f"file:{tmp_path / name}", 2 * MIB, options)
                assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").read_bytes() == b"x" * 100


def test_a_file_is_not_larger_than_its_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    with pytest.raises(OutOfMemory) as caught:
        open_backing(f"file:{tmp_path / 'new'}", 2 * free.f_blocks * free.f_frsize, FileOptions())
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert not (tmp_path / "new").exists()


def test_descriptors_for_reading_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    backing = open_backing(f"file:{path}", MIB, FileOptions())
    try:
        for fd in backing.read_only():
            if fd >= 0:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(fd, bytes(4096), 0)
        assert backing.read_only() is backing.read_only()
    finally:
        backing.close()


def as_ordinary_user(folder: Path) -> None:
    """Makes this process a user whom modes bind, as they do not bind root, and the folder its own."""
    if os.geteuid() == 0:
        os.chown(folder, ORDINARY, ORDINARY)
        os.setresuid(ORDINARY, ORDINARY, ORDINARY)


def look_at_modes(folder: Path) -> None:
    """In a process of its own."""
    as_ordinary_user(folder)
    path = folder / "file"
    path.write_bytes(bytes(8192))
    path.chmod(0o400)
    backing = open_backing(f"file:{path}", None, FileOptions())
    assert not backing.writable
    assert backing.size_bytes == 8192
    with pytest.raises(UsageError):
        open_backing(f"file:{path}", 16384, FileOptions())
    path.chmod(0)
    with pytest.raises(AccessDenied):
        open_backing(f"file:{path}", None, FileOptions())


def test_a_file_that_may_not_be_written_is_for_reading() -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        child = os.fork()
        if child == 0:
            status = 1
            try:
                look_at_modes(Path(folder))
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


def test_a_shared_file_wears_its_tag_while_it_is_offered(tmp_path: Path) -> None:
    path = tmp_path / "file"
    backing = open_backing(f"file:{path}", 8192, FileOptions(shared=True))
    try:
        assert os.listxattr(path) == [TAG_NAME + backing.tag.hex()]
        again = open_backing(f"file:{path}", 8192, FileOptions(shared=True, exclusive=False))
        assert len(os.listxattr(path)) == 2
        again.close()
    finally:
        backing.close()
    assert os.listxattr(path) == []
    with pytest.raises(UsageError, match="path of a shared file"):
        open_backing("file:/" + "x" * 1024, 8192, FileOptions(shared=True))


def test_bytes_are_offered_by_one_owner_at_a_time(tmp_path: Path) -> None:
    name = f"file:{tmp_path / 'file'}"
    backing = open_backing(name, 2 * MIB, FileOptions(offset=MIB))
    before = descriptors()
    try:
        for offset, size in ((MIB, 2 * MIB), (0, MIB + 1), (3 * MIB - 4096, 4096), (0, 8 * MIB)):
            with pytest.raises(UsageError, match="offered already"):
                open_backing(name, size, FileOptions(offset=offset, preallocate=False))
        child = (
            "import sys; from moonpool.transport.file_backing import FileOptions, open_backing\n"
            f"open_backing({name!r}, {MIB}, FileOptions(offset={2 * MIB}))"
        )
        done = subprocess.run([sys.executable, "-P", "-c", child], capture_output=True, text=True, timeout=60)
        assert "offered already" in done.stderr
        for offset in (0, 3 * MIB):
            open_backing(name, MIB, FileOptions(offset=offset)).close()
        assert descriptors() == before
    finally:
        backing.close()
    open_backing(name, 4 * MIB, FileOptions()).close()


def test_a_disk_that_is_too_small_is_not_filled_and_a_link_stays(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    for path in (tmp_path / "new", link):
        with pytest.raises(OutOfMemory, match="are wanted"):
            open_backing(f"file:{path}", 4 * free, FileOptions())
    assert link.is_symlink()
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "target").exists()
    assert os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize > free // 2


def test_only_files_and_block_devices_are_looked_at() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(UsageError):
            look_at(-1, reader)
    finally:
        os.close(reader)
        os.close(writer)
    with pytest.raises(ResourceError):
        reopen(reader, os.O_RDONLY)
