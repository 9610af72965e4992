"""One thread of an engine that keeps rails alive: it hears the NICs' events, replaces broken queue pairs and
frees the links of peers that are gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from moonpool.errors import MoonpoolError
from moonpool.native.verbs.attributes import AsyncEvent, EventKind
from moonpool.transport.rdma_links import PeerLink
from moonpool.transport.rdma_nics import OwnNic

logger = logging.getLogger(__name__)

#: How often it looks while a rail is not up, and while links exist at all, in milliseconds.
BUSY_TICK_MS: Final = 10
IDLE_TICK_MS: Final = 100
#: Links repaired at once: each repair may wait for its peer's answer.
_REPAIRS_MAX: Final = 8
_CLOSE_S: Final = 0.2
_JOIN_S: Final = 30.0


@final
class Repairer:
    """Owns its thread and its eventfd; runs from `start` to `stop`."""

    def __init__(self, nics: Sequence[OwnNic], links: Callable[[], list[PeerLink]]) -> None:
        self._nics, self._links = nics, links
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._repairs: set[threading.Thread] = set()
        #: Called with each link that is over, once it is closed.
        self.forget: Callable[[PeerLink], None] = lambda link: None
        self.port_errors = 0
        self.fatal_errors = 0
        self.access_errors = 0

    def start(self) -> None:
        """Begins."""
        self._thread = threading.Thread(target=self._run, name="moonpool-rdma", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes it look now."""
        os.eventfd_write(self.wake_fd, 1)

    def stop(self) -> None:
        """Ends the thread and the repairs under way, and closes the eventfd."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        for repair in list(self._repairs):
            repair.join(_JOIN_S)
        os.close(self.wake_fd)
        # Both lead back to the transport, whose memory must not wait for the garbage collector.
        self._links, self.forget = list, lambda link: None

    def _run(self) -> None:
        watch = select.poll()
        watch.register(self.wake_fd, select.POLLIN)
        dead: set[int] = set()
        for nic in self._nics:
            watch.register(nic.device.async_fd, select.POLLIN)
        while not self._stopping:
            for fd, events in watch.poll(self._tick_ms()):
                if events & (select.POLLERR | select.POLLHUP | select.POLLNVAL) and fd != self.wake_fd:
                    watch.unregister(fd)  # the device is gone: it says no more
                    dead.add(fd)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wake_fd)
            self._repairs = {repair for repair in self._repairs if repair.is_alive()}
            for place, nic in enumerate(self._nics):
                for event in nic.device.take_events():
                    self._heard(place, nic, event)
                if nic.device.async_fd in dead:
                    dead.discard(nic.device.async_fd)
                    self._lost(place)
            for link in self._links():
                try:
                    self._look_at(link)
                except MoonpoolError:
                    # A device in distress refuses all kinds of things: other links must not suffer for it.
                    logger.exception("a link to %s could not be looked after", link.peer.endpoint)

    def _tick_ms(self) -> int | None:
        links = self._links()
        if not links:
            return None
        return IDLE_TICK_MS if all(link.native.healthy for link in links) else BUSY_TICK_MS

    def _heard(self, place: int, nic: OwnNic, event: AsyncEvent) -> None:
        """What an event means for the rails of a NIC."""
        if event.kind is EventKind.PORT_ERROR and event.port == nic.port:
            self.port_errors += 1
            for link in self._links():
                link.native.nic_down(place, False)
        elif event.kind is EventKind.PORT_ACTIVE and event.port == nic.port:
            for link in self._links():
                link.native.nic_up(place)
        elif event.kind is EventKind.DEVICE_FATAL:
            self._lost(place)
        elif event.kind is EventKind.QP_ACCESS:
            self.access_errors += 1

    def _lost(self, place: int) -> None:
        self.fatal_errors += 1
        for link in self._links():
            link.native.nic_down(place, True)

    def _look_at(self, link: PeerLink) -> None:
        if link.end_unused():
            if link.repairing.acquire(blocking=False):
                try:
                    if link.close(_CLOSE_S):
                        self.forget(link)
                finally:
                    link.repairing.release()
            return
        if link.native.healthy:
            return
        link.native.poll()
        if len(self._repairs) >= _REPAIRS_MAX or not link.repairing.acquire(blocking=False):
            return
        due, wider = link.native.due(), link.may_widen(time.monotonic())
        if not due and not wider:
            link.repairing.release()
            return
        repair = threading.Thread(
            target=self._repair, args=(link, due, wider), name="moonpool-rdma-fix", daemon=True
        )
        self._repairs.add(repair)
        repair.start()

    def _repair(self, link: PeerLink, due: Sequence[tuple[int, bool]], wider: bool) -> None:
        try:
            if due:
                link.repair(due)
            if wider:
                link.widen()
        finally:
            link.repairing.release()
            if not self._stopping:
                self.wake()
