"""The engine's configuration: one frozen value, made once at the edge and passed down.

This module is the only reader of the process environment. Text forms take units: a field that ends in
`_bytes` accepts "8 MiB", one in `_ms` accepts "3 s", one in `_us` accepts "50 us"; plain numbers are in the
field's own unit.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, final

from moonpool.config_checks import (
    check_hosts,
    check_metadata,
    check_name,
    check_secret,
    check_type,
    wrong,
)
from moonpool.config_text import from_text, from_toml, read_bounded, read_toml
from moonpool.errors import UsageError
from moonpool.operations import class_rates
from moonpool.units import GIB, KIB, MIB

ENV_PREFIX: Final = "MOONPOOL_"
#: Fields that are one of some words.
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "tcp_io": ("auto", "blocking", "epoll", "io_uring"),
    "submit_order": ("arrival", "deadline"),
    "spray": ("rails", "transports"),
    "cxl_coherence": ("coherent", "software"),
    "nvmeof_passthrough": ("auto", "yes", "no"),
}

_HOUR_MS: Final = 3_600_000
_WORD: Final = re.compile(r"[a-z0-9_.-]{1,32}\Z", re.ASCII)
_PROVIDER: Final = re.compile(r"[a-z0-9_.;-]{0,64}\Z", re.ASCII)
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/]+):[0-9]{1,5}\Z")
#: What names far memory on every host that is attached to it (`moonpool topology` prints it).
_MEMORY: Final = re.compile(r"(uuid:[0-9a-f-]{36}|serial:[0-9a-f]{1,16}(,[0-9a-f]{1,16}){0,15})\Z", re.ASCII)

# Inclusive bounds of the integer fields. The upper ones keep a slip of the pen from exhausting the machine.
_RANGES: Final[dict[str, tuple[int, int]]] = {
    "port": (0, 65_535),
    "lanes_per_peer_max": (1, 64),
    "bulk_lanes": (1, 64),
    "bulk_lanes_remote": (1, 64),
    "stripe_min_bytes": (4 * KIB, 1 << 40),
    "spin_us": (0, 10_000),
    "spin_max_bytes": (0, 1 << 40),
    "transfer_timeout_ms": (1, 24 * _HOUR_MS),
    "connect_timeout_ms": (1, _HOUR_MS),
    "handshake_timeout_ms": (1, _HOUR_MS),
    "stall_timeout_ms": (1, _HOUR_MS),
    "revoke_timeout_ms": (1, _HOUR_MS),
    "close_timeout_ms": (1, _HOUR_MS),
    "regions_max": (1, 16_777_216),
    "peers_max": (1, 65_535),
    "connections_max": (1, 65_535),
    "handshakes_max": (1, 65_535),
    "batch_transfers_max": (1, 1 << 30),
    "queued_batches_max": (1, 1_048_576),
    "worker_threads": (1, 256),
    "priority_head_start_ms": (0, _HOUR_MS),
    "notifications_max": (1, 1_048_576),
    "notification_bytes_max": (1, 65_536),
    "non_temporal_min_bytes": (4 * KIB, 1024 * GIB),
    "disk_rings": (1, 64),
    "disk_queue_depth": (1, 1_024),
    "rdma_gid_index": (-1, 255),
    "rdma_timeout": (8, 22),
    "rdma_retries": (0, 7),
    "rdma_queue_depth": (32, 4_096),
    "rdma_traffic_class": (0, 255),
    "device_staging_bytes": (MIB, 16 * GIB),
    "device_sessions_max": (0, 4_096),
    "lease_ms": (100, 24 * _HOUR_MS),
    "nvmeof_command_timeout_ms": (2_000, _HOUR_MS),
    "nvmeof_reconnect_ms": (0, _HOUR_MS),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine listens, moves bytes, and gives up. Raises `UsageError` that names the wrong field."""

    #: Name under which the segment is published; "" means "host:port" of the engine itself.
    name: str = ""
    #: Address the engine listens on: an IPv4 or IPv6 address or a host name. Loopback unless you say so.
    bind_host: str = "127.0.0.1"
    #: Address that peers are told to use; "" means `bind_host`. Required when `bind_host` is 0.0.0.0 or ::.
    advertise_host: str = ""
    #: TCP port; 0 lets the system choose one, which is kept for the engine's life.
    port: int = 0
    #: Transports this engine may use, by name. One that cannot run here is an error, never a fall-back.
    #: "auto" is whatever can run here, but ofi.
    transports: tuple[str, ...] = ("local", "shm", "tcp")
    #: Where names are looked up: "p2p" (a name is "host:port") or a redis://, rediss:// or redis+unix:// URL.
    metadata: str = "p2p"
    #: Shared secret that guards every port; at least 16 bytes. None: whoever reaches a port may talk to it.
    cluster_secret: bytes | None = field(default=None, repr=False)
    #: Most tcp connections that carry data to one peer.
    lanes_per_peer_max: int = 4
    #: Lanes that one large transfer is cut over when the peer is on this host.
    bulk_lanes: int = 1
    #: Lanes that one large transfer is cut over when the peer is on another host.
    bulk_lanes_remote: int = 4
    #: Transfers of at least this many bytes are cut over several lanes.
    stripe_min_bytes: int = 8 * MIB
    #: TCP congestion control on lanes that stay on this host; "" leaves the kernel's choice.
    congestion_local: str = "cubic"
    #: TCP congestion control on lanes to other hosts; "" leaves the kernel's choice.
    congestion_remote: str = ""
    #: How tcp lanes do I/O: "auto" (the measured best per size), "blocking", "epoll" or "io_uring".
    tcp_io: str = "auto"
    #: libfabric provider of the ofi transport: efa, cxi, verbs, tcp, ...; "" takes one that has hardware.
    ofi_provider: str = ""
    #: How many microseconds a waiting caller polls before it sleeps; 0 never polls.
    spin_us: int = 50
    #: Only batches of at most this many bytes poll before sleeping.
    spin_max_bytes: int = 256 * KIB
    #: Deadline of a batch whose call gives none, in milliseconds.
    transfer_timeout_ms: int = 30_000
    #: Longest wait for a connection to be made, in milliseconds.
    connect_timeout_ms: int = 3_000
    #: Longest time for a whole hello, both ways, in milliseconds.
    handshake_timeout_ms: int = 2_000
    #: A peer that moves no byte for this many milliseconds ends the batch with STALLED.
    stall_timeout_ms: int = 10_000
    #: Longest wait for peers to confirm a revoke before their connections are shut, in milliseconds.
    revoke_timeout_ms: int = 5_000
    #: Longest wait of close() for running work, in milliseconds.
    close_timeout_ms: int = 5_000
    #: Where the engine shows /metrics and /healthz: "127.0.0.1:9400", port 0 for any; "" for nowhere.
    metrics_address: str = ""
    #: Most regions registered at once.
    regions_max: int = 65_536
    #: Most open segments at once.
    peers_max: int = 1_024
    #: Most accepted connections at once, control and data lanes together.
    connections_max: int = 1_024
    #: Most accepted connections whose hello is not finished; beyond it the oldest is closed.
    handshakes_max: int = 64
    #: Most transfers in one batch.
    batch_transfers_max: int = 1_048_576
    #: Most batches submitted and not ended.
    queued_batches_max: int = 4_096
    #: Most native threads that drive one segment's submitted batches; all segments together have at most 64.
    worker_threads: int = 1
    #: A submitted batch goes before what came up to this many milliseconds earlier in the class below.
    priority_head_start_ms: int = 100
    #: Order of submitted batches inside a class: "arrival", or "deadline" (the earliest first).
    submit_order: str = "arrival"
    #: Most bytes a second of the submitted batches of a class, as "low=200MiB"; others have no cap.
    class_rates: tuple[str, ...] = ()
    #: What a large batch may be dealt over: "rails" of one transport, or a segment's "transports" too.
    spray: str = "rails"
    #: Most notifications received and not yet taken; beyond it senders get QUEUE_FULL.
    notifications_max: int = 4_096
    #: Longest notification, in bytes; the wire allows 65,536.
    notification_bytes_max: int = 65_536
    #: Batches of at least this many bytes are copied with non-temporal stores, which spare the cache.
    non_temporal_min_bytes: int = 32 * KIB
    #: Ask for huge pages (MFD_HUGETLB) in `allocate`; an error when the system has none to give.
    huge_pages: bool = False
    #: What keeps caches of hosts that share far memory coherent: "coherent" (the hardware) or "software".
    cxl_coherence: str = "coherent"
    #: Far memory that engines of other hosts may map by their own device: "uuid:<uuid>", "serial:<hex>".
    cxl_shared: tuple[str, ...] = ()
    #: Folders beneath which shared files of owners on other hosts may be opened by their paths.
    file_roots: tuple[str, ...] = ()
    #: NVMe namespaces by passthrough: "yes", "no" (by the block device), or as each region says ("auto").
    nvmeof_passthrough: str = "auto"
    #: Networks ("10.0.0.0/8") whose NVMe targets this process may attach when a peer's region lies there.
    nvmeof_attach: tuple[str, ...] = ()
    #: After so many milliseconds the kernel takes an NVMe command back, and resets its controller.
    nvmeof_command_timeout_ms: int = 10_000
    #: How many milliseconds a batch waits for a lost NVMe namespace to come back before it fails.
    nvmeof_reconnect_ms: int = 15_000
    #: Most io_uring rings for files and devices: so many batches do I/O on them at once, others wait.
    disk_rings: int = 4
    #: Most I/Os in flight on each of these rings.
    disk_queue_depth: int = 64
    #: RDMA NICs to use, as "device" or "device:port"; none: all that have an active port.
    rdma_devices: tuple[str, ...] = ()
    #: GID index of their ports; -1 chooses (routable RoCE v2 first).
    rdma_gid_index: int = -1
    #: Exponent of the queue pairs' timeout: 4.096 us * 2^this between tries.
    rdma_timeout: int = 14
    #: Tries that a NIC repeats before a rail counts as failed; 7 means for ever on some devices.
    rdma_retries: int = 6
    #: Most requests under way on one rail.
    rdma_queue_depth: int = 128
    #: Traffic class (DSCP and ECN bits) of RDMA packets.
    rdma_traffic_class: int = 0
    #: Runtime of the cuda transport: "cuda", "hip", "musa", "maca", "ascend" or "cambricon".
    device_runtime: str = "cuda"
    #: File of that runtime's library; "" looks for it where the system keeps libraries.
    device_library: str = ""
    #: Share device memory with processes of this host by IPC handles, which give away whole allocations.
    device_ipc: bool = True
    #: Pinned host memory through which this engine's transfers from and to devices pass, in bytes.
    device_staging_bytes: int = 32 * MIB
    #: Most peers served from devices that they do not reach themselves; each costs a quarter of the staging.
    device_sessions_max: int = 16
    #: How long a published name outlives its process, in milliseconds; renewed at a third of it.
    lease_ms: int = 10_000

    def __post_init__(self) -> None:
        for one in fields(self):
            check_type(one.name, one.type, getattr(self, one.name))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise wrong(name, value, f"must be from {low} to {high}")
        check_name(self.name)
        check_hosts(self.bind_host, self.advertise_host)
        _check_words(self)
        _check_nvmeof(self)
        check_metadata(self.metadata)
        check_secret(self.cluster_secret)
        _check_between_fields(self)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, base: EngineConfig | None = None
    ) -> EngineConfig:
        """`base` (or the defaults) with every field that the environment sets as MOONPOOL_<FIELD>.

        `environ` is the process environment unless given. MOONPOOL_CLUSTER_SECRET_FILE names a file that
        holds the secret, which keeps it out of /proc/<pid>/environ. Raises `UsageError` naming the variable.
        """
        source = os.environ if environ is None else environ
        changes: dict[str, Any] = {}
        for one in fields(cls):
            variable = ENV_PREFIX + one.name.upper()
            if variable in source:
                changes[one.name] = from_text(one.name, one.type, source[variable], variable)
        secret_file = source.get(ENV_PREFIX + "CLUSTER_SECRET_FILE")
        if secret_file is not None:
            changes["cluster_secret"] = _secret_from(Path(secret_file), changes)
        return replace(base or cls(), **changes)


