"""Fuzzed frames of the data lane by the thousand: one entry, no payload, fields at their edges.

Their answers are computed on arrays; `confirm` has the reference codec and model predict some of them too.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt

from moonpool.bench.frame_fuzz_frames import LENGTH_EDGES, OFFSET_EDGES, FrameMaker, Piece
from moonpool.bench.frame_fuzz_model import Oracle, Violation
from moonpool.errors import Status
from moonpool.operations import Access
from moonpool.units import U64_MAX
from moonpool.wire.transfer import (
    ENTRY_BYTES,
    HEADER_BYTES,
    KEY_BYTES,
    LENGTH_MAX,
    MAGIC,
    REPLY_BIT,
    LaneOp,
    decode_entries,
    decode_group_header,
)

_FRAME: Final = np.dtype(
    [
        ("magic", "<u2"),
        ("op", "u1"),
        ("flags", "u1"),
        ("count", "<u4"),
        ("id", "<u8"),
        ("payload", "<u8"),
        ("reserved", "<u8"),
        ("region", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("key", "u1", (KEY_BYTES,)),
        ("grant", "u1", (24,)),
    ]
)
_ANSWER: Final = np.dtype(
    [
        ("magic", "<u2"),
        ("op", "u1"),
        ("status", "u1"),
        ("count", "<u4"),
        ("id", "<u8"),
        ("payload", "<u8"),
        ("reserved", "<u8"),
        ("mark", "u1"),
    ]
)


@final
class BulkMaker:
    """Makes frames of one entry and no payload by the thousand, with their answers."""

    def __init__(self, maker: FrameMaker, oracle: Oracle, rng: np.random.Generator) -> None:
        self._rng = rng
        self._regions = oracle.facts.regions
        self._handles = np.array(maker.handles, dtype=np.uint64)
        self._keys = np.array([list(key) for key in maker.keys], dtype=np.uint8)
        sizes = [region.size_bytes for region in self._regions]
        beside = [size + step for size in sizes for step in (-1, 0, 1)]
        self._offsets = np.array([*beside, *OFFSET_EDGES], dtype=np.uint64)
        self._lengths = np.array([*beside, *LENGTH_EDGES], dtype=np.uint64)

    def make(self, n: int) -> Piece:
        """`n` frames: READ groups of any length that are refused or empty, and empty WRITE groups."""
        frames = np.zeros(n, dtype=_FRAME)
        frames["magic"] = MAGIC
        frames["op"] = self._rng.integers(LaneOp.READ, LaneOp.WRITE, n, endpoint=True)
        frames["count"] = 1
        frames["id"] = self._rng.integers(0, U64_MAX, n, dtype=np.uint64, endpoint=True)
        frames["region"] = self._mixed(self._handles, n, U64_MAX)
        frames["offset"] = self._mixed(self._offsets, n, U64_MAX)
        frames["length"] = np.where(frames["op"] == LaneOp.READ, self._mixed(self._lengths, n, LENGTH_MAX), 0)
        frames["key"] = self._keys[self._rng.integers(0, len(self._keys), n)]
        self._use_right_keys(frames)
        self._spoil_keys(frames)
        status = self._statuses(frames)
        frames["length"][status == Status.COMPLETE] = 0
        frames["payload"] = frames["length"]
        refused = int(np.count_nonzero(status))
        return Piece(frames.tobytes(), _answers(frames, status), n, refused)

    def _mixed(self, edges: npt.NDArray[np.uint64], n: int, high: int) -> npt.NDArray[np.uint64]:
        """Mostly edges, and some values from anywhere."""
        values = edges[self._rng.integers(0, len(edges), n)]
        anywhere = self._rng.random(n) < 0.1
        values[anywhere] = self._rng.integers(0, high, int(anywhere.sum()), dtype=np.uint64, endpoint=True)
        return values

    def _use_right_keys(self, frames: npt.NDArray[np.void]) -> None:
        """Gives half of the frames the key of their region, so that the checks behind it are reached."""
        right = self._rng.random(len(frames)) < 0.5
        for region in self._regions:
            for op in (LaneOp.READ, LaneOp.WRITE):
                key = region.key_for(op)
                if key:
                    rows = right & (frames["region"] == region.handle) & (frames["op"] == op)
                    frames["key"][rows] = list(key)

    def _spoil_keys(self, frames: npt.NDArray[np.void]) -> None:
        """Flips one bit of some keys: as near as a wrong key can be."""
        rows = np.flatnonzero(self._rng.random(len(frames)) < 0.05)
        places = self._rng.integers(0, KEY_BYTES, len(rows))
        bits = (1 << self._rng.integers(0, 8, len(rows))).astype(np.uint8)
        frames["key"][rows, places] ^= bits

    def _statuses(self, frames: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
        """`Oracle.status_of` for all frames at once."""
        status = np.full(len(frames), Status.STALE_HANDLE, dtype=np.uint8)
        for region in self._regions:
            for op in (LaneOp.READ, LaneOp.WRITE):
                rows = np.flatnonzero((frames["region"] == region.handle) & (frames["op"] == op))
                key = region.key_for(op)
                need = Access.READ if op is LaneOp.READ else Access.WRITE
                if not key or not region.access & need:
                    status[rows] = Status.ACCESS_DENIED
                    continue
                good = (frames["key"][rows] == np.array(list(key), dtype=np.uint8)).all(axis=1)
                size = np.uint64(region.size_bytes)
                offset, length = frames["offset"][rows], frames["length"][rows]
                # Written so that nothing wraps: offsets go up to 2**64 - 1.
                fits = (offset <= size) & (length <= size - np.minimum(offset, size))
                reached = np.where(fits, Status.COMPLETE, Status.OUT_OF_RANGE)
                status[rows] = np.where(good, reached, Status.ACCESS_DENIED)
        return status


def _answers(frames: npt.NDArray[np.void], status: npt.NDArray[np.uint8]) -> bytes:
    answers = np.zeros(len(frames), dtype=_ANSWER)
    answers["magic"] = MAGIC
    answers["op"] = frames["op"] | REPLY_BIT
    answers["status"] = status
    answers["count"] = 1
    answers["id"] = frames["id"]
    answers["mark"] = status
    table = answers.view(np.uint8).reshape(len(frames), _ANSWER.itemsize)
    sent = np.ones(table.shape, dtype=bool)
    # A group that went well is answered by its header alone.
    sent[status == Status.COMPLETE, HEADER_BYTES] = False
    return table[sent].tobytes()


def confirm(oracle: Oracle, bulk: Piece, n: int) -> None:
    """Has the reference predict the answers to the first `n` frames; raises where the arrays differ."""
    at = 0
    for start in range(0, n * _FRAME.itemsize, _FRAME.itemsize):
        raw = bulk.data[start : start + HEADER_BYTES + ENTRY_BYTES]
        header = decode_group_header(raw[:HEADER_BYTES])
        expected = oracle.answer(header, decode_entries(header, raw[HEADER_BYTES:]))
        if bulk.answer[at : at + len(expected)] != expected:
            raise Violation(f"array and reference disagree on the frame {raw.hex()}: the fuzzer is wrong")
        at += len(expected)
