"""Gathering and scattering of paged blocks: the kernel's very text, compiled for the CPU, against numpy."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.device_blocks import (
    WORD_BYTES,
    BlockLayout,
    gather_blocks,
    kernel_source,
    layout_of,
    scatter_blocks,
)
from moonpool.errors import TransportUnavailable, UsageError

HARNESS = """
#define MP_DEVICE_HARNESS 1
#define MP_KERNEL static
#define MP_ALIGNED(n) __attribute__((aligned(n)))
static long long mp_thread, mp_threads;
#define MP_FIRST mp_thread
#define MP_STEP mp_threads
#define MP_SEEN(flag) (*(flag) |= 1u)
"""
RUN = """
void run(long long threads, unsigned char *paged, unsigned char *dense, const long long *table,
         unsigned int *bad, const long long *n, int scatter)
{
    mp_threads = threads;
    for (mp_thread = 0; mp_thread < threads; mp_thread++)
        mp_move_blocks(paged, dense, table, bad, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], scatter);
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The kernel as C, for each width of word."""
    folder: Path = tmp_path_factory.mktemp("kernels")
    made = {}
    for word in WORD_BYTES:
        source = folder / f"blocks{word}.c"
        source.write_text(HARNESS + kernel_source(word) + RUN)
        target = folder / f"blocks{word}.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(target), str(source)]
        subprocess.run(command, check=True, timeout=60)
        made[word] = ctypes.CDLL(str(target))
    return made


def move(kernels: dict[int, Any], paged: Any, dense: Any, table: Any, scatter: int, threads: int = 7) -> int:
    """What `_launch` does, on the CPU; returns whether a bad page was seen."""
    layout = layout_of(paged, dense, len(table))
    word = layout.word_bytes(paged.ctypes.data, dense.ctypes.data)
    numbers = np.array(
        [
            layout.layers,
            layout.pages,
            layout.blocks,
            layout.block_bytes // word,
            layout.paged_layer,
            layout.paged_page,
            layout.dense_layer,
            layout.dense_block,
        ],
        dtype=np.int64,
    )
    bad = np.zeros(1, dtype=np.uint32)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (paged, dense, table, bad, numbers)]
    kernels[word].run(ctypes.c_longlong(threads), *pointers, scatter)
    return int(bad[0])


SHAPES = [
    # layers, pages, blocks, shape within a block, type, padding between pages and layers in items
    (1, 1, 1, (1,), np.uint8, 0),
    (3, 17, 5, (16, 2, 8), np.float16, 0),
    (4, 9, 9, (33,), np.uint8, 0),
    (2, 30, 64, (6, 5), np.float32, 3),
    (5, 8, 3, (64,), np.float64, 2),
    (2, 11, 7, (128, 4), np.float16, 8),
]


def cache(layers: int, pages: int, inner: tuple[int, ...], kind: Any, padding: int, seed: int) -> Any:
    """Random blocks [layers, pages, *inner] with room between pages, and between layers."""
    rng = np.random.default_rng(seed)
    items = int(np.prod(inner))
    whole = rng.integers(0, 120, (layers, pages + 1, items + padding)).astype(kind)
    view = whole[:, :pages, :items]
    strides = (*view.strides[:2], *np.empty(inner, dtype=kind).strides)
    return np.lib.stride_tricks.as_strided(view, (layers, pages, *inner), strides), whole


@pytest.mark.parametrize(("layers", "pages", "blocks", "inner", "kind", "padding"), SHAPES)
def test_gather_and_scatter_are_those_of_numpy(
    kernels: dict[int, Any], layers: int, pages: int, blocks: int, inner: Any, kind: Any, padding: int
) -> None:
    paged, whole = cache(layers, pages, inner, kind, padding, seed=7)
    dense, around = cache(layers, blocks, inner, kind, padding, seed=8)
    table = np.random.default_rng(9).integers(0, pages, blocks).astype(np.int64)
    before, expected = around.copy(), paged[:, table].copy()
    assert move(kernels, paged, dense, table, 0) == 0
    assert np.array_equal(dense, expected)
    dense[:] = 0
    view, untouched = cache(layers, blocks, inner, kind, padding, seed=8)
    view[:] = 0
    assert np.array_equal(around, untouched), "bytes between the blocks were overwritten"
    assert before.shape == around.shape
    # And back: into other pages, no page twice.
    some = np.random.default_rng(10).permutation(pages)[: min(blocks, pages)].astype(np.int64)
    source, _ = cache(layers, len(some), inner, kind, padding, seed=11)
    wanted = whole.copy()
    items = int(np.prod(inner))
    wanted[:, some, :items] = source.reshape(layers, len(some), items)
    assert move(kernels, paged, source, some, 1) == 0
    assert np.array_equal(whole, wanted)


def test_pages_that_are_not_there_are_told_and_left_out(kernels: dict[int, Any]) -> None:
    paged, _ = cache(2, 4, (8,), np.uint8, 0, seed=1)
    dense = np.full((2, 3, 8), 200, dtype=np.uint8)
    table = np.array([1, 4, -1], dtype=np.int64)
    assert move(kernels, paged, dense, table, 0) == 1
    assert np.array_equal(dense[:, 0], paged[:, 1])
    assert (dense[:, 1:] == 200).all()


@pytest.mark.parametrize("threads", [1, 3, 256, 10_000])
def test_any_number_of_threads_does_the_same(kernels: dict[int, Any], threads: int) -> None:
    paged, _ = cache(3, 6, (5, 4), np.float32, 0, seed=2)
    dense = np.zeros((3, 4, 5, 4), dtype=np.float32)
    table = np.array([5, 0, 0, 3], dtype=np.int64)
    move(kernels, paged, dense, table, 0, threads)
    assert np.array_equal(dense, paged[:, table])


def test_the_widest_word_that_everything_allows() -> None:
    layout = BlockLayout(2, 8, 4, 96, 4096, 512, 384, 96)
    assert layout.word_bytes(0x1000, 0x2000) == 16
    assert layout.word_bytes(0x1008, 0x2000) == 8
    assert layout.word_bytes(0x1001) == 1
    assert layout.groups(16) == 1


def test_arrays_that_do_not_fit_are_refused() -> None:
    paged = np.zeros((2, 8, 4, 4), dtype=np.float32)
    with pytest.raises(UsageError, match="the table asks"):
        layout_of(paged, np.zeros((2, 3, 4, 4), dtype=np.float32), 4)
    with pytest.raises(UsageError, match="same blocks"):
        layout_of(paged, np.zeros((2, 4, 4, 5), dtype=np.float32), 4)
    with pytest.raises(UsageError, match="contiguous"):
        layout_of(paged.swapaxes(2, 3), np.zeros((2, 4, 4, 4), dtype=np.float32), 4)
    with pytest.raises(UsageError, match="backwards"):
        layout_of(paged[:, ::-1], np.zeros((2, 4, 4, 4), dtype=np.float32), 4)
    with pytest.raises(UsageError, match="words have"):
        kernel_source(3)


def test_without_cupy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    paged, dense = np.zeros((1, 1, 1)), np.zeros((1, 1, 1))
    for call in (
        lambda: gather_blocks(paged, np.zeros(1, dtype=np.int64), dense),
        lambda: scatter_blocks(dense, np.zeros(1, dtype=np.int64), paged),
    ):
        with pytest.raises(TransportUnavailable, match="pip install cupy"):
            call()
