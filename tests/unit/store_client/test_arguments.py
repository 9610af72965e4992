"""Wrong arguments of every kind: a UsageError of one line each, and nothing of the pool changes."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import Pin, PutPolicy, UsageError

WRONG: dict[str, tuple[Any, ...]] = {
    "replicas": (0, "2", None, 2.5, True, 256),
    "pin": ("hard", 7, None, Pin.SOFT),
    "soft_pin_ms": (5, "5", None, -1),
    "object_type": ("kv", -1, 2**70, None),
    "tier": ("x", 256),
    "kind": ("x", 2**70),
    "group": (5, b"x", "a\nb", "x" * 256),
    "preferred": (5, "segment", [1], None),
    "need_all": ("yes", 1),
    "unknown": (1,),
    "wait_ms": (-1, "x", 1.5, 2**70),
}
WRONG_SETTINGS: tuple[dict[str, Any], ...] = (
    *({name: value} for name, values in WRONG.items() for value in values),
    *({"pin": Pin.SOFT, "soft_pin_ms": lasts} for lasts in ("5", 1.5, 2**70)),
    {"pin": Pin.HARD, "soft_pin_ms": 5},
)
NO_LISTS: tuple[Any, ...] = (None, 5, "abc", b"abc", bytearray(b"abc"), np.array(3), object())


@pytest.fixture(scope="module")
def pool() -> Iterator[moonpool.Pool]:
    with moonpool.connect(embedded_bytes=1 << 22) as made:
        made.put("k", b"value")
        yield made
        assert [each.key for each in made.list()] == [b"k"]
        assert made.get("k") == b"value"


@pytest.mark.parametrize("settings", WRONG_SETTINGS, ids=lambda each: repr(each)[:40])
def test_wrong_settings_of_puts(pool: moonpool.Pool, settings: dict[str, Any]) -> None:
    for put in (
        lambda: pool.put("new", b"v", **settings),
        lambda: pool.put_from("new", [b"v"], **settings),
        lambda: pool.upsert("new", b"v", **settings),
        lambda: pool.put_many(["new"], [b"v"], **settings),
        lambda: pool.put_many(["new", "new2"], [b"v", b"w"], **settings),
    ):
        with pytest.raises(UsageError, match=r"^[^\n]+$"):
            put()


@pytest.mark.parametrize("policy", [5, {"replicas": 1}, "policy"])
def test_a_policy_is_a_policy(pool: moonpool.Pool, policy: Any) -> None:
    with pytest.raises(UsageError, match="PutPolicy"):
        pool.put("new", b"v", policy=policy)
    with pytest.raises(UsageError, match="not both"):
        pool.put("new", b"v", policy=PutPolicy(), replicas=2)
    with pytest.raises(UsageError, match="replace"):
        pool.upsert("k", b"v", replace=False)


@pytest.mark.parametrize("wrong", NO_LISTS, ids=lambda value: type(value).__name__)
def test_many_takes_lists(pool: moonpool.Pool, wrong: Any) -> None:
    for call in (
        pool.get_many,
        pool.exists_many,
        pool.remove_many,
        lambda keys: pool.put_many(keys, [b"1", b"2", b"3"]),
        lambda values: pool.put_many(["a", "b", "c"], values),
        lambda keys: pool.get_into_many(keys, [bytearray(9)] * 3),
        lambda buffers: pool.get_into_many(["k", "k", "k"], buffers),
        lambda buffers: pool.put_from("new", buffers),
    ):
        with pytest.raises(UsageError, match="takes a list"):
            call(wrong)


def test_many_takes_what_can_be_iterated(pool: moonpool.Pool) -> None:
    assert pool.exists_many(key for key in ("k", "x")) == [True, False]
    assert pool.exists_many(np.array(["k", "x"])) == [True, False]
    assert pool.exists_many({"k": 1}) == [True]
    assert [result.status.name for result in pool.put_many(iter(["k"]), iter([b"other"]))] == ["EXISTS"]


@pytest.mark.parametrize("prefix", [None, 1, 1.5, [], (), "x" * 1025], ids=lambda each: repr(each)[:9])
def test_a_prefix_is_text_or_bytes(pool: moonpool.Pool, prefix: Any) -> None:
    with pytest.raises(UsageError):
        list(pool.list(prefix))
    with pytest.raises(UsageError):
        pool.remove_prefix(prefix)


@pytest.mark.parametrize(
    ("pin", "lasts"), [("hard", 0), (9, 0), (None, 0), (1, 0), (2, 5), (1, "x"), (1, -1)]
)
def test_pins(pool: moonpool.Pool, pin: Any, lasts: Any) -> None:
    with pytest.raises(UsageError):
        pool.pin("k", pin, soft_pin_ms=lasts)


@pytest.mark.parametrize(
    "settings",
    [{"config": 5}, {"config": {}}, {"contribute_bytes": 1 << 20}, {"nosuch": 1}, {"secret": 5}],
    ids=repr,
)
def test_connect(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        moonpool.connect(**settings)
    with pytest.raises(UsageError):
        moonpool.connect_async(**settings)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_values_and_views_are_not_pickled(pool: moonpool.Pool, copied: Any) -> None:
    with pool.get("k") as value, pool.view("k") as view:  # type: ignore[union-attr]
        for each in (value, view):
            with pytest.raises(UsageError, match="take bytes"):
                copied(each)


def test_the_asyncio_pool_checks_alike() -> None:
    asyncio.run(check_the_asyncio_pool())


async def check_the_asyncio_pool() -> None:
    async with moonpool.connect_async(embedded_bytes=1 << 22) as pool:
        for settings in WRONG_SETTINGS:
            with pytest.raises(UsageError):
                await pool.put("new", b"v", **settings)
            with pytest.raises(UsageError):
                await pool.upsert("new", b"v", **settings)
        with pytest.raises(UsageError, match="takes a list"):
            await pool.get_many("abc")
        with pytest.raises(UsageError):
            await pool.pin("k", 9)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            _ = [each async for each in pool.list(None)]  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="takes a list"):
            await pool.put_from("new", None)  # type: ignore[arg-type]
        assert not (await pool.status())["objects"]


def test_a_pool_that_is_closed_under_calls_says_so() -> None:
    for _ in range(10):
        pool = moonpool.connect(embedded_bytes=1 << 20)
        ends: list[str] = []

        def use(pool: moonpool.Pool = pool, ends: list[str] = ends) -> None:
            try:
                while True:
                    pool.put("z", b"1")
                    pool.get_many(["z"] * 10)
            except moonpool.MoonpoolError as problem:
                ends.append(type(problem).__name__)

        threads = [threading.Thread(target=use) for _ in range(6)]
        for thread in threads:
            thread.start()
        pool.close()
        for thread in threads:
            thread.join(30)
        assert ends == ["PoolClosed"] * 6
        with pytest.raises(moonpool.PoolClosed):
            pool.metrics()
