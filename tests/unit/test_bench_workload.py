"""tebench's options, sweep, windows and patterns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moonpool.bench.workload import (
    Options,
    Point,
    doublings,
    first_difference,
    pattern_words,
    points_of,
    share_of,
    window_of,
)
from moonpool.errors import UsageError
from moonpool.units import KIB, MIB


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"start_block_size": 0}, "--start_block_size must be at least 1"),
        ({"start_block_size": 8192, "max_block_size": 4096}, "at most --max_block_size"),
        ({"start_batch_size": 2}, "--start_batch_size"),
        ({"start_num_threads": 3, "max_num_threads": 2}, "--start_num_threads"),
        ({"max_num_threads": 1000}, "at most 256"),
        ({"total_buffer_size": 2048}, "--total_buffer_size is too small"),
        ({"duration_s": 0.0}, "--duration must be above 0"),
        ({"timeout_s": -1.0}, "--timeout must be above 0"),
        ({"warmup_s": -1.0}, "--warmup cannot be negative"),
        ({"target_offset": -8}, "--target_offset cannot be negative"),
        ({"request_interval_us": -1.0}, "--request_interval_us cannot be negative"),
        ({"check_consistency": True, "start_block_size": 100}, "multiples of 8"),
        ({"op_type": "read_verify", "target_offset": 4}, "multiples of 8"),
        ({"xport_type": "local"}, "--target_seg_name=self"),
    ],
)
def test_wrong_options_are_refused_by_name(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Options(**flags)


def test_no_target_means_being_one() -> None:
    assert Options().is_target
    assert not Options(target_seg_names=("a:1",)).is_target


def test_seeding_and_verifying_look_at_the_bytes() -> None:
    assert [replace(Options(), op_type=op).verifies for op in ("read", "write", "mix")] == [False] * 3
    assert Options(op_type="write_seed").verifies
    assert Options(op_type="read_verify").verifies
    assert Options(check_consistency=True).verifies


def test_doublings_stop_at_the_largest() -> None:
    assert list(doublings(4, 32)) == [4, 8, 16, 32]
    assert list(doublings(3, 20)) == [3, 6, 12]


def test_the_sweep_goes_over_threads_then_blocks_then_batches_and_skips_what_does_not_fit() -> None:
    options = Options(
        start_block_size=64 * KIB,
        max_block_size=128 * KIB,
        max_batch_size=4,
        max_num_threads=2,
        total_buffer_size=512 * KIB,
    )
    assert list(points_of(options, 512 * KIB)) == [
        Point(1, 64 * KIB, 1),
        Point(1, 64 * KIB, 2),
        Point(1, 64 * KIB, 4),
        Point(1, 128 * KIB, 1),
        Point(1, 128 * KIB, 2),
        Point(1, 128 * KIB, 4),
        Point(2, 64 * KIB, 1),
        Point(2, 64 * KIB, 2),
        Point(2, 64 * KIB, 4),
        Point(2, 128 * KIB, 1),
        Point(2, 128 * KIB, 2),
    ]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_windows_are_equal_inside_the_buffer_and_apart(threads: int) -> None:
    total, remote_offset = 1 * MIB + 40, 8192
    point = Point(threads, 4096, 2)
    windows = [window_of(point, thread, total, remote_offset) for thread in range(threads)]
    assert {window.size_bytes for window in windows} == {share_of(total, threads)}
    for before, after in pairwise(windows):
        assert before.local_offset + before.size_bytes <= after.local_offset
    assert windows[-1].local_offset + windows[-1].size_bytes <= total
    assert all(window.remote_offset - window.local_offset == remote_offset for window in windows)


def test_shares_are_whole_pages_or_words() -> None:
    assert share_of(10 * MIB + 5, 3) % 4096 == 0
    assert share_of(1000, 3) == 328
    assert share_of(7, 1) == 0


def test_a_pattern_depends_on_position_seed_and_generation() -> None:
    whole = pattern_words(0, 8192, seed=1)
    assert (pattern_words(4096, 4096, seed=1) == whole[512:]).all()
    assert np.unique(whole).size == whole.size
    for other in (pattern_words(0, 8192, seed=2), pattern_words(0, 8192, seed=1, generation=1)):
        assert (other != whole).all()
    assert (pattern_words(8, 8192, seed=1) != whole).all()


def test_the_first_wrong_word_is_found() -> None:
    expected = pattern_words(0, 4096, seed=3)
    found = expected.copy()
    assert first_difference(found, expected) is None
    found[[17, 300]] ^= np.uint64(1)
    assert first_difference(found, expected) == 17 * 8
