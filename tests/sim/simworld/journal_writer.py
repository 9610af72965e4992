"""A leader's facts on their way into the modelled Redis.

Groups with linger, pipelined, sent again after a reconnect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.store.journal_groups import Group, GroupQueue
from simworld.loop import MS
from simworld.network import Network
from simworld.process import Process
from simworld.redis_link import RedisLink, Reply, dial_redis

LINGER_US = 1_000
TIMEOUT_MS = 1_000


class JournalWriter:
    """One term's writer. Tells the leader what is durable, and its owner when the term is over."""

    def __init__(
        self,
        process: Process,
        network: Network,
        run_id: int,
        queue: GroupQueue,
        on_durable: Callable[[int], None],
        on_deposed: Callable[[str], None],
    ) -> None:
        self._process = process
        self._network = network
        self._run_id = run_id
        self._queue = queue
        self._on_durable = on_durable
        self._on_deposed = on_deposed
        self._link: RedisLink | None = None
        self.is_over = False
        self._is_raising = False
        process.spawn(self._keep_connected())

    def _now_ns(self) -> int:
        return self._process.clock.now_us() * 1_000

    @property
    def in_trouble(self) -> bool:
        """Whether Redis is known to be away."""
        return self._link is None or not self._link.is_open

    def add(self, first: int, facts: Sequence[bytes], now_ms: int, *, urgent: bool) -> None:
        """Takes facts in."""
        self._queue.add(first, facts, now_ms, urgent=urgent, now_ns=self._now_ns())
        self._send_due()

    def hurry(self) -> None:
        """A reply waits for what was taken in."""
        self._queue.hurry()
        self._send_due()

    async def _keep_connected(self) -> None:
        while not self.is_over:
            if self._link is None or not self._link.is_open:
                self._queue.send_again()
                link = await dial_redis(self._process, self._network, TIMEOUT_MS)
                if link is not None and await self._is_same_run(link):
                    self._link = link
                    self._send_due()
            await self._process.sleep(20 * MS)

    async def _is_same_run(self, link: RedisLink) -> bool:
        reply = await link.call("read", self._queue.taken, 1)
        if reply is None:
            return False
        if reply.run_id != self._run_id:
            self._end("another run of Redis")
            return False
        return True

    def _send_due(self) -> None:
        if self._link is None or not self._link.is_open or self.is_over or self._is_raising:
            return
        while (group := self._queue.next_group(self._now_ns())) is not None:
            self._send(self._link, group)
        due_ns = self._queue.due_in_ns(self._now_ns())
        if due_ns is not None:
            self._process.after(max(1, due_ns // 1_000), self._send_due)

    def _send(self, link: RedisLink, group: Group) -> None:
        future = link.call("append", group.epoch, group.first, group.last, group.data)
        future.when_done(lambda: self._answered(group, future.value()))

    def _answered(self, group: Group, reply: Reply | None) -> None:
        if reply is None or self.is_over:
            return
        if reply.run_id != self._run_id:
            self._end("another run of Redis")
            return
        verdict, sequence = reply.result
        if verdict != "ok":
            self._end(f"{verdict} {sequence}")
            return
        if self._queue.confirm(group.last) is not None:
            self._on_durable(group.last)
            self._send_due()

    def raise_epoch(self, name: str, above: int, on_raised: Callable[[int], None]) -> None:
        """Asks for an epoch above one, once nothing is under way."""
        if not self._queue.idle:
            self._queue.flush()
            self._send_due()
            self._process.after(MS, lambda: self.raise_epoch(name, above, on_raised))
            return
        if self.is_over:
            return
        if self._link is None or not self._link.is_open:
            self._process.after(20 * MS, lambda: self.raise_epoch(name, above, on_raised))
            return
        self._is_raising = True
        future = self._link.call("raise", name, self._queue.epoch, above)
        future.when_done(lambda: self._raised(future.value(), on_raised))

    def _raised(self, reply: Reply | None, on_raised: Callable[[int], None]) -> None:
        self._is_raising = False
        if self.is_over:
            return
        # Without an answer nobody knows which epoch the journal has: the term is over.
        if reply is None or reply.run_id != self._run_id or reply.result is None:
            self._end("the epoch was not raised")
            return
        self._queue.raise_epoch(reply.result)
        on_raised(reply.result)
        self._send_due()

    def _end(self, reason: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_deposed(reason)

    def stop(self) -> None:
        """The term is over for another reason."""
        self.is_over = True
        if self._link is not None:
            self._link.close()
