"""Puts: extents from the master, bytes to every copy at once, then the digests: now the object is complete.

Nothing of an object can be seen before `put_end`, so a put that fails anywhere leaves the old state alone.
After a transfer whose outcome is not known (time-out, broken connection) bytes may still be under way: then
the extent is not given back but left to its deadline, and the node fences it before it is used again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast, final

from moonpool.errors import InternalError, MoonpoolError, PeerGone, Status, error_from_status
from moonpool.native.io.object_batch import batch_hashes, hash_objects, object_batch
from moonpool.operations import Op
from moonpool.store.client_io import Work
from moonpool.store.client_results import PutPolicy, PutResult, PutStatus
from moonpool.store.errors import (
    DeadlinePassed,
    MasterUnavailable,
    QuotaExceeded,
    TooLarge,
    UnknownPut,
)
from moonpool.store.records import EntryCode
from moonpool.store.writing_doubt import look_whether_stored
from moonpool.units import KIB, NS_PER_MS

if TYPE_CHECKING:
    from moonpool.native.io.batch import Batch as NativeBatch
    from moonpool.native.io.rpc_codec import PutReply
    from moonpool.store.client_context import Context, Span
    from moonpool.store.segments_view import Target

#: A writer stops posting by itself when this much of its deadline is over.
DEADLINE_SHARE: Final = 0.9
#: From so many bytes on a second pass over memory costs more than hashing in the copy.
_HASH_IN_COPY_BYTES: Final = 128 * KIB
#: A status of our own: never posted.
_NOT_POSTED: Final = 254
#: The target answered, or was never asked: nothing of the transfer is under way any more.
_SETTLED: Final = frozenset(
    {Status.COMPLETE, Status.ACCESS_DENIED, Status.OUT_OF_RANGE, Status.STALE_HANDLE, _NOT_POSTED}
)
_PUTS_MAX: Final = 3
EXISTS: Final = PutResult(PutStatus.EXISTS)
NO_SPACE: Final = PutResult(PutStatus.NO_SPACE)


class Slice(NamedTuple):
    """One copy of one key: the key's number, the number of its place, and what goes there."""

    number: int
    place: int
    offset: int
    grant: bytes
    span: Span


