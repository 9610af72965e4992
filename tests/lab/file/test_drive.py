"""An NVMe drive as a region by the `file` transport, which is pulled and comes back: needs `--nvme 256`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import Engine, MoonpoolError, Op, PeerGone, Status

DRIVE = Path("/dev/nvme0n1")
CONTROLLER = Path("/sys/class/nvme/nvme0/device")
MIB = 1 << 20
WAIT_S = 60.0
#: The kernel fails what is in flight on a removed drive at once; the emulated machine is slow.
NOTICE_S = 30.0
pytestmark = pytest.mark.skipif(
    os.environ.get("LAB_GUEST") != "1" or not DRIVE.is_block_device(),
    reason="needs the lab: a machine with --nvme",
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transports=("file",), transfer_timeout_ms=60_000) as made:
        yield made


def pattern(size: int, seed: int) -> bytes:
    """Bytes that depend on their position."""
    return b"".join((seed + place).to_bytes(8, "little") for place in range(size // 8))


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)


def test_a_drive_is_pulled_and_comes_back(engine: Engine) -> None:
    region = engine.offer(f"file:{DRIVE}", sync="data")
    segment = engine.open(engine.endpoint)
    kept = pattern(MIB, 7)
    engine.write(segment, region.handle, 3 * MIB, kept)
    engine.write(segment, region.handle, 5 * MIB + 13, kept[:5_000])
    engine.flush(segment)
    back = bytearray(MIB)
    engine.read(segment, region.handle, 3 * MIB, back)
    assert back == kept
    mine = engine.allocate(MIB)
    count = 20_000
    offsets = [k % 100 * MIB for k in range(count)]
    batch = engine.submit(Op.READ, segment, [mine.address] * count, region.handle, offsets, MIB)
    wait_for(lambda: Status.COMPLETE in bytes(batch.status), "the batch runs")
    (CONTROLLER / "remove").write_text("1")
    pulled = time.monotonic()
    assert batch.wait(WAIT_S)
    assert time.monotonic() - pulled < NOTICE_S
    assert set(bytes(batch.status)) == {Status.COMPLETE, Status.PEER_GONE}
    with pytest.raises(PeerGone):
        engine.write(segment, region.handle, 0, bytes(4096))
    with pytest.raises(PeerGone):
        engine.read(segment, region.handle, 5, back)
    assert engine.metrics()["counters"]["file_errors_device"] > 0
    engine.revoke(region)
    assert not DRIVE.exists()
    with pytest.raises(MoonpoolError):
        engine.offer(f"file:{DRIVE}", MIB, create=False)
    Path("/sys/bus/pci/rescan").write_text("1")
    wait_for(DRIVE.is_block_device, "the drive comes back")
    again = engine.offer(f"file:{DRIVE}", create=False)
    target = bytearray(MIB)
    engine.read(segment, again.handle, 3 * MIB, target)
    assert target == kept
    edge = bytearray(5_000)
    engine.read(segment, again.handle, 5 * MIB + 13, edge)
    assert edge == kept[:5_000], "an edge was lost that a flush had made durable"
