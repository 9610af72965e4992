"""What two engines tell each other so that their NICs can talk: a pure, bounded, versioned codec.

Theory of operation
-------------------
An initiator offers, in one request on the control session, all its NICs and one queue pair for each *rail* (a
pair of NICs, one at each end) that it wants. The owner pairs each offered queue pair with one of its own and
answers with its NICs and those queue pairs: one round trip, whatever number of NICs there is. An offer names
the partner of a rail, or leaves it to the owner (`ANY_NIC`), which takes the NIC that `choose_partner` names.
The same request again, with fresh queue pairs for some rails, rebuilds those and no others.

Regions carry their remote keys, one for each NIC and chunk, in the region's attribute; when these are too
many for an attribute, the attribute says so, and `rdma.keys` fetches them.

All numbers are little endian. Whatever a peer sends is hostile until it is decoded here: every decoder ends
in a value whose every field is in range, or in ProtocolError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from moonpool.errors import ProtocolError

MAGIC: Final = b"MPRD"
VERSION: Final = 1
#: Most NICs of one engine, and most rails between two engines.
NICS_MAX: Final = 16
RAILS_MAX: Final = 32
#: In an offer: the owner chooses. In an answer: the owner has nothing for this rail.
ANY_NIC: Final = 255
LINK_INFINIBAND: Final = 1
LINK_ETHERNET: Final = 2
#: Attributes up to this size carry their keys themselves.
INLINE_KEYS_BYTES: Final = 1024
#: Most keys of one region: NICs times chunks.
KEYS_MAX: Final = 65_536

_OFFER: Final = 1
_ANSWER: Final = 2
_U24_MAX: Final = (1 << 24) - 1
_U64_MAX: Final = (1 << 64) - 1
_NAME_BYTES: Final = 24
_HEAD: Final = struct.Struct("<4sHBBBxxxQ")
_NIC: Final = struct.Struct("<16sHBBBxxxI24s")
_RAIL: Final = struct.Struct("<BBBxII")
_MARK: Final = struct.Struct("<QI")
_KEYS_HEAD: Final = struct.Struct("<BBHxxxxQQ")
_MTU_CODES: Final = range(1, 6)
_IPV4_PREFIX: Final = bytes(10) + b"\xff\xff"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One NIC as its peer must know it. `mtu` is the IBV_MTU code (1 is 256 bytes, 5 is 4096)."""

    name: str
    gid: bytes
    lid: int
    link_layer: int
    mtu: int
    #: READs that it answers at a time on one queue pair.
    rd_atomic: int
    speed_mbps: int


@final
@dataclass(frozen=True, slots=True)
class Rail:
    """One queue pair of a rail: `nic` is its sender's NIC, `partner` the other end's (or `ANY_NIC`)."""

    index: int
    nic: int
    partner: int
    qpn: int
    psn: int


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """A byte of the owner that anyone connected may READ: a READ of it flushes the WRITEs before it."""

    address: int
    rkey: int


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """What an initiator asks for; `link` is a number of its own that stays when rails are rebuilt."""

    link: int
    nics: tuple[Nic, ...]
    rails: tuple[Rail, ...]


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The owner's NICs with a mark on each, and its queue pairs for the offered rails, in their order."""

    link: int
    nics: tuple[Nic, ...]
    marks: tuple[Mark, ...]
    rails: tuple[Rail, ...]


@final
@dataclass(frozen=True, slots=True)
class RegionKeys:
    """Remote keys of a region: `keys[nic * n_chunks + chunk]`; empty when they must be asked for.

    `base` is the address by which NICs know its first byte.
    """

    base: int
    n_nics: int
    n_chunks: int
    chunk_bytes: int
    keys: tuple[int, ...]


def encode_offer(offer: Offer) -> bytes:
    """The bytes of a request "rdma.connect"."""
    return _encode(_OFFER, offer.link, offer.nics, offer.rails)


