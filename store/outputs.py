"""What a leader has decided and the shell must carry out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from moonpool.events import ObjectEvent


class Reply(NamedTuple):
    """Answer to one request. `error` is `[code, name, message]`, or None with a result of plain values."""

    connection: int
    message_id: int
    error: list[int | str] | None
    result: Any


class Push(NamedTuple):
    """A message to a node. `params` is an encoded MessagePack array."""

    connection: int
    method: str
    params: bytes


class Bind(NamedTuple):
    """From now on the connection speaks for this client and tenant (client 0: for a node)."""

    connection: int
    client_id: int
    tenant_id: int


@final
@dataclass(slots=True)
class Outputs:
    """Everything since the last time, each list in order; `facts` are encoded, the first is `first_sequence`.

    Carry out `facts` first; the other lists hold nothing that depends on facts that are not durable yet.
    """

    first_sequence: int
    replies: list[Reply] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    facts: list[bytes] = field(default_factory=list)
    binds: list[Bind] = field(default_factory=list)
    events: list[ObjectEvent] = field(default_factory=list)
    #: Connections to close: their node's session is over.
    closes: list[int] = field(default_factory=list)
    #: Above 0: raise the journal's epoch at least to this, then call `Leader.raise_epoch`.
    epoch_wanted: int = 0
