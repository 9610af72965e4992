"""Traces: the published format, changes of pace, and the generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moonpool.conductor.cache_study import hit_ratio, hit_ratios
from moonpool.conductor.trace import GeneratorConfig, generate_trace, load_trace, trace_of
from moonpool.errors import UsageError

ROWS = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 0, "input_length": 1_200, "output_length": 9, "hash_ids": [0, 7, 9]},
    {"timestamp": 3_000, "input_length": 10, "output_length": 1, "hash_ids": [4]},
]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_published_trace_is_read(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "trace.jsonl", list(ROWS)))
    assert len(trace) == 3
    assert trace.arrival.tolist() == [0.0, 0.0, 3.0]
    assert trace.tokens.tolist() == [600, 1_200, 10]
    assert trace.starts.tolist() == [0, 2, 5, 6]
    assert trace.distinct == 4
    assert trace.block_ids.tolist() == [0, 2, 0, 2, 3, 1]
    assert trace.at_speed(2).arrival.tolist() == [0.0, 0.0, 1.5]
    assert trace.first(2).starts.tolist() == [0, 2, 5]
    assert trace.span_s == 3.0


def test_bursts_are_spread_within_their_tick(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "trace.jsonl", list(ROWS)))
    moved = trace.dequantised(seed=4)
    assert (moved.arrival[:2] < 3.0).all()
    assert moved.arrival[2] >= 3.0
    assert len(set(moved.arrival)) == 3
    assert (np.diff(moved.arrival) >= 0).all()
    assert moved.arrival.tolist() == trace.dequantised(seed=4).arrival.tolist()
    assert moved.arrival.tolist() != trace.dequantised(seed=5).arrival.tolist()


def test_poisson_arrivals_have_the_rate(tmp_path: Path) -> None:
    trace = generate_trace(GeneratorConfig(requests=4_000), seed=1).poisson(7.0, seed=2)
    assert len(trace) / trace.span_s == pytest.approx(7.0, rel=0.05)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a request"),
        ("[]", "line 2: not a request"),
        ('{"timestamp": 1}', "line 2: not a request"),
        (json.dumps({**ROWS[0], "timestamp": "x"}), "line 2: a field has the wrong type"),
        (json.dumps({**ROWS[0], "timestamp": -1}), "line 2: a field has the wrong type or sign"),
        (json.dumps({**ROWS[0], "input_length": 0}), "line 2: a field has the wrong type or sign"),
        (json.dumps({**ROWS[0], "hash_ids": [1, "a"]}), "line 2: a field has the wrong type"),
        (json.dumps({**ROWS[0], "hash_ids": [1, 2, 3]}), "wrong block size"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=message):
        load_trace(path)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no request"):
        load_trace(tmp_path / "empty.jsonl")
    trace = load_trace(write(tmp_path / "trace.jsonl", list(ROWS)))
    for call in (lambda: trace.at_speed(0), lambda: trace.poisson(0, 1), lambda: trace.first(0)):
        with pytest.raises(UsageError):
            call()


def test_the_generator_makes_growing_conversations() -> None:
    config = GeneratorConfig(requests=1_500, turns_mean=4.0)
    trace = generate_trace(config, seed=8)
    assert len(trace) == 1_500
    assert (np.diff(trace.arrival) >= 0).all()
    assert trace.tokens.max() <= config.context_tokens_max
    assert (np.diff(trace.starts) == -(-trace.tokens // config.block_tokens)).all()
    assert trace.block_ids.tolist() == generate_trace(config, seed=8).block_ids.tolist()
    shared = config.system_tokens // config.block_tokens
    heads = {tuple(trace.block_ids[start : start + shared]) for start in trace.starts[:-1]}
    assert len(heads) == 1
    # Three of four requests continue a conversation: most of what they carry was there before.
    assert hit_ratio(trace, 10**6) > 0.4


def test_hit_ratios_by_hand() -> None:
    chains = [[1, 2, 3], [1, 2, 3], [4, 5], [1, 2, 6], [4, 5]]
    trace = trace_of([(float(at), 16 * len(chain), 1, chain) for at, chain in enumerate(chains)], 16)
    assert hit_ratio(trace, 100) == pytest.approx((3 + 2 + 2) / 13)
    # Three blocks: 4 and 5 push out 3 and 2, the tail of the chain first, so only block 1 is found again.
    assert hit_ratio(trace, 3) == pytest.approx((3 + 1) / 13)
    assert list(hit_ratios(trace, [1, 2])) == [1, 2]
    with pytest.raises(UsageError):
        hit_ratio(trace, 0)
