"""The methods of a master's rpc port, as data: who may call what with which parameters, and what comes back.

`docs/rpc.md` is made from this table, and the leader binds a handler to each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple


class Caller(Enum):
    """Who may call a method."""

    ANYONE = "anyone"
    CLIENT = "client"
    NODE = "node"


class Method(NamedTuple):
    """One method. `params` names each parameter with its kind, `result` says what a reply carries."""

    name: str
    caller: Caller
    hot: bool
    params: tuple[tuple[str, str], ...]
    result: str
    doc: str


_KEYS: Final = ("keys", "array of bin or str, 1 to 1,024 bytes each")
_LEASE: Final = ("lease_ms", "int; 0 for none")
_IF_LEASED: Final = ("if_leased", '"defer" or "refuse"')
_FORCE: Final = ("force", "bool")
_LIMIT: Final = ("limit", "int, 1 or more")
_CURSOR: Final = ("cursor", "nil at first, then what the last reply gave")

_ROWS: Final = (
    Method(
        "exists",
        Caller.CLIENT,
        True,
        (_KEYS, _LEASE),
        "bin, one byte a key: 0 or 1",
        "Whether keys have objects; with a lease, their extents are kept that long.",
    ),
    Method(
        "lookup",
        Caller.CLIENT,
        True,
        (_KEYS, _LEASE),
        "[epoch, segments_version, [nil or [object id, size, digest, type, [[segment, offset, slot], ...]], "
        "...]]",
        "Where objects lie, active places first; nil for a miss.",
    ),
    Method(
        "put_start",
        Caller.CLIENT,
        True,
        (
            _KEYS,
            ("sizes", "array of int, bytes"),
            ("policy", "nil or map"),
            ("wait_ms", "int; how long to wait for space"),
        ),
        "[epoch, segments_version, put_id, remaining_ms, "
        "[[code, [[segment, offset, slot, grant], ...]], ...]]",
        "Extents for new objects. put_id is 0 when no key got one.",
    ),
    Method(
        "put_end",
        Caller.CLIENT,
        True,
        (
            ("put_id", "int"),
            ("entries", "[[index, digest, chunk digests], ...]; a fourth item masks places that failed"),
        ),
        "[epoch, [[code, object id], ...]]",
        "The payloads are written: makes the objects.",
    ),
    Method(
        "client_join",
        Caller.ANYONE,
        False,
        (
            ("instance", "bin16 of the client's engine"),
            ("name", "str"),
            ("host", "str"),
            ("tenant", 'str; "" is "default"'),
            ("token", "str or bin"),
        ),
        "[epoch, client id, tenant id, settings]",
        "Binds the connection to a client and a tenant.",
    ),
    Method(
        "client_beat", Caller.CLIENT, False, (), "[epoch, segments_version]", "Says that both sides live."
    ),
    Method(
        "segments",
        Caller.CLIENT,
        False,
        (),
        "[epoch, segments_version, [map, ...]]",
        "All segments: id, name, node, host, endpoint, view_endpoint, instance, generation, data, directory, "
        "capacity, slots, tier, kind, location, state.",
    ),
    Method(
        "put_abort",
        Caller.CLIENT,
        False,
        (("put_id", "int"), ("indexes", "array of int, or nil for all")),
        "[epoch, count]",
        "Gives extents back: nothing writes them any more.",
    ),
    Method(
        "remove",
        Caller.CLIENT,
        False,
        (_KEYS, _IF_LEASED, _FORCE),
        "[epoch, bin: 0 removed, 1 absent, 2 leased, 3 pinned]",
        "Removes keys. Leased ones are freed when the lease ends, or refused; force removes hard pins too.",
    ),
    Method(
        "remove_prefix",
        Caller.CLIENT,
        False,
        (("prefix", "bin or str"), _IF_LEASED, _FORCE, _LIMIT, _CURSOR),
        "[epoch, removed, cursor or nil]",
        "Removes keys that start with a prefix, at most `limit` in a step.",
    ),
    Method(
        "remove_all",
        Caller.CLIENT,
        False,
        (_IF_LEASED, _FORCE, _LIMIT, _CURSOR),
        "[epoch, removed, cursor or nil]",
        "Removes all keys of the tenant, at most `limit` in a step.",
    ),
    Method(
        "list",
        Caller.CLIENT,
        False,
        (("prefix", "bin or str"), _LIMIT, _CURSOR),
        "[epoch, [[key, size, type, pin, places], ...], cursor or nil]",
        "Keys that start with a prefix, in no promised order; a page may be empty before the end.",
    ),
    Method(
        "stat",
        Caller.CLIENT,
        False,
        (_KEYS,),
        "[epoch, [nil or map, ...]]",
        "Object id, size, digest, type, pin, soft_pin_left_ms, group, lease_left_ms, places.",
    ),
    Method(
        "pin",
        Caller.CLIENT,
        False,
        (_KEYS, ("pin", "0 none, 1 soft, 2 hard"), ("soft_pin_ms", "int")),
        "[epoch, bin: 0 done, 1 absent]",
        "Pins objects: soft is evicted last until its end, hard never.",
    ),
    Method(
        "damaged",
        Caller.CLIENT,
        False,
        (("key", "bin or str"), ("object id", "int"), ("segment", "int"), ("slot", "int")),
        "[epoch, verdict: 0 true, 1 damaged and dropped, 2 unknown, 3 not there any more]",
        "A reader got wrong bytes: the node hashes the place again.",
    ),
    Method("status", Caller.ANYONE, False, (), "map", "Gauges, nodes, segments, epoch, journal."),
    Method(
        "tenant_set",
        Caller.CLIENT,
        False,
        (
            ("name", "str"),
            ("quota bytes", "int; 0 for none"),
            ("token digest", "SHA-256 of the token, or empty"),
        ),
        "[epoch, tenant id]",
        "Makes or changes a tenant; for clients of the default tenant.",
    ),
    Method(
        "node_join",
        Caller.ANYONE,
        False,
        (
            ("name", "str"),
            ("host", "str"),
            ("instance", "bin16 of the node's engine"),
            ("engine endpoint", "str"),
            ("view endpoint", "str"),
            ("highest epoch", "int; the highest this node has seen"),
            (
                "segments",
                "array of maps: name, generation, capacity, slots, tier, kind, location, data, directory",
            ),
        ),
        "[epoch, node id, [segment id, ...], grant key, settings]",
        "A node comes, or comes back; its reports follow.",
    ),
    Method(
        "node_report",
        Caller.NODE,
        False,
        (("segment", "int"), ("page", "int, from 0"), ("last", "bool"), ("entries", "bin")),
        "[epoch]",
        "A page of what stands in a segment's directory.",
    ),
    Method(
        "node_ack",
        Caller.NODE,
        False,
        (
            ("effect number", "int: all effects up to it are done"),
            ("clock", "int: ms since the join was sent"),
            ("released", "[[segment, slot], ...]"),
            ("answers", "[[task, verdict], ...]"),
        ),
        "[epoch]",
        "What the node has done; sent at least each beat_ms.",
    ),
    Method(
        "node_leave",
        Caller.NODE,
        False,
        (),
        "[epoch]",
        "The node ends, and its memory with it: its places go at once, not when it has been silent for long.",
    ),
)

METHODS: Final[Mapping[str, Method]] = MappingProxyType({row.name: row for row in _ROWS})
