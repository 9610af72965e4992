"""The conductor's service over real HTTP and real event streams."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
from tests.integration.conductor_engines import Engine, stored

from moonpool.conductor.openapi import OPERATIONS
from moonpool.conductor.service import ConductorService
from moonpool.conductor.service_config import ConductorConfig
from moonpool.errors import ResourceError, UsageError

BLOCK = 4
TOKENS = list(range(100, 116))
PATIENCE_S = 20.0


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


class Client:
    def __init__(self, session: aiohttp.ClientSession, address: tuple[str, int]) -> None:
        self._session = session
        self._base = f"http://{address[0]}:{address[1]}"

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        async with self._session.request(method, self._base + path, json=body, headers=headers) as reply:
            if reply.content_type == "application/json":
                return reply.status, await reply.json()
            return reply.status, await reply.text()

    async def packed(self, path: str, body: Any) -> tuple[int, Any]:
        headers = {"Content-Type": "application/msgpack"}
        data = msgpack.packb(body, use_bin_type=True)
        async with self._session.post(self._base + path, data=data, headers=headers) as reply:
            assert reply.content_type == "application/msgpack"
            return reply.status, msgpack.unpackb(await reply.read())


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[ConductorService, Client]]:
    service = ConductorService(ConductorConfig(port=0, **settings))
    await service.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield service, Client(session, service.address)
    finally:
        await service.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async def look() -> None:
        while not await condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), PATIENCE_S)


def registration(engine: Engine | None, name: str = "e0", **more: Any) -> dict[str, Any]:
    body = {"instance_id": name, "modelname": "m", "block_size": BLOCK, "type": "vLLM", **more}
    if engine is not None:
        body |= {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
    return body


async def matched(client: Client, name: str = "e0") -> int:
    status, found = await client.ask("POST", "/query", {"model": "m", "token_ids": TOKENS})
    assert status == 200, found
    return int(found["default"].get(name, {}).get("longest_matched", -1))


def test_blocks_of_a_live_stream_are_found_by_tokens(engine: Engine) -> None:
    async def story() -> None:
        async with running() as (_, client):
            assert (await client.ask("POST", "/register", registration(engine)))[0] == 200
            assert await matched(client) == 0
            engine.publish(stored([11, 12], TOKENS[:8], BLOCK))
            engine.publish(stored([13], TOKENS[8:12], BLOCK, parent=12))

            async def warm() -> bool:
                return await matched(client) == 12

            await until(warm)
            body = {"model": "m", "token_ids": struct.pack("<16I", *TOKENS)}
            status, found = await client.packed("/query", body)
            assert status == 200
            assert found["instances"]["e0"] == {
                "longest_matched": 12,
                "gpu": 12,
                "cpu": 12,
                "disk": 12,
                "dp": {"0": 12},
                "rank_matches": {"0": {"gpu": 12, "cpu": 12, "disk": 12}},
            }
            engine.publish({"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU"})

            async def shorter() -> bool:
                return await matched(client) == 4

            await until(shorter)

    asyncio.run(story())


@pytest.mark.parametrize("old_replays", [False, True])
def test_what_was_published_before_and_what_got_lost_comes_by_replay(old_replays: bool) -> None:
    engine = Engine(old_replays=old_replays)

    async def story() -> None:
        engine.publish(stored([11], TOKENS[:4], BLOCK))
        async with running() as (service, client):
            await client.ask("POST", "/register", registration(engine))

            async def warm() -> bool:
                return await matched(client) == 4

            await until(warm)
            # Only a subscriber that is connected can lose something.
            await settled(service, engine, client)
            engine.publish(stored([12], TOKENS[4:8], BLOCK, parent=11), to_subscribers=False)
            engine.publish(stored([13], TOKENS[8:12], BLOCK, parent=12))

            async def whole() -> bool:
                return await matched(client) == 12

            await until(whole)
            (found,) = (await client.ask("GET", "/services"))[1]["services"]
            assert found["stream"]["suspect"] is False

    try:
        asyncio.run(story())
    finally:
        engine.close()


async def settled(service: ConductorService, engine: Engine, client: Client) -> None:
    """Publishes until something comes through the subscription itself."""
    (registered,) = service.core.catalogue
    feed = service.core.catalogue.feed(registered.key)
    assert feed is not None
    before = feed.counters.messages

    async def heard() -> bool:
        engine.publish(["BlockRemoved", [999]])
        return feed.counters.messages > before

    await until(heard)
    sent = engine._next

    async def all_heard() -> bool:
        return feed.expected >= sent

    await until(all_heard)


def test_a_restarted_engine_is_believed_anew(engine: Engine) -> None:
    async def story() -> None:
        async with running() as (service, client):
            await client.ask("POST", "/register", registration(engine))
            await settled(service, engine, client)
            engine.publish(stored([11], TOKENS[:4], BLOCK))

            async def warm() -> bool:
                return await matched(client) == 4

            await until(warm)
            engine.restart()
            engine.publish(stored([50], [7, 7, 7, 7], BLOCK))

            async def cold() -> bool:
                return await matched(client) == 0

            await until(cold)
            assert len(service.core.index) == 1

    asyncio.run(story())


def test_garbage_on_a_stream_harms_nobody(engine: Engine) -> None:
    async def story() -> None:
        async with running() as (service, client):
            await client.ask("POST", "/register", registration(engine))
            await settled(service, engine, client)
            for frames in ([b"x"], [b"", b"short", b"y"], [b"", b"\xff" * 8, b""], [b"", b"\0" * 8, b"\xc1"]):
                engine.send_raw(*frames)
            engine.publish(stored([11], TOKENS[:4], BLOCK))

            async def warm() -> bool:
                return await matched(client) == 4

            await until(warm)
            text = (await client.ask("GET", "/metrics"))[1]
            assert (
                'moonpool_conductor_stream_unreadable_total{instance="e0",rank="0",tenant="default"} 1'
                in text
            )

    asyncio.run(story())


def test_a_service_that_starts_again_schedules_at_once_and_is_warm_by_replay(
    engine: Engine, tmp_path: Path
) -> None:
    state = tmp_path / "state" / "conductor.json"

    async def first() -> None:
        async with running(state_path=state) as (_, client):
            engine.publish(stored([11, 12], TOKENS[:8], BLOCK))
            assert (await client.ask("POST", "/register", registration(engine)))[0] == 200
            for name in ("e0", "e1"):
                body = {"instance_id": name, "model": "m", "url": f"http://{name}"}
                assert (await client.ask("POST", "/instances", body))[0] == 200

    async def second() -> None:
        async with running(state_path=state) as (_, client):
            body = {"request_id": "r0", "model": "m", "token_ids": TOKENS}
            status, found = await client.ask("POST", "/schedule", body)
            assert status == 200
            assert found["accepted"]
            assert found["prefill"]["url"] in ("http://e0", "http://e1")

            async def warm() -> bool:
                return await matched(client) == 8

            await until(warm)
            body = {"request_id": "r1", "model": "m", "token_ids": TOKENS, "explain": True}
            status, found = await client.ask("POST", "/schedule", body)
            assert status == 200
            assert "e0" in found["explanation"]
            assert len((await client.ask("GET", "/instances"))[1]["instances"]) == 2

    asyncio.run(first())
    asyncio.run(second())


def test_requests_are_booked_and_reported_on() -> None:
    async def story() -> None:
        async with running() as (service, client):
            for name in ("a", "b"):
                await client.ask(
                    "POST", "/instances", {"instance_id": name, "model": "m", "block_size": BLOCK}
                )
            seen = set()
            for number in range(8):
                body = {"request_id": f"r{number}", "model": "m", "tokens": 1_000, "max_tokens": 100}
                status, found = await client.ask("POST", "/schedule", body)
                assert status == 200
                seen.add(found["prefill"]["instance_id"])
            assert seen == {"a", "b"}
            assert service.core.requests_running == 8
            assert (await client.ask("POST", "/schedule", {**body, "request_id": "r0"}))[0] == 400
            report = {"request_id": "r0", "event": "first_token", "cached_tokens": 0}
            assert (await client.ask("POST", "/complete", report))[1] == {"status": "noted"}
            assert (await client.ask("POST", "/complete", {"request_id": "nobody"}))[1] == {
                "status": "unknown"
            }
            # One instance leaves: its requests go with it, the others' stay booked.
            assert (await client.ask("DELETE", "/instances/m/a"))[0] == 200
            assert (await client.ask("DELETE", "/instances/m/a"))[0] == 404
            for number in range(8):
                await client.ask("POST", "/complete", {"request_id": f"r{number}"})
            assert service.core.requests_running == 0
            (left,) = (await client.ask("GET", "/instances"))[1]["instances"]
            assert left["booked"] == {"batch": 0.0, "waiting": 0.0, "queued_s": 0.0}
            text = (await client.ask("GET", "/metrics"))[1]
            assert 'moonpool_conductor_decisions_total{verdict="accepted"} 8' in text

    asyncio.run(story())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "/query", {"model": "m"}, 400, "invalid"),
        ("POST", "/query", {"token_ids": [1]}, 400, "invalid"),
        ("POST", "/query", {"model": "m", "token_ids": [1], "x": 1}, 400, "unknown_field"),
        ("POST", "/query", {"model": "m", "token_ids": "abc"}, 400, "invalid"),
        ("POST", "/query", [1], 400, "invalid_json"),
        ("POST", "/query_by_hash", {"model": "m", "seq_hashes": [2**70]}, 400, "invalid"),
        ("POST", "/schedule", {"model": "nobody", "request_id": "r", "tokens": 5}, 400, "invalid"),
        ("POST", "/register", {"instance_id": "a", "modelname": "m"}, 400, "invalid"),
        ("POST", "/register",
         {"instance_id": "a", "modelname": "m", "block_size": 4, "y": 1}, 400, "unknown_field"),
        ("POST", "/register",
         {"instance_id": "a", "modelname": "m", "block_size": 4, "endpoint": "http://a"}, 400, "invalid"),
        ("POST", "/unregister", {"instance_id": "nobody"}, 404, "not_found"),
        ("POST", "/complete", {"request_id": "r", "event": "lunch"}, 400, "invalid"),
        ("POST", "/instances", {"instance_id": "a", "model": "m", "role": "cook"}, 400, "invalid"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_named(method: str, path: str, body: Any, status: int, reason: str) -> None:
    async def story() -> None:
        async with running() as (_, client):
            got, found = await client.ask(method, path, body)
            assert (got, found["reason"]) == (status, reason), found

    asyncio.run(story())


def test_other_kinds_of_bodies_and_methods_are_refused() -> None:
    async def story() -> None:
        async with running() as (service, client), aiohttp.ClientSession() as session:
            base = "http://{}:{}".format(*service.address)
            async with session.post(
                base + "/query", data=b"a: 1", headers={"Content-Type": "text/yaml"}
            ) as reply:
                assert reply.status == 415
            async with session.post(
                base + "/query", data=b"\xc1", headers={"Content-Type": "application/msgpack"}
            ) as reply:
                assert reply.status == 400
                assert msgpack.unpackb(await reply.read())["reason"] == "invalid_msgpack"
            async with session.post(
                base + "/query", data=b"{", headers={"Content-Type": "application/json"}
            ) as reply:
                assert reply.status == 400
            assert (await client.ask("GET", "/query"))[0] == 405

    asyncio.run(story())


def test_a_token_is_asked_for_everywhere_but_for_health() -> None:
    async def story() -> None:
        token = "s" * 32
        async with running(token=token) as (_, client):
            assert (await client.ask("GET", "/healthz"))[0] == 200
            for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": token}):
                assert (await client.ask("GET", "/services", None, **wrong))[0] == 401
            allowed = {"Authorization": f"Bearer {token}"}
            assert (await client.ask("GET", "/services", None, **allowed))[0] == 200

    asyncio.run(story())


def test_the_openapi_document_has_every_path() -> None:
    async def story() -> None:
        async with running() as (_, client):
            status, found = await client.ask("GET", "/openapi.json")
            assert status == 200
            assert {(path, method) for path, methods in found["paths"].items() for method in methods} == {
                (operation.path, operation.method) for operation in OPERATIONS
            }
            assert json.dumps(found)

    asyncio.run(story())


def test_registering_twice_and_otherwise(engine: Engine) -> None:
    async def story() -> None:
        async with running() as (_, client):
            body = registration(engine)
            assert (await client.ask("POST", "/register", body))[1]["status"] == "registered"
            assert (await client.ask("POST", "/register", body))[1]["status"] == "unchanged"
            status, found = await client.ask("POST", "/register", {**body, "block_size": 8})
            assert (status, found["reason"]) == (400, "invalid_registration")
            status, found = await client.ask("POST", "/unregister", {"instance_id": "e0"})
            assert (status, found["removed_instances"]) == (200, ["e0"])
            assert await matched(client) == -1

    asyncio.run(story())


def test_wrong_states_and_ports(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"version": 9}')
    with pytest.raises(UsageError, match="version"):
        asyncio.run(ConductorService(ConductorConfig(port=0, state_path=state)).start())
    state.write_text("[1")
    with pytest.raises(UsageError, match="move it away"):
        asyncio.run(ConductorService(ConductorConfig(port=0, state_path=state)).start())

    async def clash() -> None:
        async with running() as (service, _):
            other = ConductorService(ConductorConfig(port=service.address[1]))
            with pytest.raises(ResourceError, match="cannot listen"):
                await other.start()

    asyncio.run(clash())
    with pytest.raises(UsageError, match="token"):
        ConductorConfig(token="short")
