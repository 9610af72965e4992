"""An owner in a process of its own, to be killed: offers a region, tells of it in one line, and waits.

.venv/bin/python tests/lab/rdma/peer.py SIZE_BYTES DEVICE...
"""

from __future__ import annotations

import sys

from moonpool import Engine


def main(size_bytes: int, devices: tuple[str, ...]) -> None:
    """Until its standard input closes, or it is killed."""
    with Engine(transports=("rdma", "tcp"), rdma_timeout=17, rdma_devices=devices) as engine:
        region = engine.allocate(size_bytes)
        print(engine.endpoint, region.handle, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(sys.argv[2:]))
