"""The conductor over HTTP: sockets, tasks and the clock around `ConductorCore`.

Everything runs on one asyncio loop: handlers, and the tasks that read event streams, so the core needs no
locks. A request's body is JSON or MessagePack, and so is its answer. Registrations and instances are written
to the state file before they are answered; after a restart they are there from the first request on, and the
streams' replays make the index warm behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.metadata
import logging
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, final

from moonpool.conductor import openapi, service_bodies, service_metrics
from moonpool.conductor.http_messages import HttpLimits, HttpRequest, HttpResponse, Outcome
from moonpool.conductor.http_port import HttpPort
from moonpool.conductor.http_routes import Routes
from moonpool.conductor.registration import Registration, plain
from moonpool.conductor.service_config import ConductorConfig
from moonpool.conductor.service_core import ConductorCore, global_view
from moonpool.conductor.service_state import load_state, save_state
from moonpool.conductor.subscription import Subscription, load_zmq
from moonpool.config import EngineConfig
from moonpool.engine.stream_options import tune_listener
from moonpool.errors import LimitExceeded, MoonpoolError, ResourceError, UsageError
from moonpool.kernels.warming import warm_placement
from moonpool.units import MS_PER_S

logger: Final = logging.getLogger("moonpool.conductor")

_METRICS_TYPE: Final = "text/plain; version=0.0.4"
#: Operations whose handlers wait for a stream to end.
_AWAITED: Final = frozenset({"register", "unregister"})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; the caller owns it. Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=1_024)
    if sock.getsockname()[0] in ("127.0.0.1", "::1"):
        # A congestion control made for long paths would pace answers that never leave the host.
        tune_listener(sock, EngineConfig())
    sock.setblocking(False)
    return sock


def http_limits(config: ConductorConfig) -> HttpLimits:
    """The bounds of the service's port."""
    return HttpLimits(
        body_bytes_max=config.body_bytes_max,
        connections_max=config.connections_max,
        request_s=config.receive_timeout_ms / MS_PER_S,
        idle_s=config.idle_timeout_ms / MS_PER_S,
    )


