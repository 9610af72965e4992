"""The target process of the demo: offers regions, and says on request whether they hold what they should.

It speaks JSON lines: first ``{"endpoint", "regions"}``; then, for each line ``[region index, round]`` that it
is given, the number of wrong bytes in that region. It ends when its standard input does, so it cannot outlive
the demo.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from moonpool.cli.demonstration.pattern import Pattern
from moonpool.config import EngineConfig
from moonpool.engine.engine import Engine


def serve(regions: int, size_bytes: int) -> None:
    """Offers regions of ``size_bytes`` each, filled with round 0 of the pattern, until the input ends."""
    pattern = Pattern(size_bytes)
    with Engine(EngineConfig()) as engine:
        offered = [engine.allocate(size_bytes) for _ in range(regions)]
        for region in offered:
            pattern.write(region.view[:size_bytes], 0, 0)
        say({"endpoint": engine.endpoint, "regions": [region.handle for region in offered]})
        for line in sys.stdin:
            index, round_number = json.loads(line)
            say(pattern.wrong_bytes(offered[index].view[:size_bytes], 0, round_number))


def say(value: object) -> None:
    """One JSON line on standard output, at once."""
    print(json.dumps(value), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Entry of ``python -m moonpool.cli.demonstration.target REGIONS SIZE_BYTES``."""
    regions, size_bytes = map(int, arguments)
    serve(regions, size_bytes)


if __name__ == "__main__":
    main(sys.argv[1:])
