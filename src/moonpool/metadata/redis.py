"""Metadata in Redis: one hash per name with a lease (its TTL), a generation counter, and an index by expiry.

Theory of operation. An entry is {instance, generation, record}, and (instance, generation) is what every
change compares with: `publish` writes an entry only if the name is free or still held by the pair that the
caller saw, so two processes can never both believe that they took a name. A name whose holder died need not
wait for its lease: `register` asks the injected probe whether the holder runs, and replaces it at once if
it does not. A renewal is the same `publish`, of what is already there.

Keys share the hash tag {moonpool}, so that they live in one slot of a Redis Cluster:
    {moonpool}:segment:<name>    hash  instance, generation, record (JSON); expires with the lease
    {moonpool}:generation        integer, the highest generation ever given
    {moonpool}:segments          sorted set of names by expiry (ms of Redis's clock), for `list`
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from moonpool.clock import BootClock, Clock
from moonpool.errors import (
    AccessDenied,
    EngineClosed,
    MetadataUnavailable,
    MoonpoolError,
    NameInUse,
    NoSuchSegment,
    ProtocolError,
    UsageError,
)
from moonpool.metadata.base import (
    Lease,
    LeaseState,
    Probe,
    Record,
    decode_record,
    encode_record,
)
from moonpool.metadata.lease_keeper import LeaseKeeper
from moonpool.units import MS_PER_S

PREFIX: Final = "{moonpool}"
GENERATION_KEY: Final = f"{PREFIX}:generation"
INDEX_KEY: Final = f"{PREFIX}:segments"
_ENTRY_PREFIX: Final = f"{PREFIX}:segment:".encode()
_LOG: Final = logging.getLogger("moonpool.metadata")
#: How often `register` looks again when the name changes hands under it.
REGISTER_ATTEMPTS_MAX: Final = 4
#: Most records that `list` returns.
LIST_MAX: Final = 65_536
LIST_PAGE: Final = 512

# KEYS entry, counter, index. ARGV name, instance and generation seen ("" and "0": none), instance, record,
# lease_ms, generation to keep (0: a new one). Answers {1, generation}, or the holder {0, generation, record}.
_PUBLISH: Final = """
local held = redis.call('HMGET', KEYS[1], 'instance', 'generation', 'record')
if held[1] and (held[1] ~= ARGV[2] or held[2] ~= ARGV[3]) then
    return {0, held[2] or '', held[3] or ''}
end
local generation = tonumber(ARGV[7])
local highest = tonumber(redis.call('GET', KEYS[2]) or '0')
if generation == 0 then generation = highest + 1 end
if generation > highest then redis.call('SET', KEYS[2], string.format('%d', generation)) end
local text = string.format('%d', generation)
redis.call('HSET', KEYS[1], 'instance', ARGV[4], 'generation', text, 'record', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now_ms))
redis.call('ZADD', KEYS[3], string.format('%.0f', now_ms + ARGV[6]), ARGV[1])
return {1, generation}
"""

# KEYS entry, index. ARGV name, instance and generation held. Answers 1 when the entry was ours.
_WITHDRAW: Final = """
local held = redis.call('HMGET', KEYS[1], 'instance', 'generation')
if held[1] ~= ARGV[2] or held[2] ~= ARGV[3] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""


