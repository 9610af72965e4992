"""Which GID is chosen from tables as hosts have them."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import ResourceError, UsageError
from moonpool.native.verbs.attributes import GidEntry, GidKind, LinkLayer
from moonpool.transport.rdma_gids import AUTOMATIC, address_of, choose_gid, is_routable, may_reach, needs_grh

KINDS = {"ib": GidKind.INFINIBAND, "v1": GidKind.ROCE_1, "v2": GidKind.ROCE_2}

#: A line: index, GID, kind, network interface ("-": none seen here).
ROCE_BOND = """
0 fe80::a288:c2ff:fe12:3456 v1 bond0
1 fe80::a288:c2ff:fe12:3456 v2 bond0
2 ::ffff:10.20.30.40        v1 bond0
3 ::ffff:10.20.30.40        v2 bond0
"""
ROCE_VLANS = """
0 fe80::a288:c2ff:fe12:3456 v1 eth2
1 fe80::a288:c2ff:fe12:3456 v2 eth2
2 fe80::a288:c2ff:fe12:3456 v1 eth2.100
3 fe80::a288:c2ff:fe12:3456 v2 eth2.100
4 ::ffff:192.168.100.7      v1 eth2.100
5 ::ffff:192.168.100.7      v2 eth2.100
6 ::ffff:192.168.200.7      v1 eth2.200
7 ::ffff:192.168.200.7      v2 eth2.200
"""
ROCE_TAGGED_AND_PLAIN = """
0 fe80::1 v1 eth0
1 fe80::1 v2 eth0
2 ::ffff:10.0.0.5 v1 eth0
3 ::ffff:10.0.0.5 v2 eth0
4 ::ffff:10.1.0.5 v1 eth0.7
5 ::ffff:10.1.0.5 v2 eth0.7
"""
IPV6_ONLY = """
0 fe80::a288:c2ff:fe12:3456 v1 ens5
1 fe80::a288:c2ff:fe12:3456 v2 ens5
2 2001:db8:5::17            v1 ens5
3 2001:db8:5::17            v2 ens5
"""
LINK_LOCAL_ONLY = """
0 fe80::2 v1 ens5
1 fe80::2 v2 ens5
2 ::ffff:169.254.7.9 v2 ens5
"""
SOFT_ROCE = """
0 fe80::ff:fe00:1 v2 lab0
1 ::ffff:10.99.0.1 v2 lab0
"""
ROCE_1_ONLY = """
0 fe80::3 v1 eth1
1 ::ffff:10.9.9.9 v1 eth1
"""
OTHER_NAMESPACE = """
0 ::ffff:10.0.0.9 v2 -
1 fe80::9         v2 -
2 ::ffff:10.7.0.9 v2 net1
"""
CONTAINER_WITHOUT_NAMES = """
0 fe80::9         v1 -
1 fe80::9         v2 -
2 ::ffff:10.7.0.9 v1 -
3 ::ffff:10.7.0.9 v2 -
"""
INFINIBAND = """
0 fe80::e41d:2d03:7:81 ib -
"""
INFINIBAND_PREFIX = """
0 fe80::e41d:2d03:7:81       ib -
1 fd00:12:34::e41d:2d03:7:81 ib -
"""


def read_table(text: str) -> list[GidEntry]:
    rows = [line.split() for line in text.strip().splitlines()]
    return [
        GidEntry(int(index), ipaddress.IPv6Address(gid).packed, KINDS[kind], "" if name == "-" else name)
        for index, gid, kind, name in rows
    ]


@pytest.mark.parametrize(
    ("table", "layer", "index"),
    [
        pytest.param(ROCE_BOND, LinkLayer.ETHERNET, 3, id="bond"),
        pytest.param(ROCE_VLANS, LinkLayer.ETHERNET, 5, id="address-on-vlans-only"),
        pytest.param(ROCE_TAGGED_AND_PLAIN, LinkLayer.ETHERNET, 3, id="plain-before-vlan"),
        pytest.param(IPV6_ONLY, LinkLayer.ETHERNET, 3, id="ipv6-only"),
        pytest.param(LINK_LOCAL_ONLY, LinkLayer.ETHERNET, 2, id="link-local-only"),
        pytest.param(SOFT_ROCE, LinkLayer.ETHERNET, 1, id="soft-roce"),
        pytest.param(ROCE_1_ONLY, LinkLayer.ETHERNET, 1, id="roce-1-only"),
        pytest.param(OTHER_NAMESPACE, LinkLayer.ETHERNET, 2, id="interface-seen-here"),
        pytest.param(CONTAINER_WITHOUT_NAMES, LinkLayer.ETHERNET, 3, id="no-interface-seen"),
        pytest.param(INFINIBAND, LinkLayer.INFINIBAND, 0, id="infiniband"),
        pytest.param(INFINIBAND_PREFIX, LinkLayer.INFINIBAND, 1, id="infiniband-with-prefix"),
    ],
)
def test_choice_from_a_recorded_table(table: str, layer: LinkLayer, index: int) -> None:
    entries = read_table(table)
    assert choose_gid(entries, layer).entry.index == index
    assert choose_gid(list(reversed(entries)), layer).entry.index == index


def test_an_index_that_is_set_is_taken_whatever_it_is() -> None:
    choice = choose_gid(read_table(ROCE_BOND), LinkLayer.ETHERNET, 0)
    assert (choice.entry.index, choice.reason) == (0, "set by the configuration")


def test_an_index_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no GID with index 9; it has: 0, 1, 2, 3"):
        choose_gid(read_table(ROCE_BOND), LinkLayer.ETHERNET, 9)
    with pytest.raises(UsageError, match="it has: none"):
        choose_gid([], LinkLayer.ETHERNET, 0)


def test_an_empty_table_says_what_to_do() -> None:
    with pytest.raises(ResourceError, match="give its network interface an address"):
        choose_gid([], LinkLayer.ETHERNET)
    with pytest.raises(ResourceError, match="no GID"):
        choose_gid([GidEntry(0, bytes(16), GidKind.ROCE_2, "eth0")], LinkLayer.ETHERNET)


def test_the_reason_reads_well() -> None:
    assert (
        choose_gid(read_table(ROCE_BOND), LinkLayer.ETHERNET).reason
        == "routable RoCE v2 address 10.20.30.40 on bond0"
    )


@pytest.mark.parametrize(
    ("address", "routable"),
    [
        ("fe80::1", False),
        ("::ffff:169.254.1.1", False),
        ("::ffff:127.0.0.1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", True),
        ("fd00::1", True),
        ("2001:db8::1", True),
    ],
)
def test_addresses_that_others_can_route_to(address: str, routable: bool) -> None:
    assert is_routable(ipaddress.IPv6Address(address).packed) is routable


def test_the_global_header_is_for_ethernet_and_between_subnets() -> None:
    near, far = read_table(INFINIBAND_PREFIX)
    assert needs_grh(LinkLayer.ETHERNET, near.gid, near.gid)
    assert not needs_grh(LinkLayer.INFINIBAND, near.gid, near.gid)
    assert needs_grh(LinkLayer.INFINIBAND, near.gid, far.gid)


def test_what_cannot_meet_is_not_tried() -> None:
    table = read_table(ROCE_BOND)
    ipv6 = read_table(IPV6_ONLY)
    assert may_reach(table[3], ipaddress.IPv6Address("::ffff:10.99.0.1").packed)
    assert not may_reach(table[3], ipv6[3].gid)
    assert not may_reach(table[3], table[1].gid)
    assert may_reach(table[1], ipv6[1].gid)
    assert may_reach(read_table(INFINIBAND)[0], table[3].gid)


@given(
    st.lists(
        st.builds(
            GidEntry,
            index=st.integers(0, 255),
            gid=st.binary(max_size=20),
            kind=st.sampled_from(GidKind),
            interface=st.sampled_from(["", "eth0", "eth0.7"]),
        ),
        max_size=12,
    ),
    st.sampled_from(LinkLayer),
    st.integers(AUTOMATIC, 255),
)
def test_any_table_gives_one_of_its_entries_or_a_typed_error(
    table: list[GidEntry], layer: LinkLayer, index: int
) -> None:
    try:
        entry = choose_gid(table, layer, index).entry
    except (UsageError, ResourceError):
        assert index != AUTOMATIC or not any(len(each.gid) == 16 and any(each.gid) for each in table)
    else:
        assert entry in table
        assert address_of(entry.gid)
