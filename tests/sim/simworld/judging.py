"""One last client of each tenant reads every key when all is at rest, and puts one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.bench.chaos_history import PutRecord
from simworld.loop import SECOND
from simworld.reading import Reader
from simworld.writing import Writer

if TYPE_CHECKING:
    from simworld.client import Client
    from simworld.world import World


class Judge:
    """What the last clients found."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Stored puts that a last get missed and no remove explains.
        self.missing: list[PutRecord] = []
        self.outcomes: dict[str, str] = {}

    def run(self) -> None:
        """Reads and puts through the protocol; every call must be answered in bounded time."""
        world = self._world
        tenants = sorted({key.split("/")[0] for key in list(world.history.keys())} | {"default"})
        # Patient ones: a lease that lapsed in the last fault may still have to be taken up again.
        clients = [world.make_client(tenant, f"judge-{tenant}", attempts_max=150) for tenant in tenants]
        tasks = [client.process.spawn(self._look(client)) for client in clients]
        deadline = world.loop.now + 20 * SECOND
        while not all(task.is_done for task in tasks):
            assert world.loop.now < deadline, f"last clients hang: {self.outcomes}"
            world.run_until(world.loop.now + 50_000)
        wrong = {key: what for key, what in self.outcomes.items() if what not in ("hit", "miss", "stored")}
        assert not wrong, f"at rest: {wrong}"

    async def _look(self, client: Client) -> None:
        reader, writer = Reader(client), Writer(client)
        for number in range(self._world.options.workload.keys):
            key = b"key%d" % number
            began = client.now
            outcome = await reader.get(key)
            self.outcomes[client.named(key)] = outcome
            if outcome == "miss":
                self.missing += self._world.history.judge_miss(client.named(key), began, client.now)
        self.outcomes[client.named(b"last")] = await writer.put(b"last", 100)
        self.outcomes[client.named(b"last")] = await reader.get(b"last")
