"""What the parts of one pool share, and the local memory that a call is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.errors import UsageError
from moonpool.native.io.memory import BufferHold
from moonpool.units import NS_PER_MS

if TYPE_CHECKING:
    from moonpool.engine.engine import Engine
    from moonpool.store.client_config import ClientConfig
    from moonpool.store.client_io import Io
    from moonpool.store.client_link import MasterLink
    from moonpool.store.hedging import Hedger
    from moonpool.store.location_cache import LocationCache
    from moonpool.store.segments_view import SegmentsView
    from moonpool.store.value import ValuePool

#: 50 MB/s.
_NS_PER_BYTE: Final = 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One pool's parts. `cache` is None when locations are not to be remembered."""

    config: ClientConfig
    engine: Engine
    io: Io
    link: MasterLink
    segments: SegmentsView
    values: ValuePool
    hedger: Hedger
    cache: LocationCache | None

    def patience_ns(self, size_bytes: int) -> int:
        """How long a transfer of so much may take: more than a working node on a slow network needs."""
        return self.config.transfer_timeout_ms * NS_PER_MS + size_bytes * _NS_PER_BYTE

    async def fetch_segments(self) -> None:
        """Fetches the list of segments from the master."""
        result = await self.link.ask("segments")
        self.segments.adopt((result[0], result[1]), result[2])


@final
class Span:
    """Local memory in one or more pieces, held in place while this lives."""

    __slots__ = ("addresses", "holds", "lengths", "total")

    def __init__(self, holds: Sequence[Any], addresses: list[int], lengths: list[int]) -> None:
        self.holds = holds
        self.addresses = addresses
        self.lengths = lengths
        self.total = sum(lengths)

    @classmethod
    def of(cls, data: Any, *, writable: bool) -> Span:
        """A buffer, or a list of buffers in a row. UsageError for what is neither."""
        if isinstance(data, list | tuple):
            if not data:
                raise UsageError("a scatter list needs at least one buffer; for an empty value pass b''")
            holds = [BufferHold(one, writable=writable) for one in data]
        else:
            holds = [BufferHold(data, writable=writable)]
        return cls(holds, [hold.address for hold in holds], [hold.size_bytes for hold in holds])

    def first(self, size: int) -> Span:
        """The first `size` bytes of it; there must be so many."""
        return self.part(0, size)

    def part(self, start: int, size: int) -> Span:
        """`size` bytes from `start`; they must lie inside."""
        if start == 0 and size == self.total:
            return self
        addresses: list[int] = []
        lengths: list[int] = []
        skip, left = start, size
        for address, length in zip(self.addresses, self.lengths, strict=True):
            inside = min(max(0, length - skip), left)
            if inside:
                addresses.append(address + skip)
                lengths.append(inside)
            skip = max(0, skip - length)
            left -= inside
            if not left:
                break
        if not lengths:
            addresses, lengths = self.addresses[:1], [0]
        return Span(self.holds, addresses, lengths)
