"""A master process, or part of one: rpc port, journal, leader, status pages, events; ended as a whole.

    config ─▶ Master ─┬─ RpcPort        (loop thread: master_loop)
                      ├─ Journal        (a thread of its own)
                      ├─ HttpStatus     (threads of its own, reading only)
                      └─ EventPublisher (a thread of its own)

A master may be one of several: whichever the journal elects leads, the others answer NOT_LEADER and name it.
It may also live inside another program: `start` needs no main thread, and `close` ends everything.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Final, Self, final

from moonpool.errors import InternalError
from moonpool.http_status import HttpStatus
from moonpool.ids import new_instance_id
from moonpool.rpc.server import RpcPort
from moonpool.store.event_publisher import EventPublisher
from moonpool.store.journal import Identity, Journal
from moonpool.store.journal_config import MEMORY_ADDRESS
from moonpool.store.journal_memory import MemoryJournal
from moonpool.store.journal_thread import RedisJournal
from moonpool.store.master_loop import MasterLoop
from moonpool.store.master_pages import MasterPages
from moonpool.store.master_service_config import MasterServiceConfig
from moonpool.store.method_table import METHODS
from moonpool.store.table_factory import Tables, native_tables
from moonpool.units import MS_PER_S

_LOG: Final = logging.getLogger("moonpool.store.master")


@final
class Master:
    """One master: `start`, `serve_forever` if wanted, `close`; as a context manager it starts and closes."""

    def __init__(self, config: MasterServiceConfig) -> None:
        self.config: Final = config
        self._instance = new_instance_id()
        self._port = RpcPort(
            config.endpoints,
            instance=self._instance,
            secret=config.secret,
            limits=config.rpc,
            methods=tuple(METHODS),
        )
        self._http: HttpStatus | None = None
        self._publisher: EventPublisher | None = None
        try:
            addresses = config.advertised or tuple(self._port.addresses)
            self.name: Final = config.name or addresses[0]
            if config.events is not None:
                self._publisher = EventPublisher(config.events, self.name)
            identity = Identity(name=self.name, endpoints=addresses)
            self._journal = self._make_journal(identity)
            self._loop = MasterLoop(
                config.rules, identity, self._port, self._journal, self._make_tables, self._publisher
            )
            if config.http is not None:
                pages = MasterPages(self.name, lambda: self._loop.shown, self._journal, self._publisher)
                self._http = HttpStatus(pages.pages(), config.http)
        except BaseException:
            if self._publisher is not None:
                self._publisher.close()
            self._port.close()
            raise
        self._thread = threading.Thread(target=self._run, name="moonpool-master", daemon=True)
        self._ended = threading.Event()
        self._closed = False
        self._failure: BaseException | None = None

    @property
    def address(self) -> str:
        """Where to connect to: the first endpoint, with the port that the system chose."""
        return self._port.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """All endpoints."""
        return self._port.addresses

    @property
    def http_address(self) -> str:
        """ "host:port" of the status pages; "" without any."""
        return self._http.address if self._http is not None else ""

    @property
    def events_endpoint(self) -> str:
        """Where events are published; "" when they are not."""
        return self._publisher.endpoint if self._publisher is not None else ""

    @property
    def role(self) -> str:
        """ "leader" or "standby"."""
        return str(self._loop.shown["role"])

    def start(self) -> None:
        """Begins to stand by, and to answer."""
        self._thread.start()
        self._journal.start()
        self._port.start()

    def serve_forever(self) -> None:
        """Waits until `stop` is called (by a signal handler, for example) or the master fails."""
        while not self._ended.wait(1.0):
            pass
        if self._failure is not None:
            raise InternalError(f"the master's loop failed: {self._failure!r}") from self._failure

    def stop(self) -> None:
        """Ends `serve_forever`; safe in a signal handler."""
        self._loop.stop()

    def close(self, *, release: bool = True) -> None:
        """Ends everything in order; idempotent.

        With `release` what was decided becomes durable first (within bounds), another master may lead at
        once, and a private Redis is stopped.
        """
        if self._closed:
            return
        self._closed = True
        if self._http is not None:
            self._http.close()
        self._loop.stop()
        if self._thread.ident is not None:
            self._thread.join(self.config.close_timeout_ms / MS_PER_S)
            if self._thread.is_alive():
                raise InternalError("the master's loop did not end in time; please report this with the log")
        self._journal.close(release=release)
        self._port.close()
        if self._publisher is not None:
            self._publisher.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_tables(self) -> Tables:
        return native_tables(self.config.tables)

    def _make_journal(self, identity: Identity) -> Journal:
        wake = self._port.wake
        if self.config.journal.address == MEMORY_ADDRESS:
            return MemoryJournal(identity, lambda: self._make_tables().objects, wake)
        native = self._port.native
        return RedisJournal(self.config.journal, identity, lambda: self._make_tables().objects, wake, native)

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as exc:
            _LOG.exception("the master's loop failed")
            self._failure = exc
            # Nobody answers any more: the lease is not to be renewed for a leader that does not lead.
            self._journal.close(release=False)
        finally:
            self._ended.set()
