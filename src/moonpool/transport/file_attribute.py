"""What an owner publishes of a region that lies in a file or block device: a small versioned codec.

Everything that a peer sends is hostile: what does not decode exactly is refused with ProtocolError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, final

from moonpool.errors import ProtocolError

VERSION: Final = 1
#: A longer path is not published: such a file is reached on its owner's host only.
PATH_BYTES_MAX: Final = 1_024
TAG_BYTES: Final = 16
BLOCK_BYTES_MAX: Final = 64 << 10
_HEAD: Final = struct.Struct("<BBHIQQ16s")
_SIZE_MAX: Final = 1 << 62


class FileFlag(IntFlag):
    """What a reader of the attribute must know."""

    DIRECT = 1  # whole blocks go around the page cache
    DEVICE = 2  # a block device, not a file
    SHARED = 4  # peers on other hosts may open it by its path; the tag proves that it is the same file
    DURABLE = 8  # each WRITE is on stable storage when it ends
    SYNCED = 16  # a flush makes what was written durable


_KNOWN_FLAGS: Final = sum(FileFlag)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileAttribute:
    """Where a region lies: `size_bytes` from `start` on in a file; `path` is "" unless it is shared."""

    flags: FileFlag
    block_bytes: int
    start: int
    size_bytes: int
    tag: bytes
    path: str = ""

    def encode(self) -> bytes:
        """The bytes that go into the region's attributes."""
        path = self.path.encode()
        head = _HEAD.pack(
            VERSION, self.flags, len(path), self.block_bytes, self.start, self.size_bytes, self.tag
        )
        return head + path

    @classmethod
    def decode(cls, raw: bytes) -> FileAttribute:
        """Reads what a peer sent; ProtocolError when it is not one."""
        if not _HEAD.size <= len(raw) <= _HEAD.size + PATH_BYTES_MAX:
            raise ProtocolError(f"the attribute of a file has {len(raw)} bytes")
        version, flags, path_bytes, block_bytes, start, size_bytes, tag = _HEAD.unpack_from(raw)
        if version != VERSION:
            raise ProtocolError(f"the attribute of a file has version {version}, this engine knows {VERSION}")
        if flags & ~_KNOWN_FLAGS or path_bytes != len(raw) - _HEAD.size:
            raise ProtocolError("the attribute of a file has unknown flags or a wrong length")
        if block_bytes > BLOCK_BYTES_MAX or block_bytes & (block_bytes - 1) or block_bytes == 0:
            raise ProtocolError(f"a file has no blocks of {block_bytes} bytes")
        if not 0 < size_bytes <= _SIZE_MAX or start > _SIZE_MAX:
            raise ProtocolError(f"a region of {size_bytes} bytes at {start} is in no file")
        if flags & FileFlag.DIRECT and start % block_bytes:
            raise ProtocolError(f"a region at {start} does not begin with a block of {block_bytes} bytes")
        try:
            path = raw[_HEAD.size :].decode()
        except UnicodeDecodeError as problem:
            raise ProtocolError("the path of a file is not UTF-8") from problem
        if "\0" in path or bool(flags & FileFlag.SHARED) != path.startswith("/"):
            raise ProtocolError("a shared file has an absolute path, another none")
        if flags & FileFlag.SHARED and not flags & FileFlag.DIRECT:
            raise ProtocolError("a shared file is written in whole blocks, around the page cache")
        if path and not flags & FileFlag.SHARED:
            raise ProtocolError("a file that is not shared has no path")
        return cls(
            flags=FileFlag(flags),
            block_bytes=block_bytes,
            start=start,
            size_bytes=size_bytes,
            tag=tag,
            path=path,
        )
