"""The pool as its users hold it: objects in and out, from any thread.

`connect` makes one. Outcomes are results (stored, exists, no space; hit, miss), failures are errors. After
`close`, and in a forked child, every call raises a typed error.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, final

from moonpool.errors import EngineClosed, UsageError
from moonpool.store.client_arguments import items, policy_of, prefix_of, wait_of
from moonpool.store.client_calls import Calls, Key, Removal
from moonpool.store.client_config import ClientConfig
from moonpool.store.client_io import BlockingIo, run_now
from moonpool.store.client_parts import PoolParts, build_parts, settle
from moonpool.store.client_quick import Quick
from moonpool.store.client_results import GetResult, Listed, PutPolicy, PutResult
from moonpool.store.keys import as_key
from moonpool.store.records import Pin, RemoveCode
from moonpool.store.value import Value
from moonpool.store.view import View

_Result = TypeVar("_Result")


@final
class Pool:
    """A pool of objects. Thread-safe; use it as a context manager, or call `close`."""

    def __init__(self, parts: PoolParts) -> None:
        self._parts = parts
        self._calls: Calls = parts.calls
        self._quick = Quick(parts.context, parts.calls.reader)
        self._put_wait_ms = parts.context.config.put_wait_ms
        self._verifies_fully = parts.context.config.verify in ("full", "range")
        self._closing = threading.Lock()

    # ---- put -----------------------------------------------------------------------------------------------

    def put(
        self,
        key: Key,
        data: Any,
        *,
        policy: PutPolicy | None = None,
        wait_ms: int | None = None,
        **settings: Any,
    ) -> PutResult:
        """Store an object: STORED, EXISTS (nothing changed) or NO_SPACE.

        `data` is any contiguous buffer on the host, or a list of buffers that follow each other. Further
        keywords are those of `PutPolicy`: replicas, pin, group, object_type, preferred, need_all, ...
        `wait_ms` is how long to wait for space.
        """
        if policy is None and not settings:
            waits = wait_of(wait_ms, self._put_wait_ms)
            quick = self._quick.put(key, data, waits)
            if quick is not None:
                return quick
        return self._run(self._calls.put(key, data, policy_of(policy, settings), wait_ms))

    def put_from(
        self,
        key: Key,
        buffers: Sequence[Any],
        *,
        policy: PutPolicy | None = None,
        wait_ms: int | None = None,
        **settings: Any,
    ) -> PutResult:
        """Store the bytes of several buffers, one after another, as one object: `put` of a list of them."""
        return self.put(key, items(buffers, "buffers"), policy=policy, wait_ms=wait_ms, **settings)

    def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        *,
        policy: PutPolicy | None = None,
        wait_ms: int | None = None,
        **settings: Any,
    ) -> list[PutResult]:
        """Store many objects with a handful of messages: one result a key, in order.

        A key that fails alone has a FAILED result with its error. Of a key given twice the first is stored
        (the last with `replace`).
        """
        return self._run(self._calls.put_many(keys, values, policy_of(policy, settings), wait_ms))

    def upsert(self, key: Key, data: Any, *, wait_ms: int | None = None, **settings: Any) -> PutResult:
        """Store an object in place of the one that has the key, if any.

        When it returns nobody can get the old object any more; until then readers get the old one, whole.
        """
        return self._run(self._calls.put(key, data, policy_of(None, settings, replace=True), wait_ms))

    # ---- get -----------------------------------------------------------------------------------------------

    def get(
        self, key: Key, *, offset: int = 0, length: int | None = None, verify: str | None = None
    ) -> Value | None:
        """The object's bytes in memory of the pool, or None for a miss. DataLost when no copy is readable.

        With `offset` or `length` a part of them: less than asked for where the object ends.
        """
        if offset or length is not None:
            return self._run(self._calls.get_range(key, (offset, length), verify))
        if verify is None and self._verifies_fully:
            quick = self._quick.get(key)
            if quick is not None:
                return quick if isinstance(quick, Value) else None
        return self._run(self._calls.get_many([key], verify))[0]

    def get_many(self, keys: Sequence[Key], *, verify: str | None = None) -> list[Value | None]:
        """A value a key, None for each miss. Raises when an object cannot be read: see `get_into_many`."""
        return self._run(self._calls.get_many(keys, verify))

    def get_into(
        self,
        key: Key,
        destination: Any,
        *,
        offset: int = 0,
        length: int | None = None,
        verify: str | None = None,
    ) -> GetResult:
        """Read an object into your memory: HIT with its length, or MISS.

        `destination` is a writable buffer, or a list of them to be filled one after another. With `offset` or
        `length` a part of the object is read; with an offset alone, as much as fits.
        """
        if offset or length is not None:
            return self._run(self._calls.get_range_into(key, destination, (offset, length), verify))
        if verify is None and self._verifies_fully:
            quick = self._quick.get_into(key, destination)
            if quick is not None:
                return quick
        return self._run(self._calls.get_into(key, destination, verify))

    def get_into_many(
        self, keys: Sequence[Key], destinations: Sequence[Any], *, verify: str | None = None
    ) -> list[GetResult]:
        """Read many objects into your memory: one result a key. A failed one's destination is cleared."""
        return self._run(self._calls.get_into_many(keys, destinations, verify))

    def view(self, key: Key) -> View | None:
        """The object's bytes read in place, in the memory of a node on this host; None for a miss.

        Nothing is copied, and the node keeps the bytes until the view is closed, whatever becomes of the key.
        Close it soon. NotOnThisHost when no copy is here, LimitExceeded at views_max.
        """
        return self._run(self._calls.view(key))

    # ---- names ---------------------------------------------------------------------------------------------

    def exists(self, key: Key) -> bool:
        """True when the key has a complete object."""
        quick = self._quick.exists(key)
        return self._run(self._calls.exists_many([key]))[0] if quick is None else quick

    def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        """`exists` for many keys with one message."""
        return self._run(self._calls.exists_many(keys))

    def remove(self, key: Key, *, if_leased: str = "defer", force: bool = False) -> RemoveCode:
        """Remove an object: REMOVED, ABSENT, LEASED (only with if_leased="refuse") or PINNED.

        When it returns nobody can get the object any more. `force` removes hard-pinned ones too.
        """
        return self._run(self._calls.remove_many([key], Removal(if_leased, force).check()))[0]

    def remove_many(
        self, keys: Sequence[Key], *, if_leased: str = "defer", force: bool = False
    ) -> list[RemoveCode]:
        """`remove` for many keys: one code a key."""
        return self._run(self._calls.remove_many(keys, Removal(if_leased, force).check()))

    def remove_prefix(self, prefix: Key, *, if_leased: str = "defer", force: bool = False) -> int:
        """Remove every object whose key begins so; how many there were."""
        how = Removal(if_leased, force).check()
        return self._run(self._calls.remove_prefix(as_key(prefix), how))

    def remove_all(self, *, if_leased: str = "defer", force: bool = False) -> int:
        """Remove every object of the tenant; how many there were."""
        return self._run(self._calls.remove_prefix(None, Removal(if_leased, force).check()))

    def list(self, prefix: Key = b"") -> Iterator[Listed]:
        """Every object whose key begins so, page by page. What comes and goes meanwhile may be missed."""
        cursor: Any = None
        while True:
            page, cursor = self._run(self._calls.page(prefix_of(prefix), cursor))
            yield from page
            if cursor is None:
                return

    def stat(self, key: Key) -> dict[str, Any] | None:
        """What the master knows of an object; None when there is none."""
        return self._run(self._calls.stat_many([key]))[0]

    def pin(self, key: Key, pin: Pin = Pin.HARD, *, soft_pin_ms: int = 0) -> bool:
        """Pin an object, or with Pin.NONE let it go; False when there is none."""
        return self._run(self._calls.pin_many([key], pin, soft_pin_ms))[0]

    def status(self) -> dict[str, Any]:
        """The pool's gauges, nodes and segments."""
        return self._run(self._calls.status())

    # ---- life ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Counters of the engine that moves this pool's bytes: see `Engine.metrics`."""
        if self._parts.ended:
            raise self._parts.ended()
        return self._parts.context.engine.metrics()

    @property
    def config(self) -> ClientConfig:
        """The settings that the pool was made with."""
        return self._parts.context.config

    def close(self) -> None:
        """Leave the pool and end what runs; idempotent. Values stay usable."""
        with self._closing:
            run_now(self._parts.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UsageError(
            "a pool cannot be pickled: it owns sockets and threads; connect in the other process"
        )

    def _run(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        if self._parts.ended:
            step.close()
            raise self._parts.ended()
        try:
            return run_now(step)
        except EngineClosed:
            # Another thread closed the pool meanwhile.
            if self._parts.ended:
                raise self._parts.ended() from None
            raise


def connect(*addresses: str, config: ClientConfig | None = None, **settings: Any) -> Pool:
    """Join a pool. `addresses` are those of its masters: "host:port", "/path/of/a/socket" or "@name".

    Without an address the pool is embedded: master and node live in this process and its end is theirs.
    Further keywords are the fields of `ClientConfig`, and `secret` (the cluster secret) and `transports` of
    its engine.
    Raises MasterUnavailable, AccessDenied, TenantRefused, UsageError.
    """
    return Pool(run_now(build_parts(settle(addresses, config, settings), BlockingIo)))
