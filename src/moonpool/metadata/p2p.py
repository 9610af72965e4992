"""Metadata without a service: a segment's name is its endpoint, and its process answers for itself."""

from __future__ import annotations

import threading
from typing import Final, final

from moonpool.errors import EngineClosed, LimitExceeded
from moonpool.ids import ANY_INSTANCE
from moonpool.metadata.base import Lease, LeaseState, Record
from moonpool.metadata.endpoint import parse_endpoint

#: A process publishes one segment per engine; more than this is a leak.
LEASES_MAX: Final = 1_024


@final
class P2PMetadata:
    """Resolves "host:port" by reading it. Registering only remembers; nothing can be taken or expire."""

    __slots__ = ("_closed", "_leases", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[Lease] = []
        self._closed = False

    def register(self, record: Record) -> Lease:
        """Remembers a record, at generation 1: the instance in the hello tells a restarted process apart."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the metadata service of this engine is closed; make a new engine")
            if len(self._leases) >= LEASES_MAX:
                raise LimitExceeded(f"this process already publishes {LEASES_MAX} segments", limit=LEASES_MAX)
            lease = Lease(record.with_generation(1))
            self._leases.append(lease)
            return lease

    def resolve(self, name: str) -> Record:
        """The record of "host:port"; raises `UsageError` for another form.

        Instance and generation are unknown (zero) until the process itself has said them.
        """
        host, port = parse_endpoint(name)
        return Record(name=name, host=host, port=port, unix_name="", instance=ANY_INSTANCE)

    def list(self) -> list[Record]:
        """The records that this process published: there is nowhere to ask about others."""
        with self._lock:
            return sorted((lease.record for lease in self._leases), key=lambda record: record.name)

    def withdraw(self, lease: Lease) -> None:
        """Forgets a record. Idempotent."""
        with self._lock:
            self._leases = [kept for kept in self._leases if kept is not lease]
        lease.ended(LeaseState.WITHDRAWN)

    def close(self) -> None:
        """Forgets all records. Idempotent."""
        with self._lock:
            self._closed = True
            leases, self._leases = self._leases, []
        for lease in leases:
            lease.ended(LeaseState.WITHDRAWN)
