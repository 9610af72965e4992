"""A small router: OpenAI-style completions go where the conductor says.

It proxies /v1/completions and /v1/chat/completions, streaming or not. Each request is tokenized by one of the
engines (vLLM's /tokenize), placed by the conductor, sent on, and reported: its first token, its end, and how
much was found cached. When the conductor does not answer, requests go round robin.

Run it: python examples/conductor_router.py --conductor http://127.0.0.1:13333 --port 9000 http://engine-0:8000
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import struct
import uuid
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgpack  # type: ignore[import-untyped]
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
CONDUCTOR_TIMEOUT = aiohttp.ClientTimeout(total=1.0)
ENGINE_TIMEOUT = aiohttp.ClientTimeout(total=600.0, connect=3.0)


class Router:
    """Forwards requests, one conductor decision for each."""

    def __init__(self, conductor: str, engines: Sequence[str], token: str = "") -> None:
        self._conductor = conductor.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        urls = [url.rstrip("/") for url in engines]
        self._round_robin, self._tokenizers = itertools.cycle(urls), itertools.cycle(urls)
        self.fallbacks = 0

    def application(self) -> web.Application:
        """The router as an application."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self._session_of)
        for path in PATHS:
            app.router.add_post(path, self._serve)
        return app

    async def _session_of(self, _app: web.Application) -> Any:
        self._session = aiohttp.ClientSession()
        yield
        await self._session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        request_id = f"router-{uuid.uuid4().hex}"
        url = await self._place(request_id, body)
        try:
            return await self._forward(request, url, body, request_id)
        except aiohttp.ClientError as exc:
            await self._report(request_id, "refused")
            return web.json_response({"error": {"message": f"{url} failed: {exc}"}}, status=502)
        except BaseException:
            await self._report(request_id, "cancelled")
            raise

    async def _place(self, request_id: str, body: dict[str, Any]) -> str:
        """Where the conductor sends the request; the next engine in turn when it does not say."""
        try:
            tokens = await self._tokenize(body)
            question = {
                "request_id": request_id,
                "model": body["model"],
                "token_ids": struct.pack(f"<{len(tokens)}I", *tokens),
                "max_tokens": int(body.get("max_tokens") or 0),
                "cache_salt": body.get("cache_salt") or "",
            }
            answer = await self._ask("/schedule", question)
            if answer.get("accepted"):
                return str(answer["prefill"]["url"])
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
            pass
        self.fallbacks += 1
        return next(self._round_robin)

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        fields = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
        url = next(self._tokenizers) + "/tokenize"
        async with self._session.post(url, json=fields, timeout=CONDUCTOR_TIMEOUT) as reply:
            reply.raise_for_status()
            tokens: list[int] = (await reply.json())["tokens"]
            return tokens

    async def _ask(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        headers = {**self._headers, "Content-Type": "application/msgpack"}
        data = msgpack.packb(question, use_bin_type=True)
        url = self._conductor + path
        async with self._session.post(url, data=data, headers=headers, timeout=CONDUCTOR_TIMEOUT) as reply:
            reply.raise_for_status()
            answer: dict[str, Any] = msgpack.unpackb(await reply.read())
            return answer

    async def _report(self, request_id: str, event: str, cached_tokens: int | None = None) -> None:
        question: dict[str, Any] = {"request_id": request_id, "event": event}
        if cached_tokens is not None:
            question["cached_tokens"] = cached_tokens
        # What does not get through is forgotten by the conductor itself after a while.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await self._ask("/complete", question)

    async def _forward(
        self, request: web.Request, url: str, body: dict[str, Any], request_id: str
    ) -> web.StreamResponse:
        async with self._session.post(url + request.path, json=body, timeout=ENGINE_TIMEOUT) as upstream:
            response = web.StreamResponse(status=upstream.status)
            response.content_type = upstream.content_type
            await response.prepare(request)
            tail = b""
            is_first = True
            async for chunk in upstream.content.iter_any():
                if is_first and upstream.status == 200:
                    is_first = False
                    await self._report(request_id, "first_token")
                await response.write(chunk)
                tail = (tail + chunk)[-65_536:]
            await self._report(
                request_id, "finished" if upstream.status == 200 else "refused", cached_tokens_of(tail)
            )
            await response.write_eof()
            return response


def cached_tokens_of(tail: bytes) -> int | None:
    """`usage.prompt_tokens_details.cached_tokens` of an answer, or of a stream's last event that has it."""
    texts = [tail] if not tail.lstrip().startswith(b"data:") else tail.split(b"data:")[::-1]
    for text in texts:
        try:
            usage = json.loads(text)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "engines", nargs="+", help="URLs of the engines, for tokenizing and when all else fails"
    )
    parser.add_argument("--conductor", default="http://127.0.0.1:13333")
    parser.add_argument("--token", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    options = parser.parse_args(arguments)
    router = Router(options.conductor, options.engines, options.token)
    web.run_app(router.application(), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
