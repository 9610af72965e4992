"""What an owner publishes of a region in an NVMe namespace, as bytes: enough for a peer to find it by itself.

One header of fixed size, then texts with their lengths (all little endian). Whatever a peer sends is hostile
until it has been parsed: `decode` gives a value within its bounds, or raises `ProtocolError`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final, final

from moonpool.errors import ProtocolError

VERSION: Final = 1
#: NVMe base specification 2.0, 4.5: a qualified name has at most 223 bytes.
NQN_BYTES_MAX: Final = 223
WWID_BYTES_MAX: Final = 192
TARGETS_MAX: Final = 8
WORD_BYTES_MAX: Final = 64
ATTRIBUTE_BYTES_MAX: Final = 2048
BLOCK_BYTES_MAX: Final = 64 * 1024
OFFSET_MAX: Final = 1 << 62

FUA: Final = 1
_FLAGS_KNOWN: Final = FUA
_HEADER: Final = struct.Struct("<BBHIIQQ")
_PASSTHROUGH: Final = ("auto", "yes", "no")
_PRINTABLE: Final = re.compile(r"[!-~]+\Z")
#: Nothing that would end an option of the kernel's connect string, or begin another.
_ADDRESS: Final = re.compile(r"[0-9A-Za-z.:%_-]+\Z")
_FABRICS: Final = ("tcp", "rdma")


@final
@dataclass(frozen=True, slots=True)
class Target:
    """Where a subsystem is served: "tcp" or "rdma", an address and a port."""

    transport: str
    address: str
    port: str = "4420"

    @property
    def is_valid(self) -> bool:
        """True when it can be put into a connect string."""
        return (
            self.transport in _FABRICS
            and 0 < len(self.address) <= WORD_BYTES_MAX
            and _ADDRESS.match(self.address) is not None
            and self.port.isascii()
            and self.port.isdigit()
            and 0 < int(self.port[:6]) < 65536
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRange:
    """A range of a namespace, by identity; `targets` say where it is served.

    It begins with a block, and the block in which it ends is its own to the end.
    """

    subsystem_nqn: str
    nsid: int
    wwid: str
    block_bytes: int
    offset: int
    size_bytes: int
    #: Each WRITE is on stable media when it is complete.
    fua: bool = False
    #: "yes": by passthrough only; "no": by the block device only.
    passthrough: str = "auto"
    targets: tuple[Target, ...] = ()

    def encode(self) -> bytes:
        """The attribute; ProtocolError when it is not one that `decode` takes."""
        self.check()
        head = _HEADER.pack(
            VERSION,
            FUA if self.fua else 0,
            _PASSTHROUGH.index(self.passthrough) << 8 | len(self.targets),
            self.nsid,
            self.block_bytes,
            self.offset,
            self.size_bytes,
        )
        words = [self.subsystem_nqn, self.wwid]
        for target in self.targets:
            words += [target.transport, target.address, target.port]
        return head + b"".join(bytes([len(word)]) + word.encode("ascii") for word in words)

    def check(self) -> None:
        """ProtocolError when a field is out of its bounds."""
        block = self.block_bytes
        if not (512 <= block <= BLOCK_BYTES_MAX and block & (block - 1) == 0):
            raise ProtocolError(f"a namespace has no blocks of {block} bytes")
        if not 0 < self.nsid < 0xFFFFFFFF:
            raise ProtocolError(f"there is no namespace {self.nsid}")
        if not 0 < self.size_bytes <= OFFSET_MAX or not 0 <= self.offset <= OFFSET_MAX:
            raise ProtocolError(f"no range of {self.size_bytes} bytes at {self.offset}")
        if self.offset % block:
            raise ProtocolError(f"a range of a namespace begins with a block, not at {self.offset}")
        if self.passthrough not in _PASSTHROUGH or len(self.targets) > TARGETS_MAX:
            raise ProtocolError("a range of a namespace names a way that there is not, or too many targets")
        if not all(target.is_valid for target in self.targets):
            raise ProtocolError("an address of a target cannot be used")
        for word, limit in ((self.subsystem_nqn, NQN_BYTES_MAX), (self.wwid, WWID_BYTES_MAX)):
            if not 0 < len(word) <= limit or not _PRINTABLE.match(word) or "," in word:
                raise ProtocolError("a namespace's names are short, printable and without commas")


def decode(data: bytes) -> NamespaceRange:
    """The range that a peer published; ProtocolError for anything that is none."""
    if not _HEADER.size <= len(data) <= ATTRIBUTE_BYTES_MAX:
        raise ProtocolError(f"{len(data)} bytes are no range of a namespace")
    version, flags, ways, nsid, block_bytes, offset, size_bytes = _HEADER.unpack_from(data)
    n_targets, passthrough = ways & 0xFF, ways >> 8
    if version != VERSION or flags & ~_FLAGS_KNOWN or passthrough >= len(_PASSTHROUGH):
        raise ProtocolError(f"a range of a namespace in version {version}, which this engine does not know")
    if n_targets > TARGETS_MAX:
        raise ProtocolError(f"a namespace served at {n_targets} addresses")
    words = _words(data, 2 + 3 * n_targets)
    found = NamespaceRange(
        subsystem_nqn=words[0],
        nsid=nsid,
        wwid=words[1],
        block_bytes=block_bytes,
        offset=offset,
        size_bytes=size_bytes,
        fua=bool(flags & FUA),
        passthrough=_PASSTHROUGH[passthrough],
        targets=tuple(Target(*words[at : at + 3]) for at in range(2, len(words), 3)),
    )
    found.check()
    return found


def _words(data: bytes, count: int) -> list[str]:
    """Exactly `count` texts with their lengths behind the header."""
    at, words = _HEADER.size, []
    for _ in range(count):
        end = at + 1 + data[at] if at < len(data) else at + 1
        if end > len(data):
            raise ProtocolError("a range of a namespace is cut off")
        try:
            words.append(data[at + 1 : end].decode("ascii"))
        except UnicodeDecodeError as problem:
            raise ProtocolError("a range of a namespace holds a text that is not ASCII") from problem
        at = end
    if at != len(data):
        raise ProtocolError(f"{len(data) - at} bytes stand behind a range of a namespace")
    return words
