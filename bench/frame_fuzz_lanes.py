"""Fuzzes data lanes: long runs of frames that must be answered byte for byte, then what ends them."""

from __future__ import annotations

import random
import socket
from collections import Counter
from typing import Final, final

import numpy as np

from moonpool.bench.frame_fuzz_bulk import BulkMaker, confirm
from moonpool.bench.frame_fuzz_frames import FrameMaker, Piece
from moonpool.bench.frame_fuzz_model import Oracle, Violation
from moonpool.bench.frame_fuzz_wire import SEND_BYTES_MAX, Where, end_connection, exchange, reset
from moonpool.errors import Status
from moonpool.wire.hello import ConnectionKind

#: Frames of one connection; the lengths of runs are spread evenly over their logarithm.
RUN_FRAMES_MAX: Final = 32_768
#: Frames a run has of those made one by one, which cost a hundred times as much.
SINGLE_FRAMES_MAX: Final = 64
CONFIRMED_FRAMES: Final = 16
_BULK_PARTS: Final = 3


@final
class LaneFuzzer:
    """One lane after the other. `tally` counts what was sent and what the target must have counted."""

    def __init__(self, where: Where, seed: int) -> None:
        self._where = where
        self._seed = seed
        self._oracle = Oracle(where.facts)
        self.tally: Counter[str] = Counter()
        self._runs = 0

    def run(self, frames_max: int) -> int:
        """One connection with at most `frames_max` frames; returns how many. Raises `Violation`."""
        self._runs += 1
        rng = random.Random(f"{self._seed} lane {self._runs}")
        try:
            return self._run(rng, frames_max)
        except Violation as exc:
            raise Violation(f"lane run {self._runs} of seed {self._seed}: {exc}") from exc

    def _run(self, rng: random.Random, frames_max: int) -> int:
        maker = FrameMaker(self._oracle, rng)
        n = max(1, min(frames_max - 1, int(RUN_FRAMES_MAX ** rng.random())))
        pieces = self._pieces(maker, rng, n)
        is_unix = rng.random() < 0.1
        sock = self._where.greet(ConnectionKind.LANE, is_unix)
        self.tally["connections"] += 1
        try:
            # Small pieces cut frames at every place; large ones bring the volume.
            piece_bytes = rng.randint(1, 97) if n < 64 else SEND_BYTES_MAX
            self._exchange(sock, pieces, piece_bytes)
            self._end(sock, maker, rng)
        finally:
            sock.close()
        return n + 1

    def _pieces(self, maker: FrameMaker, rng: random.Random, n: int) -> list[Piece]:
        n_single = min(n, SINGLE_FRAMES_MAX)
        pieces = [maker.legal() for _ in range(n_single)]
        left = n - n_single
        bulk_maker = BulkMaker(maker, self._oracle, np.random.default_rng(rng.getrandbits(64)))
        for part in range(_BULK_PARTS):
            size = left // _BULK_PARTS if part else left - 2 * (left // _BULK_PARTS)
            if size:
                bulk = bulk_maker.make(size)
                confirm(self._oracle, bulk, min(size, CONFIRMED_FRAMES))
                pieces.insert(rng.randint(0, len(pieces)), bulk)
        return pieces

    def _exchange(self, sock: socket.socket, pieces: list[Piece], piece_bytes: int) -> None:
        expected = b"".join(piece.answer for piece in pieces)
        data = b"".join(piece.data for piece in pieces)
        answer = exchange(sock, data, len(expected), self._where, piece_bytes)
        at = 0
        for piece in pieces:
            if piece.is_notice and answer[at + 3] == Status.QUEUE_FULL:
                answer[at + 3] = Status.COMPLETE
                self.tally["queue_full"] += 1
            at += len(piece.answer)
        if answer != expected:
            raise Violation(_difference(pieces, answer))
        frames = sum(piece.frames for piece in pieces)
        self.tally["frames"] += frames
        self.tally["answered"] += frames
        self.tally["groups"] += frames
        self.tally["refused"] += sum(piece.refused for piece in pieces)
        self.tally["bytes"] += len(data)

    def _end(self, sock: socket.socket, maker: FrameMaker, rng: random.Random) -> None:
        ender = maker.ender()
        self.tally["frames"] += 1
        self.tally["closed"] += 1
        if not ender.verdict.breaks and rng.random() < 0.2:
            # Nothing more is asked of the target than to let go; what it counts of this is its own affair.
            reset(sock)
            return
        self.tally["groups"] += ender.verdict.has_header
        self.tally["refused"] += ender.refused
        self.tally["broken"] += ender.verdict.breaks
        end_connection(sock, ender.data, not ender.verdict.breaks, self._where)


def _difference(pieces: list[Piece], answer: bytearray) -> str:
    """The first piece that was answered otherwise than predicted."""
    at = 0
    for piece in pieces:
        got = bytes(answer[at : at + len(piece.answer)])
        if got != piece.answer:
            first = next(k for k, (a, b) in enumerate(zip(got, piece.answer, strict=True)) if a != b)
            begin = max(0, first - 64)
            return (
                f"byte {first} of the answer to {piece.frames} frames: got {got[begin : first + 64].hex()}, "
                f"expected {piece.answer[begin : first + 64].hex()}; sent {piece.data[:256].hex()}"
            )
        at += len(piece.answer)
    return "the answers are longer than predicted"
