"""Chained XXH64 of token blocks: the recipe of Mooncake Conductor's Go generation.

The hash of a block is XXH64 (seed 0) of the hash before it (8 bytes, little endian) and its tokens (4 bytes
each); the first block follows XXH64 of the salt. XXH64 is plain 64-bit arithmetic, which numba does well;
recipes that need 128-bit products (XXH3: a third of the native speed here) or SHA instructions are in
moonpool.native.table.chains.
Sources: xxHash specification 0.1.1 (XXH64); Mooncake's indexer API design, "hash standard" of the Go indexer.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.kernels._jit import jit

U8: TypeAlias = NDArray[np.uint8]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
I64: TypeAlias = NDArray[np.int64]

_PRIME_1: Final = np.uint64(0x9E3779B185EBCA87)
_PRIME_2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3: Final = np.uint64(0x165667B19E3779F9)
_PRIME_4: Final = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5: Final = np.uint64(0x27D4EB2F165667C5)


class Prompts(NamedTuple):
    """Where prompts lie in the tokens, and where their hashes go: int64[p + 1] each."""

    offsets: I64
    starts: I64
    block_tokens: int


@jit
def _rotated(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@jit
def _read(data: U8, at: int, size: int) -> np.uint64:
    """`size` bytes, little endian."""
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return value


@jit
def _round(lane: np.uint64, value: np.uint64) -> np.uint64:
    return _rotated(lane + value * _PRIME_2, 31) * _PRIME_1


@jit
def xxh64(data: U8, seed: np.uint64) -> np.uint64:
    """XXH64 of uint8[n]."""
    size = data.shape[0]
    at = 0
    if size >= 32:
        a = seed + _PRIME_1 + _PRIME_2
        b = seed + _PRIME_2
        c = seed
        d = seed - _PRIME_1
        while at + 32 <= size:
            a = _round(a, _read(data, at, 8))
            b = _round(b, _read(data, at + 8, 8))
            c = _round(c, _read(data, at + 16, 8))
            d = _round(d, _read(data, at + 24, 8))
            at += 32
        mixed = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
        for lane in (a, b, c, d):
            mixed = (mixed ^ _round(np.uint64(0), lane)) * _PRIME_1 + _PRIME_4
    else:
        mixed = seed + _PRIME_5
    mixed += np.uint64(size)
    while at + 8 <= size:
        mixed = _rotated(mixed ^ _round(np.uint64(0), _read(data, at, 8)), 27) * _PRIME_1 + _PRIME_4
        at += 8
    if at + 4 <= size:
        mixed = _rotated(mixed ^ (_read(data, at, 4) * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
        at += 4
    while at < size:
        mixed = _rotated(mixed ^ (np.uint64(data[at]) * _PRIME_5), 11) * _PRIME_1
        at += 1
    mixed = (mixed ^ (mixed >> np.uint64(33))) * _PRIME_2
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _PRIME_3
    return mixed ^ (mixed >> np.uint64(32))


@jit
def _chain(tokens: U32, block_tokens: int, parent: np.uint64, out: U64) -> None:
    message = np.empty(8 + 4 * block_tokens, np.uint8)
    before = parent
    for block in range(out.shape[0]):
        for i in range(8):
            message[i] = (before >> np.uint64(8 * i)) & np.uint64(0xFF)
        for k in range(block_tokens):
            token = tokens[block * block_tokens + k]
            for i in range(4):
                message[8 + 4 * k + i] = (token >> np.uint32(8 * i)) & np.uint32(0xFF)
        before = xxh64(message, np.uint64(0))
        out[block] = before


@jit
def _chain_prompts(tokens: U32, prompts: Prompts, parent: np.uint64, out: U64) -> None:
    for i in range(prompts.starts.shape[0] - 1):
        hashes = out[prompts.starts[i] : prompts.starts[i + 1]]
        _chain(tokens[prompts.offsets[i] :], prompts.block_tokens, parent, hashes)


def root_of_salt(salt: bytes) -> int:
    """The parent of a chain's first block."""
    return int(xxh64(np.frombuffer(salt, np.uint8), np.uint64(0)))


def chain_xxh64(tokens: U32, block_tokens: int, parent: int) -> U64:
    """Hashes of the whole blocks of uint32[n] tokens, going on from `parent`: uint64[n // block_tokens].

    Raises `ValueError` for an array of another kind. O(n); about 2 ns a token after the first call.
    """
    _check(tokens, block_tokens)
    out = np.empty(tokens.shape[0] // block_tokens, np.uint64)
    _chain(tokens, block_tokens, np.uint64(parent), out)
    return out


def chain_xxh64_prompts(tokens: U32, offsets: I64, block_tokens: int, parent: int) -> tuple[U64, I64]:
    """The same for prompts one behind another: prompt i is `tokens[offsets[i]:offsets[i + 1]]`, int64[p + 1].

    Returns (hashes, starts): prompt i has `hashes[starts[i]:starts[i + 1]]`.
    """
    _check(tokens, block_tokens)
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 1:
        raise ValueError("offsets must be int64[p + 1]")
    lengths = np.diff(offsets)
    if offsets[0] < 0 or (lengths < 0).any() or offsets[-1] > len(tokens):
        raise ValueError("offsets must ascend and end inside the tokens")
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths // block_tokens)))
    out = np.empty(int(starts[-1]), np.uint64)
    _chain_prompts(tokens, Prompts(offsets, starts, block_tokens), np.uint64(parent), out)
    return out, starts


def _check(tokens: U32, block_tokens: int) -> None:
    if tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise ValueError(f"tokens must be uint32[n], not {tokens.dtype}{list(tokens.shape)}")
    if block_tokens < 1:
        raise ValueError(f"a block has at least one token, not {block_tokens}")
