"""The way to the master that leads: connect, join, follow the leader, try again, and in the end say so.

Every call goes to the connection at hand. When that fails for a reason that another try could cure (the
master died, stands by, is not ready, does not know us any more) the link looks for the leader among its
addresses until `unavailable_ms` is over, then raises `MasterUnavailable`. What the master refuses is raised
at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.errors import AccessDenied, MoonpoolError, PeerError, ProtocolError
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.store.client_io import answer_of
from moonpool.store.errors import (
    MasterUnavailable,
    NotLeader,
    NotReady,
    Overloaded,
    PoolClosed,
    StaleEpoch,
    StoreError,
    UnknownClient,
)
from moonpool.units import MS_PER_S

if TYPE_CHECKING:
    from moonpool.native.io.rpc_codec import EndReply, LookupReply, PutReply
    from moonpool.store.client_config import ClientConfig
    from moonpool.store.client_io import Io

#: Another master, or the same one a little later, may answer.
_ELSEWHERE: Final = (NotLeader, NotReady, StaleEpoch, UnknownClient)
#: The other end answered, and no other try or address would cure what it said.
_FINAL: Final = (StoreError, RpcError, AccessDenied)
_EPOCH_OF_REPLY: Final = attrgetter("epoch")
_MS: Final = 1 / MS_PER_S


@final
class MasterLink:
    """One at a time: the connection to the leader. Thread-safe with a blocking `io`."""

    def __init__(self, config: ClientConfig, io: Io, who: tuple[bytes, str, str]) -> None:
        self._config = config
        self._io = io
        self._instance, self._name, self._host = who
        self._lock = io.lock()
        self._addresses = list(config.addresses)
        self._limits = ClientLimits(
            connect_ms=config.connect_timeout_ms, handshake_ms=config.connect_timeout_ms
        )
        self._timeout_s = config.request_timeout_ms * _MS
        #: Of answers that a master has at once.
        self.quick_timeout_s = config.lookup_timeout_ms * _MS
        self._closed = False
        #: The connection, joined; None while there is none. The hot paths use it directly.
        self.client: Any = None
        #: Highest epoch heard; replies of a lower one are refused.
        self.epoch = 0
        #: How often a connection was made: open puts end with their connection.
        self.joins = 0
        self.client_id = 0
        self.tenant_id = 0
        #: Called with the master's settings at each join.
        self.on_join: Callable[[dict[str, Any]], None] = lambda _settings: None

    async def ask(self, method: str, *params: Any, wait_ms: int = 0) -> Any:
        """The result of a method whose reply begins with the epoch. Raises the store's errors."""
        told = list(params)
        return await self.until_answered(
            lambda client, limit_s: client.call(method, told, limit_s),
            self._timeout_s + wait_ms * _MS,
            epoch_of_result,
        )

    async def ask_plain(self, method: str, *params: Any, wait_ms: int = 0) -> Any:
        """The result of a method whose reply carries no epoch."""
        told = list(params)
        return await self.until_answered(
            lambda client, limit_s: client.call(method, told, limit_s), self._timeout_s + wait_ms * _MS
        )

    async def lookup(self, keys: Sequence[bytes], lease_ms: int) -> LookupReply:
        """Where each key's object lies."""
        reply: LookupReply = await self._hot(
            lambda hot, limit_s: hot.lookup(keys, lease_ms, limit_s), self.quick_timeout_s
        )
        return reply

    async def put_start(
        self, keys: Sequence[bytes], sizes: Sequence[int], policy: bytes | None, wait_ms: int
    ) -> PutReply:
        """Extents for new objects. `policy` is the MessagePack of its map."""
        reply: PutReply = await self._hot(
            lambda hot, limit_s: hot.put_start(keys, sizes, policy, wait_ms, limit_s),
            self.quick_timeout_s + wait_ms * _MS,
        )
        return reply

    async def put_end(
        self, put_id: int, indexes: Sequence[int], digests: bytes, chunks: Sequence[bytes] | None
    ) -> EndReply:
        """Objects of which every copy was written."""
        reply: EndReply = await self._hot(
            lambda hot, limit_s: hot.put_end(put_id, indexes, digests, chunks, limit_s), self._timeout_s
        )
        return reply

    async def exists(self, keys: Sequence[bytes], lease_ms: int) -> bytes:
        """One byte a key."""
        io = self._io
        flags: bytes = await self.until_answered(
            lambda client, limit_s: io.hot(client).exists(keys, lease_ms, limit_s),
            self.quick_timeout_s,
        )
        return flags

    async def _hot(self, call: Callable[[Any, float], Any], limit_s: float) -> Any:
        io = self._io
        return await self.until_answered(
            lambda client, bound_s: call(io.hot(client), bound_s), limit_s, _EPOCH_OF_REPLY
        )

    async def until_answered(
        self,
        call: Callable[[Any, float], Any],
        limit_s: float,
        epoch_of: Callable[[Any], int] | None = None,
    ) -> Any:
        """Makes a call on the connection to the leader; looks for a leader as long as the config allows.

        `call` gets the connection and `limit_s`, the time for one try. `epoch_of` finds the epoch in the
        answer, where it has one.
        """
        give_up = time.monotonic() + self._config.unavailable_ms * _MS
        pause_ms = self._config.retry_first_ms
        while True:
            client = self.client
            try:
                if client is None:
                    client = await self._join(give_up)
                answer = await answer_of(self._io, call(client, limit_s))
                if epoch_of is not None:
                    self.note_epoch(epoch_of(answer))
                return answer
            except MoonpoolError as problem:
                failure = problem
                await self.failed(client, failure)
            if time.monotonic() >= give_up:
                raise self._unavailable(failure) from failure
            await self._io.pause(pause_ms * _MS)
            pause_ms = min(2 * pause_ms, self._config.retry_max_ms)

    async def failed(self, client: Any, failure: MoonpoolError) -> None:
        """Lets a connection go that another try would not use; raises what no other try can cure."""
        if self._closed:
            raise PoolClosed() from failure
        if isinstance(failure, Overloaded):
            return
        if isinstance(failure, MasterUnavailable):
            raise failure
        elsewhere = isinstance(failure, _ELSEWHERE)
        broken = isinstance(failure, PeerError) and not isinstance(failure, _FINAL)
        if not elsewhere and not broken:
            raise failure
        if isinstance(failure, NotLeader):
            self._prefer(failure)
        elif client is not None and client is self.client:
            self._addresses.append(self._addresses.pop(0))  # the one that failed is asked last
        if client is not None:
            await self._let_go(client)

    def note_epoch(self, epoch: int) -> None:
        """Takes a reply's epoch; StaleEpoch when a later leader was heard before."""
        if epoch != self.epoch:
            if epoch < self.epoch:
                raise StaleEpoch("a master that no longer leads answered; asking the next one")
            self.epoch = epoch

    async def close(self) -> None:
        """Ends the connection; calls in progress raise PoolClosed."""
        self._closed = True
        client = self.client
        if client is not None:
            await self._let_go(client)

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._closed = True
        client, self.client = self.client, None
        fd = -1 if client is None else client.fileno()
        if fd >= 0:
            # Not closed, for that would end the parent's connection; the number must stay taken until then.
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), fd, inheritable=False)

    async def _join(self, give_up: float) -> Any:
        """The connection to a master that took us in; tries each address once."""
        async with self._lock:
            if self.client is not None:
                return self.client
            failure: MoonpoolError = PoolClosed() if self._closed else MasterUnavailable()
            for address in [] if self._closed else list(self._addresses):
                try:
                    client = await self._join_one(address)
                except MoonpoolError as problem:
                    failure = problem
                    final = isinstance(failure, _FINAL) and not isinstance(failure, _ELSEWHERE)
                    if final or not isinstance(failure, PeerError | UnknownClient):
                        raise
                    if isinstance(failure, NotLeader):
                        self._prefer(failure)
                    if time.monotonic() >= give_up:
                        break
                    continue
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                self.client = client
                self.joins += 1
                return client
            raise failure

    async def _join_one(self, address: str) -> Any:
        config = self._config
        client = await self._io.connect(address, config.engine.cluster_secret, self._limits)
        try:
            who = [self._instance, self._name, self._host, config.tenant, config.token or b""]
            given = client.call("client_join", who, self._timeout_s)
            result = await answer_of(self._io, given)
            self.note_epoch(epoch_of_result(result))
            if len(result) < 4 or not isinstance(result[3], dict):
                raise ProtocolError("the master's answer to client_join is not one", peer=address)
            self.client_id, self.tenant_id = result[1], result[2]
            self.on_join(result[3])
        except BaseException:
            await answer_of(self._io, client.close())
            raise
        return client

    def _prefer(self, failure: NotLeader) -> None:
        """Asks the named leader next, if it is one of ours; else the next in turn."""
        named = [address for address in self._addresses if address in failure.message]
        if named:
            self._addresses.remove(named[0])
            self._addresses.insert(0, named[0])
        elif self._addresses:
            self._addresses.append(self._addresses.pop(0))

    async def _let_go(self, client: Any) -> None:
        if self.client is client:
            self.client = None
        await answer_of(self._io, client.close())

    def _unavailable(self, failure: MoonpoolError) -> MasterUnavailable:
        told = "" if isinstance(failure, MasterUnavailable) else f" ({failure})"
        return MasterUnavailable(
            f"no master that leads answered{told}; check the addresses, and that a master runs",
            peer=", ".join(self._addresses),
            timeout_ms=self._config.unavailable_ms,
            reason=str(failure),
        )


def epoch_of_result(result: Any) -> int:
    """The epoch with which a result begins; ProtocolError when it does not."""
    if not isinstance(result, list | tuple) or not result or type(result[0]) is not int:
        raise ProtocolError("the master's reply does not begin with its epoch")
    epoch: int = result[0]
    return epoch


def spread(keys: Sequence[Any], most: int) -> list[range]:
    """Ranges of indexes of at most `most` each."""
    return [range(start, min(start + most, len(keys))) for start in range(0, len(keys), most)]