def decode_offer(data: bytes) -> Offer:
    """The offer in a request; ProtocolError for anything else."""
    link, nics, rails, rest = _decode(_OFFER, data)
    if rest or not rails:
        raise ProtocolError("an rdma offer has rails, and nothing behind them")
    _check_rails(rails, len(nics), NICS_MAX)
    return Offer(link, nics, rails)


def encode_answer(answer: Answer) -> bytes:
    """The bytes of the answer to "rdma.connect"."""
    marks = b"".join(_MARK.pack(mark.address, mark.rkey) for mark in answer.marks)
    return _encode(_ANSWER, answer.link, answer.nics, answer.rails) + marks


def decode_answer(data: bytes, offer: Offer) -> Answer:
    """The owner's answer to this offer: the same rails in the same order; ProtocolError for anything else."""
    link, nics, rails, rest = _decode(_ANSWER, data)
    if len(rest) != _MARK.size * len(nics):
        raise ProtocolError("an rdma answer has one mark for each NIC")
    marks = tuple(Mark(*_MARK.unpack_from(rest, at)) for at in range(0, len(rest), _MARK.size))
    if link != offer.link or [rail.index for rail in rails] != [rail.index for rail in offer.rails]:
        raise ProtocolError("the rdma answer is to another offer")
    for asked, got in zip(offer.rails, rails, strict=True):
        if got.nic == ANY_NIC:
            continue
        if got.nic >= len(nics) or got.partner != asked.nic or asked.partner not in (ANY_NIC, got.nic):
            raise ProtocolError(f"the owner pairs rail {asked.index} with NICs that were not asked for")
    return Answer(link, nics, marks, rails)


def encode_keys(keys: RegionKeys) -> bytes:
    """A region's attribute, with or without its keys."""
    head = _KEYS_HEAD.pack(VERSION, keys.n_nics, keys.n_chunks, keys.base, keys.chunk_bytes)
    return head + struct.pack(f"<{len(keys.keys)}I", *keys.keys)


def without_keys(keys: RegionKeys) -> RegionKeys:
    """The same keys, or their place-holder when they are too many for an attribute."""
    if len(keys.keys) * 4 <= INLINE_KEYS_BYTES:
        return keys
    return RegionKeys(keys.base, keys.n_nics, keys.n_chunks, keys.chunk_bytes, ())


