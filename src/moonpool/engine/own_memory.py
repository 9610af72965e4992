"""The memory, files and devices that an engine offers to its peers: how `Engine` makes regions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast, final

from moonpool.engine.memory_room import check_request
from moonpool.engine.placement import create_placed
from moonpool.engine.region import Region
from moonpool.errors import TransportUnavailable, UsageError
from moonpool.native.io.memory import BufferHold
from moonpool.operations import Access
from moonpool.transport.base import DeviceTaking
from moonpool.units import MS_PER_S

if TYPE_CHECKING:
    from moonpool.config import EngineConfig
    from moonpool.engine.control import ControlService, SessionInfo
    from moonpool.engine.offering import Offering
    from moonpool.engine.opening import Openings
    from moonpool.native.io.regions import LocalRegions
    from moonpool.native.io.server import TargetServer
    from moonpool.transport.base import OwnerSession, Transport


@final
class OwnerHost:
    """What transports may use of the engine that they serve."""

    def __init__(self, table: LocalRegions, instance: bytes, offering: Offering) -> None:
        self.table = table
        self.instance = instance
        self._offering = offering

    def region(self, handle: int) -> Region:
        """A live region of this engine; StaleHandle otherwise."""
        return self._offering.get(handle)

    def given(self, handle: int, session: OwnerSession, *, writes: bool, lasting: bool = False) -> None:
        """A session of ours gets the region's bytes; StaleHandle when it is not live."""
        info = cast("SessionInfo", session)
        self._offering.note_given(handle, info, writes=writes, process_vm=lasting)

    def lend(self, size_bytes: int, location: str, session_id: int | None) -> Region:
        """New engine memory that one session's peer is told of, or nobody."""
        return self._offering.lend(size_bytes, location, session_id)

    def take_back(self, handle: int, timeout_s: float) -> bool:
        """Revoke what was lent; False when somebody of this process may still touch it."""
        return self._offering.take_back(handle, timeout_s)


def device_transport(transports: Iterable[object]) -> DeviceTaking | None:
    """The transport that takes device arrays, if one is configured."""
    return next((one for one in transports if isinstance(one, DeviceTaking)), None)


class OwnMemory:
    """Regions of this engine: made, listed and taken back. Only `Engine` derives from it."""

    config: EngineConfig
    _by_name: dict[str, Transport]
    _control: ControlService
    _offering: Offering
    _openings: Openings
    _server: TargetServer

    def _check(self) -> None:
        raise NotImplementedError

    def allocate(
        self,
        size_bytes: int,
        *,
        access: Access = Access.READ_WRITE,
        location: str = "cpu:0",
        huge_pages: bool | None = None,
        prefault: bool = True,
        granted: bool = False,
    ) -> Region:
        """New engine memory, registered: a sealed memfd of whole pages, zeroed and pre-faulted.

        It is what same-host peers map, so it is the fastest kind. `location` may bind it: "numa:<n>" to a
        numa node, "cxl:<n>" to one without CPUs, "cpu:<n>" to one with CPUs where there are several; "cpu:0"
        leaves it to the kernel. `access` is what peers may do with it. With
        `granted`, their WRITEs over tcp and unix lanes must show grants (`gate`).
        """
        self._check()
        check_request(size_bytes, prefault)
        huge = self.config.huge_pages if huge_pages is None else huge_pages
        memory = create_placed(size_bytes, location, huge_pages=huge, prefault=prefault)
        region = self._offering.add(memory, Access(access), location, granted=granted)
        self._openings.own_region_added(region.handle)
        return region

    def register(self, buffer: Any, *, access: Access = Access.READ_WRITE, location: str = "cpu:0") -> Region:
        """Register a foreign, contiguous buffer in place: buffer protocol, array interface or DLPack.

        The buffer is held until the region is revoked. Align large ones to pages: a target a few bytes past a
        page start makes the kernel's copies slow on some CPUs. Device arrays (CuPy, torch) are taken by the
        transport cuda: such a region has a `device_address` and its location is the device. UnsupportedMemory
        for them without that transport.
        """
        self._check()
        devices = device_transport(self._by_name.values())
        hold = BufferHold(buffer, writable=False, device=devices is not None)
        if access & Access.WRITE and not hold.writable:
            raise UsageError("this buffer is read-only: register it with access=Access.READ", field="access")
        if hold.on_device and devices is not None:
            backing = devices.adopt(hold)
            try:
                region = self._offering.add(backing, Access(access), backing.location)
            except BaseException:
                backing.close()
                raise
        else:
            region = self._offering.add(hold, Access(access), location)
        self._openings.own_region_added(region.handle)
        return region

    def offer(
        self,
        location: str,
        size_bytes: int | None = None,
        *,
        access: Access = Access.READ_WRITE,
        granted: bool = False,
        **how: Any,
    ) -> Region:
        """Offer what a location names as a region, through the transport whose business it is.

        `location` is "file:<path>", "nvme:<device>", "dax:<device>" and so on; `how` is that transport's (its
        guide lists it). The region's `address` is 0 unless the bytes are mapped here: then this process too
        reaches them by transfers on its own segment. TransportUnavailable when no configured transport takes
        the location.
        """
        self._check()
        access = Access(access)
        self._offering.let_go()  # what an ended process kept of a device may be what is asked for now
        for transport in self._by_name.values():
            if transport.takes(location):
                backing = transport.offer(location, size_bytes, how)
                break
        else:
            raise TransportUnavailable(
                f"no configured transport ({', '.join(self._by_name)}) offers {location!r}",
                "name its transport in the config field transports",
            )
        try:
            if access & Access.WRITE and not backing.writable:
                raise UsageError(
                    f"{location} cannot be written here: offer it with access=Access.READ", field="access"
                )
            region = self._offering.add(backing, access, backing.location, granted=granted)
        except BaseException:
            backing.close()
            raise
        self._openings.own_region_added(region.handle)
        return region

    def revoke(self, region: Region | int) -> None:
        """Take a region back: stale for everyone at once; returns when nobody can touch its memory any more.

        RevokeIncomplete after revoke_timeout_ms when somebody may still; the memory is then kept until it is
        safe.
        """
        self._check()
        handle = region if isinstance(region, int) else region.handle
        self._openings.own_region_gone(handle, self.config.revoke_timeout_ms / MS_PER_S)
        self._offering.revoke(handle, self._control, self._server)

    @property
    def regions(self) -> list[Region]:
        """The live regions of this engine."""
        return self._offering.regions
