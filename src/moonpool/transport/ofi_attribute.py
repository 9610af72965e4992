"""What owners and initiators of `ofi` tell each other: keys of regions and addresses of endpoints. Pure.

All of it comes from a peer, so all of it is bounded and checked before it goes anywhere near the library.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool.errors import ProtocolError

VERSION: Final = 1
#: Longest address of an endpoint; the library's own longest is far shorter.
ADDRESS_BYTES_MAX: Final = 256
#: Longest name of a provider, and longest number of an endpoint.
PROVIDER_CHARS_MAX: Final = 64
NUMBER_MAX: Final = 1 << 32

_REGION: Final = struct.Struct("<B7xQQ")


@final
@dataclass(frozen=True, slots=True)
class RegionKey:
    """The provider's key of a region, and the address that its first byte has there."""

    key: int
    base: int

    def encode(self) -> bytes:
        """As the region's attribute."""
        return _REGION.pack(VERSION, self.key, self.base)

    @classmethod
    def decode(cls, data: bytes) -> RegionKey:
        """From an attribute; ProtocolError for anything else."""
        if len(data) != _REGION.size or data[0] != VERSION or any(data[1:8]):
            raise ProtocolError(f"{len(data)} bytes are no region of ofi that this version knows")
        _version, key, base = _REGION.unpack(data)
        return cls(key, base)


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What an initiator asks an owner for: an endpoint, in place of one that it had before."""

    provider: str
    address_format: int
    process: int
    previous: int | None = None

    def to_params(self) -> dict[str, Any]:
        """As the params of the request."""
        return {
            "provider": self.provider,
            "format": self.address_format,
            "pid": self.process,
            "previous": self.previous,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Asked:
        """From the params of a request; ProtocolError for anything else."""
        provider, form, process = params.get("provider"), params.get("format"), params.get("pid")
        previous = params.get("previous")
        if not isinstance(provider, str) or not 1 <= len(provider) <= PROVIDER_CHARS_MAX:
            raise ProtocolError("an endpoint is asked for with the name of a provider")
        if type(form) is not int or type(process) is not int:
            raise ProtocolError("an endpoint is asked for with a format of addresses and a process")
        if previous is not None and (type(previous) is not int or not 0 < previous < NUMBER_MAX):
            raise ProtocolError("the previous endpoint is a number that this owner gave, or none")
        return cls(provider, form, process, previous)


@final
@dataclass(frozen=True, slots=True)
class Endpoint:
    """An owner's answer: an endpoint's number and address, and 8 bytes there that anybody may read."""

    number: int
    address: bytes
    flush: RegionKey

    def to_answer(self) -> dict[str, Any]:
        """As the result of the request."""
        return {"number": self.number, "address": self.address, "flush": self.flush.encode()}

    @classmethod
    def from_answer(cls, value: object) -> Endpoint:
        """From a result; ProtocolError for anything else."""
        about = value if isinstance(value, Mapping) else {}
        number, address, flush = about.get("number"), about.get("address"), about.get("flush")
        if type(number) is not int or not 0 < number < NUMBER_MAX:
            raise ProtocolError("an endpoint has a number")
        if not isinstance(address, bytes) or not 1 <= len(address) <= ADDRESS_BYTES_MAX:
            raise ProtocolError(f"an endpoint's address has 1 to {ADDRESS_BYTES_MAX} bytes")
        if not isinstance(flush, bytes):
            raise ProtocolError("an endpoint comes with bytes to read")
        return cls(number, address, RegionKey.decode(flush))
