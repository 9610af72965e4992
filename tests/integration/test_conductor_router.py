"""The example router between real HTTP servers: engines, the conductor's service, clients."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from moonpool.conductor.service import ConductorService
from moonpool.conductor.service_config import ConductorConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "conductor_router.py"
BLOCK = 4


def load_router() -> Any:
    spec = importlib.util.spec_from_file_location("conductor_router", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """An OpenAI-style server: a token for each character, an answer that names the server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.served: list[str] = []
        self.fails = False

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(each) for each in (await request.json())["prompt"]]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.fails:
            raise web.HTTPServiceUnavailable(text="busy")
        self.served.append(body["prompt"])
        usage = {"usage": {"prompt_tokens_details": {"cached_tokens": 4}}}
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": self.name}], **usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in ("from ", self.name):
            await response.write(b"data: " + json.dumps({"choices": [{"text": word}]}).encode() + b"\n\n")
        await response.write(b"data: " + json.dumps({"choices": [], **usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


class World:
    def __init__(self) -> None:
        self.engines = [Engine("e0"), Engine("e1")]
        self.service = ConductorService(ConductorConfig(port=0))
        self.router: Any = None
        self.url = ""
        self.session: aiohttp.ClientSession

    @asynccontextmanager
    async def running(self, *, conductor: bool = True) -> AsyncIterator[World]:
        async with AsyncExitStack() as stack:
            await self.service.start()
            stack.push_async_callback(self.service.close)
            urls = [await stack.enter_async_context(listening(each.application())) for each in self.engines]
            for engine, url in zip(self.engines, urls, strict=True):
                core = self.service.core
                core.register({"instance_id": engine.name, "modelname": "m", "block_size": BLOCK})
                core.put_instance({"instance_id": engine.name, "model": "m", "url": url}, 0.0)
            base = "http://{}:{}".format(*self.service.address) if conductor else "http://127.0.0.1:1"
            self.router = load_router().Router(base, urls)
            self.url = await stack.enter_async_context(listening(self.router.application()))
            self.session = await stack.enter_async_context(aiohttp.ClientSession())
            yield self

    async def complete(self, prompt: str, **more: Any) -> tuple[int, str]:
        body = {"model": "m", "prompt": prompt, **more}
        async with self.session.post(self.url + "/v1/completions", json=body) as reply:
            return reply.status, await reply.text()


@pytest.mark.parametrize("stream", [False, True])
def test_requests_go_where_their_blocks_are_and_are_reported(stream: bool) -> None:
    prompt = "a system prompt that is long enough, " * 60

    async def story() -> None:
        async with World().running() as world:
            core = world.service.core
            (_first, second) = core.catalogue
            tokens = [ord(each) for each in prompt]
            hashes = core.catalogue.hashes(question(), tokens)
            core.index.store(second.context, second.holder, hashes)
            for number in range(3):
                status, answer = await world.complete(prompt + str(number), stream=stream)
                assert status == 200
                assert "e1" in answer
            assert [len(engine.served) for engine in world.engines] == [0, 3]
            assert core.requests_running == 0
            assert world.router.fallbacks == 0
            feed = core.catalogue.feed(second.key)
            assert feed is not None
            assert feed.drift > 0  # the engine found 4 tokens where more were believed

    asyncio.run(story())


def question() -> Any:
    from moonpool.conductor.catalogue import Question

    return Question(model="m")


def test_without_a_conductor_requests_go_round() -> None:
    async def story() -> None:
        async with World().running(conductor=False) as world:
            for number in range(4):
                assert (await world.complete(f"p{number}"))[0] == 200
            assert all(engine.served for engine in world.engines)
            assert world.router.fallbacks == 4

    asyncio.run(story())


def test_a_failing_engine_is_reported_and_its_answer_passed_on() -> None:
    async def story() -> None:
        async with World().running() as world:
            for engine in world.engines:
                engine.fails = True
            status, text = await world.complete("p")
            assert (status, text) == (503, "busy")
            assert world.service.core.requests_running == 0

    asyncio.run(story())
