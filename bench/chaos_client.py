"""A client of a chaos run, as a process.

It puts, gets, removes and views without end, and writes down what it saw.

    python -m moonpool.bench.chaos_client SETTINGS-AS-JSON

It ends at the end of its standard input. A call that fails is an outcome nobody knows; what is judged is
what calls returned (`chaos_record`). Bytes are told apart by their digest, computed here anew from what
came back.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from moonpool.bench.chaos_history import content_digest
from moonpool.bench.chaos_record import Recorder
from moonpool.errors import MoonpoolError
from moonpool.store.client import Pool, connect
from moonpool.store.client_results import PutStatus
from moonpool.store.records import RemoveCode

#: Weights of what a client does.
MIX: Final = {"put": 24, "upsert": 14, "get": 38, "get_into": 10, "view": 8, "remove": 6, "many": 4}
SIZES: Final = (0, 200, 4_096, 70_000, 300_000, 2_000_000)
SIZE_WEIGHTS: Final = (2, 15, 30, 30, 15, 8)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How one client behaves. `transports`: what it may move bytes by."""

    number: int
    birth: int
    seed: int
    addresses: list[str]
    record: str
    keys: int
    transports: list[str]
    cached: bool
    replicas: int = 2
    think_ms: float = 8.0

    @property
    def who(self) -> str:
        """Its name in the record: which start of a client, and what kind."""
        return f"c{self.birth}{'near' if self.is_near else 'far'}{'cached' if self.cached else ''}"

    @property
    def is_near(self) -> bool:
        """Whether it maps the nodes' memory."""
        return "shm" in self.transports

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


@final
class ChaosClient:
    """One client's calls."""

    def __init__(self, settings: ClientSettings, pool: Pool, recorder: Recorder) -> None:
        self._settings = settings
        self._pool = pool
        self._recorder = recorder
        self._chance = random.Random(settings.seed)
        self._count = 0
        self._out = bytearray(max(SIZES))

    def run(self) -> None:
        """Works until standard input ends."""
        # Who maps no memory cannot look at it in place.
        mix = {name: weight for name, weight in MIX.items() if name != "view" or self._settings.is_near}
        names, weights = list(mix), list(mix.values())
        while not select.select([sys.stdin], [], [], self._chance.random() * self._settings.think_ms / 500)[
            0
        ]:
            name = self._chance.choices(names, weights)[0]
            began = time.monotonic()
            try:
                getattr(self, f"_{name}")()
            except MoonpoolError as error:
                self._recorder.note("failed", name, type(error).__name__, str(error)[:300])
            self._recorder.note("lasted", name, round(time.monotonic() - began, 3))

    def read_everything(self) -> None:
        """Reads each key once more, at rest."""
        for number in range(self._settings.keys):
            self._get(f"key{number}")

    def _key(self) -> str:
        return f"key{self._chance.randrange(self._settings.keys)}"

    def _tag(self) -> int:
        self._count += 1
        return self._settings.birth << 32 | self._count

    def _new_value(self) -> tuple[int, bytes, str]:
        tag = self._tag()
        content = random.Random(tag).randbytes(self._chance.choices(SIZES, SIZE_WEIGHTS)[0])
        return tag, content, content_digest(content).hex()

    def _put(self, *, replace: bool = False) -> None:
        tag, content, digest = self._new_value()
        key = self._key()
        replicas = self._chance.randint(1, self._settings.replicas)
        outcome = "unknown"
        self._recorder.note("put_began", tag, key, digest)
        try:
            if replace:
                result = self._pool.upsert(key, content, replicas=replicas)
            else:
                result = self._pool.put(key, content, replicas=replicas)
            outcome = "stored" if result.status is PutStatus.STORED else result.status.name.lower()
        finally:
            self._recorder.note("put_ended", tag, outcome, replace)

    def _upsert(self) -> None:
        self._put(replace=True)

    def _get(self, key: str | None = None) -> None:
        key = key or self._key()
        began = time.monotonic_ns()
        value = self._pool.get(key)
        if value is None:
            self._recorder.note("got", key, began, "miss", "")
            return
        with value:
            self._recorder.note("got", key, began, "hit", content_digest(value.view).hex())

    def _get_into(self) -> None:
        key = self._key()
        began = time.monotonic_ns()
        result = self._pool.get_into(key, self._out)
        found = memoryview(self._out)[: result.length]
        self._recorder.note(
            "got",
            key,
            began,
            "hit" if result.hit else "miss",
            content_digest(found).hex() if result.hit else "",
        )

    def _many(self) -> None:
        keys = [self._key() for _ in range(6)]
        began = time.monotonic_ns()
        for key, value in zip(keys, self._pool.get_many(keys), strict=True):
            digest = "" if value is None else content_digest(value.view).hex()
            self._recorder.note("got", key, began, "miss" if value is None else "hit", digest, "many")

    def _view(self) -> None:
        key, number = self._key(), str(self._tag())
        began = time.monotonic_ns()
        view = self._pool.view(key)
        if view is None:
            self._recorder.note("got", key, began, "miss", "")
            return
        with view:
            self._recorder.note("view_began", number)
            before = content_digest(view.view)
            self._recorder.note("viewed", number, key, began, before.hex())
            time.sleep(self._chance.random() * 0.4)
            after = content_digest(view.view)
            self._recorder.note("view_ended", number, "kept" if before == after else "changed")

    def _remove(self) -> None:
        key, number = self._key(), str(self._tag())
        outcome = "unknown"
        self._recorder.note("remove_began", number, key)
        try:
            code = self._pool.remove(key)
            outcome = "gone" if code in (RemoveCode.REMOVED, RemoveCode.ABSENT) else "stays"
        finally:
            self._recorder.note("remove_ended", number, outcome)


def open_pool(settings: ClientSettings) -> Pool:
    """The client's pool; waits for a master that leads."""
    for attempt in range(60):
        try:
            return connect(
                *settings.addresses,
                transports=tuple(settings.transports),
                location_cache_keys=1_000 if settings.cached else 0,
            )
        except MoonpoolError:
            if attempt == 59:
                raise
            time.sleep(0.25)
    raise AssertionError("not reached")


def main() -> None:
    """The process."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    settings = ClientSettings(**fields)
    recorder = Recorder(Path(settings.record), settings.who)
    with open_pool(settings) as pool:
        os.write(1, b'{"ready": true}\n')
        client = ChaosClient(settings, pool, recorder)
        client.run()
        os.write(1, b'{"done": true}\n')
    recorder.close()


if __name__ == "__main__":
    main()
