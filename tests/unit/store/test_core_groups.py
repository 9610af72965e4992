"""Groups are evicted whole or not at all, over all segments that their members are on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.store.core_world import MIB, World

from moonpool.store.master_config import MasterConfig
from moonpool.store.table_factory import native_tables, twin_tables


@pytest.mark.parametrize("make", [native_tables, twin_tables])
def test_a_group_ends_with_its_first_member(make: Any) -> None:
    world = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0, evict_batch=16), make_tables=make)
    for at in range(2):
        world.node(f"n{at}", f"h{at}", capacity=MIB, slots=200)
    client = world.client()
    for key in (b"g1", b"g2", b"g3"):
        assert world.put(client, key, group="together")[0] == 0
    assert world.put(client, b"g4", group="together", replicas=2)[0] == 0
    on = {world.lookup(client, key)[4][0][0] for key in (b"g1", b"g2", b"g3")}
    assert len(on) == 2, "the members should lie on two segments"
    assert world.put(client, b"alone")[0] == 0
    # Fill the pool with other keys until something must go; reads keep one in use.
    for number in range(400):
        world.put(client, b"filler-%d" % number, 8_192)
        world.lookup(client, b"alone")
        world.advance(100)
        # Without a lease this is no use.
        left = world.call(client, "exists", [[b"g1", b"g2", b"g3", b"g4"], 0])
        assert len(set(left)) == 1, f"a part of the group is gone after {number} puts: {left!r}"
        if not left[0]:
            break
    else:
        pytest.fail("the group was never evicted")
    assert world.lookup(client, b"alone") is not None
    world.leader.check()
