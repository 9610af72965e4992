"""The pool for asyncio: the same calls, awaited. Nothing runs in a thread pool but what opens connections.

Requests go over one pipelined connection, transfers are awaited through descriptors, and a cancelled task's
transfers have ended before the task has: its buffers are its own again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, final

from moonpool.errors import MoonpoolError, UsageError
from moonpool.rpc.aio import AsyncRpcClient
from moonpool.store.client_arguments import items, policy_of, prefix_of
from moonpool.store.client_calls import Calls, Key, Removal
from moonpool.store.client_config import ClientConfig
from moonpool.store.client_io import Work, error_of_fault
from moonpool.store.client_parts import PoolParts, build_parts, settle
from moonpool.store.client_results import GetResult, Listed, PutPolicy, PutResult
from moonpool.store.keys import as_key
from moonpool.store.records import Pin, RemoveCode
from moonpool.store.value import Value
from moonpool.store.view import View
from moonpool.units import KIB

if TYPE_CHECKING:
    from moonpool.engine.batch import Batch
    from moonpool.engine.engine import Engine
    from moonpool.rpc.limits import ClientLimits

_Result = TypeVar("_Result")
#: Copies up to this size are done at once: the loop is held for less time than a switch takes.
_AT_ONCE_BYTES: Final = 256 * KIB


@final
class LoopIo:
    """Awaits. For one event loop."""

    awaits: bool = True

    def __init__(self, engine: Engine) -> None:
        self._transfers = engine.transfers

    def lock(self) -> asyncio.Lock:
        """A lock of the loop."""
        return asyncio.Lock()

    async def connect(self, address: str, secret: bytes | None, limits: ClientLimits) -> AsyncRpcClient:
        """A pipelined connection."""
        return await AsyncRpcClient.connect(
            address,
            secret=secret,
            limits=limits,
            make_error=lambda fault: error_of_fault(fault, address),
        )

    def hot(self, client: Any) -> Any:
        """The connection itself has them."""
        return client

    async def pause(self, seconds: float) -> None:
        """Lets other tasks run meanwhile."""
        await asyncio.sleep(seconds)

    async def blocking(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """In a thread: opening a segment takes milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(None, work, *args)

    async def carry(self, works: Sequence[Work]) -> None:
        """Small copies at once, everything else side by side. Cancelled, it ends them before it returns."""
        transfers = self._transfers
        waiting: list[Batch] = []
        try:
            for work in works:
                if not work.target.is_near or work.batch.total_bytes > _AT_ONCE_BYTES:
                    waiting.append(transfers.launch(work.target.peer, work.batch))  # noqa: PERF401
            for work in works:
                if work.target.is_near and work.batch.total_bytes <= _AT_ONCE_BYTES:
                    transfers.carry(work.target.peer, work.batch)
            for batch in waiting:
                await _end_of(batch)
        except BaseException:
            for batch in waiting:
                batch.cancel()
            raise


async def _end_of(batch: Batch) -> None:
    """The end of a batch, whatever its outcome: that is in its statuses."""
    try:
        await batch
    except MoonpoolError:
        return


