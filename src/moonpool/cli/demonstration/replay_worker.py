"""A worker of the demo: asks the pool for a request's blocks, checks every byte, makes and puts what is
missing.

It speaks JSON lines. First it is given its settings (`WorkerSettings`) and answers `{"ready": true}`; then,
for each line `[number, [block id, ...]]`, it answers with a `RequestOutcome`; on `null` it answers with the
bytes that it moved by each transport. It ends when its standard input does, so it cannot outlive the demo.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.cli.demonstration.block_bytes import BlockBytes, hash_of, key_of
from moonpool.cli.demonstration.replay_tally import PUT_OUTCOMES, RequestOutcome
from moonpool.units import NS_PER_US

if TYPE_CHECKING:
    from moonpool.store.client import Pool

WINDOW_BLOCKS: Final = 64
"""Most blocks of one call to the pool."""


@final
@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to know. `seed` goes into hashes, so that two demos on one pool do not meet."""

    address: str
    transports: tuple[str, ...]
    block_bytes: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> WorkerSettings:
        """The inverse of `to_dict`."""
        return cls(**{**plain, "transports": tuple(plain["transports"])})


class ReplayWorker:
    """Handles requests one after another over one connection. Owns a buffer of one window."""

    def __init__(self, pool: Pool, settings: WorkerSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._blocks = BlockBytes(settings.block_bytes)
        self._buffer = mmap.mmap(-1, WINDOW_BLOCKS * settings.block_bytes)
        whole = memoryview(self._buffer)
        size = settings.block_bytes
        self._places = [whole[at * size : (at + 1) * size] for at in range(WINDOW_BLOCKS)]

    def request(self, number: int, chain: Sequence[int]) -> RequestOutcome:
        """Looks up a whole chain, reads what is there, then puts the rest.

        Blocks are asked for from the last to the first, so that the start of a prompt is used most recently
        and is evicted last.
        """
        outcome = RequestOutcome(number, b"")
        hashes = [hash_of(block, self._settings.seed) for block in chain]
        found = bytearray(len(chain))
        for window in windows(len(chain)):
            self._read(window, hashes, found, outcome)
        outcome.found = bytes(found)
        missing = [place for place in range(len(chain)) if not found[place]]
        for window in windows(len(missing)):
            self._write([hashes[missing[each]] for each in window], outcome)
        return outcome

    def _read(
        self, window: Sequence[int], hashes: Sequence[int], found: bytearray, outcome: RequestOutcome
    ) -> None:
        outs = self._places[: len(window)]
        started = time.perf_counter_ns()
        results = self._pool.get_into_many([key_of(hashes[place]) for place in window], outs)
        outcome.get_us.append((time.perf_counter_ns() - started) / NS_PER_US)
        for place, result, out in zip(window, results, outs, strict=True):
            if result.error is not None:
                raise result.error
            if not result.hit:
                continue
            found[place] = 1
            wrong = self._blocks.wrong_bytes(out, hashes[place])
            outcome.wrong_bytes += wrong
            outcome.wrong_blocks += wrong > 0

    def _write(self, hashes: Sequence[int], outcome: RequestOutcome) -> None:
        places = self._places[: len(hashes)]
        for place, block_hash in zip(places, hashes, strict=True):
            self._blocks.make(place, block_hash)
        started = time.perf_counter_ns()
        results = self._pool.put_many([key_of(each) for each in hashes], places)
        outcome.put_us.append((time.perf_counter_ns() - started) / NS_PER_US)
        for result in results:
            if result.error is not None:
                raise result.error
            outcome.puts[PUT_OUTCOMES.index(result.status.name.lower())] += 1

    def transports(self) -> dict[str, dict[str, int]]:
        """Payload bytes that this worker moved, by transport and direction."""
        moved: dict[str, dict[str, int]] = {}
        for path in self._pool.metrics()["paths"]:
            direction = "get" if path["op"] == "READ" else "put"
            total = moved.setdefault(path["transport"], {"get": 0, "put": 0})
            total[direction] += path["bytes"]
        return moved

    def close(self) -> None:
        """Lets go of the buffer."""
        for place in self._places:
            place.release()
        self._places.clear()


def windows(count: int) -> Iterator[range]:
    """Places in windows of at most `WINDOW_BLOCKS`, the last window first."""
    for end in range(count, 0, -WINDOW_BLOCKS):
        yield range(max(end - WINDOW_BLOCKS, 0), end)


def say(value: object) -> None:
    """One JSON line on standard output, at once."""
    print(json.dumps(value, separators=(",", ":")), flush=True)


def serve() -> None:
    """Runs until the input ends."""
    import moonpool

    settings = WorkerSettings.from_dict(json.loads(sys.stdin.readline()))
    with moonpool.connect(settings.address, transports=settings.transports) as pool:
        worker = ReplayWorker(pool, settings)
        say({"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            say(worker.transports() if asked is None else worker.request(*asked).to_list())
        worker.close()


if __name__ == "__main__":
    serve()
