"""Request traces: the published format, changes of pace, and a seeded generator.

A published trace is one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, one integer for each block of the prompt; equal ids mean equal prefixes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.cost import check_positive
from moonpool.errors import UsageError

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
TRACE_BYTES_MAX: Final = 1 << 30
TRACE_REQUESTS_MAX: Final = 10_000_000


@final
@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """r requests in the order of their arrival. Blocks are dense ids, 0 to `distinct` - 1.

    `arrival` float64[r] in seconds, `tokens` and `output` int64[r]; request k has the blocks
    `block_ids[starts[k]:starts[k + 1]]`.
    """

    arrival: F64
    tokens: I64
    output: I64
    block_ids: I32
    starts: I64
    distinct: int
    block_tokens: int

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def span_s(self) -> float:
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    def at_speed(self, speed: float) -> Trace:
        """The same requests, `speed` times as fast."""
        if not 0 < speed < float("inf"):
            raise UsageError("a speed is above 0", field="speed", value=str(speed))
        return replace(self, arrival=self.arrival / speed)

    def dequantised(self, seed: int) -> Trace:
        """Spreads the requests of each time stamp evenly at random until the next one; the order stays.

        Published stamps are rounded to bursts of 3 s that no user sent.
        """
        ticks, tick_of = np.unique(self.arrival, return_inverse=True)
        gaps = np.diff(ticks)
        widths = np.append(gaps, np.median(gaps) if len(gaps) else 0.0)
        moved = self.arrival + np.random.default_rng(seed).random(len(self)) * widths[tick_of]
        # Sorting keeps every request in its tick, since each stays below the next one.
        return replace(self, arrival=np.sort(moved))

    def poisson(self, per_s: float, seed: int) -> Trace:
        """The same requests arriving at random, `per_s` a second on average."""
        if not 0 < per_s < float("inf"):
            raise UsageError("a rate is above 0 requests a second", field="rate", value=str(per_s))
        gaps = np.random.default_rng(seed).exponential(1.0 / per_s, len(self))
        return replace(self, arrival=np.cumsum(gaps))

    def first(self, number: int) -> Trace:
        """The first `number` requests."""
        if number < 1:
            raise UsageError("a trace has a request or more", field="requests", value=str(number))
        number = min(number, len(self))
        return replace(
            self,
            arrival=self.arrival[:number],
            tokens=self.tokens[:number],
            output=self.output[:number],
            starts=self.starts[: number + 1],
        )


def load_trace(path: Path, block_tokens: int = 512) -> Trace:
    """Reads a published trace; raises `UsageError` that names the line which is not of that format."""
    try:
        if path.stat().st_size > TRACE_BYTES_MAX:
            raise UsageError(f"{path} is larger than {TRACE_BYTES_MAX} bytes; cut it")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"cannot read the trace {path}: {exc}") from exc
    rows: list[tuple[float, int, int, list[int]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if len(rows) >= TRACE_REQUESTS_MAX:
            raise UsageError(f"{path} has more than {TRACE_REQUESTS_MAX} requests; cut it")
        rows.append(parse_row(line, f"{path}, line {number}", block_tokens))
    if not rows:
        raise UsageError(f"{path} holds no request")
    rows.sort(key=lambda row: row[0])
    return trace_of(rows, block_tokens)


def parse_row(line: str, where: str, block_tokens: int) -> tuple[float, int, int, list[int]]:
    """(seconds, tokens, output tokens, block ids) of a line; raises `UsageError` that says what is wrong."""
    try:
        row: Any = json.loads(line)
        stamp, tokens, output, ids = (
            row[name] for name in ("timestamp", "input_length", "output_length", "hash_ids")
        )
        fits = (
            isinstance(stamp, int | float)
            and isinstance(tokens, int)
            and isinstance(output, int)
            and isinstance(ids, list)
            and all(isinstance(each, int) for each in ids)
        )
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise UsageError(f"{where}: not a request of a trace ({exc})") from exc
    if not fits or not 0 <= stamp < 1e15 or tokens < 1 or output < 0:
        raise UsageError(f"{where}: a field has the wrong type or sign")
    if len(ids) > -(-tokens // block_tokens):
        raise UsageError(
            f"{where}: {len(ids)} blocks of {block_tokens} for {tokens} tokens; wrong block size?"
        )
    return stamp / 1e3, tokens, output, ids


def trace_of(rows: list[tuple[float, int, int, list[int]]], block_tokens: int) -> Trace:
    """A trace from (seconds, tokens, output tokens, block ids), in the order of time."""
    flat = np.array([each for row in rows for each in row[3]], dtype=object)
    try:
        wide = flat.astype(np.int64)
    except OverflowError:
        wide = np.array([hash(each) for each in flat], np.int64)
    distinct, dense = np.unique(wide, return_inverse=True)
    return Trace(
        arrival=np.array([row[0] for row in rows], np.float64),
        tokens=np.array([row[1] for row in rows], np.int64),
        output=np.array([row[2] for row in rows], np.int64),
        block_ids=dense.astype(np.int32).reshape(-1),
        starts=np.concatenate(([0], np.cumsum([len(row[3]) for row in rows]))).astype(np.int64),
        distinct=len(distinct),
        block_tokens=block_tokens,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """Conversations that grow turn by turn, all under one system prompt, arriving at random.

    Lengths are log-normal around their means; a conversation goes on with the chance that gives `turns_mean`.
    """

    requests: int = 2_000
    per_s: float = 4.0
    block_tokens: int = 512
    system_tokens: int = 1_024
    turn_tokens_mean: float = 2_500.0
    output_tokens_mean: float = 300.0
    turns_mean: float = 3.0
    think_s_mean: float = 60.0
    spread: float = 0.8
    context_tokens_max: int = 131_072

    def __post_init__(self) -> None:
        check_positive(self, zero=("system_tokens", "spread"))
        if self.turns_mean < 1 or self.requests > TRACE_REQUESTS_MAX:
            raise UsageError("turns_mean is 1 or more, and requests at most ten million")


def generate_trace(config: GeneratorConfig, seed: int) -> Trace:
    """Conversations as `config` says; the same seed gives the same trace."""
    rng = np.random.default_rng(seed)
    size = config.block_tokens
    starts_per_s = config.per_s / config.turns_mean
    rows: list[tuple[float, int, int, list[int]]] = []
    shared = list(range(config.system_tokens // size))
    fresh, begin = len(shared), 0.0
    drift = config.spread**2 / 2
    while len(rows) < config.requests:
        begin += float(rng.exponential(1.0 / starts_per_s))
        now, tokens, chain = begin, config.system_tokens, list(shared)
        while True:
            tokens += max(1, round(config.turn_tokens_mean * rng.lognormal(-drift, config.spread)))
            if tokens > config.context_tokens_max:
                break
            output = max(1, round(config.output_tokens_mean * rng.lognormal(-drift, config.spread)))
            whole = tokens // size
            chain += range(fresh, fresh + whole - len(chain))
            fresh += whole
            # A partial last block has an id of its own: it is never found again.
            partial = [fresh] if tokens % size else []
            fresh += 1
            rows.append((now, tokens, output, chain[:whole] + partial))
            tokens += output
            if rng.random() >= 1.0 - 1.0 / config.turns_mean:
                break
            now += float(rng.exponential(config.think_s_mean))
    rows.sort(key=lambda row: row[0])
    return trace_of(rows[: config.requests], size)
