"""`cuda`: memory of devices, by CUDA or another runtime of its shape (`device_runtime`).

A device of this process or of another one on this host is reached by its address (IPC handles; the same
user, over the unix session); copies go from device to device. All else is staged: through pinned buffers to
whatever the segment's other transports reach, and at an owner whose device is out of reach through two slots
that it fills and empties for us (`cuda_serving`). See docs/transports/cuda.md.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    ProtocolError,
    TransportUnavailable,
    UnsupportedMemory,
    UnsupportedOperation,
)
from moonpool.native.device.path import DeviceReach, FarRegion, NearRegion, add_device_path, set_far, set_near
from moonpool.native.device.runtime import DeviceRuntime, row_names
from moonpool.native.device.stages import Stages
from moonpool.operations import Access
from moonpool.transport.base import (
    Availability,
    Backing,
    Capabilities,
    HeldBuffer,
    Host,
    OwnerSession,
    OwnMethod,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.cuda_attribute import DEVICE, SLOTS, CudaAttribute, decode, encode
from moonpool.transport.cuda_memory import DeviceBacking, ImportedAllocation, unknown_memory
from moonpool.transport.cuda_serving import SLOTS_LOCATION, DeviceServing, pin_memory
from moonpool.transport.plain import PlainTransport
from moonpool.units import MS_PER_S, NS_PER_MS

OPEN: Final = "cuda.open"
STAGE: Final = "cuda.stage"
EXPORT: Final = "cuda.export"
#: Batches of device memory that run at once; each has two pinned buffers.
STAGES: Final = 4
#: Host memory that a copy may still touch: leaking it is the only safe thing left.
_never_freed: list[object] = []


def available() -> Availability:
    """Whether a runtime with a device is here: CUDA, else the first of the others."""
    reasons = []
    for row in row_names():
        try:
            runtime = DeviceRuntime(row)
        except TransportUnavailable as problem:
            reasons.append(problem)
            continue
        return Availability(True, f"{runtime.devices} devices of the {row} runtime")
    first = reasons[0]
    others = ", ".join(row_names()[1:])
    return Availability(
        False,
        f"{first.fields.get('reason') or first}; none of the other runtimes ({others}) is here either",
        "install the driver of the device, or name its library in device_library",
    )


def available_for(config: EngineConfig) -> Availability:
    """Whether the runtime that a config names is here."""
    try:
        runtime = DeviceRuntime(config.device_runtime, config.device_library)
    except TransportUnavailable as problem:
        return Availability(False, str(problem), "install its driver, or name its library in device_library")
    return Availability(True, f"{runtime.devices} devices of the {runtime.name} runtime")


@final
class CudaTransport(PlainTransport):
    """Devices of one runtime: our regions on them, and the paths to peers' memory and devices."""

    name = "cuda"
    gauges = frozenset({"served_sessions", "staging_pinned", "last_error"})
    capabilities = Capabilities(
        same_process=True, same_host=True, other_hosts=True, over_unix=True, device_memory=True
    )

    gauges = frozenset({"served_sessions", "staging_pinned", "last_error"})

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.runtime = DeviceRuntime(config.device_runtime, config.device_library)
        self._host: Host | None = None
        self._staging: OwnRegion | None = None
        self._stages: Stages | None = None
        self._pinned = False
        self._serving: DeviceServing | None = None
        #: What reaches a peer's devices; one for all its segments, for they share its session.
        self._reaches: weakref.WeakKeyDictionary[PeerSide, DeviceReach] = weakref.WeakKeyDictionary()

    def open(self, host: Host) -> None:
        """Pinned memory is made when the first segment is opened."""
        self._host = host
        slot_bytes = self.config.device_staging_bytes // (2 * STAGES) // (64 << 10) * (64 << 10)
        self._serving = DeviceServing(self.config, self.runtime, host, slot_bytes)

    def _made_stages(self) -> Stages:
        if self._stages is None:
            assert self._host is not None
            region = self._host.lend(self.config.device_staging_bytes, "cpu:staging", None)
            self._pinned = pin_memory(self.runtime, region)
            self._staging = region
            self._stages = Stages(
                self.runtime,
                region.address,
                self.config.device_staging_bytes,
                STAGES,
                self.config.stall_timeout_ms * NS_PER_MS,
                region,
            )
        return self._stages

    # ---- device arrays -------------------------------------------------------------------------------------

    def adopt(self, hold: HeldBuffer) -> Backing:
        """A device array as a region: UnsupportedMemory when this runtime does not know its memory."""
        return DeviceBacking(self.runtime, hold)

    def settle(self, hold: HeldBuffer) -> None:
        """Wait for the stream that the array's owner works on, where it names one.

        UnsupportedMemory when the runtime does not know the array.
        """
        if hold.size_bytes == 0:
            return
        about = self.runtime.classify(hold.address)
        if about.kind == "host":
            raise UnsupportedMemory(unknown_memory(self.runtime), transport="cuda")
        if hold.stream:
            self.runtime.sync_stream(about.device, hold.stream)

    # ---- of the owner --------------------------------------------------------------------------------------

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Which device it is on; for slots, their size."""
        if isinstance(region.backing, DeviceBacking):
            device = region.backing.device
            about = CudaAttribute(
                kind=DEVICE, runtime=self.runtime.name, device=device, uuid=self.runtime.uuid(device)
            )
            return encode(about)
        if region.location == SLOTS_LOCATION:
            slot_bytes = region.size_bytes // 2
            return encode(CudaAttribute(kind=SLOTS, runtime=self.runtime.name, slot_bytes=slot_bytes))
        return None

    def registered(self, region: OwnRegion) -> None:
        """Note the device, for transfers and for serving."""
        if isinstance(region.backing, DeviceBacking):
            assert self._host is not None
            set_near(self._host.table, region.handle, NearRegion(region.backing.device))

    def methods(self) -> Mapping[str, OwnMethod]:
        """An allocation for a process of this host; slots, and windows through them, for all others."""
        assert self._serving is not None
        return {
            EXPORT: self._export,
            OPEN: lambda session, _params: self._served().open(session),
            STAGE: lambda session, params: self._served().stage(session, params),
        }

    def _served(self) -> DeviceServing:
        assert self._serving is not None
        return self._serving

    def _export(self, session: OwnerSession, params: Mapping[str, Any]) -> object:
        handle = params.get("handle")
        if type(handle) is not int:
            raise ProtocolError("a region is asked for by its handle")
        if not session.is_unix or session.peer_pid is None or not self.config.device_ipc:
            raise UnsupportedOperation(
                "device memory is shared with processes of this host only, and only with device_ipc"
            )
        assert self._host is not None
        region = self._host.region(handle)
        if not isinstance(region.backing, DeviceBacking):
            raise UnsupportedOperation("the region is not on a device", region=handle)
        if region.access != Access.READ_WRITE:
            raise AccessDenied("who maps an allocation may read and write it; this region is not for both")
        # Noted before it is given: a revoke that comes between then asks for it.
        self._host.given(handle, session, writes=True, lasting=True)
        if session.peer_pid == os.getpid():
            return {"address": region.backing.device_address}
        ipc_handle, offset = region.backing.export()
        return {"ipc": ipc_handle, "offset": offset, "size": region.backing.allocation_bytes}

    def session_ended(self, session_id: int) -> None:
        """Its slots are taken back."""
        if self._serving is not None:
            self._serving.session_ended(session_id)

    # ---- of the initiator ----------------------------------------------------------------------------------

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """One path, for transfers with a device on either side; none when there is no memory to stage in."""
        reach = self._reaches.get(peer)
        if reach is None:
            try:
                stages = self._made_stages()
            except MoonpoolError as problem:
                segment.note_unreachable(0, self.name, problem)
                return ()
            reach = DeviceReach(stages, None if peer.is_self else _asker_of(peer))
            self._reaches[peer] = reach
        path = add_device_path(segment.native, reach)
        return (PathInfo(path, self.name, self.runtime.name, peer.endpoint),)

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """By the device's address where we can have it, and by the owner's serving where it does."""
        published = region.attributes.get(self.name)
        if published is None or peer not in self._reaches:
            return False
        try:
            about = decode(published)
            if about.kind == SLOTS:
                if region.size_bytes < 2 * about.slot_bytes:
                    raise ProtocolError("the peer's slots are larger than their region")
                self._reaches[peer].serve_by(region.handle, about.slot_bytes)
                return True
            return self._reach_device(peer, segment, region, about)
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False

    def _reach_device(
        self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide, about: CudaAttribute
    ) -> bool:
        if peer.is_self:
            assert self._host is not None
            backing = self._host.region(region.handle).backing
            if not isinstance(backing, DeviceBacking):
                return False
            set_far(segment.native, region.handle, FarRegion(backing.device_address, backing.device, False))
            return True
        pointer, device = 0, 0
        try:
            pointer, device = self._pointer(peer, segment, region, about)
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, f"{self.name} by its address", problem)
        served = self._open_slots(peer, segment, region)
        if pointer or served:
            set_far(segment.native, region.handle, FarRegion(pointer, device, served))
        return bool(pointer or served)

    def _pointer(
        self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide, about: CudaAttribute
    ) -> tuple[int, int]:
        """Where another process's region is in this one, and on which device; zeros when out of reach."""
        by_ipc = self.config.device_ipc and peer.session.is_unix
        if not by_ipc or region.access != Access.READ_WRITE:
            return 0, 0
        if about.runtime != self.runtime.name:
            raise UnsupportedOperation(f"its runtime is {about.runtime}, ours is {self.runtime.name}")
        device = self._device_of(about)
        with peer.request(EXPORT, {"handle": region.handle}) as answer:
            given = answer.value if isinstance(answer.value, Mapping) else {}
        address = given.get("address")
        if peer.session.peer_pid == os.getpid() and type(address) is int:
            # The kernel says that the peer is this very process, so its address is ours too.
            return self._checked(address, region), device
        ipc_handle, offset, size = given.get("ipc"), given.get("offset"), given.get("size")
        if not isinstance(ipc_handle, bytes) or type(offset) is not int or type(size) is not int:
            raise ProtocolError("the answer to cuda.export is a handle, an offset and a size")
        if offset < 0 or offset + region.size_bytes > size:
            raise ProtocolError("the peer's region is not inside the allocation that it gave")
        imported = ImportedAllocation(self.runtime, device, ipc_handle)
        segment.hold(region.handle, imported)
        return self._checked(imported.base + offset, region), device

    def _checked(self, pointer: int, region: RemoteRegionSide) -> int:
        """The pointer, once the runtime agrees that so many bytes of a device are there."""
        if not 0 < pointer < 1 << 64:
            raise ProtocolError(f"the peer gave the impossible address {pointer:#x}")
        about = self.runtime.classify(pointer)
        if about.kind == "host":
            raise ProtocolError("what the peer gave is no memory of a device")
        if about.base and pointer + region.size_bytes > about.base + about.size_bytes:
            raise ProtocolError("the peer's allocation is smaller than its region")
        return pointer

    def _device_of(self, about: CudaAttribute) -> int:
        """Which of our devices is the owner's: processes may see them in different orders."""
        if any(about.uuid):
            for device in range(self.runtime.devices):
                if self.runtime.uuid(device) == about.uuid:
                    return device
            raise UnsupportedOperation("this process does not see the peer's device")
        if about.device >= self.runtime.devices:
            raise UnsupportedOperation("this process sees fewer devices than the peer")
        return about.device

    def _open_slots(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """True when the owner serves us; asks it to where it does not yet."""
        if self._reaches[peer].served:
            return True
        try:
            peer.request(OPEN, {}).close()
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, f"{self.name} served", problem)
            return False
        segment.again = True
        return True

    # ---- measuring and ending ------------------------------------------------------------------------------

    def counters(self) -> Mapping[str, int]:
        """Bytes by direction, what went wrong, and what is held."""
        found = dict(self._stages.counters()) if self._stages is not None else {}
        if self._serving is not None:
            found |= {
                "served_sessions": self._serving.sessions,
                "served_bytes": self._serving.served_bytes,
            }
        return found | {"staging_pinned": int(self._pinned), "last_error": self.runtime.last_error}

    def abandon_after_fork(self) -> None:
        """A child has none of the parent's devices."""
        self.runtime.abandon_after_fork()

    def close(self) -> None:
        """Let go of streams and pinned memory; what a copy may still touch is kept for good."""
        if self._serving is not None:
            self._serving.close(self.config.close_timeout_ms / MS_PER_S)
        stages, self._stages = self._stages, None
        staging, self._staging = self._staging, None
        if stages is not None and staging is not None:
            self._close_stages(stages, staging)
        self.runtime.release()

    def _close_stages(self, stages: Stages, staging: OwnRegion) -> None:
        stages.close()
        if not stages.whole:
            _never_freed.append((stages, staging))
        elif self._pinned:
            with contextlib.suppress(MoonpoolError):  # a runtime that is gone pins nothing any more
                self.runtime.unpin(staging.address)


def _asker_of(peer: PeerSide) -> Any:
    """Asks the peer to serve a window; holds it weakly, for the peer outlives nobody's reach to it."""
    of = weakref.ref(peer)

    def ask(slot: int, write: bool, entries: bytes, n_marks: int) -> bytes:
        found = of()
        if found is None:
            return b""
        with found.request(STAGE, {"slot": slot, "write": write, "entries": entries}) as answer:
            value = answer.value
        statuses = value.get("statuses") if isinstance(value, Mapping) else None
        if not isinstance(statuses, bytes) or (n_marks and len(statuses) != n_marks):
            raise ProtocolError("the answer to cuda.stage is one status for each entry of the window before")
        return statuses[:n_marks]

    return ask
