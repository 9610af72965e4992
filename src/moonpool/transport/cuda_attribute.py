"""What the `cuda` transport publishes of a region: 48 bytes, version 1, all little endian. Pure.

version u8 = 1 | kind u8 | device u16 | reserved u32 | slot bytes u64 | uuid 16s | runtime 16s (name, zeros)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, final

from moonpool.errors import ProtocolError
from moonpool.units import GIB

_FORM: Final = struct.Struct("<BBHIQ16s16s")
_VERSION: Final = 1
#: A region of device memory.
DEVICE: Final = 1
#: Two slots of host memory by which the owner serves one session's peer.
SLOTS: Final = 2
UUID_BYTES: Final = 16
_NAME_BYTES: Final = 16
SLOT_BYTES_MAX: Final = 16 * GIB


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAttribute:
    """`device` and `uuid` name the device among the owner's; `slot_bytes` is the size of one slot."""

    kind: int
    runtime: str
    device: int = 0
    uuid: bytes = bytes(UUID_BYTES)
    slot_bytes: int = 0


def encode(attribute: CudaAttribute) -> bytes:
    """The attribute as it is published."""
    return _FORM.pack(
        _VERSION,
        attribute.kind,
        attribute.device,
        0,
        attribute.slot_bytes,
        attribute.uuid,
        attribute.runtime.encode(),
    )


def decode(raw: bytes) -> CudaAttribute:
    """What a peer published; ProtocolError for anything that `encode` cannot have made."""
    if len(raw) != _FORM.size:
        raise ProtocolError(f"a cuda attribute has {_FORM.size} bytes, not {len(raw)}")
    version, kind, device, reserved, slot_bytes, uuid, name = _FORM.unpack(raw)
    if version != _VERSION or kind not in (DEVICE, SLOTS) or reserved:
        raise ProtocolError(f"a cuda attribute of version {version} and kind {kind} cannot be read here")
    bare = name.rstrip(b"\0")
    if not bare.isalnum() or (kind == SLOTS) != (0 < slot_bytes <= SLOT_BYTES_MAX):
        raise ProtocolError("a cuda attribute names no runtime, or slots of an impossible size")
    return CudaAttribute(
        kind=kind, runtime=bare.decode("ascii"), device=device, uuid=uuid, slot_bytes=slot_bytes
    )
