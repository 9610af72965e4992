"""What devices, ports and connections are made of, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: Lanes by `active_width`, and Gb/s of a lane by `active_speed` (PortInfo of the InfiniBand specification).
LANES: Final = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
LANE_GBITS: Final = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0}
#: IBV_MTU_* by its number, in bytes.
MTU_BYTES: Final = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}

LOCAL_WRITE: Final = 1
REMOTE_WRITE: Final = 2
REMOTE_READ: Final = 4


class LinkLayer(StrEnum):
    """What a port's link is."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    UNKNOWN = "unknown"


class GidKind(StrEnum):
    """How packets with a GID are built. An InfiniBand port has the first kind only."""

    INFINIBAND = "IB"
    ROCE_1 = "RoCE v1"
    ROCE_2 = "RoCE v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAttributes:
    """Bounds of a device; `max_mr_bytes` is what one memory region may hold."""

    name: str
    firmware: str
    guid: int
    vendor_id: int
    vendor_part_id: int
    ports: int
    max_mr_bytes: int
    max_mr: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    on_demand_paging: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PortAttributes:
    """A port as it is now; `active_mtu` is a number of IBV_MTU_*, `state` one of IBV_PORT_* (4: active)."""

    number: int
    state: int
    link_layer: LinkLayer
    active_mtu: int
    max_mtu: int
    lid: int
    lmc: int
    gids: int
    pkeys: int
    max_message_bytes: int
    active_width: int
    active_speed: int

    @property
    def active(self) -> bool:
        return self.state == 4

    @property
    def gbits_per_s(self) -> float:
        """The link's speed; 0 when the port does not say."""
        return LANES.get(self.active_width, 0) * LANE_GBITS.get(self.active_speed, 0.0)

    @property
    def state_name(self) -> str:
        """As `ibv_devinfo` prints it, without its prefix."""
        names = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
        return names[self.state] if 0 <= self.state < len(names) else str(self.state)


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One valid entry of a port's GID table; `interface` is the network interface it belongs to, or ""."""

    index: int
    gid: bytes
    kind: GidKind
    interface: str = ""


class EventKind(StrEnum):
    """Asynchronous events that something is done about."""

    PORT_ACTIVE = "port active"
    PORT_ERROR = "port error"
    DEVICE_FATAL = "device fatal"
    QP_FATAL = "queue pair fatal"
    QP_ACCESS = "queue pair access error"
    CQ_ERROR = "completion queue error"
    ADDRESS_CHANGE = "address change"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """An event of a device: about a port (0: none) or a queue pair (0: none)."""

    kind: EventKind
    text: str
    port: int = 0
    qp_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """All that a reliable connection needs to know, nothing left to defaults of a provider.

    `mtu` is a number of IBV_MTU_*, `timeout` an exponent (4.096 us * 2^timeout between tries, 0: for ever).
    """

    remote_qp: int
    remote_gid: bytes
    remote_lid: int = 0
    local_psn: int
    remote_psn: int
    port: int = 1
    gid_index: int = 0
    with_grh: bool = True
    mtu: int = 3
    traffic_class: int = 0
    service_level: int = 0
    hop_limit: int = 64
    timeout: int = 17
    retry_count: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    rd_atomic: int = 16
    dest_rd_atomic: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationPlan:
    """How a range is registered: bounds of a chunk and of threads, and whether order may be relaxed.

    Relaxed ordering lets the device's writes overtake each other inside the host (PCIe): fine for bytes that
    nobody looks at before the completion, wrong for flags that are polled. Devices without it ignore it.
    """

    #: A chunk is pinned by one thread: large ranges have several, so that more than one core pins for a NIC.
    chunk_bytes_max: int = 8 << 30
    threads_max: int = 8
    relaxed_ordering: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion: `status` 0 is success, else IBV_WC_* (`text` names it)."""

    id: int
    status: int
    text: str
    qp_number: int
