"""One request on its way through a leader."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from moonpool.store.sessions import Client, Join, Session


class Held:
    """What a handler returns when it has answered, or will: `HELD`."""


HELD: Final = Held()


class Call(NamedTuple):
    """Who asks what. `params` has as many items as the method takes; `tenant` is the client's."""

    session: Session
    message_id: int
    params: list[Any]
    tenant: int

    @property
    def connection(self) -> int:
        return self.session.connection

    @property
    def client(self) -> Client:
        """The client, for methods of clients."""
        assert self.session.client is not None
        return self.session.client

    @property
    def join(self) -> Join:
        """The node's join, for methods of nodes."""
        assert self.session.join is not None
        return self.session.join