def load_config(path: str | os.PathLike[str]) -> EngineConfig:
    """Reads the table [engine] of a TOML file; fields it does not set keep their defaults.

    A key `cluster_secret_file` names a file with the secret, relative to the TOML file. Raises `UsageError`
    for an unreadable file, bad TOML, an unknown key or a wrong value, and names it.
    """
    file = Path(path)
    table = read_toml(file).get("engine", {})
    if not isinstance(table, dict):
        raise UsageError(f"{file}: engine must be a table; write [engine] above its keys", field="engine")
    types = {one.name: one.type for one in fields(EngineConfig)}
    unknown = sorted(table.keys() - types.keys() - {"cluster_secret_file"})
    if unknown:
        raise UsageError(f"{file}: unknown key {unknown[0]!r} in [engine]; remove it", field=unknown[0])
    changes: dict[str, Any] = {
        name: from_toml(name, types[name], value) for name, value in table.items() if name in types
    }
    if "cluster_secret_file" in table:
        named = table["cluster_secret_file"]
        if not isinstance(named, str):
            raise wrong("cluster_secret_file", named, "must be a path")
        changes["cluster_secret"] = _secret_from(file.parent / named, changes)
    return EngineConfig(**changes)


def _check_words(config: EngineConfig) -> None:
    for name in ("congestion_local", "congestion_remote"):
        value = getattr(config, name)
        if value and not _WORD.match(value):
            raise wrong(name, value, "must be the name of a congestion control, or empty")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise wrong(name, getattr(config, name), f"must be one of {', '.join(choices)}")
    try:
        class_rates(config.class_rates)
    except UsageError as problem:
        raise wrong("class_rates", config.class_rates, f"is wrong: {problem.message}") from problem
    if config.metrics_address and not _ADDRESS.match(config.metrics_address):
        raise wrong("metrics_address", config.metrics_address, "must be host:port, or empty")
    if not all(_MEMORY.match(name) for name in config.cxl_shared):
        raise wrong("cxl_shared", config.cxl_shared, "must hold names such as 'uuid:...' or 'serial:...'")
    if not _PROVIDER.match(config.ofi_provider):
        raise wrong("ofi_provider", config.ofi_provider, "must be a libfabric provider's name or empty")
    if not config.transports or not all(_WORD.match(name) for name in config.transports):
        raise wrong("transports", config.transports, "must hold at least one name such as 'tcp'")
    if not all(root.startswith("/") and "\0" not in root for root in config.file_roots):
        raise wrong("file_roots", config.file_roots, "must hold absolute paths")
    if len(set(config.transports)) != len(config.transports):
        raise wrong("transports", config.transports, "must not repeat a name")


def _check_nvmeof(config: EngineConfig) -> None:
    for network in config.nvmeof_attach:
        try:
            ipaddress.ip_network(network)
        except ValueError as problem:
            raise wrong("nvmeof_attach", network, f"must hold networks or addresses: {problem}") from problem


def _check_between_fields(config: EngineConfig) -> None:
    for name, bound in (
        ("bulk_lanes", "lanes_per_peer_max"),
        ("bulk_lanes_remote", "lanes_per_peer_max"),
        ("handshakes_max", "connections_max"),
    ):
        if getattr(config, name) > getattr(config, bound):
            rule = f"must not be above {bound}, which is {getattr(config, bound)}"
            raise wrong(name, getattr(config, name), rule)


def process_environment() -> Mapping[str, str]:
    """A copy of the process environment, for whoever builds configs at the edge."""
    return dict(os.environ)


def _secret_from(file: Path, changes: Mapping[str, Any]) -> bytes:
    """The file's bytes without the line end an editor adds."""
    if "cluster_secret" in changes:
        raise UsageError("give cluster_secret or cluster_secret_file, not both", field="cluster_secret")
    return read_bounded(file).rstrip(b"\r\n")
