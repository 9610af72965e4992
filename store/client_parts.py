"""A pool's parts, put together and taken apart in order."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from moonpool.engine.engine import Engine
from moonpool.engine.fork import forget_forks, watch_forks
from moonpool.errors import UsageError
from moonpool.store.client_calls import Calls
from moonpool.store.client_config import FIELDS, ClientConfig
from moonpool.store.client_context import Context
from moonpool.store.client_link import MasterLink
from moonpool.store.errors import ForkedPool, MasterUnavailable, PoolClosed, StoreError
from moonpool.store.hedging import Hedger
from moonpool.store.location_cache import LocationCache
from moonpool.store.records import NodeState
from moonpool.store.segments_view import SegmentsView
from moonpool.store.value import ValuePool
from moonpool.units import MS_PER_S, NS_PER_MS

if TYPE_CHECKING:
    from moonpool.store.client_io import Io

#: Settings of `connect` that are the engine's, by its names for them.
_OF_THE_ENGINE = {"secret": "cluster_secret", "cluster_secret": "cluster_secret", "transports": "transports"}
#: A cached location is used for this much of its lease: clocks and messages take the rest.
_LEASE_SHARE = 0.9
_MEMORY_S = 10.0
_MEMORY_PAUSE_S = 0.002


def settle(addresses: tuple[str, ...], config: ClientConfig | None, settings: dict[str, Any]) -> ClientConfig:
    """One config out of what `connect` was given. UsageError for a name that is no setting."""
    changes = dict(settings)
    base = ClientConfig() if config is None else config
    if not isinstance(base, ClientConfig):
        raise UsageError(f"config takes a ClientConfig; got {type(base).__name__}", field="config")
    engine = {_OF_THE_ENGINE[name]: changes.pop(name) for name in _OF_THE_ENGINE.keys() & changes.keys()}
    unknown = sorted(changes.keys() - set(FIELDS))
    if unknown:
        known = ", ".join((*FIELDS, *_OF_THE_ENGINE))
        raise UsageError(f"connect has no setting {unknown[0]!r}; there are {known}", field=unknown[0])
    if addresses:
        changes["addresses"] = addresses
    if engine:
        changes["engine"] = replace(changes.get("engine", base.engine), **engine)
    settled = replace(base, **changes)
    if settled.contribute_bytes and not settled.addresses:
        raise UsageError(
            "contribute_bytes goes with the addresses of a shared pool; the memory of an embedded one is "
            "embedded_bytes",
            field="contribute_bytes",
        )
    return settled


@final
class PoolParts:
    """What one pool owns. `close` in any state, once; afterwards `ended` says what calls raise."""

    def __init__(self, context: Context, owned: list[Callable[[], None]]) -> None:
        self.context = context
        self.calls = Calls(context)
        #: None while calls may be made.
        self.ended: type[StoreError] | None = None
        self._owned = owned
        self._pid = os.getpid()
        watch_forks(self)

    async def close(self) -> None:
        """Leaves the master, then takes the rest apart, in the order opposite to how it was made."""
        if self.ended is not None:
            return
        self.ended = PoolClosed
        forget_forks(self)
        await self.context.link.close()
        await self.context.io.blocking(self.context.hedger.close)
        await self.context.io.blocking(self.calls.desk.close)
        self.context.segments.close()
        await self.context.io.blocking(self._close_owned)

    def abandon_after_fork(self) -> None:
        """In a forked child: every call raises, and the parent's connections stay the parent's."""
        self.ended = ForkedPool
        self._owned.clear()
        self.context.link.abandon()
        self.calls.desk.abandon()

    def _close_owned(self) -> None:
        while self._owned:
            self._owned.pop()()


async def build_parts(config: ClientConfig, make_io: Callable[[Engine], Io]) -> PoolParts:
    """Starts what the pool needs and joins the master. Raises as `connect`; leaves nothing behind then."""
    owned: list[Callable[[], None]] = []
    expected: list[str] = []
    parts: PoolParts | None = None
    engine = Engine(config.engine)
    owned.append(engine.close)
    io = make_io(engine)
    try:
        if not config.addresses:
            from moonpool.store.embedded_pool import EmbeddedPool

            embedded = await io.blocking(EmbeddedPool, config, engine)
            owned.append(embedded.close)
            config = replace(config, addresses=(embedded.address,))
            expected.append(embedded.node.name)
        link = MasterLink(config, io, (engine.instance, _name_of(config), socket.gethostname()))
        segments = SegmentsView(engine, config.segments_open_max, config.connect_timeout_ms / MS_PER_S)
        context = Context(
            config=config,
            engine=engine,
            io=io,
            link=link,
            segments=segments,
            values=ValuePool(engine, config.value_pool_bytes),
            hedger=Hedger(config.hedge_after_us, config.hedges_max),
            cache=_cache_of(config),
        )
        parts = PoolParts(context, owned)
        link.on_join = partial(_take_settings, parts)
        await context.fetch_segments()
        if config.contribute_bytes:
            from moonpool.store.embedded_pool import contribute

            node = await io.blocking(contribute, config, engine)
            owned.append(node.close)
            expected.append(node.name)
        await _wait_for_memory(context, expected)
        return parts
    except BaseException:
        if parts is not None:
            await parts.close()
        while owned:
            owned.pop()()
        raise


async def _wait_for_memory(context: Context, nodes: list[str]) -> None:
    """Until the master gives out extents on our own nodes: it says so a moment after it took them in."""
    give_up = time.monotonic() + _MEMORY_S
    while set(nodes) - {info.node for info in context.segments.infos if info.state == NodeState.ACTIVE}:
        if time.monotonic() >= give_up:
            raise MasterUnavailable("the master does not use this process's memory", value=", ".join(nodes))
        await context.io.pause(_MEMORY_PAUSE_S)
        await context.fetch_segments()


def _name_of(config: ClientConfig) -> str:
    return config.name or f"{socket.gethostname()}-{os.getpid()}"


def _take_settings(parts: PoolParts, settings: dict[str, Any]) -> None:
    """Leases and locations may be trusted for as long as the masters stand by them, and no longer.

    A new join may be with a master that lost its journal: its segments' numbers may mean others.
    """
    parts.context.segments.version = None
    lease_ms, location_lease_ms = settings.get("lease_ms_max"), settings.get("location_lease_ms")
    if type(lease_ms) is int:
        parts.calls.reader.lease_ms_max = min(parts.context.config.lease_ms_max, lease_ms)
    if parts.context.cache is not None and type(location_lease_ms) is int:
        parts.context.cache.shorten(int(location_lease_ms * NS_PER_MS * _LEASE_SHARE))


def _cache_of(config: ClientConfig) -> LocationCache | None:
    if not config.location_cache_keys:
        return None
    lease_ns = int(config.location_lease_ms * NS_PER_MS * _LEASE_SHARE)
    return LocationCache(config.location_cache_keys, lease_ns)
