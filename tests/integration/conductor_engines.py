"""Engines for tests of the conductor's service: real ZMQ publishers with replays, as vLLM's are."""

from __future__ import annotations

import struct
import threading
from collections import deque
from typing import Any

import msgpack
import zmq

NUMBER = struct.Struct(">Q")
END = NUMBER.pack(2**64 - 1)


class Engine:
    """Publishes batches and answers replays until closed. Every message can be held back from subscribers."""

    def __init__(self, *, kept: int = 10_000, topic: bytes = b"", old_replays: bool = False) -> None:
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._publisher.bind_to_random_port('tcp://127.0.0.1')}"
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.replay_endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._next = 0
        self._stamp = 0.0
        self._topic = topic
        self._old_replays = old_replays
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.replays = 0
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def publish(self, *events: Any, to_subscribers: bool = True) -> None:
        with self._lock:
            self._stamp += 0.001
            payload = msgpack.packb([self._stamp, list(events), 0], use_bin_type=True)
            if to_subscribers:
                self._publisher.send_multipart([self._topic, NUMBER.pack(self._next), payload])
            self._kept.append((self._next, payload))
            self._next += 1

    def send_raw(self, *frames: bytes) -> None:
        with self._lock:
            self._publisher.send_multipart(list(frames))

    def restart(self) -> None:
        """Numbers begin again; nothing that was published is kept."""
        with self._lock:
            self._kept.clear()
            self._next = 0

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            client, _empty, start = self._router.recv_multipart()
            with self._lock:
                self.replays += 1
                kept = list(self._kept)
            front = [client, b""] if self._old_replays else [client, b"", self._topic]
            for number, payload in kept:
                if number >= NUMBER.unpack(start)[0]:
                    self._router.send_multipart([*front, NUMBER.pack(number), payload])
            self._router.send_multipart([*front, END, b""])

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._publisher.close()
        self._router.close()
        self._context.term()


def stored(hashes: list[int], tokens: list[int], block: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block,
        "medium": "GPU",
    }
