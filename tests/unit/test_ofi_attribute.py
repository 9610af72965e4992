"""What owners and initiators of `ofi` tell each other: round trips, and nothing else gets through."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from moonpool.errors import ProtocolError
from moonpool.transport.ofi_attribute import Asked, Endpoint, RegionKey

EDGES = (0, 1, 2**32, 2**63, 2**64 - 1)


@pytest.mark.parametrize("key", EDGES)
@pytest.mark.parametrize("base", EDGES)
def test_a_region_comes_back_as_it_was(key: int, base: int) -> None:
    assert RegionKey.decode(RegionKey(key, base).encode()) == RegionKey(key, base)


def test_only_whole_attributes_of_this_version_are_regions() -> None:
    good = RegionKey(7, 9).encode()
    for size in range(len(good)):
        with pytest.raises(ProtocolError):
            RegionKey.decode(good[:size])
    with pytest.raises(ProtocolError):
        RegionKey.decode(good + b"\0")
    for at in range(8):
        spoilt = bytearray(good)
        spoilt[at] ^= 0x40
        with pytest.raises(ProtocolError):
            RegionKey.decode(bytes(spoilt))


def test_a_question_comes_back_as_it_was() -> None:
    for previous in (None, 1, 77):
        asked = Asked("verbs;ofi_rxm", 2, 4711, previous)
        assert Asked.from_params(asked.to_params()) == asked


def test_an_answer_comes_back_as_it_was() -> None:
    told = Endpoint(3, b"\x02\x00" + bytes(14), RegionKey(1, 2))
    assert Endpoint.from_answer(told.to_answer()) == told


WRONG: tuple[Any, ...] = (None, True, -1, 0, 2**70, 1.5, "", "tcp", "x" * 65, b"", b"x" * 257, [], {}, [1])


def test_random_questions_and_answers_are_taken_whole_or_refused() -> None:
    choice = random.Random(5)
    for _ in range(5_000):
        params = {name: choice.choice(WRONG) for name in ("provider", "format", "pid", "previous")}
        answer = {name: choice.choice(WRONG) for name in ("number", "address", "flush")}
        with contextlib.suppress(ProtocolError):
            asked = Asked.from_params(params)
            assert asked.to_params() == params
        with contextlib.suppress(ProtocolError):
            assert Endpoint.from_answer(answer).to_answer() == answer
    for value in WRONG:
        with pytest.raises(ProtocolError):
            Endpoint.from_answer(value)
