"""What every metadata service offers: names of segments, each with an endpoint, a generation and a lease."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, final

from moonpool.config_checks import is_segment_name
from moonpool.errors import MoonpoolError, ProtocolError, UsageError
from moonpool.ids import INSTANCE_BYTES, InstanceId
from moonpool.metadata.endpoint import format_endpoint
from moonpool.units import U64_MAX

RECORD_VERSION: Final = 1
RECORD_BYTES_MAX: Final = 4_096


@final
@dataclass(frozen=True, slots=True)
class Record:
    """Where a segment is found.

    `unix_name` is the abstract unix socket of its control plane, "" when unknown. `instance` is all zero when
    unknown (p2p). `generation` grows each time the name gets a new holder; 0 means not registered yet.
    """

    name: str
    host: str
    port: int
    unix_name: str
    instance: InstanceId
    generation: int = 0

    def __post_init__(self) -> None:
        for field, text in (("name", self.name), ("host", self.host)):
            if not is_segment_name(text):
                raise UsageError(f"a record's {field} cannot be {text!r}", field=field)
        if self.unix_name and not is_segment_name(self.unix_name):
            raise UsageError(f"a record's unix_name cannot be {self.unix_name!r}", field="unix_name")
        if not 1 <= self.port <= 65_535:
            raise UsageError(f"a record's port cannot be {self.port}", field="port")
        if len(self.instance) != INSTANCE_BYTES:
            raise UsageError(f"a record's instance has {INSTANCE_BYTES} bytes", field="instance")
        if not 0 <= self.generation <= U64_MAX:
            raise UsageError(f"a record's generation cannot be {self.generation}", field="generation")

    @property
    def endpoint(self) -> str:
        """ "host:port", with brackets around an IPv6 address."""
        return format_endpoint(self.host, self.port)

    def with_generation(self, generation: int) -> Record:
        """The same record under another generation."""
        return replace(self, generation=generation)


def encode_record(record: Record) -> str:
    """A record as one line of JSON, without its generation (the service keeps that beside it)."""
    fields = {
        "version": RECORD_VERSION,
        "name": record.name,
        "host": record.host,
        "port": record.port,
        "unix_name": record.unix_name,
        "instance": record.instance.hex(),
    }
    return json.dumps(fields, separators=(",", ":"))


def decode_record(text: str | bytes, generation: int) -> Record:
    """The record in a line of JSON; raises `ProtocolError` for anything `encode_record` would not write."""
    if len(text) > RECORD_BYTES_MAX:
        raise ProtocolError(f"a metadata entry has at most {RECORD_BYTES_MAX} bytes, not {len(text)}")
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields["version"] != RECORD_VERSION:
            raise ProtocolError(
                f"the metadata entry has version {fields['version']}; this Moonpool reads {RECORD_VERSION}"
            )
        name, host, unix_name, port = (fields[key] for key in ("name", "host", "unix_name", "port"))
        if not all(isinstance(one, str) for one in (name, host, unix_name)) or type(port) is not int:
            raise ProtocolError("the metadata entry has fields of the wrong type")
        instance = InstanceId(bytes.fromhex(fields["instance"]))
        return Record(name, host, port, unix_name, instance, generation)
    except ProtocolError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ProtocolError(f"the metadata entry is not a Moonpool record: {exc}") from exc


#: Asks the process behind a record whether it runs, in bounded time; False only when it surely does not.
Probe: TypeAlias = Callable[[Record], bool]


class LeaseState(Enum):
    """How a published name stands."""

    #: Renewed in time.
    HELD = "held"
    #: The last renewal failed; the lease still runs, and renewals go on.
    FAILING = "failing"
    #: Not renewed before the lease ran out; renewals go on, and take the name back if nobody else did.
    EXPIRED = "expired"
    #: Another process has the name now; no more renewals.
    LOST = "lost"
    #: Given back by its owner.
    WITHDRAWN = "withdrawn"


_ENDED: Final = frozenset({LeaseState.LOST, LeaseState.WITHDRAWN})


@final
@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A snapshot of a lease. `renewals` and `failures` count since it was given."""

    state: LeaseState
    renewals: int = 0
    failures: int = 0
    last_error: MoonpoolError | None = None


@final
class Lease:
    """A name held by this process. Safe to read from any thread; only the metadata service changes it."""

    __slots__ = ("_lock", "_record", "_report")

    def __init__(self, record: Record) -> None:
        self._lock = threading.Lock()
        self._record = record
        self._report = LeaseReport(LeaseState.HELD)

    @property
    def record(self) -> Record:
        """The record as published, with its generation."""
        return self._record

    def report(self) -> LeaseReport:
        """How the lease stands now."""
        with self._lock:
            return self._report

    def renewed(self) -> LeaseReport:
        """Notes a renewal that went well and returns the report before it; a lease that ended stays ended."""
        with self._lock:
            before = self._report
            if before.state not in _ENDED:
                count = before.renewals + 1
                self._report = replace(before, state=LeaseState.HELD, renewals=count, last_error=None)
            return before

    def failed(self, error: MoonpoolError, state: LeaseState) -> LeaseReport:
        """Notes a renewal that failed and returns the report before it; a lease that ended stays ended."""
        with self._lock:
            before = self._report
            if before.state not in _ENDED:
                self._report = replace(before, state=state, failures=before.failures + 1, last_error=error)
            return before

    def ended(self, state: LeaseState) -> None:
        """Notes that nothing will renew the lease any more."""
        with self._lock:
            self._report = replace(self._report, state=state)


class Metadata(Protocol):
    """A directory of segments. Every call ends in bounded time, with a typed error if it has to."""

    def register(self, record: Record) -> Lease:
        """Publishes a record under its name and keeps it published until withdrawn.

        Raises `NameInUse` when a live process holds the name, `MetadataUnavailable` when the service is away.
        """
        ...

    def resolve(self, name: str) -> Record:
        """The record under a name; raises `NoSuchSegment` or `MetadataUnavailable`."""
        ...

    def list(self) -> list[Record]:
        """All records known, by name, up to the service's bound."""
        ...

    def withdraw(self, lease: Lease) -> None:
        """Takes a name back at once. Idempotent; another holder's entry is left alone."""
        ...

    def close(self) -> None:
        """Withdraws what is still held and frees threads and sockets, in bounded time. Idempotent."""
        ...
