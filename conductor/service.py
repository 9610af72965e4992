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
from collections.abc import Awaitable, Callable
from typing import Any, Final, final

from moonpool.conductor import openapi, service_bodies, service_metrics
from moonpool.conductor.registration import Registration, plain
from moonpool.conductor.service_config import ConductorConfig
from moonpool.conductor.service_core import ConductorCore, global_view
from moonpool.conductor.service_state import load_state, save_state
from moonpool.conductor.subscription import Subscription, load_zmq
from moonpool.config import EngineConfig
from moonpool.engine.stream_options import tune_listener
from moonpool.errors import LimitExceeded, MoonpoolError, ResourceError, UsageError
from moonpool.kernels.warming import warm_placement

logger: Final = logging.getLogger("moonpool.conductor")

_METRICS_TYPE: Final = "text/plain; version=0.0.4"


def load_aiohttp() -> Any:
    """The aiohttp.web module; raises `ResourceError` that says how to get it."""
    try:
        from aiohttp import web
    except ImportError as exc:
        raise ResourceError("the service needs aiohttp; install moonpool[service]") from exc
    return web


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; the caller owns it. Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=1_024)
    if sock.getsockname()[0] in ("127.0.0.1", "::1"):
        # A congestion control made for long paths would pace answers that never leave the host.
        tune_listener(sock, EngineConfig())
    sock.setblocking(False)
    return sock


@final
class ConductorService:
    """One service, from `start` to `close`, on the loop that calls them."""

    def __init__(self, config: ConductorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config: Final = config
        self.core: Final = ConductorCore(config)
        self._clock: Final = clock
        self._web: Final = load_aiohttp()
        self._zmq_context: Any = None
        self._subscriptions: dict[tuple[str, str, int], Subscription] = {}
        self._timings: Final = service_metrics.Timings()
        self._runner: Any = None
        self._listener: socket.socket | None = None
        self._version = ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        host, port = self._runner.addresses[0][:2]
        return host, port

    async def start(self) -> None:
        """Loads the state, subscribes, and listens. Raises `ResourceError` when the port cannot be had."""
        warm_placement()
        self._version = importlib.metadata.version("moonpool")
        self._restore()
        web = self._web
        app = web.Application(client_max_size=self.config.body_bytes_max)
        for operation in openapi.OPERATIONS:
            handler = getattr(self, f"_{operation.name}")
            app.router.add_route(operation.method, operation.path, self._wrap(operation.name, handler))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            self._listener = listen(self.config.host, self.config.port)
        except OSError as exc:
            await self.close()
            where = f"{self.config.host}:{self.config.port}"
            raise ResourceError(
                f"cannot listen on {where}: {exc.strerror}; choose another port", errno=exc.errno or 0
            ) from exc
        await web.SockSite(self._runner, self._listener).start()

    async def close(self) -> None:
        """Stops listening, ends the streams. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
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

    def _wrap(self, name: str, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def answer(request: Any) -> Any:
            began = time.perf_counter()
            if name != "healthz" and not self._allowed(request):
                response = self._reply(request, {"error": "a bearer token is asked for"}, 401)
            else:
                response = await self._guarded(handler, request)
            self._timings.note(name, response.status, time.perf_counter() - began)
            return response

        return answer

    async def _guarded(self, handler: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        try:
            found = await handler(request)
            return found if isinstance(found, self._web.StreamResponse) else self._reply(request, found)
        except LimitExceeded as exc:
            return self._reply(request, _failure(exc), 429)
        except UsageError as exc:
            status = 415 if exc.value == "unsupported_content_type" else 400
            return self._reply(request, _failure(exc), status)
        except MoonpoolError as exc:
            return self._reply(request, _failure(exc), 503)

    def _allowed(self, request: Any) -> bool:
        if not self.config.token:
            return True
        given = request.headers.get("Authorization", "")
        wanted = f"Bearer {self.config.token}"
        return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())

    def _reply(self, request: Any, answer: Any, status: int = 200) -> Any:
        body, kind = service_bodies.encode_body(answer, request.content_type)
        return self._web.Response(body=body, status=status, content_type=kind)

    async def _body(self, request: Any) -> dict[Any, Any]:
        return service_bodies.decode_body(await request.read(), request.content_type)

    # ---- one method for each operation ---------------------------------------------------------------------

    async def _register(self, request: Any) -> Any:
        registration, is_new = self.core.register(await self._body(request))
        if is_new:
            try:
                self._subscribe(registration)
                self._save()
            except BaseException:
                await self._drop([registration])
                raise
        return {"status": "registered" if is_new else "unchanged", "instance_id": registration.instance}

    async def _unregister(self, request: Any) -> Any:
        gone = self.core.unregister(await self._body(request))
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

    async def _query(self, request: Any) -> Any:
        body = await self._body(request)
        return self.core.query(body, request.content_type in service_bodies.MSGPACK_TYPES)

    async def _query_by_hash(self, request: Any) -> Any:
        body = await self._body(request)
        return self.core.query_by_hash(body, request.content_type in service_bodies.MSGPACK_TYPES)

    async def _schedule(self, request: Any) -> Any:
        return self.core.schedule(await self._body(request), self._clock())

    async def _complete(self, request: Any) -> Any:
        known = self.core.complete(await self._body(request), self._clock())
        return {"status": "noted" if known else "unknown"}

    async def _put_instance(self, request: Any) -> Any:
        changed = self.core.put_instance(await self._body(request), self._clock())
        if changed:
            self._save()
        return {"status": "changed" if changed else "unchanged"}

    async def _list_instances(self, _request: Any) -> Any:
        return {"instances": self.core.instances()}

    async def _drop_instance(self, request: Any) -> Any:
        model, name = request.match_info["model"], request.match_info["name"]
        if not self.core.drop_instance(model, name, self._clock()):
            return self._reply(request, {"error": "no such instance", "reason": "not_found"}, 404)
        self._save()
        return {"status": "removed"}

    async def _services(self, _request: Any) -> Any:
        return {"services": self.core.services()}

    async def _global_view(self, _request: Any) -> Any:
        return global_view(self.core)

    async def _metrics(self, _request: Any) -> Any:
        text = service_metrics.render(self.core, self._timings)
        return self._web.Response(text=text, headers={"Content-Type": _METRICS_TYPE})

    async def _healthz(self, _request: Any) -> Any:
        suspect = sum(feed["stream"]["suspect"] for feed in self.core.services())
        return {"status": "ok", "registrations": len(self.core.catalogue), "suspect": suspect}

    async def _openapi(self, _request: Any) -> Any:
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
