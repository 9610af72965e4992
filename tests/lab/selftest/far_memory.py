"""Runs in the guest of `tests/lab/run.py --cxl MB`: a DAX device on a far, CPU-less NUMA node can be mapped.

What one mapping writes the other must read. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

DEVICE = Path("/dev/dax0.0")
CHECKED_BYTES = 8 << 20


def attribute(name: str) -> str:
    return (Path("/sys/bus/dax/devices/dax0.0") / name).read_text().strip()


def main() -> int:
    """0 when all holds; prints what does not."""
    size = int(attribute("size"))
    node = int(attribute("target_node"))
    here = Path(f"/sys/devices/system/node/node{node}/cpulist")
    cpus = here.read_text().strip() if here.exists() else ""
    descriptor = os.open(DEVICE, os.O_RDWR)
    writer = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    reader = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    os.close(descriptor)
    block = os.urandom(1 << 20)
    offsets = range(0, min(size, CHECKED_BYTES), len(block))
    for offset in offsets:
        writer[offset : offset + len(block)] = block
    wrong = [offset for offset in offsets if reader[offset : offset + len(block)] != block]
    if wrong or cpus:
        print(f"far memory: wrong bytes at {wrong}; CPUs of its node: {cpus or 'none'}", file=sys.stderr)
        return 1
    print(f"far memory: {size >> 20} MiB on node {node} without CPUs; {len(offsets)} MiB read back the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
