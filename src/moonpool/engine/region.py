"""Regions: registered memory of this process, and what is known of a peer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

from moonpool.errors import ProtocolError, UsageError
from moonpool.operations import Access

if TYPE_CHECKING:
    from moonpool.native.io.memory import BufferHold, SharedMemory
    from moonpool.transport.base import Backing

KEY_BYTES = 16
#: An attribute map larger than this is not a transport's, it is an attack.
ATTRIBUTE_BYTES_MAX = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A registered range of this process's memory; alive until the engine revokes it or closes.

    `memory` is set for engine memory (`Engine.allocate`), `hold` for a registered foreign buffer, `backing`
    for what a transport offers (`Engine.offer`); each keeps the bytes in place. `address` is 0 for bytes
    that have none in this process: a file's, a device's. `device_address` is where a device has them: for
    the local side of transfers only, no CPU may touch it. Keys are secrets: whoever has one may use the
    region.
    """

    handle: int
    address: int
    size_bytes: int
    access: Access
    location: str
    memory: SharedMemory | None = None
    hold: BufferHold | None = None
    backing: Backing | None = None
    device_address: int = 0
    read_key: bytes = field(repr=False, default=bytes(KEY_BYTES))
    write_key: bytes = field(repr=False, default=bytes(KEY_BYTES))
    attributes: Mapping[str, bytes] = field(repr=False, default_factory=dict)

    @property
    def view(self) -> memoryview:
        """The bytes of engine memory, writable. UsageError for a foreign buffer: use its own object."""
        if self.memory is None and self.backing is not None:
            raise UsageError(f"bytes at {self.location} are reached by transfers only: open your own segment")
        if self.memory is None:
            raise UsageError("this region is a registered buffer: use the buffer itself")
        return memoryview(self.memory)

    def describe(self) -> dict[str, Any]:
        """The region as it is published to peers; keys go along only for what is allowed."""
        return {
            "handle": self.handle,
            "address": self.address,
            "length": self.size_bytes,
            "location": self.location,
            "access": int(self.access),
            "read_key": self.read_key if self.access & Access.READ else bytes(KEY_BYTES),
            "write_key": self.write_key if self.access & Access.WRITE else bytes(KEY_BYTES),
            "attributes": dict(self.attributes),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRegion:
    """A peer's region, as published. `address` is in the peer's process; transfers use offsets."""

    handle: int
    address: int
    size_bytes: int
    location: str
    access: Access
    read_key: bytes = field(repr=False)
    write_key: bytes = field(repr=False)
    attributes: Mapping[str, bytes] = field(repr=False)
    #: Memory that the owner's transports lend this peer for their own business.
    lent: bool = False

    @classmethod
    def parse(cls, about: object) -> RemoteRegion:
        """Read what a peer sent; ProtocolError when it is not a region. Unknown attributes are kept."""
        try:
            if not isinstance(about, Mapping):
                raise TypeError("not a map")
            attributes = {str(k): bytes(v) for k, v in about["attributes"].items()}
            region = cls(
                handle=int(about["handle"]),
                address=int(about["address"]),
                size_bytes=int(about["length"]),
                location=str(about["location"]),
                access=Access(int(about["access"]) & 3),
                read_key=bytes(about["read_key"]),
                write_key=bytes(about["write_key"]),
                attributes=MappingProxyType(attributes),
                lent=about.get("lent") is True,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
            raise ProtocolError(
                f"the peer described a region in a way we cannot read ({problem})"
            ) from problem
        sizes_fit = (
            0 < region.size_bytes < 1 << 63
            and 0 <= region.address <= (1 << 64) - region.size_bytes
            and 0 < region.handle < 1 << 64
        )
        if (
            not sizes_fit
            or region.handle >> 32 == 0
            or {len(region.read_key), len(region.write_key)} != {KEY_BYTES}
        ):
            raise ProtocolError("the peer described a region with impossible numbers")
        if sum(len(k) + len(v) for k, v in attributes.items()) > ATTRIBUTE_BYTES_MAX:
            raise ProtocolError(f"the peer's region has more than {ATTRIBUTE_BYTES_MAX} bytes of attributes")
        return region