def decode_keys(data: bytes, size_bytes: int) -> RegionKeys:
    """The keys of a region of `size_bytes`; ProtocolError when they are none, or do not cover it."""
    if not _KEYS_HEAD.size <= len(data) <= _KEYS_HEAD.size + 4 * KEYS_MAX:
        raise ProtocolError(f"{len(data)} bytes are no rdma keys")
    version, n_nics, n_chunks, base, chunk_bytes = _KEYS_HEAD.unpack_from(data)
    if version != VERSION:
        raise ProtocolError(f"the region's rdma keys are of version {version}, we know {VERSION}")
    count = n_nics * n_chunks
    if not 1 <= n_nics <= NICS_MAX or not 1 <= count <= KEYS_MAX or chunk_bytes == 0:
        raise ProtocolError(f"impossible rdma keys: {n_nics} NICs, {n_chunks} chunks")
    if -(-size_bytes // chunk_bytes) != n_chunks or base + size_bytes > _U64_MAX:
        raise ProtocolError(f"{n_chunks} chunks of {chunk_bytes} bytes at {base:#x} are not {size_bytes}")
    rest = len(data) - _KEYS_HEAD.size
    if rest not in (0, 4 * count):
        raise ProtocolError(f"{rest} bytes are not {count} rdma keys")
    keys = struct.unpack_from(f"<{rest // 4}I", data, _KEYS_HEAD.size)
    return RegionKeys(base, n_nics, n_chunks, chunk_bytes, keys)


def choose_partner(theirs: Nic, own: Sequence[Nic], used: Sequence[int]) -> int:
    """The NIC of ours that a peer's NIC is paired with when it leaves that to us; -1 when there is none.

    Of the same link layer; the least used, those on its own network first (NICs in different networks may not
    reach each other), the earlier one when all else is equal. `used[k]` counts the rails that NIC k has.
    """
    fitting = [k for k, nic in enumerate(own) if nic.link_layer == theirs.link_layer]
    near = [k for k in fitting if same_network(own[k], theirs)]
    return min(near or fitting, key=lambda k: (used[k], k), default=-1)


def same_network(one: Nic, other: Nic) -> bool:
    """True when two NICs seem to be on one network, by their GIDs: a /24 of IPv4, a /64 otherwise."""
    width = 15 if one.gid.startswith(_IPV4_PREFIX) else 8
    return one.gid[:width] == other.gid[:width]


def _encode(kind: int, link: int, nics: Sequence[Nic], rails: Sequence[Rail]) -> bytes:
    parts = [_HEAD.pack(MAGIC, VERSION, kind, len(nics), len(rails), link)]
    for nic in nics:
        numbers = (nic.lid, nic.link_layer, nic.mtu, nic.rd_atomic, nic.speed_mbps)
        parts.append(_NIC.pack(nic.gid, *numbers, nic.name.encode("ascii", "replace")[:_NAME_BYTES]))
    parts += [_RAIL.pack(rail.index, rail.nic, rail.partner, rail.qpn, rail.psn) for rail in rails]
    return b"".join(parts)


def _decode(kind: int, data: bytes) -> tuple[int, tuple[Nic, ...], tuple[Rail, ...], bytes]:
    if len(data) < _HEAD.size:
        raise ProtocolError("an rdma handshake is cut off")
    magic, version, got, n_nics, n_rails, link = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or got != kind:
        raise ProtocolError(f"no rdma handshake of version {VERSION}")
    if not 1 <= n_nics <= NICS_MAX or n_rails > RAILS_MAX:
        raise ProtocolError(f"an rdma handshake has up to {NICS_MAX} NICs and {RAILS_MAX} rails")
    stop_nics = _HEAD.size + n_nics * _NIC.size
    stop = stop_nics + n_rails * _RAIL.size
    if not stop <= len(data) <= stop + _MARK.size * NICS_MAX:
        raise ProtocolError("an rdma handshake is as long as its parts")
    nics = tuple(_nic_at(data, at) for at in range(_HEAD.size, stop_nics, _NIC.size))
    rails = tuple(Rail(*_RAIL.unpack_from(data, at)) for at in range(stop_nics, stop, _RAIL.size))
    if len({rail.index for rail in rails}) != len(rails):
        raise ProtocolError("an rdma handshake names a rail twice")
    if any(rail.index >= RAILS_MAX or max(rail.qpn, rail.psn) > _U24_MAX for rail in rails):
        raise ProtocolError("an rdma handshake has impossible queue pairs")
    return link, nics, rails, data[stop:]


def _nic_at(data: bytes, at: int) -> Nic:
    gid, lid, link_layer, mtu, rd_atomic, speed_mbps, raw_name = _NIC.unpack_from(data, at)
    name = raw_name.rstrip(b"\0")
    if not name.isascii() or not name.decode().isprintable():
        raise ProtocolError("a NIC's name is printable ASCII")
    if link_layer not in (LINK_INFINIBAND, LINK_ETHERNET) or mtu not in _MTU_CODES:
        raise ProtocolError(f"a NIC with link layer {link_layer} and MTU code {mtu}")
    return Nic(
        name=name.decode(),
        gid=gid,
        lid=lid,
        link_layer=link_layer,
        mtu=mtu,
        rd_atomic=rd_atomic,
        speed_mbps=speed_mbps,
    )


def _check_rails(rails: Sequence[Rail], n_nics: int, partners_max: int) -> None:
    for rail in rails:
        if rail.nic >= n_nics or not (rail.partner < partners_max or rail.partner == ANY_NIC):
            raise ProtocolError(f"rail {rail.index} names NICs that are not there")
