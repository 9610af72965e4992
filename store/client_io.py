"""How a pool waits: by blocking its thread, or by awaiting in an asyncio loop.

The client's logic is written once, as coroutines over the `Io` protocol. `BlockingIo` never suspends, so
`run_now` drives such a coroutine to its end in one step, as a plain call; `moonpool.store.aio` has the other
one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, final

from moonpool.errors import InternalError, MoonpoolError
from moonpool.rpc.client import RpcClient
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.store.errors import ERRORS_BY_CODE, error_of_code
from moonpool.wire.rpc import RpcFault

if TYPE_CHECKING:
    from moonpool.engine.batch import Batch
    from moonpool.engine.engine import Engine
    from moonpool.native.io.batch import Batch as NativeBatch
    from moonpool.store.segments_view import Target

_Result = TypeVar("_Result")


class Work(NamedTuple):
    """A native batch and the target that it runs on."""

    target: Target
    batch: NativeBatch


class Io(Protocol):
    """What the client's logic asks of its surroundings."""

    @property
    def awaits(self) -> bool:
        """True when the methods of a master's connection return awaitables."""

    def lock(self) -> AbstractAsyncContextManager[Any]:
        """A new lock, for `async with`."""

    async def connect(self, address: str, secret: bytes | None, limits: ClientLimits) -> Any:
        """A connection to a master: `call` and the fast calls, and `close`."""

    def hot(self, client: Any) -> Any:
        """The part of a connection that has the hot methods."""

    async def pause(self, seconds: float) -> None:
        """Lets time pass."""

    async def blocking(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Runs what may block for milliseconds."""

    async def carry(self, works: Sequence[Work]) -> None:
        """Runs batches side by side; returns when every one has ended."""


def run_now(step: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that never suspends."""
    try:
        step.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    step.close()
    raise InternalError("a blocking call was about to suspend")


class _BlockingLock:
    """A thread lock behind `async with`, which never suspends."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_problem: object) -> None:
        self._lock.release()


@final
class BlockingIo:
    """Blocks the calling thread. Safe from any number of threads."""

    awaits: bool = False

    def __init__(self, engine: Engine) -> None:
        self._transfers = engine.transfers

    def lock(self) -> _BlockingLock:
        """A thread lock."""
        return _BlockingLock()

    async def connect(self, address: str, secret: bytes | None, limits: ClientLimits) -> RpcClient:
        """A synchronous connection, to be used by any thread."""
        return RpcClient(
            address,
            secret=secret,
            limits=limits,
            make_error=lambda fault: error_of_fault(fault, address),
        )

    def hot(self, client: Any) -> Any:
        """The native connection: fewest steps in between."""
        return client.native

    async def pause(self, seconds: float) -> None:
        """Sleeps."""
        time.sleep(seconds)

    async def blocking(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Calls it."""
        return work(*args)

    async def carry(self, works: Sequence[Work]) -> None:
        """Near batches one by one, for they are copies; of the far ones this thread drives the last."""
        transfers = self._transfers
        if len(works) == 1:
            transfers.carry(works[0].target.peer, works[0].batch)
            return
        far = [work for work in works if not work.target.is_near]
        launched: list[Batch] = []
        try:
            for work in far[:-1]:  # one by one: what was launched must be known if the next is refused
                launched.append(transfers.launch(work.target.peer, work.batch))  # noqa: PERF401
            for work in (*(work for work in works if work.target.is_near), *far[-1:]):
                transfers.carry(work.target.peer, work.batch)
            for batch in launched:
                batch.wait()
        except BaseException:
            for batch in launched:
                batch.cancel()
            raise


def error_of_fault(fault: RpcFault, address: str) -> MoonpoolError:
    """The store's own class of what a master answered, else the rpc's."""
    if fault.code in ERRORS_BY_CODE:
        return error_of_code(fault.code, fault.message)
    return RpcError(fault, address)


async def answer_of(io: Io, given: _Result | Awaitable[_Result]) -> _Result:
    """What a connection's method returned: at once, or after awaiting it."""
    return await given if io.awaits else given  # type: ignore[misc, return-value]
