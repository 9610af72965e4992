"""`nvmeof`: ranges of NVMe namespaces, by passthrough commands or by the block device.

The owner offers a range of a namespace that its host sees; a peer finds the same namespace on its own host by
what it is, and both talk to the device themselves. The owner is needed for two things only: it is told who
uses a region, and it alone writes blocks that a WRITE covers in part (`moonpool.native.nvmeof.ways`).
"""

from __future__ import annotations

import ipaddress
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    OutOfRange,
    ProtocolError,
    ResourceError,
    Status,
    TransportUnavailable,
    error_from_status,
)
from moonpool.native.disk.rings import DiskRings, probe_rings
from moonpool.native.nvmeof.namespace import COUNTERS, NamespaceRegion, NativeNamespace
from moonpool.native.nvmeof.ways import NamespaceWay, add_way, flush_range, write_pieces
from moonpool.transport.base import (
    Availability,
    Capabilities,
    Host,
    OwnMethod,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.nvme_attribute import NamespaceRange, Target, decode
from moonpool.transport.nvme_book import RangeBook
from moonpool.transport.nvme_devices import DeviceFinder, check_unused
from moonpool.transport.nvme_fabrics import FABRICS, AttachOptions, attach, host_identity
from moonpool.transport.nvme_offers import (
    PREFIX,
    Claims,
    NamespaceBacking,
    check_offered,
    find_offered,
    identity_of,
    plan_range,
)
from moonpool.transport.nvme_owner import BUDGET_MS_MAX, EDGES, OPEN, RangeOwner
from moonpool.transport.nvme_sysfs import Namespace, read_subsystems
from moonpool.transport.plain import PlainTransport
from moonpool.units import MS_PER_S, NS_PER_MS

#: ask(region, [(offset, bytes)], timeout_s): the status of each.
Ask: TypeAlias = Callable[[int, list[tuple[int, bytes]], float], Sequence[int]]
#: Commands under way for one batch: native/nvmeof/carry.pxd.
DEPTH: Final = 32
#: What the kernel may take over a command's own timeout until it has torn the queue down.
TEARDOWN_S: Final = 2.0


def available() -> Availability:
    """Whether this process may open an io_uring, and this host has an initiator or a namespace."""
    problem = probe_rings()
    if problem:
        return Availability(
            False,
            f"the kernel gives this process no io_uring ({os.strerror(problem)})",
            "set the sysctl kernel.io_uring_disabled to 0, and allow io_uring_setup in the container",
        )
    if not read_subsystems() and not os.path.exists(FABRICS):
        return Availability(
            False,
            "this host sees no NVMe namespace, and its kernel has no NVMe over fabrics initiator",
            "load one with `modprobe nvme-tcp` or `modprobe nvme-rdma`, then `moonpool nvmf attach`",
        )
    return Availability(True)


@final
class NvmeofTransport(PlainTransport):
    """Two paths a segment, passthrough before block device; the rings are shared by all of the engine."""

    name = "nvmeof"
    gauges = frozenset({"namespaces"})
    capabilities = Capabilities(same_process=True, same_host=True, other_hosts=True, over_unix=True)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._claims = Claims()
        grace_s = (config.nvmeof_command_timeout_ms + config.stall_timeout_ms) / MS_PER_S + TEARDOWN_S
        self._book = RangeBook(grace_s)
        self._owner: RangeOwner | None = None
        #: By whether they carry passthrough commands; none where the kernel has no such rings.
        self._rings: dict[bool, DiskRings] = {}
        self._namespaces: dict[tuple[str, int, str], NativeNamespace] = {}
        self._reached: weakref.WeakKeyDictionary[SegmentSide, weakref.WeakSet[NamespaceRegion]] = (
            weakref.WeakKeyDictionary()
        )
        self._attached = 0

    def open(self, host: Host) -> None:
        """Opens the first rings: TransportUnavailable when an engine cannot have what its config wants."""
        self._owner = RangeOwner(host, self._book, self._write_edges)
        wanted = self.config.nvmeof_passthrough
        for passthrough in (True, False):
            if wanted == ("no" if passthrough else "yes"):
                continue
            try:
                self._rings[passthrough] = DiskRings(self.config.disk_rings, DEPTH, passthrough)
            except ResourceError as problem:
                if passthrough and wanted == "auto":
                    continue  # before Linux 5.19: by the block device then
                self.close()
                raise TransportUnavailable(
                    str(problem), "use Linux 5.19 or newer with io_uring allowed", transport=self.name
                ) from problem

    def close(self) -> None:
        """Closes rings and devices."""
        for rings in self._rings.values():
            rings.close()
        for namespace in self._namespaces.values():
            namespace.close()
        self._rings.clear()
        self._namespaces.clear()

    def counters(self) -> Mapping[str, int]:
        """What became of commands, over all namespaces; see docs/transports/nvmeof.md."""
        total = dict.fromkeys(COUNTERS, 0)
        for namespace in self._namespaces.values():
            for name, value in namespace.counters.items():
                total[name] += value
        return total | {"namespaces": len(self._namespaces), "attached": self._attached}

    # Of the owner's side

    def takes(self, location: str) -> bool:
        """nvme:<block device, char device or id>"""
        return location.startswith(PREFIX)

    def offer(self, location: str, size_bytes: int | None, how: Mapping[str, Any]) -> NamespaceBacking:
        """A range of a namespace of this host: `offset`, `passthrough` and `fua` say which and how."""
        namespace = find_offered(location)
        about = plan_range(namespace, size_bytes, how)
        check_offered(namespace)
        native = self._open_namespace(about, namespace)
        self._claims.take(about)
        return NamespaceBacking(
            about=about,
            writable=not namespace.read_only,
            location=f"{PREFIX}{namespace.nsid}",
            range=self._range(native, about, writable=not namespace.read_only),
            claims=self._claims,
        )

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Which bytes of which namespace, and where it is served."""
        return region.backing.about.encode() if isinstance(region.backing, NamespaceBacking) else None

    def methods(self) -> Mapping[str, OwnMethod]:
        """`nvmeof.open` and `nvmeof.edges`; on the control thread, after `open`."""
        assert self._owner is not None
        return self._owner.methods()

    def holders(self, handle: int) -> set[int]:
        """Peers on other hosts; those of this host are in the engine's books."""
        return self._book.holders(handle)

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Peers on other hosts that write it by themselves."""
        return self._book.writers(handle, instance)

    def fence(self, session_id: int, timeout_s: float) -> bool:
        """An ended session's last commands run out by themselves; nothing ends those of a live one."""
        return self._book.is_over(session_id, timeout_s)

    def session_ended(self, session_id: int) -> None:
        """Its last commands run out from now on."""
        self._book.session_ended(session_id)

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """True when no edge of the region is being written, and nobody's last command can still land."""
        if not isinstance(region.backing, NamespaceBacking) or self._owner is None:
            return True
        settled = self._owner.settle(region.handle, timeout_s)
        return self._book.forget(region.handle, timeout_s) and settled

    def _write_edges(
        self, where: NamespaceRegion, pieces: list[tuple[int, bytes]], timeout_s: float
    ) -> list[int]:
        """The statuses of pieces of blocks written here, by the first way that can."""
        statuses = [int(Status.UNSUPPORTED)] * len(pieces)
        for passthrough, rings in self._rings.items():
            statuses = write_pieces(rings, where, pieces, timeout_s, passthrough=passthrough)
            if Status.PENDING not in statuses:
                break
        return [int(Status.UNSUPPORTED) if status == Status.PENDING else status for status in statuses]

    # Of the initiator's side

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """A path for each way that this kernel has and the config allows."""
        ask = None if peer.is_self else _asking(peer)
        paths = []
        for passthrough, rings in self._rings.items():
            way = NamespaceWay(rings, ask, passthrough=passthrough)
            name = "passthrough" if passthrough else "block"
            paths.append(PathInfo(add_way(segment.native, way), self.name, name, peer.endpoint))
        return paths

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Find the namespace on this host, or attach it where the config allows, and tell the owner."""
        data = region.attributes.get(self.name)
        if data is None:
            return False
        try:
            about = decode(data)
            if about.size_bytes != region.size_bytes:
                raise ProtocolError("the region and its range of a namespace differ in size")
            namespace = self._find(peer, about)
            native = self._open_namespace(about, namespace)
            if not peer.is_self:
                params = {"handle": region.handle, "access": int(region.access)}
                peer.request(OPEN, params).close()
                peer.has_release = True
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        found = self._range(native, about, writable=not namespace.read_only)
        found.attach(segment.native, region.handle)
        segment.hold(region.handle, found)
        self._reached.setdefault(segment, weakref.WeakSet()).add(found)
        return True

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """One flush command for each namespace: what is complete is on stable media afterwards."""
        flushed: set[int] = set()
        for found in list(self._reached.get(segment, ())):
            if id(found.namespace) in flushed:
                continue
            flushed.add(id(found.namespace))
            status = int(Status.PENDING)
            for passthrough, rings in self._rings.items():
                if status == Status.PENDING:
                    status = flush_range(rings, found, timeout_s, passthrough=passthrough)
            if status not in (Status.COMPLETE, Status.PENDING):
                raise error_from_status(status, peer=peer.endpoint, transport=self.name, operation="FLUSH")

    def _range(self, native: NativeNamespace, about: NamespaceRange, *, writable: bool) -> NamespaceRegion:
        ours = self.config.nvmeof_passthrough
        way = about.passthrough if ours == "auto" else ours
        return NamespaceRegion(
            native, about.offset, about.size_bytes, fua=about.fua, way=way, writable=writable
        )

    def _find(self, peer: PeerSide, about: NamespaceRange) -> Namespace:
        """The namespace as this host sees it, if this peer's word is enough to use it."""
        finder = DeviceFinder(*identity_of(about))
        namespace = finder.find() or self._attach(about) or finder.find()
        if namespace is None:
            where = " or ".join(
                f"--address {one.address} --transport {one.transport}" for one in about.targets
            )
            raise TransportUnavailable(
                f"this host sees no namespace {about.nsid} ({about.wwid}) of {about.subsystem_nqn}",
                f"attach it: `moonpool nvmf attach {about.subsystem_nqn} {where}`, or let engines do it "
                "(config field nvmeof_attach)",
                transport=self.name,
            )
        if not namespace.is_fabric and not peer.is_self and not peer.session.is_unix:
            raise AccessDenied(
                f"a peer on another host speaks of the local drive {namespace.block_name}: its word is not "
                "enough to read or write that"
            )
        if namespace.block_bytes != about.block_bytes:
            raise ProtocolError(
                f"the owner's blocks have {about.block_bytes} bytes, here they have {namespace.block_bytes}"
            )
        end = about.offset + -(-about.size_bytes // about.block_bytes) * about.block_bytes
        if end > namespace.size_bytes:
            raise OutOfRange(
                f"the owner speaks of byte {end} of a namespace that has {namespace.size_bytes} here"
            )
        check_unused(namespace)
        return namespace

    def _attach(self, about: NamespaceRange) -> Namespace | None:
        """Attach the subsystem from one of the targets that the config allows; None when it allows none."""
        host_nqn, host_id = host_identity()
        problem: MoonpoolError | None = None
        for target in about.targets:
            if not self._may_attach(target):
                continue
            options = AttachOptions(
                target=target, subsystem_nqn=about.subsystem_nqn, host_nqn=host_nqn, host_id=host_id
            )
            try:
                attach(options, self.config.connect_timeout_ms / MS_PER_S)
            except MoonpoolError as failed:
                problem = failed
                continue
            self._attached += 1
            return DeviceFinder(*identity_of(about)).find()
        if problem is not None:
            raise problem
        return None

    def _may_attach(self, target: Target) -> bool:
        try:
            address = ipaddress.ip_address(target.address)
        except ValueError:
            return False  # a name: whose it is may change between the check and the use
        networks = map(ipaddress.ip_network, self.config.nvmeof_attach)
        return any(address in network for network in networks if network.version == address.version)

    def _open_namespace(self, about: NamespaceRange, namespace: Namespace) -> NativeNamespace:
        """The namespace with its devices open; one object for all regions in it."""
        key = identity_of(about)
        native = self._namespaces.get(key)
        if native is None:
            native = NativeNamespace(
                namespace.nsid,
                namespace.block_bytes,
                namespace.memory_align,
                namespace.command_bytes_max,
                namespace.segments_max,
                self.config.nvmeof_reconnect_ms * NS_PER_MS,
                self.config.nvmeof_command_timeout_ms,
                DeviceFinder(*key),
            )
        native.open_devices()
        self._namespaces[key] = native
        return native


def _asking(peer: PeerSide) -> Ask:
    """How an initiator has the owner write pieces of blocks; called from a batch's thread."""

    def ask(handle: int, pieces: list[tuple[int, bytes]], timeout_s: float) -> Sequence[int]:
        budget_ms = min(int(timeout_s * MS_PER_S), BUDGET_MS_MAX)
        params = {"handle": handle, "pieces": pieces, "budget_ms": budget_ms}
        with peer.request(EDGES, params) as answer:
            statuses = answer.value
        valid = isinstance(statuses, list) and len(statuses) == len(pieces)
        if not valid or not all(type(one) is int and one in set(Status) for one in statuses):
            raise ProtocolError("the answer to edges is a status for each")
        return [int(Status.UNSUPPORTED) if one == Status.PENDING else one for one in statuses]

    return ask
