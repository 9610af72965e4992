"""Which transports a config stands for."""

from __future__ import annotations

import pytest

from moonpool import Engine
from moonpool.config import EngineConfig
from moonpool.errors import UsageError
from moonpool.transport.registry import KNOWN, NAMED_ONLY, availability, make_transports


def test_auto_is_what_can_run_here_in_order_of_preference_but_those_that_must_be_named() -> None:
    made = [transport.name for transport in make_transports(EngineConfig(transports=("auto",)))]
    can = [name for name, state in availability().items() if state.ok and name not in NAMED_ONLY]
    assert made == can
    assert {"local", "shm", "tcp", "file"} <= set(made)
    assert made == [name for name in KNOWN if name in made]


def test_what_is_named_beside_auto_is_added_and_what_is_unknown_is_named() -> None:
    with pytest.raises(UsageError, match=r"no transport 'carrier'.*auto"):
        make_transports(EngineConfig(transports=("auto", "carrier")))


def test_an_engine_with_auto_reads_its_own_memory() -> None:
    with Engine(transports=("auto",)) as engine:
        region = engine.allocate(4_096)
        region.view[:3] = b"abc"
        room = bytearray(3)
        engine.read(engine.open(engine.endpoint), region.handle, 0, room)
        assert room == b"abc"
