"""A pool whose master follows a script: true rpc, true engine memory, and answers that a test can bend.

It keeps objects in a dict and gives out extents one after another. `bend[method]` is called with the params
before the method runs: what it raises is answered as an error, what it returns (unless None) as the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from moonpool.engine.engine import Engine
from moonpool.errors import MoonpoolError
from moonpool.ids import new_instance_id
from moonpool.operations import Access
from moonpool.rpc.server import Closed, RpcPort
from moonpool.store.client import Pool, connect
from moonpool.store.directory import word_offset
from moonpool.store.records import EntryCode

SEGMENT_BYTES = 32 << 20
SLOTS = 4096
DEAD = 1 << 63


class Segment:
    """One segment's memory at the node, and what of it is given."""

    def __init__(self, number: int, engine: Engine) -> None:
        self.number = number
        self.engine = engine
        self.data = engine.allocate(SEGMENT_BYTES, prefault=False)
        self.directory = engine.allocate(word_offset(SLOTS) + SLOTS * 64, access=Access.READ)
        self.used = 0
        self.slot = 0
        self.state = 2

    def take(self, size: int) -> tuple[int, int]:
        """Offset and slot of a new extent."""
        offset, slot = self.used, self.slot
        self.used += -(-max(size, 1) // 4096) * 4096
        self.slot += 1
        if self.used > SEGMENT_BYTES:
            raise AssertionError("the scripted segment is full")
        return offset, slot

    def stamp(self, slot: int, word: int) -> None:
        """Sets a state word."""
        start = word_offset(slot)
        self.directory.view[start : start + 8] = word.to_bytes(8, "little")

    def describe(self) -> dict[str, Any]:
        """The segment map of the rpc table."""
        return {
            "id": self.number,
            "name": f"s{self.number}",
            "node": f"n{self.number}",
            "host": "here",
            "endpoint": self.engine.endpoint,
            "view_endpoint": "",
            "instance": bytes(self.engine.instance),
            "generation": 1,
            "data": self.data.handle,
            "directory": self.directory.handle,
            "capacity": SEGMENT_BYTES,
            "slots": SLOTS,
            "tier": 2,
            "kind": 1,
            "location": "cpu:0",
            "state": self.state,
        }


class ScriptedPool:
    """Use as a context manager; `address` is where clients connect."""

    def __init__(self, segments: int = 1, **engine: Any) -> None:
        self.engines = [Engine(**engine) for _ in range(segments)]
        self.segments = [Segment(number, engine) for number, engine in enumerate(self.engines, 1)]
        self.objects: dict[bytes, tuple[int, int, bytes, list[tuple[int, int, int]]]] = {}
        self.puts: dict[int, list[Any]] = {}
        self.bend: dict[str, Callable[[list[Any]], Any]] = {}
        self.calls: list[tuple[str, list[Any]]] = []
        self.epoch = 1
        self.version = 1
        self.remaining_ms = 10_000
        self.next_id = 1
        self.drop_connection_on = ""
        self._port = RpcPort(["127.0.0.1:0"], instance=new_instance_id())
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        """Of the master."""
        return self._port.addresses[0]

    def __enter__(self) -> Self:
        self._port.start()
        self._thread.start()
        return self

    def __exit__(self, *_problem: object) -> None:
        self._stop = True
        self._port.wake()
        self._thread.join(10)
        self._port.close()
        for engine in self.engines:
            engine.close()

    def names(self) -> list[str]:
        """The methods called so far."""
        return [method for method, _ in self.calls]

    def _serve(self) -> None:
        while not self._stop:
            for event in self._port.poll(100):
                if not isinstance(event, Closed):
                    self._answer(event)

    def _answer(self, event: Any) -> None:
        self.calls.append((event.method, event.params))
        try:
            bent = self.bend[event.method](event.params) if event.method in self.bend else None
            if self.drop_connection_on == event.method:
                self.drop_connection_on = ""
                self._port.close_connection(event.connection)
                return
            result = getattr(self, f"_{event.method}")(*event.params) if bent is None else bent
            self._port.reply(event.connection, event.message_id, result)
        except MoonpoolError as problem:
            self._port.fail(event.connection, event.message_id, problem)

    # The methods

    def _client_join(self, *_who: Any) -> Any:
        return [self.epoch, 7, 0, {"lease_ms_max": 5_000, "location_lease_ms": 2_000}]

    def _client_beat(self) -> Any:
        return [self.epoch, self.version]

    def _segments(self) -> Any:
        return [self.epoch, self.version, [segment.describe() for segment in self.segments]]

    def _exists(self, keys: list[bytes], _lease_ms: int) -> Any:
        return bytes(key in self.objects for key in keys)

    def _lookup(self, keys: list[bytes], _lease_ms: int) -> Any:
        found = [self.objects.get(key) for key in keys]
        rows = [one and [one[0], one[1], one[2], 0, one[3]] for one in found]
        return [self.epoch, self.version, rows]

    def _put_start(self, keys: list[bytes], sizes: list[int], policy: Any, _wait_ms: int) -> Any:
        policy = policy or {}
        put_id = self.next_id = self.next_id + 1
        rows, entries = [], []
        for key, size in zip(keys, sizes, strict=True):
            if key in self.objects and not policy.get("replace"):
                rows.append([int(EntryCode.EXISTS), []])
                entries.append(None)
                continue
            copies = self.segments[: policy.get("replicas", 1)]
            places = [(segment.number, *segment.take(size)) for segment in copies]
            entries.append((key, size, places, bool(policy.get("replace"))))
            rows.append([0, [[*place, bytes(24)] for place in places]])
        self.puts[put_id] = entries
        return [self.epoch, self.version, put_id, self.remaining_ms, rows]

    def _put_end(self, put_id: int, rows: list[Any]) -> Any:
        return [self.epoch, [self._end(put_id, *row) for row in rows]]

    def _end(self, put_id: int, index: int, digest: bytes, _chunks: bytes, mask: int = 0) -> Any:
        entry = self.puts.get(put_id, [])[index] if put_id in self.puts else None
        if entry is None:
            return [int(EntryCode.UNKNOWN_PUT), 0]
        key, size, places, replace = entry
        old = self.objects.get(key)
        if old is not None and not replace:
            return [int(EntryCode.EXISTS), old[0]]
        self.next_id += 1
        kept = [place for at, place in enumerate(places) if not mask >> at & 1]
        if old is not None:
            self._stamp(old, DEAD)
        self.objects[key] = (self.next_id, size, digest, kept)
        self._stamp(self.objects[key], 0)
        return [0, self.next_id]

    def _put_abort(self, put_id: int, indexes: Any) -> Any:
        return [self.epoch, len(indexes or self.puts.get(put_id, []))]

    def _remove(self, keys: list[bytes], _if_leased: str, _force: bool) -> Any:
        gone = [self.objects.pop(key, None) for key in keys]
        for one in gone:
            if one is not None:
                self._stamp(one, DEAD)
        return [self.epoch, bytes(one is None for one in gone)]

    def _damaged(self, *_where: Any) -> Any:
        return [self.epoch, 0]

    def _stamp(self, stored: Any, bits: int) -> None:
        for number, _, slot in stored[3]:
            self.segments[number - 1].stamp(slot, stored[0] | bits)


@pytest.fixture
def scripted() -> Iterator[ScriptedPool]:
    """Two segments on two nodes."""
    with ScriptedPool(2) as scripted:
        yield scripted


@pytest.fixture(params=["shm", "tcp"])
def pool(request: pytest.FixtureRequest, scripted: ScriptedPool) -> Iterator[Pool]:
    """A pool of the scripted master, by shared memory and by tcp."""
    with connect(scripted.address, transports=(request.param,), unavailable_ms=300) as pool:
        yield pool
