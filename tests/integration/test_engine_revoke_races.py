"""A revoke meets the opening of a segment: when it has returned, nobody can touch the memory any more."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from moonpool import Engine, MoonpoolError, RevokeIncomplete
from moonpool.engine.peers import Peer


@pytest.mark.parametrize("kind", ["allocate", "register"])
def test_a_revoke_while_a_segment_is_being_opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Peer.request
    asked = threading.Event()
    go_on = threading.Event()

    def held_up(self: Peer, method: str, params: Any) -> Any:
        answer = real(self, method, params)
        if method in ("map", "grant_vm") and asked.is_set() is False:
            asked.set()
            go_on.wait(10)  # the grant is given, and nothing of the initiator's knows it yet
        return answer

    with Engine(transports=("shm",)) as owner, Engine(transports=("shm",)) as user:
        buffer = np.full(1 << 16, 1, np.uint8)
        region = owner.allocate(1 << 16) if kind == "allocate" else owner.register(buffer)
        monkeypatch.setattr(Peer, "request", held_up)
        opened: list[Any] = []
        opener = threading.Thread(target=lambda: opened.append(user.open(owner.endpoint)))
        opener.start()
        assert asked.wait(10)
        revoker = threading.Thread(target=owner.revoke, args=(region,))
        revoker.start()
        go_on.set()
        opener.join(10)
        revoker.join(10)
        assert not opener.is_alive()
        assert not revoker.is_alive()
        buffer[:] = 0xEE
        with pytest.raises(MoonpoolError):
            user.read(opened[0], region.handle, 0, bytearray(4))
        with pytest.raises(MoonpoolError):
            user.write(opened[0], region.handle, 0, b"EVIL")
        assert (buffer == 0xEE).all()


def test_opening_and_revoking_at_random() -> None:
    done = threading.Event()
    handles: list[int] = []
    with Engine(transports=("shm",)) as owner, Engine(transports=("shm",)) as user:

        def use() -> None:
            while not done.is_set():
                try:
                    segment = user.open(owner.endpoint)
                    for handle in handles[-1:]:
                        user.write(segment, handle, 0, b"\xff" * 8)
                except MoonpoolError:
                    continue
                user.close_segment(segment)

        users = [threading.Thread(target=use) for _ in range(2)]
        for one in users:
            one.start()
        changed = rounds = 0
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            buffer = np.zeros(1 << 16, np.uint8)
            region = owner.register(buffer)
            handles.append(region.handle)
            time.sleep(0.001)
            try:
                owner.revoke(region)
            except RevokeIncomplete:
                continue
            buffer[:] = 0
            time.sleep(0.002)
            changed += bool(buffer.any())
            rounds += 1
        done.set()
        for one in users:
            one.join(10)
    assert rounds > 10
    assert changed == 0
