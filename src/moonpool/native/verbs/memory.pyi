from collections.abc import Sequence
from typing import final

from moonpool.native.verbs.attributes import RegistrationPlan
from moonpool.native.verbs.devices import Device

REGIONS_MAX: int
DEVICES_MAX: int
DEFAULT_PLAN: RegistrationPlan
HUGE_PAGE: int
PAGE: int
GONE: tuple[int, ...]

def chunk_bytes_of(length: int, bound: int) -> int: ...
def register(
    devices: Sequence[Device], address: int, length: int, access: int, plan: RegistrationPlan = ...
) -> MemoryRegistration: ...
def register_dmabuf(
    devices: Sequence[Device],
    fd: int,
    offset: int,
    length: int,
    access: int,
    address: int = 0,
    plan: RegistrationPlan = ...,
) -> MemoryRegistration: ...
@final
class MemoryRegistration:
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def address(self) -> int: ...
    @property
    def length_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    def rkeys(self, device: int) -> list[int]: ...
    def lkeys(self, device: int) -> list[int]: ...
    def keys_at(self, device: int, address: int) -> tuple[int, int, int]: ...