@final
@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How Redis is reached: URL (redis://, rediss://, redis+unix://), longest wait per answer, lease."""

    url: str
    timeout_ms: int
    lease_ms: int


@final
class RedisMetadata:
    """Names in Redis. Thread-safe; one thread renews the leases; each call ends within a few timeouts.

    `probe(record)` must answer in bounded time and return False only when the process behind the record is
    surely gone (refused, or another instance answers there). `changed(lease)` hears of lease states.
    """

    def __init__(
        self,
        options: RedisOptions,
        probe: Probe,
        changed: Callable[[Lease], None] = lambda lease: None,
        clock: Clock | None = None,
    ) -> None:
        self._options = options
        self._probe = probe
        self._clock = clock or BootClock()
        self._address = _without_secrets(options.url)
        self._client = _connect(options)
        self._publish = self._client.register_script(_PUBLISH)
        self._withdraw = self._client.register_script(_WITHDRAW)
        self._keeper = LeaseKeeper(self._renew, options.lease_ms, self._clock, changed)
        # Held over one exchange, so that a renewal under way cannot publish again what `withdraw` removed.
        self._exchange = threading.Lock()
        self._closed = False

    def register(self, record: Record) -> Lease:
        """Publishes a record; a dead holder is replaced at once, a live one raises `NameInUse`."""
        seen: Record | None = None
        for _ in range(REGISTER_ATTEMPTS_MAX):
            self._check_open()
            asked_ns = self._clock.now_ns()
            generation, holder = self._publish_once(record, seen, keep_generation=0)
            if holder is None:
                return self._keep(record.with_generation(generation), asked_ns)
            # Our own instance there means that an earlier answer was lost on the way: take it over.
            if holder.instance != record.instance and self._probe(holder):
                raise NameInUse(name=record.name, peer=holder.endpoint)
            seen = holder
        raise NameInUse(
            f"the name changed hands {REGISTER_ATTEMPTS_MAX} times; choose another", name=record.name
        )

    def resolve(self, name: str) -> Record:
        """The live record of a name."""
        self._check_open()
        with self._exchanging():
            fields: Any = self._client.hmget(_entry_key(name), "record", "generation")
        if fields[0] is None or fields[1] is None:
            raise NoSuchSegment(name=name)
        return _read_entry(fields[0], fields[1])

    def list(self) -> list[Record]:
        """All live records by name, at most LIST_MAX; entries that end while it runs are left out."""
        self._check_open()
        with self._exchanging():
            seconds, microseconds = self._client.time()
            now_ms = seconds * MS_PER_S + microseconds // MS_PER_S
            names: Any = self._client.zrangebyscore(INDEX_KEY, now_ms, "+inf", start=0, num=LIST_MAX)
        records: list[Record] = []
        for start in range(0, len(names), LIST_PAGE):
            records += self._read_page(names[start : start + LIST_PAGE])
        return sorted(records, key=lambda record: record.name)

    def withdraw(self, lease: Lease) -> None:
        """Takes a name back; when Redis is away the entry ends with its lease, and this raises."""
        held = self._keeper.drop(lease)
        lease.ended(LeaseState.WITHDRAWN)
        if held:
            self._remove_entry(lease.record)

    def close(self) -> None:
        """Withdraws what is held (entries that Redis cannot drop now end with their leases); idempotent."""
        self._closed = True
        leases = self._keeper.leases()
        self._keeper.close(self._options.timeout_ms / MS_PER_S)
        try:
            for lease in leases:
                lease.ended(LeaseState.WITHDRAWN)
                self._remove_entry(lease.record)
        except MetadataUnavailable:
            pass  # Redis is away: trying the next lease would only wait as long again
        finally:
            self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the metadata service of this engine is closed; make a new engine")

    def _publish_once(
        self, record: Record, seen: Record | None, keep_generation: int
    ) -> tuple[int, Record | None]:
        """One compare-and-replace: (generation, None) when published, else (0, the holder)."""
        arguments: list[str | int] = [
            record.name,
            seen.instance.hex() if seen else "",
            seen.generation if seen else 0,
            record.instance.hex(),
            encode_record(record),
            self._options.lease_ms,
            keep_generation,
        ]
        keys: list[bytes | str] = [_entry_key(record.name), GENERATION_KEY, INDEX_KEY]
        with self._exchanging():
            answer: Any = self._publish(keys, arguments)
        if answer[0] == 1:
            return int(answer[1]), None
        try:
            return 0, _read_entry(answer[2], answer[1])
        except ProtocolError as exc:
            raise NameInUse(f"the name is held by an unreadable entry: {exc}", name=record.name) from exc

    def _keep(self, record: Record, asked_ns: int) -> Lease:
        lease = Lease(record)
        try:
            self._keeper.add(lease, asked_ns)
        except MoonpoolError:
            self._remove_entry(record)
            raise
        return lease

    def _renew(self, lease: Lease) -> None:
        """Extends a lease, or publishes it again under its generation when Redis lost it."""
        record = lease.record
        with self._exchange:
            if lease.report().state is LeaseState.WITHDRAWN:
                return
            _, holder = self._publish_once(record, record, record.generation)
        if holder is not None:
            raise NameInUse(name=record.name, peer=holder.endpoint)

    def _remove_entry(self, record: Record) -> None:
        keys: list[bytes | str] = [_entry_key(record.name), INDEX_KEY]
        with self._exchange, self._exchanging():
            self._withdraw(keys, [record.name, record.instance.hex(), record.generation])

    def _read_page(self, names: Sequence[bytes]) -> Iterator[Record]:
        with self._exchanging(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(_ENTRY_PREFIX + name, "record", "generation")
            entries = pipeline.execute()
        for name, (text, generation) in zip(names, entries, strict=True):
            if text is None or generation is None:
                continue
            try:
                yield _read_entry(text, generation)
            except ProtocolError as exc:
                _LOG.warning("the metadata entry %r is left out of the list: %s", name, exc)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Turns what redis-py raises into ours: away (to be retried) or refused."""
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as exc:
            raise AccessDenied(
                "Redis refused the user or password in the config field metadata",
                peer=self._address,
                reason=str(exc),
            ) from exc
        except (redis.RedisError, OSError, ValueError) as exc:
            raise MetadataUnavailable(
                f"Redis does not answer as it should: {exc}; check the config field metadata",
                peer=self._address,
                reason=str(exc),
                timeout_ms=self._options.timeout_ms,
            ) from exc


def _entry_key(name: str) -> bytes:
    return _ENTRY_PREFIX + name.encode()


def _read_entry(text: bytes, generation: bytes) -> Record:
    """The record of an entry's fields; raises `ProtocolError` for what this Moonpool would not write."""
    if not generation.isdigit() or len(generation) > 20:
        raise ProtocolError(f"the metadata entry has the generation {generation[:20]!r}")
    return decode_record(text, int(generation))


def _connect(options: RedisOptions) -> redis.Redis:
    url = options.url
    if url.startswith("redis+unix://"):
        url = url.removeprefix("redis+")
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,  # one round trip fewer when connecting
            socket_timeout=options.timeout_ms / MS_PER_S,
            socket_connect_timeout=options.timeout_ms / MS_PER_S,
            retry=Retry(NoBackoff(), 0),  # the callers retry, within bounds of their own
            retry_on_timeout=False,
        )
    except ValueError as exc:
        raise UsageError(f"config field metadata is not a Redis URL: {exc}", field="metadata") from exc


def _without_secrets(url: str) -> str:
    """Scheme and place of a URL: what may be shown in logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
