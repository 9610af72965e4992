"""The initiator's side of RDMA: rails to one peer, made by a handshake, replaced when they break."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.errors import MoonpoolError, ProtocolError
from moonpool.native.rdma.bounce import BounceArena
from moonpool.native.rdma.link import Link
from moonpool.native.verbs.queue_pairs import CompletionQueue, QueuePair
from moonpool.transport.base import PeerSide, SegmentSide
from moonpool.transport.rdma_handshake import (
    ANY_NIC,
    RAILS_MAX,
    Answer,
    Nic,
    Offer,
    Rail,
    decode_answer,
    encode_offer,
)
from moonpool.transport.rdma_nics import SPARE_ENTRIES, OwnNic, devices_of, route_to
from moonpool.units import NS_PER_MS, NS_PER_S, NS_PER_US

#: How long an open waits for the first rail that works, and then for the others.
_FIRST_RAIL_S: Final = 1.0
_OTHER_RAILS_S: Final = 0.05
_POLL_S: Final = 0.0005
#: Without any rail for so long, other pairs of NICs are tried.
_WIDEN_AFTER_S: Final = 1.0
#: 4.096 us, the unit of the queue pairs' timeout.
_TIMEOUT_UNIT_NS: Final = 4_096
_BYTES_PER_S_OF_MBPS: Final = 125_000


@final
@dataclass(slots=True)
class _Draft:
    """A queue pair of ours that is on offer for a rail."""

    index: int
    nic: int
    partner: int
    queue: CompletionQueue
    pair: QueuePair
    psn: int


@final
@dataclass(frozen=True, slots=True)
class RailState:
    """A rail as it is: "none", "up", "probing" or "broken" (and why), its ends, and what it did so far."""

    state: str
    cause: str
    local_nic: int
    remote_nic: int
    bytes_read: int
    bytes_written: int
    breaks: int
    repairs: int
    requests_posted: int


def silence_ns(config: EngineConfig) -> int:
    """After so long without a completion a busy rail has failed: twice what a NIC tries, and a second."""
    tries = _TIMEOUT_UNIT_NS * (1 << config.rdma_timeout) * (config.rdma_retries + 1)
    return 2 * tries + NS_PER_S


@final
class PeerLink:
    """Rails to one peer, shared by its segments. Made under the engine's lock; one thread repairs it."""

    def __init__(
        self, peer: PeerSide, parts: tuple[Sequence[OwnNic], BounceArena, EngineConfig], wake_fd: int
    ) -> None:
        self.peer = peer
        self._nics, arena, self._config = parts
        self.native = Link(devices_of(self._nics), arena, wake_fd)
        self.native.set_bounds(
            self._config.spin_us * NS_PER_US,
            silence_ns(self._config),
            self._config.stall_timeout_ms * NS_PER_MS,
            min(nic.pieces for nic in self._nics),
        )
        self.repairing = threading.Lock()
        self.remote_nics: tuple[Nic, ...] = ()
        self.closed = False
        self._lock = threading.Lock()
        #: Why the last repair failed.
        self.last_problem = ""
        self._id = secrets.randbits(63)
        self._is_wide = False
        self._dry_since: float | None = None
        self._segments: weakref.WeakSet[SegmentSide] = weakref.WeakSet()

    # ---- making --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """One round trip for all NIC pairs; a second one when the peer has more NICs than we have.

        Raises what the peer or a device says; then nothing is left.
        """
        try:
            self._add_rails([(k, ANY_NIC) for k in range(len(self._nics))])
            used = {rail.remote_nic for rail in self.rails() if rail.state != "none"}
            spare = [number for number in range(len(self.remote_nics)) if number not in used]
            room = RAILS_MAX - len(self.native.rails())
            more = [(k % len(self._nics), remote) for k, remote in enumerate(spare[:room])]
            if more:
                self._add_rails(more)
        except BaseException:
            self.native.shut(0.0)
            raise
        self._await_rails()

    def _add_rails(self, wanted: Sequence[tuple[int, int]]) -> None:
        first = len(self.native.rails())
        with contextlib.ExitStack() as undo:
            drafts = []
            for k, (nic, partner) in enumerate(wanted):
                own = self._nics[nic]
                queue = CompletionQueue(own.device, own.queue_depth + SPARE_ENTRIES)
                undo.callback(queue.close)
                draft = self._draft(first + k, (nic, partner), queue)
                undo.callback(draft.pair.close)
                drafts.append(draft)
            answer = self._ask(drafts)
            undo.pop_all()
        self.remote_nics = answer.nics
        for draft, theirs in zip(drafts, answer.rails, strict=True):
            declined = theirs.nic == ANY_NIC
            mbps = self._nics[draft.nic].about.speed_mbps
            mbps = mbps if declined else min(mbps, max(1_000, answer.nics[theirs.nic].speed_mbps))
            self.native.add_rail(
                draft.queue,
                draft.nic,
                0 if declined else theirs.nic,
                self._nics[draft.nic].queue_depth,
                mbps * _BYTES_PER_S_OF_MBPS,
            )
            if declined:
                draft.pair.close()
            else:
                self._install(draft, theirs, answer, probe=True)

    def _draft(self, index: int, ends: tuple[int, int], queue: CompletionQueue) -> _Draft:
        """A queue pair of ours in INIT, for the rail between our NIC ends[0] and the peer's NIC ends[1]."""
        nic, partner = ends
        pair = QueuePair(queue, self._nics[nic].queue_depth, self._nics[nic].pieces)
        try:
            pair.to_init(self._nics[nic].port, 0)
        except BaseException:
            pair.close()
            raise
        return _Draft(index, nic, partner, queue, pair, secrets.randbits(24))

    def _ask(self, drafts: Sequence[_Draft]) -> Answer:
        rails = tuple(
            Rail(draft.index, draft.nic, draft.partner, draft.pair.number, draft.psn) for draft in drafts
        )
        offer = Offer(self._id, tuple(nic.about for nic in self._nics), rails)
        with self.peer.request("rdma.connect", {"offer": encode_offer(offer)}) as answer:
            value = answer.value.get("answer") if isinstance(answer.value, Mapping) else None
            if not isinstance(value, bytes):
                raise ProtocolError("the answer to rdma.connect has no bytes", peer=self.peer.endpoint)
            return decode_answer(value, offer)

    def _install(self, draft: _Draft, theirs: Rail, answer: Answer, *, probe: bool) -> None:
        """Connect a queue pair and let its rail use it; refused, the rail waits for repair."""
        own, mark = self._nics[draft.nic], answer.marks[theirs.nic]
        try:
            draft.pair.to_ready(route_to(own, answer.nics[theirs.nic], (theirs, draft.psn), self._config))
            self.native.install(draft.index, draft.pair, mark.address, mark.rkey, probe)
        except MoonpoolError as problem:
            self.last_problem = str(problem)
            draft.pair.close()
            self.native.not_replaced(draft.index, probe)

    def _await_rails(self) -> None:
        """Wait until probes have shown which rails work: all, or one and a moment more; at most a second."""
        started = time.monotonic()
        first: float | None = None
        while True:
            self.native.poll()
            states = [rail.state for rail in self.rails()]
            now = time.monotonic()
            if "up" in states and first is None:
                first = now
            settled = "probing" not in states
            if (
                settled
                or now - started > _FIRST_RAIL_S
                or (first is not None and now - first > _OTHER_RAILS_S)
            ):
                return
            time.sleep(_POLL_S)

    # ---- keeping -------------------------------------------------------------------------------------------

    def repair(self, due: Sequence[tuple[int, bool]]) -> None:
        """Replace the queue pairs of rails (rail, whether to probe) by a new handshake; blocks, bounded.

        What fails is tried again when the rail's back-off has passed.
        """
        rails = self.rails()
        drafts: list[_Draft] = []
        try:
            for number, _ in due:
                rail = rails[number]
                drafts.append(self._draft(number, (rail.local_nic, rail.remote_nic), self._queue(number)))
            answer = self._ask(drafts)
        except MoonpoolError as problem:
            self.last_problem = str(problem)
            for draft in drafts:
                draft.pair.close()
            for number, probe in due:
                self.native.not_replaced(number, probe)
            return
        for draft, theirs, (number, probe) in zip(drafts, answer.rails, due, strict=True):
            if theirs.nic == ANY_NIC:
                draft.pair.close()
                self.native.not_replaced(number, probe)
            else:
                self._install(draft, theirs, answer, probe=probe)

    def may_widen(self, now: float) -> bool:
        """True when no rail was up for a second, and pairs of NICs that have none may still reach each other.

        `now` is a reading of the monotonic clock; asked again and again by who repairs.
        """
        if self._is_wide or self.native.healthy or any(rail.state == "up" for rail in self.rails()):
            self._dry_since = None
            return False
        self._dry_since = now if self._dry_since is None else self._dry_since
        return now - self._dry_since > _WIDEN_AFTER_S

    def widen(self) -> None:
        """Add rails for the pairs of NICs that have none, which happens once. Blocks, bounded."""
        self._is_wide = True
        known = {(rail.local_nic, rail.remote_nic) for rail in self.rails() if rail.state != "none"}
        n = len(self.remote_nics)
        pairs = [(local, (local + shift) % n) for shift in range(n) for local in range(len(self._nics))]
        others = [ends for ends in pairs if ends not in known]
        room = RAILS_MAX - len(self.native.rails())
        if others[:room]:
            try:
                self._add_rails(others[:room])
            except MoonpoolError as problem:
                self.last_problem = str(problem)

    def _queue(self, number: int) -> CompletionQueue:
        return self.native.queue(number)

    def serve(self, segment: SegmentSide) -> bool:
        """A segment uses the link from now on; False when it is closed already."""
        with self._lock:
            if not self.closed:
                self._segments.add(segment)
            return not self.closed

    def end_unused(self) -> bool:
        """Closes the link when no segment can use it any more: all are closed, or their peer is gone."""
        with self._lock:
            self.closed = self.closed or all(segment.native.dead for segment in self._segments)
            return self.closed

    def rails(self) -> list[RailState]:
        """Each rail as it is."""
        return [RailState(*row) for row in self.native.rails()]

    def close(self, timeout_s: float) -> bool:
        """Ends all work on it and destroys its queue pairs; False when a batch was still inside."""
        with self._lock:
            self.closed = True
        return self.native.shut(timeout_s)
