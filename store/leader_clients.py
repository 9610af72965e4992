"""Clients and tenants: who may speak for whom."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final, final

from moonpool.store import facts
from moonpool.store.call import HELD, Call
from moonpool.store.errors import BadParams, NotReady, Overloaded, TenantRefused
from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_put_end import PutEnds
from moonpool.store.outputs import Bind, Reply
from moonpool.store.params import name_text, number, raw
from moonpool.store.records import DEFAULT_TENANT_ID
from moonpool.store.sessions import Client, Session

#: A client id is the epoch's low bits above a counter, so that none comes twice.
_COUNTER_BITS: Final = 20
_DIGEST_BYTES: Final = 32
_TOKEN_BYTES_MAX: Final = 4_096
_SETTINGS: Final = (
    "lease_ms_max",
    "location_lease_ms",
    "put_ms",
    "put_bytes_per_ms",
    "put_wait_ms_max",
    "batch_keys_max",
    "replicas_max",
    "client_grace_ms",
)


@final
class Clients:
    """Joins of clients, their ends, and tenants."""

    def __init__(self, core: LeaderCore, put_ends: PutEnds) -> None:
        self._core = core
        self._put_ends = put_ends
        self._by_instance: dict[tuple[bytes, int], Client] = {}
        self._last = 0

    def client_join(self, call: Call) -> list[Any]:
        """Binds the connection to a client and its tenant; the same instance stays the same client."""
        core, params = self._core, call.params
        instance = raw(params[0], "instance", 16)
        name, host = name_text(params[1], "name", may_be_empty=True), name_text(params[2], "host")
        tenant_name = name_text(params[3], "tenant", may_be_empty=True) or "default"
        token = params[4]
        if isinstance(token, str):
            token = token.encode("utf-8", "surrogatepass")
        if type(token) is not bytes or len(token) > _TOKEN_BYTES_MAX:
            raise BadParams(f"token must be text or bytes, at most {_TOKEN_BYTES_MAX}", field="token")
        if call.session.join is not None:
            raise BadParams("this connection belongs to a node; a client needs one of its own")
        tenant_id = self._tenant(tenant_name, token)
        client = self._by_instance.get((instance, tenant_id))
        if client is None:
            client = self._new_client(tenant_id, instance, name, host)
        self.leave(call.session)
        call.session.client = client
        client.connections.add(call.connection)
        client.ends_ms = 0
        core.out.binds.append(Bind(call.connection, client.client_id, tenant_id))
        settings = {name: getattr(core.config, name) for name in _SETTINGS}
        return [core.counters.epoch, client.client_id, tenant_id, settings]

    def _tenant(self, name: str, token: bytes) -> int:
        core = self._core
        for tenant in core.state.tenants.values():
            if tenant.name == name:
                given = hashlib.sha256(token).digest()
                if tenant.token_digest and not hmac.compare_digest(given, tenant.token_digest):
                    break
                return tenant.tenant_id
        raise TenantRefused(f"the tenant {name!r} is unknown or the token is wrong")

    def _new_client(self, tenant_id: int, instance: bytes, name: str, host: str) -> Client:
        core = self._core
        if len(core.clients) >= core.config.clients_max:
            raise Overloaded("too many clients", field="clients_max", limit=core.config.clients_max)
        if self._last + 1 >> _COUNTER_BITS:
            core.out.epoch_wanted = max(core.out.epoch_wanted, core.counters.epoch + 1)
            raise NotReady("all client ids of this epoch are given; the master raises its epoch")
        self._last += 1
        low_epoch = core.counters.epoch % (1 << 32 - _COUNTER_BITS)
        client = Client(low_epoch << _COUNTER_BITS | self._last, tenant_id, instance, name, host)
        core.clients[client.client_id] = client
        self._by_instance[instance, tenant_id] = client
        return client

    def epoch_raised(self) -> None:
        """A new epoch has client ids of its own."""
        self._last = 0

    def leave(self, session: Session) -> None:
        """The connection does not speak for its client any more; without another the client ends soon."""
        client, session.client = session.client, None
        if client is not None:
            client.connections.discard(session.connection)
            if not client.connections:
                client.ends_ms = max(1, self._core.now_ms + self._core.config.client_grace_ms)

    def end_clients(self) -> None:
        """Ends the clients that did not come back in time: their puts are fenced."""
        core = self._core
        for client in [each for each in core.clients.values() if each.ends_ms]:
            if client.ends_ms <= core.now_ms:
                self._put_ends.client_ended(client.client_id)
                del core.clients[client.client_id]
                del self._by_instance[client.instance, client.tenant_id]

    def client_beat(self, call: Call) -> list[Any]:
        """Says which epoch and which version of the segments there is."""
        del call
        return [self._core.counters.epoch, self._core.state.segments_version]

    def segments(self, call: Call) -> list[Any]:
        """All segments that are not gone, and where to reach them."""
        del call
        state = self._core.state
        rows = []
        for segment in state.segments.values():
            node = state.nodes[segment.node_id]
            rows.append(
                {
                    "id": segment.segment_id,
                    "name": segment.name,
                    "node": node.name,
                    "host": node.host,
                    "endpoint": node.engine_endpoint,
                    "view_endpoint": node.view_endpoint,
                    "instance": node.instance,
                    "generation": segment.generation,
                    "data": segment.data_handle,
                    "directory": segment.directory_handle,
                    "capacity": segment.capacity,
                    "slots": segment.slots,
                    "tier": segment.tier,
                    "kind": segment.kind,
                    "location": segment.location,
                    "state": segment.state,
                }
            )
        return [self._core.counters.epoch, state.segments_version, rows]

    def tenant_set(self, call: Call) -> Any:
        """Makes a tenant, or changes its quota and token. Clients of the default tenant may."""
        core = self._core
        name = name_text(call.params[0], "name")
        quota = number(call.params[1], "quota bytes", 0, 1 << 62)
        digest = raw(call.params[2], "token digest")
        if len(digest) not in (0, _DIGEST_BYTES):
            raise BadParams(
                "a token digest is SHA-256 of the token (32 bytes), or empty", field="token digest"
            )
        if call.tenant != DEFAULT_TENANT_ID:
            raise TenantRefused("only clients of the default tenant may set tenants")
        core.check_may_change()
        tenants = core.state.tenants
        tenant_id = next((each.tenant_id for each in tenants.values() if each.name == name), None)
        if tenant_id is None:
            if len(tenants) >= core.config.tenants_max:
                raise Overloaded("too many tenants", field="tenants_max", limit=core.config.tenants_max)
            tenant_id = core.state.next_tenant_id
        core.commit(facts.Tenant(tenant_id, name, quota, digest))
        result = [core.counters.epoch, tenant_id]
        reply = Reply(call.connection, call.message_id, None, result)
        core.hold(reply, Needs(core.counters.last_fact))
        return HELD
