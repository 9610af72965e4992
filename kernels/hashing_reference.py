"""What the kernels of `hashing` must compute, in plain Python integers: the oracle of their tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MASK: Final = 2**64 - 1
_PRIMES: Final = (
    0,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _round(lane: int, value: int) -> int:
    return _rotated((lane + value * _PRIMES[2]) & _MASK, 31) * _PRIMES[1] & _MASK


def xxh64(data: bytes, seed: int = 0) -> int:
    """XXH64, by the steps of the specification."""
    lanes = [seed + _PRIMES[1] + _PRIMES[2], seed + _PRIMES[2], seed, seed - _PRIMES[1]]
    whole = len(data) // 32 * 32
    for at in range(0, whole, 8):
        lane = at // 8 % 4
        lanes[lane] = _round(lanes[lane] & _MASK, int.from_bytes(data[at : at + 8], "little"))
    mixed = seed + _PRIMES[5]
    if whole:
        mixed = sum(_rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            mixed = (mixed & _MASK ^ _round(0, lane)) * _PRIMES[1] + _PRIMES[4]
    mixed = (mixed + len(data)) & _MASK
    rest = data[whole:]
    while len(rest) >= 8:
        mixed = _rotated(mixed ^ _round(0, int.from_bytes(rest[:8], "little")), 27) * _PRIMES[1] + _PRIMES[4]
        mixed, rest = mixed & _MASK, rest[8:]
    if len(rest) >= 4:
        word = int.from_bytes(rest[:4], "little") * _PRIMES[1] & _MASK
        mixed, rest = _rotated(mixed ^ word, 23) * _PRIMES[2] + _PRIMES[3] & _MASK, rest[4:]
    for byte in rest:
        mixed = _rotated(mixed ^ byte * _PRIMES[5] & _MASK, 11) * _PRIMES[1] & _MASK
    mixed = (mixed ^ mixed >> 33) * _PRIMES[2] & _MASK
    mixed = (mixed ^ mixed >> 29) * _PRIMES[3] & _MASK
    return mixed ^ mixed >> 32


def chain_xxh64(tokens: Sequence[int], block_tokens: int, parent: int) -> list[int]:
    """Hashes of the whole blocks, each after the one before."""
    chain = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        words = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_tokens])
        parent = xxh64(parent.to_bytes(8, "little") + words)
        chain.append(parent)
    return chain
