"""Everything that one master process is told: where it listens, its journal, its rules, what it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from moonpool.config_checks import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.http_status import HttpStatusConfig
from moonpool.rpc.limits import ServerLimits
from moonpool.store.event_publisher import EventPublisherConfig
from moonpool.store.journal_config import JournalConfig
from moonpool.store.master_config import MasterConfig
from moonpool.store.table_factory import TableConfig

ENDPOINTS_MAX: Final = 16
_NAME_BYTES_MAX: Final = 255


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MasterServiceConfig:
    """A master process. Raises `UsageError` that names the wrong field."""

    #: Where facts are kept; `JournalConfig(address="memory://")` for a pool inside one process.
    journal: JournalConfig
    #: What others call this master; "" means its first address.
    name: str = ""
    #: Where it serves: "host:port" (port 0: the system chooses), "@abstract name" or "/path/of/a/socket".
    endpoints: tuple[str, ...] = ("127.0.0.1:7420",)
    #: Addresses that others are told, where they differ from those above (behind 0.0.0.0, for example).
    advertised: tuple[str, ...] = ()
    #: Shared by all processes of the pool; None asks for none.
    secret: bytes | None = None
    #: Rules of the core.
    rules: MasterConfig = field(default_factory=MasterConfig)
    #: Policy and bounds of the tables.
    tables: TableConfig = field(default_factory=TableConfig)
    #: Bounds of the rpc port.
    rpc: ServerLimits = field(default_factory=ServerLimits)
    #: Where `/metrics` and `/healthz` are; None: nowhere.
    http: HttpStatusConfig | None = None
    #: Where store events are published; None: nowhere.
    events: EventPublisherConfig | None = None
    #: Longest wait of `close` for the loop thread to end, in milliseconds.
    close_timeout_ms: int = 10_000

    def __post_init__(self) -> None:
        if not 1 <= len(self.endpoints) <= ENDPOINTS_MAX:
            raise UsageError(f"a master serves at 1 to {ENDPOINTS_MAX} endpoints", field="endpoints")
        if len(self.advertised) > ENDPOINTS_MAX:
            raise UsageError(f"at most {ENDPOINTS_MAX} addresses can be told", field="advertised")
        for name in ("endpoints", "advertised"):
            for text in getattr(self, name):
                if not text or any(letter.isspace() for letter in text):
                    raise UsageError(f"{text!r} is no address", field=name)
        if len(self.name.encode()) > _NAME_BYTES_MAX or "\n" in self.name:
            raise UsageError(f"a name is one line of at most {_NAME_BYTES_MAX} bytes", field="name")
        if self.secret is not None and not SECRET_BYTES_MIN <= len(self.secret) <= SECRET_BYTES_MAX:
            raise UsageError(
                f"the secret must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes", field="secret"
            )
        check_ranges(self, {"close_timeout_ms": (100, 600_000)})
