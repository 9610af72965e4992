"""The calls of a pool, as coroutines: keys and buffers in, results out. See `Pool` and `AsyncPool`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

from moonpool.errors import MoonpoolError, UsageError
from moonpool.native.io.memory import BufferHold
from moonpool.store.client_arguments import items, pin_of, wait_of
from moonpool.store.client_config import Verify, check_verify
from moonpool.store.client_context import Context, Span
from moonpool.store.client_link import spread
from moonpool.store.client_results import GetResult, GetStatus, Listed, PutPolicy, PutResult, PutStatus
from moonpool.store.client_views import Viewer
from moonpool.store.errors import DestinationTooSmall
from moonpool.store.keys import as_key
from moonpool.store.reading import Reader
from moonpool.store.reading_many import ManyReader
from moonpool.store.reading_ranges import RangeReader
from moonpool.store.reading_recovery import Recovery
from moonpool.store.records import Pin, RemoveCode
from moonpool.store.value import Value
from moonpool.store.view import View, ViewDesk
from moonpool.store.writing import Writer
from moonpool.store.writing_many import ManyWriter, Sources
from moonpool.units import KIB

Key: TypeAlias = str | bytes | bytearray | memoryview
_PAGE_KEYS: Final = 1_000
#: From so many keys on a location cache does not pay.
_MANY: Final = 8
#: Objects of this size on average, and larger ones, are put so that they are hashed in the copy.
_SMALL_BYTES: Final = 256 * KIB
IF_LEASED: Final = ("defer", "refuse")


class Removal(NamedTuple):
    """How to remove: what to do about leases, and whether hard pins count."""

    if_leased: str = "defer"
    force: bool = False

    def check(self) -> Removal:
        """Itself; UsageError for a word that is none of the two."""
        if self.if_leased not in IF_LEASED:
            raise UsageError(f"if_leased={self.if_leased!r}: choose 'defer' or 'refuse'", field="if_leased")
        return self


@final
class Calls:
    """Everything a pool can do, over one context."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.reader = Reader(context)
        self.reader.recover = Recovery(self.reader).run
        self.many = ManyReader(self.reader)
        self.ranges = RangeReader(self.reader)
        self.writer = Writer(context)
        self.many_writer = ManyWriter(context, self.writer)
        config = context.config
        self.desk = ViewDesk(context.engine, config.engine.cluster_secret, config.views_max)
        self.viewer = Viewer(self.reader, self.desk)
        self._verify = check_verify(context.config.verify)

    # ---- put -----------------------------------------------------------------------------------------------

    async def put_many(
        self, keys: Sequence[Key], values: Sequence[Any], policy: PutPolicy | None, wait_ms: int | None
    ) -> list[PutResult]:
        """One result a key; a key's own failure is in its result."""
        keys, values = items(keys, "keys"), items(values, "values")
        if len(keys) != len(values):
            raise UsageError(f"{len(keys)} keys and {len(values)} values: give one value for each key")
        raw = [as_key(key) for key in keys]
        if len(raw) > 1 and not any(isinstance(value, list | tuple) for value in values):
            return await self._put_plain(raw, values, policy, wait_ms)
        spans = [Span.of(value, writable=False) for value in values]
        waits = wait_of(wait_ms, self.context.config.put_wait_ms)
        results: list[PutResult] = []
        for part in self._parts([span.total for span in spans]):
            chosen = slice(part.start, part.stop)
            results += await self.writer.put(raw[chosen], spans[chosen], policy, waits)
        self._forget(raw, policy)
        return results

    async def _put_plain(
        self, keys: list[bytes], values: Sequence[Any], policy: PutPolicy | None, wait_ms: int | None
    ) -> list[PutResult]:
        """Values of one piece each: many small ones natively, large ones hashed in the copy."""
        sources = Sources.of([BufferHold(value, writable=False) for value in values])
        waits = wait_of(wait_ms, self.context.config.put_wait_ms)
        results: list[PutResult] = []
        for part in self._parts(sources.length):
            chosen = sources.part(part)
            if sum(chosen.length) <= _SMALL_BYTES * len(part):
                results += await self.many_writer.put(keys[part.start : part.stop], chosen, policy, waits)
            else:
                spans = chosen.spans()
                results += await self.writer.put(keys[part.start : part.stop], spans, policy, waits)
        self._forget(keys, policy)
        return results

    async def put(self, key: Key, value: Any, policy: PutPolicy | None, wait_ms: int | None) -> PutResult:
        """As `put_many` for one key, but its failure is raised."""
        waits = wait_of(wait_ms, self.context.config.put_wait_ms)
        raw = [as_key(key)]
        results = await self.writer.put(raw, [Span.of(value, writable=False)], policy, waits)
        self._forget(raw, policy)
        if results[0].status is PutStatus.FAILED and results[0].error is not None:
            raise results[0].error
        return results[0]

    def _parts(self, sizes: Sequence[int]) -> list[range]:
        """Ranges of at most batch_keys_max keys and about batch_bytes_max bytes."""
        config = self.context.config
        parts, start, held = [], 0, 0
        for i, size in enumerate(sizes):
            if i > start and (i - start >= config.batch_keys_max or held + size > config.batch_bytes_max):
                parts.append(range(start, i))
                start, held = i, 0
            held += size
        return [*parts, range(start, len(sizes))] if sizes else parts

    def _forget(self, keys: Sequence[bytes], policy: PutPolicy | None) -> None:
        cache = self.context.cache
        if cache is not None and policy is not None and policy.replace:
            for key in keys:
                cache.forget(key)

    # ---- get -----------------------------------------------------------------------------------------------

    async def get_many(self, keys: Sequence[Key], verify: str | None) -> list[Value | None]:
        """A value a key, None for a miss. Raises the first key's error that cannot be read."""
        raw = [as_key(key) for key in items(keys, "keys")]
        way = self._way(verify)
        if self._is_plain(way, len(raw)):
            plain: list[Value | None] = []
            for part in spread(raw, self.context.config.batch_keys_max):
                plain += await self.many.values(raw[part.start : part.stop], way)
            return plain
        values: list[Value | None] = [None] * len(raw)
        pool = self.context.values

        def memory(number: int, size: int) -> Span:
            value = pool.take(size)
            values[number] = value
            return Span((value,), [value.address], [size])

        for number, result in enumerate(await self._read(raw, memory, way, 0)):
            if result.error is not None:
                raise result.error
            value = values[number]
            if result.status is GetStatus.HIT and value is not None:
                value.object_id = result.object_id
            else:
                values[number] = None
        return values

    def _is_plain(self, way: Verify, count: int) -> bool:
        """True when a read needs no state words: then it is planned natively.

        For many keys asking the master once takes less time than reading a word for each.
        """
        cached = self.context.cache is not None and count < _MANY
        return not cached and way is not Verify.GENERATION

    async def get_range(self, key: Key, part: tuple[int, int | None], verify: str | None) -> Value | None:
        """A value with a part of the object, None for a miss."""
        pool = self.context.values
        values: list[Value] = []

        def memory(_number: int, size: int) -> Span:
            values[:] = [pool.take(size)]
            return Span((values[0],), [values[0].address], [size])

        result = await self.ranges.read(as_key(key), check_part(part), memory, self._way(verify))
        if result.error is not None:
            raise result.error
        if result.status is GetStatus.MISS:
            return None
        values[0].object_id = result.object_id
        return values[0]

    async def get_range_into(
        self, key: Key, destination: Any, part: tuple[int, int | None], verify: str | None
    ) -> GetResult:
        """A part of the object into local memory; as much as fits when no length is given."""
        span = Span.of(destination, writable=True)
        offset, length = check_part(part)

        def memory(_number: int, size: int) -> Span:
            if size > span.total:
                raise DestinationTooSmall(length_bytes=size, limit=span.total)
            return span.first(size)

        wanted = span.total if length is None else length
        result = await self.ranges.read(as_key(key), (offset, wanted), memory, self._way(verify))
        if result.error is not None:
            raise result.error
        return result

    async def get_into_many(
        self, keys: Sequence[Key], destinations: Sequence[Any], verify: str | None
    ) -> list[GetResult]:
        """One result a key; a key's own failure is in its result."""
        keys, destinations = items(keys, "keys"), items(destinations, "destinations")
        if len(keys) != len(destinations):
            raise UsageError(f"{len(keys)} keys and {len(destinations)} buffers: give one for each key")
        raw = [as_key(key) for key in keys]
        way = self._way(verify)
        if self._is_plain(way, len(raw)) and not any(isinstance(one, list | tuple) for one in destinations):
            results: list[GetResult] = []
            for part in spread(raw, self.context.config.batch_keys_max):
                chosen = slice(part.start, part.stop)
                results += await self.many.into(raw[chosen], destinations[chosen], way)
            return results
        spans = [Span.of(one, writable=True) for one in destinations]

        def memory(number: int, size: int) -> Span:
            span = spans[number]
            if size > span.total:
                raise DestinationTooSmall(length_bytes=size, limit=span.total, index=number)
            return span.first(size)

        return await self._read(raw, memory, way, sum(span.total for span in spans))

    async def get_into(self, key: Key, destination: Any, verify: str | None) -> GetResult:
        """As `get_into_many` for one key, but its failure is raised."""
        result = (await self.get_into_many([key], [destination], verify))[0]
        if result.error is not None:
            raise result.error
        return result

    def _way(self, verify: str | None) -> Verify:
        return self._verify if verify is None else check_verify(verify)

    async def _read(
        self, keys: Sequence[bytes], memory: Any, verify: Verify, expected_bytes: int
    ) -> list[GetResult]:
        most = self.context.config.batch_keys_max
        if len(keys) <= most:
            return await self.reader.read(keys, memory, verify, expected_bytes) if keys else []
        results: list[GetResult] = []
        for part in spread(keys, most):

            def shifted(number: int, size: int, start: int = part.start) -> Span:
                span: Span = memory(start + number, size)
                return span

            chosen = keys[part.start : part.stop]
            share = expected_bytes * len(part) // len(keys)
            results += await self.reader.read(chosen, shifted, verify, share)
        return results

    async def view(self, key: Key) -> View | None:
        """The object's bytes in place, None for a miss."""
        return await self.viewer.view(as_key(key))

    # ---- names ---------------------------------------------------------------------------------------------

    async def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a complete object."""
        raw = [as_key(key) for key in items(keys, "keys")]
        found: list[bool] = []
        for part in spread(raw, self.context.config.batch_keys_max):
            chosen = raw[part.start : part.stop]
            found += [flag != 0 for flag in await self.context.link.exists(chosen, 0)]
        return found

    async def remove_many(self, keys: Sequence[Key], how: Removal) -> list[RemoveCode]:
        """What became of each key. Returns when no reader anywhere can get one of the old objects."""
        raw = [as_key(key) for key in items(keys, "keys")]
        codes: list[RemoveCode] = []
        for part in spread(raw, self.context.config.batch_keys_max):
            chosen = raw[part.start : part.stop]
            answer = await self.context.link.ask("remove", chosen, how.if_leased, how.force, wait_ms=5_000)
            codes += [RemoveCode(code) for code in answer[1]]
        if self.context.cache is not None:
            for key in raw:
                self.context.cache.forget(key)
        return codes

    async def remove_prefix(self, prefix: bytes | None, how: Removal) -> int:
        """How many objects whose keys begin so (None: all of the tenant) were removed."""
        cursor: Any = None
        removed = 0
        method, first = ("remove_all", ()) if prefix is None else ("remove_prefix", (prefix,))
        while True:
            answer = await self.context.link.ask(
                method, *first, how.if_leased, how.force, _PAGE_KEYS, cursor, wait_ms=5_000
            )
            removed += int(answer[1])
            cursor = answer[2]
            if cursor is None:
                break
        if self.context.cache is not None:
            self.context.cache.clear()
        return removed

    async def page(self, prefix: bytes, cursor: Any) -> tuple[list[Listed], Any]:
        """The next objects whose keys begin so, and a cursor for those after them, None at the end."""
        answer = await self.context.link.ask("list", prefix, _PAGE_KEYS, cursor)
        found = [
            Listed(key, size, object_type, Pin(pin), places)
            for key, size, object_type, pin, places in answer[1]
        ]
        return found, answer[2]

    async def stat_many(self, keys: Sequence[Key]) -> list[dict[str, Any] | None]:
        """What the master knows of each key; None for a key without an object."""
        answer = await self.context.link.ask("stat", [as_key(key) for key in items(keys, "keys")])
        return list(answer[1])

    async def pin_many(self, keys: Sequence[Key], pin: Pin, soft_pin_ms: int) -> list[bool]:
        """True for each key that has an object, whose pin is as asked now."""
        raw = [as_key(key) for key in items(keys, "keys")]
        kind, lasts = pin_of(pin, soft_pin_ms)
        answer = await self.context.link.ask("pin", raw, int(kind), lasts)
        return [code == 0 for code in answer[1]]

    async def status(self) -> dict[str, Any]:
        """Gauges, nodes and segments, as the master tells them."""
        answer: dict[str, Any] = await self.context.link.ask_plain("status")
        return answer


def check_part(part: tuple[int, int | None]) -> tuple[int, int | None]:
    """Offset and length of a range; UsageError unless they are whole numbers from 0."""
    offset, length = part
    if not isinstance(offset, int) or offset < 0:
        raise UsageError(f"offset={offset!r}: a range begins at a whole number from 0", field="offset")
    if length is not None and (not isinstance(length, int) or length < 0):
        raise UsageError(f"length={length!r}: a range has a whole number of bytes", field="length")
    return offset, length


def first_error(results: Sequence[GetResult | PutResult]) -> MoonpoolError | None:
    """The first key's error among the results of a many-form; None when each ended in an outcome."""
    return next((result.error for result in results if result.error is not None), None)
