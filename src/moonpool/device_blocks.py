"""Blocks of a paged KV cache on a device, gathered into one dense buffer or scattered from it in one launch.

A paged cache is an array [layers, pages, ...]; a request's blocks are rows of it, named by a table of pages.
One launch copies all of them, for all layers, between the pages and a dense array [layers, n, ...], which
then goes as one transfer. The kernel is written so that a C compiler takes it too: tests run its text on the
CPU.

CuPy is imported only when a function here is called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from moonpool.errors import OutOfRange, TransportUnavailable, UsageError

#: Threads of a group, and most groups of a launch; each thread strides over the words.
THREADS: Final = 256
GROUPS_MAX: Final = 4096
#: Widest first: what one thread moves at once, where every address allows it.
WORD_BYTES: Final = (16, 8, 4, 2, 1)

_PRELUDE: Final = """
#ifndef MP_DEVICE_HARNESS
#define MP_KERNEL extern "C" __global__
#define MP_FIRST (blockIdx.x * (long long)blockDim.x + threadIdx.x)
#define MP_STEP ((long long)gridDim.x * blockDim.x)
#define MP_ALIGNED(n) __align__(n)
#define MP_SEEN(flag) atomicOr(flag, 1u)
#endif
"""
# Words are numbered layer by layer, block by block: neighbouring threads touch neighbouring words.
_KERNEL: Final = """
typedef struct MP_ALIGNED(MP_WORD) { unsigned char bytes[MP_WORD]; } mp_word;
MP_KERNEL void mp_move_blocks(
    unsigned char *paged, unsigned char *dense, const long long *table, unsigned int *bad, long long layers,
    long long pages, long long n, long long words, long long paged_layer, long long paged_page,
    long long dense_layer, long long dense_block, int scatter)
{
    long long total = layers * n * words, w;
    for (w = MP_FIRST; w < total; w += MP_STEP) {
        long long word = w % words, block = w / words % n, layer = w / words / n;
        long long page = table[block];
        if (page < 0 || page >= pages) {
            MP_SEEN(bad);
            continue;
        }
        mp_word *there = (mp_word *)(paged + layer * paged_layer + page * paged_page + word * MP_WORD);
        mp_word *here = (mp_word *)(dense + layer * dense_layer + block * dense_block + word * MP_WORD);
        if (scatter)
            *there = *here;
        else
            *here = *there;
    }
}
"""


class ArrayLike(Protocol):
    """What is asked of a device array; CuPy's has it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]: ...

    @property
    def itemsize(self) -> int: ...


