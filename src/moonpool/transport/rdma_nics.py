"""The NICs of this engine: opened, with the port and the address that each uses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.errors import MoonpoolError, TransportUnavailable, UsageError
from moonpool.native.verbs.attributes import LinkLayer, PortAttributes, Route
from moonpool.native.verbs.devices import Device, VerbsLibrary
from moonpool.transport.rdma_gids import choose_gid, needs_grh
from moonpool.transport.rdma_handshake import LINK_ETHERNET, LINK_INFINIBAND, NICS_MAX, Nic, Rail

#: READs on one queue pair at a time: more than this gains nothing, and devices have a budget for all.
RD_ATOMIC_MAX: Final = 16
RNR_RETRY_FOR_EVER: Final = 7
#: Completion queue entries beyond the requests of a rail.
SPARE_ENTRIES: Final = 16
#: Local pieces of one request.
PIECES_MAX: Final = 16
#: IBV width and speed codes, as lanes and Mbit/s of a lane.
_LANES: Final[Mapping[int, int]] = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_LANE_MBPS: Final[Mapping[int, int]] = {
    1: 2_500,
    2: 5_000,
    4: 10_000,
    8: 10_000,
    16: 14_000,
    32: 25_000,
    64: 50_000,
    128: 100_000,
}
_LOAD_DRIVER: Final = "load the NIC's driver (`ibv_devices` lists what is there), or leave rdma out"


@final
@dataclass(frozen=True, slots=True)
class OwnNic:
    """A NIC in use: one port of an open device. `about` is what peers are told."""

    device: Device
    port: int
    gid_index: int
    about: Nic
    #: READs that it can have under way on one queue pair.
    rd_atomic: int
    #: Requests of one queue pair, and local pieces of one request.
    queue_depth: int
    pieces: int


def usable_names(library: VerbsLibrary, config: EngineConfig) -> list[str]:
    """The NICs that an engine would use, as "device" or "device:port"; TransportUnavailable without any."""
    names = list(config.rdma_devices) or library.device_names()
    if not names:
        raise TransportUnavailable("this machine has no RDMA device", _LOAD_DRIVER, transport="rdma")
    return names[:NICS_MAX]


def open_nics(library: VerbsLibrary, config: EngineConfig) -> list[OwnNic]:
    """The configured NICs, or all that have an active port; TransportUnavailable when there is none.

    A named NIC is used with its port down too: it may come up.
    """
    found: list[OwnNic] = []
    troubles: list[str] = []
    with contextlib.ExitStack() as undo:
        for name in usable_names(library, config):
            nic = _open_one(library, name, config, troubles)
            if nic is not None:
                undo.callback(nic.device.close)
                found.append(nic)
        if not found:
            raise TransportUnavailable("; ".join(troubles), _LOAD_DRIVER, transport="rdma")
        undo.pop_all()
    return found


def route_to(own: OwnNic, theirs: Nic, pair: tuple[Rail, int], config: EngineConfig) -> Route:
    """How a queue pair of ours reaches one of theirs; `pair` is their rail and our packet number."""
    rail, local_psn = pair
    layer = LinkLayer.ETHERNET if theirs.link_layer == LINK_ETHERNET else LinkLayer.INFINIBAND
    return Route(
        remote_qp=rail.qpn,
        remote_gid=theirs.gid,
        remote_lid=theirs.lid,
        local_psn=local_psn,
        remote_psn=rail.psn,
        port=own.port,
        gid_index=own.gid_index,
        with_grh=needs_grh(layer, own.about.gid, theirs.gid),
        mtu=min(own.about.mtu, theirs.mtu),
        traffic_class=config.rdma_traffic_class,
        timeout=config.rdma_timeout,
        retry_count=config.rdma_retries,
        rnr_retry=RNR_RETRY_FOR_EVER,
        rd_atomic=max(1, min(own.rd_atomic, theirs.rd_atomic)),
        dest_rd_atomic=own.about.rd_atomic,
    )


def speed_mbps(port: PortAttributes) -> int:
    """The port's link, in Mbit/s; at least 1,000 when the driver's codes are unknown."""
    return max(1_000, _LANES.get(port.active_width, 1) * _LANE_MBPS.get(port.active_speed, 0))


def devices_of(nics: Sequence[OwnNic]) -> list[Device]:
    """Their devices, in order."""
    return [nic.device for nic in nics]


def _open_one(library: VerbsLibrary, name: str, config: EngineConfig, troubles: list[str]) -> OwnNic | None:
    """The NIC, or None with a note in `troubles`; raises for one that the config names and cannot be used."""
    device_name, _, port_text = name.partition(":")
    if port_text and not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text) <= 255):
        raise UsageError(f"an RDMA NIC is named device or device:port, not {name!r}", field="rdma_devices")
    try:
        device = Device(library, device_name)
    except MoonpoolError as problem:
        if config.rdma_devices:
            raise
        troubles.append(str(problem))
        return None
    try:
        return _use_port(device, int(port_text or 0), config)
    except MoonpoolError as problem:
        device.close()
        if config.rdma_devices:
            raise
        troubles.append(str(problem))
        return None


def _use_port(device: Device, wanted: int, config: EngineConfig) -> OwnNic:
    bounds = device.attributes()
    ports = [device.port(wanted)] if wanted else [device.port(k) for k in range(1, bounds.ports + 1)]
    port = next((one for one in ports if one.active), ports[0])
    if not port.active and not config.rdma_devices:
        reason = f"no port of {device.name} is active (port {port.number} is {port.state_name})"
        raise TransportUnavailable(reason, "bring its link up", transport="rdma")
    entry = choose_gid(device.gids(port.number), port.link_layer, config.rdma_gid_index).entry
    ethernet = port.link_layer is LinkLayer.ETHERNET
    about = Nic(
        name=device.name,
        gid=entry.gid,
        lid=port.lid,
        link_layer=LINK_ETHERNET if ethernet else LINK_INFINIBAND,
        mtu=port.active_mtu,
        rd_atomic=max(1, min(bounds.max_qp_rd_atom, RD_ATOMIC_MAX)),
        speed_mbps=speed_mbps(port),
    )
    return OwnNic(
        device=device,
        port=port.number,
        gid_index=entry.index,
        about=about,
        rd_atomic=max(1, min(bounds.max_qp_init_rd_atom, RD_ATOMIC_MAX)),
        queue_depth=min(config.rdma_queue_depth, bounds.max_qp_wr, bounds.max_cqe - SPARE_ENTRIES),
        pieces=max(1, min(bounds.max_sge, bounds.max_sge_rd or 1, PIECES_MAX)),
    )
