"""Copies and digests: every alignment, sizes around every border, against numpy and the xxhash library."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from moonpool.native.io.copying import chunk_digests, copy_buffer, root_digest, stream_kernel

Bytes = npt.NDArray[np.uint8]

CHUNK = 65536
ALIGNMENTS = range(131)
SMALL_SIZES = range(1101)
SLOT = 1536
GUARD = 0xA5
NEVER = 1 << 62
RNG = np.random.default_rng(7)


def aligned(size: int, fill: int = GUARD) -> Bytes:
    """uint8[size] that starts at a page."""
    whole = np.full(size + 4096, fill, dtype=np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + size]


def random_bytes(size: int) -> Bytes:
    out = aligned(size)
    out[:] = RNG.integers(0, 256, size, dtype=np.uint8)
    return out


def oracle(data: Any) -> list[int]:
    raw = bytes(data)
    return [xxhash.xxh3_64_intdigest(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK)]


def around(*borders: int, reach: int) -> Iterator[int]:
    for border in borders:
        yield from range(border - reach, border + reach + 1)


def check_copies(sizes: Iterable[int], alignment: int, stream_min: int, digest: bool) -> None:
    """Copies of all sizes into one guarded buffer; the source has another alignment than the target."""
    sizes = list(sizes)
    source = random_bytes(SLOT * len(sizes) + 256)
    target, expected = aligned(source.size), aligned(source.size)
    shift = (alignment * 7 + 3) % 131
    into, out_of = memoryview(target), memoryview(source)
    for slot, size in enumerate(sizes):
        at = slot * SLOT + alignment
        piece = out_of[slot * SLOT + shift :][:size]
        made = copy_buffer(into[at : at + size], piece, stream_min_bytes=stream_min, digest=digest)
        expected[at : at + size] = piece
        assert made == (oracle(piece) if digest else None), (alignment, size)
    wrong = np.flatnonzero(target != expected)
    assert wrong.size == 0, f"alignment {alignment}: byte {wrong[0]} of {wrong.size} wrong ones"


@pytest.mark.parametrize("stream_min", [0, NEVER], ids=["streamed", "plain"])
@pytest.mark.parametrize("eighth", range(8))
def test_every_alignment_and_small_size(eighth: int, stream_min: int) -> None:
    for alignment in ALIGNMENTS[eighth::8]:
        check_copies(SMALL_SIZES, alignment, stream_min, digest=False)


@pytest.mark.parametrize("stream_min", [0, NEVER], ids=["streamed", "plain"])
def test_every_alignment_with_digests(stream_min: int) -> None:
    sizes = sorted({*range(0, 260, 7), *around(240, 512, 768, 1024, reach=3)})
    for alignment in ALIGNMENTS:
        check_copies(sizes, alignment, stream_min, digest=True)


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("border", [CHUNK, 4 * CHUNK])
def test_sizes_around_a_chunk_and_the_streaming_border(border: int, digest: bool) -> None:
    source = random_bytes(border + 1024)
    target = aligned(source.size)
    for size in around(border, reach=70):
        alignment, shift = (size * 5) % 131, (size * 11) % 131
        target[:] = GUARD
        piece = source[shift : shift + size]
        made = copy_buffer(target[alignment : alignment + size], piece, digest=digest)
        assert np.array_equal(target[alignment : alignment + size], piece), (size, alignment, shift)
        assert (target[:alignment] == GUARD).all(), (size, alignment)
        assert (target[alignment + size :] == GUARD).all(), (size, alignment)
        assert made == (oracle(piece) if digest else None), (size, alignment)


@pytest.mark.parametrize("seed", range(3))
def test_large_copies_with_any_border(seed: int) -> None:
    chance = random.Random(seed)
    source = random_bytes(9 * CHUNK + 4096)
    target = aligned(source.size)
    for _ in range(20):
        size, at, shift = chance.randrange(9 * CHUNK), chance.randrange(4096), chance.randrange(4096)
        stream_min = chance.choice([0, 4096, CHUNK, 262144, NEVER])
        target[:] = GUARD
        piece = source[shift : shift + size]
        made = copy_buffer(target[at : at + size], piece, stream_min_bytes=stream_min, digest=True)
        assert made == oracle(piece)
        assert np.array_equal(target[at : at + size], piece)
        assert (target[:at] == GUARD).all()
        assert (target[at + size :] == GUARD).all()


def test_digests_of_every_small_size_and_alignment() -> None:
    source = random_bytes(2048)
    for size in SMALL_SIZES:
        piece = source[size % 131 :][:size]
        assert chunk_digests(piece) == oracle(piece), size


def test_an_empty_block_has_no_chunk() -> None:
    assert chunk_digests(b"") == []
    assert copy_buffer(bytearray(), b"", digest=True) == []
    assert copy_buffer(bytearray(), b"") is None


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 1000])
def test_the_root_is_the_long_hash_of_the_chunk_digests(count: int) -> None:
    digests = [int(number) for number in RNG.integers(0, 1 << 64, count, dtype=np.uint64)]
    packed = b"".join(number.to_bytes(8, "little") for number in digests)
    assert root_digest(digests) == xxhash.xxh3_128_intdigest(packed).to_bytes(16, "little")
    assert root_digest(iter(digests)) == root_digest(tuple(digests))


def test_the_order_of_chunks_counts() -> None:
    assert root_digest([1, 2]) != root_digest([2, 1])


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_what_is_no_digest_has_no_root(wrong: int) -> None:
    with pytest.raises(OverflowError):
        root_digest([wrong])


def test_lengths_must_be_equal() -> None:
    target = bytearray(b"kept")
    with pytest.raises(ValueError, match="target has 4 bytes, source 5"):
        copy_buffer(target, b"other")
    assert target == b"kept"


def test_a_read_only_target_is_refused() -> None:
    with pytest.raises(BufferError):
        copy_buffer(bytes(4), b"data")


def test_a_strided_buffer_is_refused() -> None:
    strided = memoryview(bytearray(16))[::2]
    with pytest.raises(BufferError):
        copy_buffer(strided, bytes(8))
    with pytest.raises(BufferError):
        copy_buffer(bytearray(8), strided)
    with pytest.raises(BufferError):
        chunk_digests(strided)


def test_buffers_are_let_go_after_an_error() -> None:
    target, source = bytearray(4), bytearray(5)
    with pytest.raises(ValueError, match="equal"):
        copy_buffer(target, source)
    target.append(0)  # BufferError while a view of it lives
    source.append(0)


def test_the_kernel_fits_the_cpu() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    expected = "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "memcpy"
    assert stream_kernel() == expected