@final
@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the blocks of a paged and of a dense array lie; strides and sizes in bytes."""

    layers: int
    pages: int
    blocks: int
    block_bytes: int
    paged_layer: int
    paged_page: int
    dense_layer: int
    dense_block: int

    def word_bytes(self, *addresses: int) -> int:
        """The widest word that divides every address, stride and size."""
        numbers = (
            *addresses,
            self.block_bytes,
            self.paged_layer,
            self.paged_page,
            self.dense_layer,
            self.dense_block,
        )
        return next(word for word in WORD_BYTES if all(number % word == 0 for number in numbers))

    def groups(self, word_bytes: int) -> int:
        """How many groups of threads a launch has."""
        words = self.layers * self.blocks * (self.block_bytes // word_bytes)
        return max(1, min(GROUPS_MAX, -(-words // THREADS)))


def layout_of(paged: ArrayLike, dense: ArrayLike, blocks: int) -> BlockLayout:
    """The layout of `paged` [layers, pages, ...] and `dense` [layers, n, ...]; UsageError if they differ.

    The first two axes may have any strides that are not negative; each block must be contiguous.
    """
    if len(paged.shape) < 3 or paged.shape[2:] != dense.shape[2:] or paged.itemsize != dense.itemsize:
        raise UsageError(
            "give a paged array [layers, pages, ...] and a dense one [layers, n, ...] of the same blocks"
        )
    if dense.shape[:2] != (paged.shape[0], blocks):
        raise UsageError(
            f"the dense array is {dense.shape[:2]}, the table asks for {(paged.shape[0], blocks)}"
        )
    block_bytes = paged.itemsize
    for extent, strides in zip(reversed(paged.shape[2:]), _inner(paged, dense), strict=True):
        if extent > 1 and any(stride != block_bytes for stride in strides):
            raise UsageError("each block must be contiguous: only the first two axes may have strides")
        block_bytes *= extent
    if min(*paged.strides[:2], *dense.strides[:2]) < 0:
        raise UsageError("the first two axes must not run backwards")
    return BlockLayout(
        layers=paged.shape[0],
        pages=paged.shape[1],
        blocks=blocks,
        block_bytes=block_bytes,
        paged_layer=paged.strides[0],
        paged_page=paged.strides[1],
        dense_layer=dense.strides[0],
        dense_block=dense.strides[1],
    )


def _inner(paged: ArrayLike, dense: ArrayLike) -> list[tuple[int, int]]:
    """Strides of the axes within a block, innermost first, of both arrays."""
    return list(zip(reversed(paged.strides[2:]), reversed(dense.strides[2:]), strict=True))


def kernel_source(word_bytes: int) -> str:
    """The kernel's text for one width of word."""
    if word_bytes not in WORD_BYTES:
        raise UsageError(f"words have {', '.join(map(str, WORD_BYTES))} bytes, not {word_bytes}")
    return f"#define MP_WORD {word_bytes}\n{_PRELUDE}{_KERNEL}"


def gather_blocks(paged: Any, table: Any, dense: Any, *, check: bool = True) -> Any:
    """Copy the pages that `table` (int64[n], on the device) names into `dense`; returns `dense`.

    Runs on CuPy's current stream. With `check` it waits for it, and raises OutOfRange when the table names a
    page that is not there (such blocks are left as they were); without, they are only left out.
    """
    return _launch(paged, table, dense, 0, check)


def scatter_blocks(dense: Any, table: Any, paged: Any, *, check: bool = True) -> Any:
    """Copy `dense` into the pages that `table` names; returns `paged`. See `gather_blocks`.

    A page that the table names twice gets either block.
    """
    _launch(paged, table, dense, 1, check)
    return paged


def _launch(paged: Any, table: Any, dense: Any, scatter: int, check: bool) -> Any:
    cupy = _cupy()
    if table.ndim != 1 or table.dtype != cupy.int64 or not table.flags.c_contiguous:
        raise UsageError(
            "a table is a contiguous one-dimensional array of int64 on the device", field="table"
        )
    layout = layout_of(paged, dense, int(table.size))
    if layout.layers * layout.blocks * layout.block_bytes == 0:
        return dense
    word = layout.word_bytes(int(paged.data.ptr), int(dense.data.ptr))
    bad = cupy.zeros(1, dtype=cupy.uint32)
    arguments: Sequence[Any] = (
        paged,
        dense,
        table,
        bad,
        *map(cupy.int64, (layout.layers, layout.pages, layout.blocks, layout.block_bytes // word)),
        *map(cupy.int64, (layout.paged_layer, layout.paged_page, layout.dense_layer, layout.dense_block)),
        cupy.int32(scatter),
    )
    _kernel(word)((layout.groups(word),), (THREADS,), arguments)
    if check and int(bad.get()[0]):
        raise OutOfRange(f"the table names a page that is not one of {layout.pages}", limit=layout.pages)
    return dense


@functools.cache
def _kernel(word_bytes: int) -> Any:
    return _cupy().RawKernel(kernel_source(word_bytes), "mp_move_blocks")


def _cupy() -> Any:
    """CuPy; TransportUnavailable, with how to get it, where it is not installed."""
    if importlib.util.find_spec("cupy") is None:
        raise TransportUnavailable(
            "gathering and scattering of blocks needs CuPy, which is not installed",
            "pip install cupy-cuda12x (or the package for your runtime)",
            transport="cuda",
        )
    return importlib.import_module("cupy")
