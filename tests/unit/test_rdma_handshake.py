"""The handshake of RDMA as a codec: what goes in comes out, and garbage is a ProtocolError and no more."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from moonpool.errors import ProtocolError
from moonpool.transport.rdma_handshake import (
    ANY_NIC,
    INLINE_KEYS_BYTES,
    LINK_ETHERNET,
    LINK_INFINIBAND,
    NICS_MAX,
    RAILS_MAX,
    Answer,
    Mark,
    Nic,
    Offer,
    Rail,
    RegionKeys,
    choose_partner,
    decode_answer,
    decode_keys,
    decode_offer,
    encode_answer,
    encode_keys,
    encode_offer,
    same_network,
    without_keys,
)

IPV4 = bytes(10) + b"\xff\xff"


def nic(name: str = "mlx5_0", gid: bytes = IPV4 + bytes([10, 0, 0, 1]), layer: int = LINK_ETHERNET) -> Nic:
    return Nic(name=name, gid=gid, lid=7, link_layer=layer, mtu=5, rd_atomic=16, speed_mbps=400_000)


OFFER = Offer(
    0x1234_5678_9ABC,
    (nic("mlx5_0"), nic("mlx5_1")),
    (Rail(0, 0, ANY_NIC, 0x11, 0x22), Rail(1, 1, 3, 0xFFFFFF, 0)),
)
ANSWER = Answer(
    OFFER.link,
    tuple(nic(f"mlx5_{k}") for k in range(4)),
    tuple(Mark(0x7F00_0000_0000 + k, 0xDEAD + k) for k in range(4)),
    (Rail(0, 2, 0, 0x31, 0x41), Rail(1, 3, 1, 0x59, 0x26)),
)
KEYS = RegionKeys(0x7F00_0000_0000, 2, 3, 1 << 20, (1, 2, 3, 4, 5, 0xFFFFFFFF))


def test_what_goes_in_comes_out() -> None:
    assert decode_offer(encode_offer(OFFER)) == OFFER
    assert decode_answer(encode_answer(ANSWER), OFFER) == ANSWER
    declined = replace(ANSWER, rails=(Rail(0, ANY_NIC, 0, 0, 0), ANSWER.rails[1]))
    assert decode_answer(encode_answer(declined), OFFER) == declined
    assert decode_keys(encode_keys(KEYS), 3 << 20) == KEYS
    assert decode_keys(encode_keys(KEYS), (2 << 20) + 1) == KEYS


def test_the_largest_fit_and_larger_ones_do_not() -> None:
    nics = tuple(nic(f"n{k}") for k in range(NICS_MAX))
    rails = tuple(Rail(k, k % NICS_MAX, ANY_NIC, k, k) for k in range(RAILS_MAX))
    assert decode_offer(encode_offer(Offer(1, nics, rails))) == Offer(1, nics, rails)
    with pytest.raises(ProtocolError):
        decode_offer(encode_offer(Offer(1, (*nics, nic()), rails)))
    with pytest.raises(ProtocolError):
        decode_offer(encode_offer(Offer(1, nics, (*rails, Rail(0, 0, 0, 0, 0)))))


@pytest.mark.parametrize(
    "offer",
    [
        replace(OFFER, rails=()),
        replace(OFFER, rails=(OFFER.rails[0], OFFER.rails[0])),
        replace(OFFER, rails=(Rail(0, 2, ANY_NIC, 1, 1),)),
        replace(OFFER, rails=(Rail(0, 0, NICS_MAX, 1, 1),)),
        replace(OFFER, rails=(Rail(RAILS_MAX, 0, 0, 1, 1),)),
        replace(OFFER, rails=(Rail(0, 0, 0, 1 << 24, 1),)),
        replace(OFFER, rails=(Rail(0, 0, 0, 1, 1 << 24),)),
        replace(OFFER, nics=()),
        replace(OFFER, nics=(replace(OFFER.nics[0], mtu=6), OFFER.nics[1])),
        replace(OFFER, nics=(replace(OFFER.nics[0], link_layer=3), OFFER.nics[1])),
        replace(OFFER, nics=(replace(OFFER.nics[0], name="a\x07b"), OFFER.nics[1])),
    ],
)
def test_impossible_offers_are_refused(offer: Offer) -> None:
    with pytest.raises(ProtocolError):
        decode_offer(encode_offer(offer))


@pytest.mark.parametrize(
    "answer",
    [
        replace(ANSWER, link=1),
        replace(ANSWER, rails=ANSWER.rails[::-1]),
        replace(ANSWER, rails=ANSWER.rails[:1]),
        replace(ANSWER, marks=ANSWER.marks[:3]),
        # Pairs that were not asked for: a NIC that is not there, another NIC of ours, another partner.
        replace(ANSWER, rails=(Rail(0, 4, 0, 1, 1), ANSWER.rails[1])),
        replace(ANSWER, rails=(Rail(0, 2, 1, 1, 1), ANSWER.rails[1])),
        replace(ANSWER, rails=(ANSWER.rails[0], Rail(1, 2, 1, 1, 1))),
    ],
)
def test_answers_to_something_else_are_refused(answer: Answer) -> None:
    with pytest.raises(ProtocolError):
        decode_answer(encode_answer(answer), OFFER)


@pytest.mark.parametrize(
    ("keys", "size_bytes"),
    [
        (KEYS, 2 << 20),
        (KEYS, (3 << 20) + 1),
        (replace(KEYS, keys=KEYS.keys[:5]), 3 << 20),
        (replace(KEYS, n_nics=0, keys=()), 3 << 20),
        (replace(KEYS, n_nics=NICS_MAX + 1, keys=()), 3 << 20),
        (replace(KEYS, n_chunks=0, keys=()), 3 << 20),
        (replace(KEYS, chunk_bytes=0), 3 << 20),
        (replace(KEYS, base=(1 << 64) - 4096), 3 << 20),
    ],
)
def test_keys_must_cover_their_region(keys: RegionKeys, size_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        decode_keys(encode_keys(keys), size_bytes)


def test_many_keys_are_left_out_of_the_attribute() -> None:
    many = RegionKeys(4096, 8, 1000, 1 << 20, tuple(range(8000)))
    short = without_keys(many)
    assert short.keys == ()
    assert len(encode_keys(short)) <= INLINE_KEYS_BYTES
    assert decode_keys(encode_keys(short), 1000 << 20) == short
    assert decode_keys(encode_keys(many), 1000 << 20) == many
    assert without_keys(KEYS) is KEYS


def test_garbage_is_a_protocol_error_and_nothing_else() -> None:
    random_source = random.Random(20_05)
    goods = [encode_offer(OFFER), encode_answer(ANSWER), encode_keys(KEYS)]
    refused = 0
    for turn in range(6_000):
        data = bytearray(random_source.choice(goods))
        how = turn % 4
        if how == 0:
            data = bytearray(random_source.randbytes(random_source.randrange(200)))
        elif how == 1:
            del data[random_source.randrange(len(data)) :]
        elif how == 2:
            data += random_source.randbytes(random_source.randrange(1, 400))
        for _ in range(random_source.randrange(1, 4) if data else 0):
            data[random_source.randrange(len(data))] = random_source.randrange(256)
        for decode in (
            decode_offer,
            lambda given: decode_answer(given, OFFER),
            lambda given: decode_keys(given, 3 << 20),
        ):
            try:
                decode(bytes(data))
            except ProtocolError:
                refused += 1
    assert refused > 12_000


def test_versions_are_told_apart() -> None:
    data = bytearray(encode_offer(OFFER))
    struct.pack_into("<H", data, 4, 2)
    with pytest.raises(ProtocolError, match="version 1"):
        decode_offer(bytes(data))
    keys = bytearray(encode_keys(KEYS))
    keys[0] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        decode_keys(bytes(keys), 3 << 20)


def test_partners_are_near_and_shared_evenly() -> None:
    here = [nic(gid=IPV4 + bytes([10, 0, k, 1])) for k in range(4)]
    assert [choose_partner(nic(gid=IPV4 + bytes([10, 0, k, 9])), here, [0] * 4) for k in range(4)] == [
        0,
        1,
        2,
        3,
    ]
    # One network for all: in turn.
    flat = [nic(gid=IPV4 + bytes([10, 0, 0, k])) for k in range(4)]
    used = [0] * 4
    for turn in range(8):
        chosen = choose_partner(nic(), flat, used)
        assert chosen == turn % 4
        used[chosen] += 1
    # An unknown network: any NIC may do; another link layer: none.
    assert choose_partner(nic(gid=IPV4 + bytes([172, 16, 0, 1])), here, [1, 0, 1, 1]) == 1
    assert choose_partner(nic(layer=LINK_INFINIBAND), here, [0] * 4) == -1
    assert choose_partner(nic(), [], []) == -1


def test_networks_are_told_by_gids() -> None:
    assert same_network(nic(gid=IPV4 + bytes([10, 1, 2, 3])), nic(gid=IPV4 + bytes([10, 1, 2, 250])))
    assert not same_network(nic(gid=IPV4 + bytes([10, 1, 2, 3])), nic(gid=IPV4 + bytes([10, 1, 3, 3])))
    one, two = bytes([0xFE, 0x80] + [0] * 14), bytes([0xFE, 0x80] + [0] * 13 + [9])
    assert same_network(nic(gid=one), nic(gid=two))
    assert not same_network(nic(gid=one), nic(gid=IPV4 + bytes(4)))