@final
class AsyncPool:
    """A pool of objects for one event loop; see `moonpool.store.client.Pool` for what each call does."""

    def __init__(self, parts: PoolParts) -> None:
        self._parts = parts
        self._calls: Calls = parts.calls

    async def put(
        self,
        key: Key,
        data: Any,
        *,
        policy: PutPolicy | None = None,
        wait_ms: int | None = None,
        **settings: Any,
    ) -> PutResult:
        """Store an object: STORED, EXISTS or NO_SPACE."""
        return await self._run(self._calls.put(key, data, policy_of(policy, settings), wait_ms))

    async def put_from(
        self,
        key: Key,
        buffers: Sequence[Any],
        *,
        policy: PutPolicy | None = None,
        wait_ms: int | None = None,
        **settings: Any,
    ) -> PutResult:
        """Store the bytes of several buffers, one after another, as one object."""
        return await self.put(key, items(buffers, "buffers"), policy=policy, wait_ms=wait_ms, **settings)

    async def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        *,
        policy: PutPolicy | None = None,
        wait_ms: int | None = None,
        **settings: Any,
    ) -> list[PutResult]:
        """Store many objects: one result a key."""
        return await self._run(self._calls.put_many(keys, values, policy_of(policy, settings), wait_ms))

    async def upsert(self, key: Key, data: Any, *, wait_ms: int | None = None, **settings: Any) -> PutResult:
        """Store an object in place of the one that has the key, if any."""
        return await self._run(self._calls.put(key, data, policy_of(None, settings, replace=True), wait_ms))

    async def get(
        self, key: Key, *, offset: int = 0, length: int | None = None, verify: str | None = None
    ) -> Value | None:
        """The object's bytes, or a part of them; None for a miss."""
        if offset or length is not None:
            return await self._run(self._calls.get_range(key, (offset, length), verify))
        return (await self._run(self._calls.get_many([key], verify)))[0]

    async def get_many(self, keys: Sequence[Key], *, verify: str | None = None) -> list[Value | None]:
        """A value a key, None for each miss."""
        return await self._run(self._calls.get_many(keys, verify))

    async def get_into(
        self,
        key: Key,
        destination: Any,
        *,
        offset: int = 0,
        length: int | None = None,
        verify: str | None = None,
    ) -> GetResult:
        """Read an object, or a part of it, into your memory: HIT with its length, or MISS."""
        if offset or length is not None:
            part = (offset, length)
            return await self._run(self._calls.get_range_into(key, destination, part, verify))
        return await self._run(self._calls.get_into(key, destination, verify))

    async def get_into_many(
        self, keys: Sequence[Key], destinations: Sequence[Any], *, verify: str | None = None
    ) -> list[GetResult]:
        """Read many objects into your memory: one result a key."""
        return await self._run(self._calls.get_into_many(keys, destinations, verify))

    async def view(self, key: Key) -> View | None:
        """The object's bytes read in place, in the memory of a node on this host; None for a miss."""
        return await self._run(self._calls.view(key))

    async def exists(self, key: Key) -> bool:
        """True when the key has a complete object."""
        return (await self._run(self._calls.exists_many([key])))[0]

    async def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        """`exists` for many keys with one message."""
        return await self._run(self._calls.exists_many(keys))

    async def remove(self, key: Key, *, if_leased: str = "defer", force: bool = False) -> RemoveCode:
        """Remove an object: REMOVED, ABSENT, LEASED or PINNED."""
        return (await self._run(self._calls.remove_many([key], Removal(if_leased, force).check())))[0]

    async def remove_many(
        self, keys: Sequence[Key], *, if_leased: str = "defer", force: bool = False
    ) -> list[RemoveCode]:
        """`remove` for many keys."""
        return await self._run(self._calls.remove_many(keys, Removal(if_leased, force).check()))

    async def remove_prefix(self, prefix: Key, *, if_leased: str = "defer", force: bool = False) -> int:
        """Remove every object whose key begins so; how many there were."""
        how = Removal(if_leased, force).check()
        return await self._run(self._calls.remove_prefix(as_key(prefix), how))

    async def remove_all(self, *, if_leased: str = "defer", force: bool = False) -> int:
        """Remove every object of the tenant; how many there were."""
        return await self._run(self._calls.remove_prefix(None, Removal(if_leased, force).check()))

    async def list(self, prefix: Key = b"") -> AsyncIterator[Listed]:
        """Every object whose key begins so, page by page."""
        cursor: Any = None
        while True:
            page, cursor = await self._run(self._calls.page(prefix_of(prefix), cursor))
            for one in page:
                yield one
            if cursor is None:
                return

    async def stat(self, key: Key) -> dict[str, Any] | None:
        """What the master knows of an object; None when there is none."""
        return (await self._run(self._calls.stat_many([key])))[0]

    async def pin(self, key: Key, pin: Pin = Pin.HARD, *, soft_pin_ms: int = 0) -> bool:
        """Pin an object, or with Pin.NONE let it go; False when there is none."""
        return (await self._run(self._calls.pin_many([key], pin, soft_pin_ms)))[0]

    async def status(self) -> dict[str, Any]:
        """The pool's gauges, nodes and segments."""
        return await self._run(self._calls.status())

    def metrics(self) -> dict[str, Any]:
        """Counters of the engine that moves this pool's bytes: see `Engine.metrics`."""
        if self._parts.ended:
            raise self._parts.ended()
        return self._parts.context.engine.metrics()

    @property
    def config(self) -> ClientConfig:
        """The settings that the pool was made with."""
        return self._parts.context.config

    async def close(self) -> None:
        """Leave the pool and end what runs; idempotent. Values stay usable."""
        await self._parts.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_problem: object) -> None:
        await self.close()

    def __reduce__(self) -> Any:
        raise UsageError(
            "a pool cannot be pickled: it owns sockets and threads; connect in the other process"
        )

    def _run(self, step: Coroutine[Any, Any, _Result]) -> Awaitable[_Result]:
        if self._parts.ended:
            step.close()
            raise self._parts.ended()
        return step


@final
class Connecting:
    """What `connect_async` returns: await it for the pool, or open an `async with` block."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._pool: AsyncPool | None = None

    def __await__(self) -> Generator[Any, None, AsyncPool]:
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncPool:
        self._pool = await self._connect()
        return self._pool

    async def __aexit__(self, *_problem: object) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _connect(self) -> AsyncPool:
        return AsyncPool(await build_parts(self._config, LoopIo))


def connect_async(*addresses: str, config: ClientConfig | None = None, **settings: Any) -> Connecting:
    """`moonpool.connect` for asyncio: `async with connect_async("host:7420") as pool:`, or await it."""
    return Connecting(settle(addresses, config, settings))
