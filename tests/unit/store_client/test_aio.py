"""The asyncio face: the same results, many calls at once, cancellation that leaves nothing running."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonpool.errors import UsageError
from moonpool.store.aio import AsyncPool, connect_async
from moonpool.store.client_results import GetStatus, PutStatus
from moonpool.store.errors import DataLost, ForkedPool, MasterUnavailable, NotReady, PoolClosed
from moonpool.store.records import RemoveCode

Story = Callable[[AsyncPool, Any], Awaitable[None]]


def play(scripted: Any, story: Story, transport: str = "tcp") -> None:
    async def act() -> None:
        async with connect_async(scripted.address, transports=(transport,), unavailable_ms=300) as pool:
            await story(pool, scripted)

    asyncio.run(asyncio.wait_for(act(), 60))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_calls_of_a_pool(scripted: Any, transport: str) -> None:
    async def story(pool: AsyncPool, scripted: Any) -> None:
        data = bytes(range(256)) * 2000
        assert (await pool.put("k", data, replicas=2)).replicas == 2
        assert (await pool.put("k", data)).status is PutStatus.EXISTS
        assert await pool.get("k") == data
        assert await pool.get("none") is None
        assert await pool.get("k", offset=65_530, length=20) == data[65_530:65_550]
        out = bytearray(len(data))
        assert (await pool.get_into("k", out)).status is GetStatus.HIT
        assert out == data
        assert (await pool.get_into("k", out, offset=500_000)).length == 12_000
        results = await pool.put_many(["a", "b"], [b"1", b"2"])
        assert [result.stored for result in results] == [True, True]
        assert [bytes(value) for value in await pool.get_many(["b", "a"]) if value] == [b"2", b"1"]
        assert [one.hit for one in await pool.get_into_many(["a", "x"], [out, bytearray(1)])] == [True, False]
        assert await pool.exists("a")
        assert await pool.exists_many(["a", "x"]) == [True, False]
        assert (await pool.upsert("a", b"3")).stored
        assert await pool.get("a") == b"3"
        assert await pool.remove("a") is RemoveCode.REMOVED
        assert await pool.remove_many(["a", "b"]) == [RemoveCode.ABSENT, RemoveCode.REMOVED]

    play(scripted, story, transport)


def test_many_calls_go_at_once_over_one_connection(scripted: Any) -> None:
    async def story(pool: AsyncPool, scripted: Any) -> None:
        keys = [f"k{i}" for i in range(64)]
        await asyncio.gather(*(pool.put(key, key.encode() * 100) for key in keys))
        values = await asyncio.gather(*(pool.get(key) for key in keys))
        assert all(value == key.encode() * 100 for key, value in zip(keys, values, strict=True))
        assert scripted.names().count("client_join") == 1

    play(scripted, story)


def test_a_copy_that_is_wrong_is_never_returned(scripted: Any) -> None:
    async def story(pool: AsyncPool, scripted: Any) -> None:
        await pool.put("k", b"v" * 5000)
        scripted.segments[0].data.view[scripted.objects[b"k"][3][0][1]] ^= 1
        with pytest.raises(DataLost):
            await pool.get("k")

    play(scripted, story)


def test_a_cancelled_call_ends_and_the_pool_goes_on(scripted: Any) -> None:
    async def story(pool: AsyncPool, scripted: Any) -> None:
        await pool.put("k", b"v")
        asked, release = threading.Event(), threading.Event()

        def slow(_params: Any) -> None:
            asked.set()
            release.wait(10)

        scripted.bend["lookup"] = slow
        task = asyncio.create_task(pool.get("k"))
        while not asked.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        scripted.bend.clear()
        assert await pool.get("k") == b"v"

    play(scripted, story)


def test_a_master_that_is_away_is_waited_for_and_then_told(scripted: Any) -> None:
    async def story(pool: AsyncPool, scripted: Any) -> None:
        await pool.put("k", b"v")
        refusals = iter([NotReady()])

        def not_ready(_params: Any) -> None:
            refusal = next(refusals, None)
            if refusal is not None:
                raise refusal

        scripted.bend["lookup"] = not_ready
        assert await pool.get("k") == b"v"
        scripted.__exit__()
        with pytest.raises(MasterUnavailable):
            await pool.get("k")

    play(scripted, story)


def test_after_close_every_call_says_so(scripted: Any) -> None:
    async def act() -> None:
        pool = await connect_async(scripted.address)
        await pool.close()
        await pool.close()
        for call in (lambda: pool.get("k"), lambda: pool.put("k", b"v"), lambda: pool.exists("k")):
            with pytest.raises(PoolClosed):
                await call()
        with pytest.raises(PoolClosed):
            async for _ in pool.list():
                pass

    asyncio.run(asyncio.wait_for(act(), 60))


def test_a_forked_child_is_refused_and_the_parent_goes_on(scripted: Any) -> None:
    async def story(pool: AsyncPool, _scripted: Any) -> None:
        await pool.put("k", b"v")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool.get("k").send(None)
            except ForkedPool:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert await pool.get("k") == b"v"

    play(scripted, story)


def test_wrong_settings_are_told_before_anything_is_awaited() -> None:
    with pytest.raises(UsageError, match="no setting"):
        connect_async("host:1", tennant="x")
