"""One engine's event stream into a prefix index: order, decode, translate, apply, and say how well it goes.

Pure: bytes and numbers in, a replay to ask for out. A payload that cannot be read counts as not received:
the next message shows the gap, and a replay may bring it whole. A loss or a restart makes the index forget
the instance's blocks of this stream, and the feed is *suspect* from a gap until it is closed or forgotten.

Drift is measured: `note_feedback` takes what an engine reports as really cached beside what the index
believed, and `drift` is the share of believed tokens that were not there, fading over some hundred requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from moonpool.conductor.engine_payload import RawBatch, decode_payload
from moonpool.conductor.engine_source import EngineSource, SourceSpec
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.stream_order import Apply, AskReplay, Lost, Restarted, Step, StreamOrder
from moonpool.errors import LimitExceeded, ProtocolError, UsageError
from moonpool.events import Holder

#: Weight of one request in the drift.
_DRIFT_GAIN: Final = 0.01


@final
@dataclass(slots=True)
class FeedCounters:
    """What came of a stream's messages; all only grow."""

    messages: int = 0
    unreadable: int = 0
    lost: int = 0
    restarts: int = 0
    replays_asked: int = 0
    #: Blocks that did not fit into the index.
    refused_by_index: int = 0


@final
class StreamFeed:
    """Feeds one stream into an index. Not thread-safe; whoever owns the index owns its feeds."""

    def __init__(
        self, spec: SourceSpec, index: PrefixIndex, *, can_replay: bool, held_max: int = 4_096
    ) -> None:
        self.spec: Final = spec
        self.counters: Final = FeedCounters()
        self.source: Final = EngineSource(spec)
        self._index: Final = index
        self._order: Final[StreamOrder[RawBatch]] = StreamOrder(can_replay=can_replay, held_max=held_max)
        self._holders: set[Holder] = set()
        self._drift = 0.0

    @property
    def is_suspect(self) -> bool:
        """True while messages are missing that a replay may still bring."""
        return self._order.is_waiting

    @property
    def expected(self) -> int:
        """The number of the next message."""
        return self._order.expected

    @property
    def duplicates(self) -> int:
        """Messages that came twice or late."""
        return self._order.duplicates

    @property
    def drift(self) -> float:
        """The share of tokens believed cached that engines did not find, over the last requests."""
        return self._drift

    def live(self, number: int, payload: bytes) -> int | None:
        """A message of the stream. Returns the number to ask a replay from, or None."""
        batch = self._read(payload)
        return None if batch is None else self._do(self._order.live(number, batch.stamp_s, batch))

    def replayed(self, number: int, payload: bytes) -> int | None:
        """A message of a replay."""
        batch = self._read(payload)
        return None if batch is None else self._do(self._order.replayed(number, batch.stamp_s, batch))

    def replay_ended(self) -> None:
        """The replay brought all it had, or never answered."""
        self._do(self._order.replay_ended())

    def forget(self) -> int:
        """Makes the index forget what this stream said; returns how many blocks that were."""
        self.source.forget()
        return sum(self._index.clear(holder) for holder in self._holders)

    def note_feedback(self, believed_tokens: int, cached_tokens: int) -> None:
        """A request found `cached_tokens` where the index said `believed_tokens`."""
        if believed_tokens < 0 or cached_tokens < 0:
            raise UsageError("tokens are counted from 0", field="cached_tokens")
        if believed_tokens:
            missing = max(0, believed_tokens - cached_tokens) / believed_tokens
            self._drift += _DRIFT_GAIN * (missing - self._drift)

    def _read(self, payload: bytes) -> RawBatch | None:
        self.counters.messages += 1
        try:
            return decode_payload(payload)
        except ProtocolError:
            self.counters.unreadable += 1
            return None

    def _do(self, steps: list[Step[RawBatch]]) -> int | None:
        ask: int | None = None
        for step in steps:
            if isinstance(step, Apply):
                self._apply(step.message)
            elif isinstance(step, AskReplay):
                self.counters.replays_asked += 1
                ask = step.start
            elif isinstance(step, Lost):
                self.counters.lost += step.end - step.first
                self.forget()
            elif isinstance(step, Restarted):
                self.counters.restarts += 1
                self.forget()
        return ask

    def _apply(self, batch: RawBatch) -> None:
        for event in self.source.events(batch):
            self._holders.add(event.holder)
            try:
                self._index.apply(event)
            except LimitExceeded:
                self.counters.refused_by_index += 1
