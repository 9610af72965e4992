"""Puts of many small objects at once, each in one piece of memory: planned and judged natively.

The same rules as in `moonpool.store.writing`, to which everything goes that does not run smoothly.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

from moonpool.errors import MoonpoolError
from moonpool.native.io.object_puts import PutPlan
from moonpool.store.client_context import Span
from moonpool.store.client_io import Work
from moonpool.store.client_results import PutPolicy, PutResult, PutStatus
from moonpool.store.writing import DEADLINE_SHARE, Attempt, Writer, put_order, refusal
from moonpool.units import NS_PER_MS

if TYPE_CHECKING:
    from moonpool.native.io.memory import BufferHold
    from moonpool.native.io.rpc_codec import PutReply
    from moonpool.store.client_context import Context
    from moonpool.store.segments_view import Target


class Sources(NamedTuple):
    """One piece of memory for each key: its hold, its address and its length (uint64[n] each)."""

    holds: Sequence[BufferHold]
    address: array[int]
    length: array[int]

    @classmethod
    def of(cls, holds: Sequence[BufferHold]) -> Sources:
        """What holds say of their memory."""
        addresses = array("Q", [hold.address for hold in holds])
        return cls(holds, addresses, array("Q", [hold.size_bytes for hold in holds]))

    def part(self, numbers: Sequence[int]) -> Sources:
        """Those of these keys, in this order."""
        return Sources.of([self.holds[number] for number in numbers])

    def spans(self) -> list[Span]:
        """The same as the general way has it."""
        return [
            Span((hold,), [address], [length])
            for hold, address, length in zip(self.holds, self.address, self.length, strict=True)
        ]


@final
class ManyWriter:
    """Thread-safe as its context is."""

    def __init__(self, context: Context, writer: Writer) -> None:
        self._context = context
        self._writer = writer

    async def put(
        self, keys: Sequence[bytes], sources: Sources, policy: PutPolicy | None, wait_ms: int
    ) -> list[PutResult]:
        """One result a key. Raises only what concerns the whole call."""
        order = put_order(keys)
        asked = [keys[number] for number in order]
        chosen = sources.part(order)
        results: list[PutResult | None] = [None] * len(keys)
        for number, result in zip(order, await self._attempt(asked, chosen, policy, wait_ms), strict=True):
            results[number] = result
        left = [number for number, result in enumerate(results) if result is None]
        if left:
            spans = sources.part(left).spans()
            again = await self._writer.put([keys[number] for number in left], spans, policy, wait_ms)
            for number, result in zip(left, again, strict=True):
                results[number] = result
        return cast("list[PutResult]", results)

    async def _attempt(
        self, keys: list[bytes], sources: Sources, policy: PutPolicy | None, wait_ms: int
    ) -> list[PutResult | None]:
        """Results stay None where another try is right."""
        context = self._context
        link = context.link
        told = policy.packed() if policy is not None else None
        sent = time.monotonic_ns()
        reply = await link.put_start(keys, list(sources.length), told, wait_ms)
        joins = link.joins
        stop_ns = sent + int(reply.remaining_ms * NS_PER_MS * DEADLINE_SHARE)
        if (reply.epoch, reply.segments_version) != context.segments.version:
            await context.fetch_segments()
            version = context.segments.version
            if version is None or version[0] != reply.epoch:
                return [None] * len(keys)
        await self._open_all(reply)
        plan = PutPlan(reply)
        until_ns = min(stop_ns, time.monotonic_ns() + context.patience_ns(sum(sources.length)))
        pairs = plan.prepare(self._ready, sources.address, sources.length, sources.holds, until_ns)
        if pairs and time.monotonic_ns() < stop_ns:
            await context.io.carry([Work._make(pair) for pair in pairs])
            whole = plan.judge()
        else:
            whole = False
        if whole:
            return await self._end(keys, (reply, plan), joins)
        attempt = Attempt(context, keys, sources.spans(), policy, wait_ms)
        attempt.take_over(reply, [plan.statuses_of(number) for number in range(len(keys))], stop_ns)
        return await attempt.end()

    async def _end(
        self, keys: list[bytes], written: tuple[PutReply, PutPlan], joins: int
    ) -> list[PutResult | None]:
        reply, plan = written
        numbers, roots, chunks = plan.hashes()
        results: list[PutResult | None] = [None if code == 0 else refusal(code) for code in reply.codes]
        end = await self._context.link.put_end(reply.put_id, numbers, roots, chunks if any(chunks) else None)
        copies, stored = reply.place_counts, PutStatus.STORED
        rows = zip(numbers, end.codes, end.object_ids, strict=True)
        changed = self._context.link.joins != joins
        for number, code, object_id in rows:
            if code == 0:
                results[number] = PutResult(stored, object_id, copies[number])
            elif not changed:
                results[number] = refusal(code)
        return results

    def _ready(self, segment: int) -> Target | None:
        target = self._context.segments.ready.get(segment)
        return None if target is None or target.peer.native.dead else target

    async def _open_all(self, reply: Any) -> None:
        """Opens the segments that the reply names and that are not open yet, as far as that is possible."""
        for segment in set(reply.place_segments):
            if self._ready(segment) is None:
                try:
                    await self._context.io.blocking(self._context.segments.target, segment)
                except MoonpoolError:
                    continue
