"""Which GID a port is used by: a choice that works without settings on the usual hosts.

A RoCE port has one GID per address and protocol version. Only RoCE v2 is routed (it is UDP), so it comes
before v1; an entry whose network interface is seen here comes before one without, which the kernel would
refuse; an address that others can route to comes before a link-local one, IPv4 before IPv6, and the lower
index wins what is left: the plain interface is entered before its VLANs. Source: the GID table as
libibverbs gives it (ibv_query_gid_table), RoCEv2 annex A17 of the InfiniBand specification.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from moonpool.errors import ResourceError, UsageError
from moonpool.native.verbs.attributes import GidEntry, GidKind, LinkLayer

#: The index that means "choose".
AUTOMATIC: Final = -1
GID_BYTES: Final = 16
#: fe80::/64, the subnet prefix of an InfiniBand fabric that nobody gave one.
DEFAULT_PREFIX: Final = b"\xfe\x80" + bytes(6)

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class GidChoice:
    """The entry that is used, and why, as a half sentence for reports."""

    entry: GidEntry
    reason: str


def address_of(gid: bytes) -> Address:
    """The IP address that a RoCE GID stands for: IPv4 where it is mapped into IPv6."""
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def is_routable(gid: bytes) -> bool:
    """True when other hosts can send to the address: not link-local, loopback, multicast or unspecified."""
    address = address_of(gid)
    barred = address.is_link_local or address.is_loopback or address.is_multicast or address.is_unspecified
    return not barred


def choose_gid(entries: Sequence[GidEntry], link_layer: LinkLayer, index: int = AUTOMATIC) -> GidChoice:
    """The best entry of a port's table, or the one with this index.

    UsageError when an index is given that the table lacks; ResourceError for a table without a usable entry.
    """
    valid = [entry for entry in entries if len(entry.gid) == GID_BYTES and any(entry.gid)]
    if index != AUTOMATIC:
        return GidChoice(_by_index(valid, index), "set by the configuration")
    if not valid:
        raise ResourceError(
            "the port has no GID: give its network interface an address, and set the interface up"
        )
    if link_layer is LinkLayer.INFINIBAND:
        best = max(valid, key=lambda entry: (entry.gid[:8] != DEFAULT_PREFIX, -entry.index))
        return GidChoice(best, "first with the fabric's subnet prefix")
    best = max(valid, key=_rank)
    return GidChoice(best, _describe(best))


def needs_grh(link_layer: LinkLayer, own: bytes, peer: bytes) -> bool:
    """True when packets between two GIDs carry a global header: always on Ethernet, between InfiniBand's
    subnets.
    """
    return link_layer is not LinkLayer.INFINIBAND or own[:8] != peer[:8]


def may_reach(own: GidEntry, peer: bytes) -> bool:
    """False when no packet can go from one RoCE GID to another: families differ, or one is link-local only.

    Two link-local ones may be on one link. It knows nothing of routes and firewalls: what it admits can fail.
    """
    if own.kind is GidKind.INFINIBAND:
        return True
    here, there = address_of(own.gid), address_of(peer)
    return here.version == there.version and is_routable(own.gid) == is_routable(peer)


def _by_index(entries: Sequence[GidEntry], index: int) -> GidEntry:
    for entry in entries:
        if entry.index == index:
            return entry
    known = ", ".join(str(entry.index) for entry in entries) or "none"
    raise UsageError(f"the port has no GID with index {index}; it has: {known}", value=str(index))


def _rank(entry: GidEntry) -> tuple[bool, bool, bool, bool, int]:
    return (
        entry.kind is GidKind.ROCE_2,
        bool(entry.interface),
        is_routable(entry.gid),
        address_of(entry.gid).version == 4,
        -entry.index,
    )


def _describe(entry: GidEntry) -> str:
    scope = "routable" if is_routable(entry.gid) else "link-local"
    on = f" on {entry.interface}" if entry.interface else ""
    return f"{scope} {entry.kind} address {address_of(entry.gid)}{on}"
