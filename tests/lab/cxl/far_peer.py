"""A process that offers far memory, or writes into it, for the tests of this folder.

far_peer.py offer LOCATION SIZE OFFSET [FIELD=VALUE...]  says "<endpoint> <handle>", then waits for its end
far_peer.py hold ENDPOINT HANDLE [FIELD=VALUE...]        opens the segment, writes once, says "<path>", waits
"""

from __future__ import annotations

import sys
from typing import Any

from moonpool import Engine


def config_of(words: list[str]) -> dict[str, Any]:
    """Config fields; commas make tuples."""
    fields: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        fields[name] = tuple(value.split("+")) if name in ("transports", "cxl_shared") else value
    return fields


def main(words: list[str]) -> None:
    """One role."""
    if words[0] == "offer":
        with Engine(**config_of(words[4:])) as engine:
            if words[1].startswith("dax:"):
                region = engine.offer(words[1], int(words[2]), offset=int(words[3]))
            else:
                region = engine.allocate(int(words[2]), location=words[1])
            print(engine.endpoint, region.handle, flush=True)
            sys.stdin.readline()
        return
    with Engine(**config_of(words[3:])) as engine:
        segment = engine.open(words[1])
        engine.write(segment, int(words[2]), 0, b"held by another")
        print(segment.paths[0].transport, flush=True)
        sys.stdin.readline()


main(sys.argv[1:])