@final
class PutGroup:
    """All copies that one target takes, in one batch."""

    __slots__ = ("batch", "hashed", "slices", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.slices: list[Slice] = []
        self.batch: NativeBatch | None = None
        self.hashed = False

    def plan(self, hash_in_copy: bool, stop_ns: int) -> Work:
        """Makes the batch; with `hash_in_copy` digests come with it where each copy is one piece.

        It begins to write nothing after `stop_ns` (CLOCK_MONOTONIC), however late it comes to run: the
        extents are somebody else's soon after.
        """
        local, offset, length = array("Q"), array("Q"), array("Q")
        grants = bytearray()
        for _, _, start, grant, span in self.slices:
            for address, size in zip(span.addresses, span.lengths, strict=True):
                local.append(address)
                offset.append(start)
                length.append(size)
                grants += grant
                start += size
        self.hashed = hash_in_copy and len(local) == len(self.slices)
        things = [one.span for one in self.slices]
        timeout_ns = max(1, stop_ns - time.monotonic_ns())
        self.batch = object_batch(
            Op.WRITE, things, local, self.target.data, offset, length, self.hashed, timeout_ns
        )
        self.batch.end_at(stop_ns)
        self.batch.attach_grants(grants)
        return Work(self.target, self.batch)

    @property
    def native(self) -> NativeBatch:
        """The batch, once planned."""
        if self.batch is None:
            raise InternalError("a group was used before its batch was made")
        return self.batch

    @property
    def all_complete(self) -> bool:
        """True when every transfer of the ended batch completed."""
        return self.native.worst == Status.COMPLETE

    def outcomes(self) -> list[tuple[int, int, int]]:
        """(key's number, place's number, status) of each copy."""
        statuses = self.native.statuses()
        out, at = [], 0
        for one in self.slices:
            pieces = len(one.span.addresses)
            out.append((one.number, one.place, max(statuses[at : at + pieces])))
            at += pieces
        return out


@final
class Attempt:
    """One try to put keys: `run` once. Results are None where another try is right (the master changed)."""

    def __init__(
        self,
        context: Context,
        keys: list[bytes],
        spans: list[Span],
        policy: PutPolicy | None,
        wait_ms: int,
    ) -> None:
        self._context = context
        self._keys = keys
        self._spans = spans
        self._policy = policy
        self._wait_ms = wait_ms
        self._results: list[PutResult | None] = [None] * len(keys)
        self._groups: dict[int, PutGroup] = {}
        #: Status of each place of each key.
        self._statuses: list[dict[int, int]] = [{} for _ in keys]
        self._errors: dict[int, MoonpoolError] = {}
        #: Why keys without a result have none, where nodes refused their grants.
        self.refused: dict[int, MoonpoolError] = {}
        self._put_id = 0
        self._stop_ns = 0
        self._joins = 0
        self._roots = b""
        self._chunks: list[bytes] = []

    async def run(self) -> list[PutResult | None]:
        """One result a key."""
        reply = await self._start()
        version = self._context.segments.version
        if version is None or version[0] != reply.epoch:
            # Another leader by now, to whom these numbers may mean other segments: nothing is written there.
            return self._results
        for number in range(len(self._keys)):
            code, places = reply.entry(number)
            if code:
                self._results[number] = refusal(code)
            else:
                await self._place(number, places)
        if any(result is None for result in self._results):
            await self._write()
            await self._end()
        return self._results

    def take_over(self, reply: PutReply, statuses: Sequence[bytes], stop_ns: int) -> None:
        """Goes on with a put that was started and written elsewhere, and did not run smoothly.

        `statuses` has the status of each place for each key.
        """
        self._put_id, self._stop_ns, self._joins = reply.put_id, stop_ns, self._context.link.joins
        self._statuses = [dict(enumerate(marks)) for marks in statuses]
        for number, code in enumerate(reply.codes):
            if code:
                self._results[number] = refusal(code)
        self._roots, self._chunks = self._hash()
        if time.monotonic_ns() >= stop_ns:
            self._errors = {number: _late() for number in range(len(statuses))}

    async def end(self) -> list[PutResult | None]:
        """Ends what was taken over: one result a key."""
        await self._end()
        return self._results

    async def _start(self) -> PutReply:
        link = self._context.link
        told = self._policy.packed() if self._policy is not None else None
        sent = time.monotonic_ns()
        reply = await link.put_start(self._keys, [span.total for span in self._spans], told, self._wait_ms)
        # Time that passed before the master answered counts against us: its deadline is never before ours.
        self._stop_ns = sent + int(reply.remaining_ms * NS_PER_MS * DEADLINE_SHARE)
        self._put_id = reply.put_id
        self._joins = link.joins
        if (reply.epoch, reply.segments_version) != self._context.segments.version:
            await self._context.fetch_segments()
        return reply

    async def _place(self, number: int, places: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Adds each copy of a key to the batch of its target."""
        segments, groups = self._context.segments, self._groups
        for place, (segment, offset, _, grant) in enumerate(places):
            target = segments.ready.get(segment)
            if target is None or target.peer.native.dead:
                try:
                    target = await self._context.io.blocking(segments.target, segment)
                except MoonpoolError as problem:
                    self._errors[number] = problem
            if target is None:
                self._statuses[number][place] = _NOT_POSTED
                continue
            group = groups.get(id(target)) or groups.setdefault(id(target), PutGroup(target))
            group.slices.append(Slice(number, place, offset, grant, self._spans[number]))

    async def _write(self) -> None:
        """Writes every copy, and computes the digests: in a group's copy where it holds all keys."""
        groups = list(self._groups.values())
        if time.monotonic_ns() >= self._stop_ns:
            self._post_nothing(groups)
            return
        total = sum(span.total for span in self._spans)
        whole = [group for group in groups if len(group.slices) == len(self._keys)]
        in_copy = whole[0] if whole and total >= _HASH_IN_COPY_BYTES else None
        until_ns = min(self._stop_ns, time.monotonic_ns() + self._context.patience_ns(total))
        works = [group.plan(group is in_copy, until_ns) for group in groups]
        if works:
            await self._context.io.carry(works)
        for group in groups:
            failed = False
            for number, place, status in group.outcomes():
                self._statuses[number][place] = status
                failed |= status != 0
            if failed:
                self._context.segments.drop(group.target.info.segment_id)
        if in_copy is not None and in_copy.hashed and in_copy.all_complete:
            roots, chunks = batch_hashes(in_copy.native)
            at = {one.number: i for i, one in enumerate(in_copy.slices)}
            order = [at[number] for number in range(len(self._keys))]
            self._chunks = [chunks[i] for i in order]
            self._roots = b"".join(roots[16 * i : 16 * i + 16] for i in order)
        else:
            self._roots, self._chunks = self._hash()

    def _post_nothing(self, groups: Sequence[PutGroup]) -> None:
        """The deadline passed before anything could be posted."""
        for group in groups:
            for one in group.slices:
                self._statuses[one.number][one.place] = _NOT_POSTED
                self._errors[one.number] = _late()

    def _hash(self) -> tuple[bytes, list[bytes]]:
        addresses, lengths, first = array("Q"), array("Q"), array("Q", [0])
        for span in self._spans:
            addresses.extend(span.addresses)
            lengths.extend(span.lengths)
            first.append(len(addresses))
        return hash_objects(addresses, lengths, first)

    async def _end(self) -> None:
        whole: list[int] = []
        partly: list[int] = []
        aborted: list[int] = []
        need_all = self._policy is not None and self._policy.need_all
        for number, statuses in enumerate(self._statuses):
            if self._results[number] is not None:
                continue
            failed = sum(status != 0 for status in statuses.values())
            if failed and (need_all or failed == len(statuses)):
                self._fail(number, aborted)
            else:
                (partly if failed else whole).append(number)
        if aborted:
            await self._context.link.ask("put_abort", self._put_id, aborted)
        if whole:
            await self._end_whole(whole)
        if partly:
            await self._end_partly(partly)

    async def _end_whole(self, numbers: list[int]) -> None:
        """Ends keys of which every copy was written."""
        roots = self._roots
        if len(numbers) != len(self._keys):
            roots = b"".join(roots[16 * number : 16 * number + 16] for number in numbers)
        chunks = [self._chunks[number] for number in numbers]
        reply = await self._context.link.put_end(self._put_id, numbers, roots, chunks)
        for at, number in enumerate(numbers):
            code, object_id = reply.entry(at)
            self._results[number] = await self._ended(number, code, object_id)

    async def _end_partly(self, numbers: list[int]) -> None:
        """Ends keys of which some copies were not written: the master is told which."""
        entries = []
        for number in numbers:
            mask = sum(1 << place for place, status in self._statuses[number].items() if status)
            root = self._roots[16 * number : 16 * number + 16]
            entries.append([number, root, self._chunks[number], mask])
        answer = await self._context.link.ask("put_end", self._put_id, entries)
        for number, (code, object_id) in zip(numbers, answer[1], strict=True):
            self._results[number] = await self._ended(number, code, object_id)

    def _fail(self, number: int, aborted: list[int]) -> None:
        """Sets the result of a key that cannot be stored; notes it when its extents may be given back."""
        statuses = self._statuses[number].values()
        worst = next(status for status in statuses if status)
        if time.monotonic_ns() >= self._stop_ns and worst == Status.TIMED_OUT:
            error: MoonpoolError = DeadlinePassed(
                "the bytes were not written before the put's deadline; put less at once, or later"
            )
        elif worst == _NOT_POSTED:
            error = self._errors.get(number) or PeerGone("no node that was to take a copy can be reached")
        else:
            error = error_from_status(worst, operation="WRITE", index=number)
        settled = all(status in _SETTLED for status in statuses)
        if settled:
            aborted.append(number)
        if settled and Status.ACCESS_DENIED in statuses:
            # A refused grant may be good: its key is of the join before, or its tag of 16 bits is by chance
            # that of an earlier put, whose grants the node refuses here. Another put gets another grant.
            self.refused[number] = error
        else:
            self._results[number] = PutResult(PutStatus.FAILED, error=error)

    async def _ended(self, number: int, code: int, object_id: int) -> PutResult | None:
        if code == EntryCode.OK:
            copies = sum(not status for status in self._statuses[number].values())
            return PutResult(PutStatus.STORED, object_id, copies)
        if code == EntryCode.UNKNOWN_PUT and self._context.link.joins != self._joins:
            return await self._look_whether_stored(number)
        return refusal(code)

    async def _look_whether_stored(self, number: int) -> PutResult | None:
        root = self._roots[16 * number : 16 * number + 16]
        return await look_whether_stored(self._context, self._keys[number], self._spans[number].total, root)


@final
class Writer:
    """Stores whole objects. Thread-safe as its context is."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def put(
        self, keys: Sequence[bytes], spans: Sequence[Span], policy: PutPolicy | None, wait_ms: int
    ) -> list[PutResult]:
        """One result a key. Raises only what concerns the whole call (no master, closed, refused)."""
        results: list[PutResult | None] = [None] * len(keys)
        refused: dict[int, MoonpoolError] = {}
        left = put_order(keys)
        for _ in range(_PUTS_MAX):
            attempt = Attempt(
                self._context, [keys[i] for i in left], [spans[i] for i in left], policy, wait_ms
            )
            for i, result in zip(left, await attempt.run(), strict=True):
                results[i] = result
            refused = {left[number]: error for number, error in attempt.refused.items()}
            left = [i for i in left if results[i] is None]
            if not left:
                return cast("list[PutResult]", results)
        lost = MasterUnavailable("the master changed during each of several tries to put; try again")
        return [
            result or PutResult(PutStatus.FAILED, error=refused.get(i, lost))
            for i, result in enumerate(results)
        ]


def _late() -> DeadlinePassed:
    return DeadlinePassed("the put's deadline passed before its bytes could be written; put it again")


def put_order(keys: Sequence[bytes]) -> list[int]:
    """In which order keys are put: the last first, so that the end of a chain counts as older than its head.

    A key given twice needs the order of the call: without `replace` the first one wins, with it the last.
    """
    numbers = list(range(len(keys)))
    if len(keys) > 1 and len(set(keys)) == len(keys):
        numbers.reverse()
    return numbers


def refusal(code: int) -> PutResult:
    """The result of a code that is not OK."""
    if code == EntryCode.EXISTS:
        return EXISTS
    if code == EntryCode.NO_SPACE:
        return NO_SPACE
    kind = _REFUSALS.get(code, QuotaExceeded)
    return PutResult(PutStatus.FAILED, error=kind())


_REFUSALS: Final[dict[int, type[MoonpoolError]]] = {
    EntryCode.UNKNOWN_PUT: UnknownPut,
    EntryCode.DEADLINE_PASSED: DeadlinePassed,
    EntryCode.TOO_LARGE: TooLarge,
    EntryCode.REFUSED: QuotaExceeded,
}
