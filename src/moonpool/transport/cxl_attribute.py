"""What an owner publishes of a far region, as bytes: version 1 of the attribute "cxl".

    u8 version = 1, u8 kind
    kind 1, memory of a numa node (a memfd that peers map):    nothing more
    kind 2, a range of a DAX device:   u8 flags (1: software coherence), u64 size and u64 alignment of the
        device, u64 offset of the range in it, u64 length of the range, u8 n and n bytes: what names the
        memory on every host that is attached to it (ASCII), n = 0 when nothing does

Little endian. Everything here was said by a peer: nothing is believed that it could not also do itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from moonpool.errors import ProtocolError

VERSION: Final = 1
NODE: Final = 1
DAX: Final = 2
SOFTWARE: Final = 1
IDENTITY_BYTES_MAX: Final = 255

_HEAD: Final = struct.Struct("<BB")
_DAX: Final = struct.Struct("<BQQQQB")
_DEVICE_BYTES_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class DaxRange:
    """A range of a DAX device; sizes in bytes. `identity` is "" when nothing names it on other hosts."""

    device_bytes: int
    align_bytes: int
    offset: int
    length: int
    software_coherence: bool = False
    identity: str = ""


def pack_node() -> bytes:
    """The attribute of memory of a numa node."""
    return _HEAD.pack(VERSION, NODE)


def pack_dax(about: DaxRange) -> bytes:
    """The attribute of a range of a DAX device."""
    identity = about.identity.encode("ascii")[:IDENTITY_BYTES_MAX]
    flags = SOFTWARE if about.software_coherence else 0
    return (
        _HEAD.pack(VERSION, DAX)
        + _DAX.pack(flags, about.device_bytes, about.align_bytes, about.offset, about.length, len(identity))
        + identity
    )


def parse(data: bytes) -> DaxRange | None:
    """A DAX range, or None for memory of a numa node. ProtocolError for anything else."""
    if len(data) < _HEAD.size:
        raise ProtocolError("the peer's far region is described by too few bytes")
    version, kind = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ProtocolError(
            f"the peer describes far memory in version {version}, this one reads {VERSION}: "
            "run the same Moonpool on both"
        )
    if kind == NODE and len(data) == _HEAD.size:
        return None
    if kind != DAX or len(data) < _HEAD.size + _DAX.size:
        raise ProtocolError("the peer's far region is of a kind that is not known here")
    flags, device, align, offset, length, n = _DAX.unpack_from(data, _HEAD.size)
    identity = data[_HEAD.size + _DAX.size :]
    if len(identity) != n or flags & ~SOFTWARE or not identity.isascii():
        raise ProtocolError("the peer's far region is described in a way that cannot be read")
    if not 0 < device <= _DEVICE_BYTES_MAX or align == 0 or align & (align - 1) or align > device:
        raise ProtocolError("the peer's far region is on a device with impossible numbers")
    if length == 0 or offset > device or length > device - offset:
        raise ProtocolError("the peer's far region does not lie inside its device")
    return DaxRange(
        device_bytes=device,
        align_bytes=align,
        offset=offset,
        length=length,
        software_coherence=bool(flags & SOFTWARE),
        identity=identity.decode("ascii"),
    )
