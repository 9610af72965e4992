"""A master, a node and a client over sockets: hot methods are answered by the native core, and count."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from tests.integration.pool_parts import Caller, open_master, open_node, until

from moonpool.native.io.copying import chunk_digests, root_digest

KEYS = 200
DIGEST = root_digest(chunk_digests(b"x" * 512))


@pytest.mark.parametrize("durability", ["async", "sync"])
def test_hot_methods_do_not_come_to_python(durability: str) -> None:
    with contextlib.closing(open_master(durability=durability)) as master:
        node = open_node(master.address)
        caller = Caller(master.address)
        try:
            keys = [b"key-%d" % number for number in range(KEYS)]

            def call(method: str, *params: Any) -> Any:
                return caller.rpc.call(method, list(params))

            # The first window opens with the first put; it may wait for it.
            caller.end(caller.start(b"first", 512)[0], b"x" * 512)
            before = master_counts(master)
            for turn in range(5):
                some = keys[turn * 40 : turn * 40 + 40]
                put_id = call("put_start", some, [512] * 40, None, 1_000)[2]
                ended = call("put_end", put_id, [[at, DIGEST, b""] for at in range(40)])
                assert {code for code, _ in ended[1]} == {0}
                found = call("lookup", some, 100)[2]
                assert [row[0] for row in found] == [object_id for _, object_id in ended[1]]
                assert call("exists", [*some, b"none"], 0) == bytes([1] * 40 + [0])
            # What was put natively is the leader's as if it had made it: it can be listed and removed.
            assert len(call("list", b"key-", KEYS + 1, None)[1]) == KEYS
            assert call("remove", keys, "defer", False)[1] == bytes(KEYS)
            assert call("exists", keys, 0) == bytes(KEYS)
            until(lambda: master_counts(master)["replies"] > before["replies"] + 20)
            after = master_counts(master)
            natively = 15 if durability == "sync" else 20
            assert after["hot_answered"] - before["hot_answered"] >= natively
            # The node has been told of every object: their effects took the same way as Python's.
            until(lambda: call("status")["objects"] == 1, lambda: call("status"))
        finally:
            caller.rpc.close()
            node.close()


def master_counts(master: Any) -> dict[str, int]:
    counts: dict[str, int] = dict(master._loop._port.counters())
    return counts