@final
class ConductorService:
    """One service, from `start` to `close`, on the loop that calls them."""

    def __init__(self, config: ConductorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config: Final = config
        self.core: Final = ConductorCore(config)
        self._clock: Final = clock
        self._port: Final = HttpPort(self._answer, http_limits(config))
        self._routes: Final = Routes((each.method, each.path, each.name) for each in openapi.OPERATIONS)
        self._zmq_context: Any = None
        self._subscriptions: dict[tuple[str, str, int], Subscription] = {}
        self._timings: Final = service_metrics.Timings()
        self._address: tuple[str, int] = (config.host, config.port)
        self._version = ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        return self._address

    async def start(self) -> None:
        """Loads the state, subscribes, and listens. Raises `ResourceError` when the port cannot be had."""
        warm_placement()
        self._version = importlib.metadata.version("moonpool")
        self._restore()
        try:
            listener = listen(self.config.host, self.config.port)
        except OSError as exc:
            await self.close()
            where = f"{self.config.host}:{self.config.port}"
            raise ResourceError(
                f"cannot listen on {where}: {exc.strerror}; choose another port", errno=exc.errno or 0
            ) from exc
        host, port = listener.getsockname()[:2]
        self._address = (host, port)
        await self._port.start(listener)

    async def close(self) -> None:
        """Stops listening, ends the streams. Idempotent."""
        await self._port.close()
        for subscription in list(self._subscriptions.values()):
            await subscription.stop()
        self._subscriptions.clear()
        if self._zmq_context is not None:
            self._zmq_context.destroy(linger=0)
            self._zmq_context = None

    def _restore(self) -> None:
        if self.config.state_path is None:
            return
        saved = load_state(self.config.state_path)
        for body in saved.instances:
            self.core.put_instance(body, self._clock())
        for body in saved.registrations:
            registration, _ = self.core.register(body)
            try:
                self._subscribe(registration)
            except ResourceError as exc:
                # Its endpoint may be gone for good; the others must not wait for somebody to look.
                logger.warning("%s", exc)

    def _save(self) -> None:
        if self.config.state_path is not None:
            registrations = [plain(each) for each in self.core.catalogue]
            save_state(self.config.state_path, registrations, self.core.saved_instances())

    def _subscribe(self, registration: Registration) -> None:
        if not registration.endpoint:
            return  # fed by somebody else, or known by name only
        if self._zmq_context is None:
            self._zmq_context = load_zmq().asyncio.Context()
        feed = self.core.catalogue.feed(registration.key)
        assert feed is not None
        subscription = Subscription(registration, feed, self.config, self._zmq_context)
        subscription.start()
        self._subscriptions[registration.key] = subscription

    # ---- around every request ------------------------------------------------------------------------------

    def _answer(self, request: HttpRequest) -> Outcome:
        """The port's handler: at once where nothing has to be awaited."""
        began = time.perf_counter()
        name, place = self._routes.find(request.method, request.path)
        if name is None:
            status = 405 if place else 404
            allowed = (("Allow", ", ".join(place)),) if place else ()
            response = self._reply(
                request, {"error": HTTPStatus(status).phrase, "reason": "not_found"}, status
            )
            return response._replace(headers=allowed)
        if name != "healthz" and not self._allowed(request):
            return self._noted(
                name, began, self._reply(request, {"error": "a bearer token is asked for"}, 401)
            )
        if name in _AWAITED:
            return self._awaited(name, began, request)
        try:
            response = self._respond(request, getattr(self, f"_{name}")(request, *place))
        except MoonpoolError as exc:
            response = self._refuse(request, exc)
        return self._noted(name, began, response)

    async def _awaited(self, name: str, began: float, request: HttpRequest) -> HttpResponse:
        try:
            response = self._respond(request, await getattr(self, f"_{name}")(request))
        except MoonpoolError as exc:
            response = self._refuse(request, exc)
        return self._noted(name, began, response)

    def _noted(self, name: str, began: float, response: HttpResponse) -> HttpResponse:
        self._timings.note(name, response.status, time.perf_counter() - began)
        return response

    def _respond(self, request: HttpRequest, found: Any) -> HttpResponse:
        return found if isinstance(found, HttpResponse) else self._reply(request, found)

    def _refuse(self, request: HttpRequest, problem: MoonpoolError) -> HttpResponse:
        status = 503
        if isinstance(problem, LimitExceeded):
            status = 429
        elif isinstance(problem, UsageError):
            status = 415 if problem.value == "unsupported_content_type" else 400
        return self._reply(request, _failure(problem), status)

    def _allowed(self, request: HttpRequest) -> bool:
        if not self.config.token:
            return True
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {self.config.token}"
        # Header values came as bytes, one letter each.
        return hmac.compare_digest(given.encode("latin-1"), wanted.encode())

    def _reply(self, request: HttpRequest, answer: Any, status: int = 200) -> HttpResponse:
        body, kind = service_bodies.encode_body(answer, request.content_type)
        return HttpResponse(body, kind, status)

    def _body(self, request: HttpRequest) -> dict[Any, Any]:
        return service_bodies.decode_body(request.body, request.content_type)

    # ---- one method for each operation ---------------------------------------------------------------------

    async def _register(self, request: HttpRequest) -> Any:
        registration, is_new = self.core.register(self._body(request))
        if is_new:
            try:
                self._subscribe(registration)
                self._save()
            except BaseException:
                await self._drop([registration])
                raise
        return {"status": "registered" if is_new else "unchanged", "instance_id": registration.instance}

    async def _unregister(self, request: HttpRequest) -> Any:
        gone = self.core.unregister(self._body(request))
        if not gone:
            return self._reply(request, {"error": "no such registration", "reason": "not_found"}, 404)
        await self._end(gone)
        self._save()
        return {"status": "unregistered", "removed_instances": sorted({each.instance for each in gone})}

    async def _drop(self, registrations: list[Registration]) -> None:
        for each in registrations:
            self.core.catalogue.unregister(each.instance, each.tenant, each.rank)
        await self._end(registrations)

    async def _end(self, registrations: list[Registration]) -> None:
        for each in registrations:
            subscription = self._subscriptions.pop(each.key, None)
            if subscription is not None:
                await subscription.stop()

    def _query(self, request: HttpRequest) -> Any:
        body = self._body(request)
        return self.core.query(body, request.content_type in service_bodies.MSGPACK_TYPES)

    def _query_by_hash(self, request: HttpRequest) -> Any:
        body = self._body(request)
        return self.core.query_by_hash(body, request.content_type in service_bodies.MSGPACK_TYPES)

    def _schedule(self, request: HttpRequest) -> Any:
        return self.core.schedule(self._body(request), self._clock())

    def _complete(self, request: HttpRequest) -> Any:
        known = self.core.complete(self._body(request), self._clock())
        return {"status": "noted" if known else "unknown"}

    def _put_instance(self, request: HttpRequest) -> Any:
        changed = self.core.put_instance(self._body(request), self._clock())
        if changed:
            self._save()
        return {"status": "changed" if changed else "unchanged"}

    def _list_instances(self, _request: HttpRequest) -> Any:
        return {"instances": self.core.instances()}

    def _drop_instance(self, request: HttpRequest, model: str, name: str) -> Any:
        if not self.core.drop_instance(model, name, self._clock()):
            return self._reply(request, {"error": "no such instance", "reason": "not_found"}, 404)
        self._save()
        return {"status": "removed"}

    def _services(self, _request: HttpRequest) -> Any:
        return {"services": self.core.services()}

    def _global_view(self, _request: HttpRequest) -> Any:
        return global_view(self.core)

    def _metrics(self, _request: HttpRequest) -> Any:
        text = service_metrics.render(self.core, self._timings)
        return HttpResponse(text.encode(), _METRICS_TYPE)

    def _healthz(self, _request: HttpRequest) -> Any:
        suspect = sum(feed["stream"]["suspect"] for feed in self.core.services())
        return {"status": "ok", "registrations": len(self.core.catalogue), "suspect": suspect}

    def _openapi(self, _request: HttpRequest) -> Any:
        return openapi.document(self._version)


def _failure(error: MoonpoolError) -> dict[str, Any]:
    found: dict[str, Any] = {"error": error.message}
    field, value = getattr(error, "field", None), getattr(error, "value", None)
    found["reason"] = value if value in service_bodies.REASONS else "invalid"
    if field is not None:
        found["field"] = field
    return found


async def serve(config: ConductorConfig, ready: Callable[[tuple[str, int]], object]) -> None:
    """Runs a service until the task is cancelled; `ready` is told the address once it listens."""
    service = ConductorService(config)
    await service.start()
    try:
        ready(service.address)
        await asyncio.Event().wait()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await service.close()
