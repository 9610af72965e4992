"""Native chains against chains built from hashlib, pickle and the xxhash library, block by block."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.conductor.extra_keys import encode_cbor
from moonpool.native.table.chains import DIGESTS, DigestChain, Xxh3Chain, pack_tokens, xxh3_64, xxh3_128

tokens_31 = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 2**31 - 1))
tokens_32 = tokens_31 | st.integers(0, 2**32 - 1)
seeds = st.integers(0, 2**64 - 1)


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def xxh3_blocks(tokens: list[int], block: int, window: int, seed: int) -> list[int]:
    starts = range(0, max(0, len(tokens) - window + 1), block)
    return [xxhash.xxh3_64_intdigest(pack(tokens[at : at + window]), seed) for at in starts]


def xxh3_chain(local: list[int], seed: int, parent: int | None) -> list[int]:
    chain = []
    for alone in local:
        parent = (
            alone if parent is None else xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, alone), seed)
        )
        chain.append(parent)
    return chain


@given(
    tokens=st.lists(tokens_32, max_size=300),
    block=st.integers(1, 80),
    ahead=st.integers(0, 3),
    seed=seeds,
    link_seed=seeds,
    parent=st.none() | seeds,
)
@example(tokens=[1] * 200, block=61, ahead=0, seed=0, link_seed=0, parent=None)
def test_xxh3_chains(
    tokens: list[int], block: int, ahead: int, seed: int, link_seed: int, parent: int | None
) -> None:
    window = block + min(ahead, block)
    chain = Xxh3Chain(block_tokens=block, window_tokens=window, seed=seed, link_seed=link_seed)
    local = xxh3_blocks(tokens, block, window, seed)
    expected = xxh3_chain(local, link_seed, parent)
    for form in (tokens, np.array(tokens, np.uint32), pack(tokens)):
        assert chain.blocks(form).tolist() == local
        assert chain.chain(form, parent).tolist() == expected


@given(
    prompts=st.lists(st.lists(tokens_32, max_size=90), max_size=6),
    block=st.integers(1, 40),
    seed=seeds,
)
def test_xxh3_chains_of_many_prompts(prompts: list[list[int]], block: int, seed: int) -> None:
    chain = Xxh3Chain(block_tokens=block, seed=seed, link_seed=seed)
    flat = np.array([token for prompt in prompts for token in prompt], np.uint32)
    offsets = np.cumsum([0, *map(len, prompts)]).astype(np.int64)
    hashes, starts = chain.chain_prompts(flat, offsets)
    assert len(starts) == len(prompts) + 1
    for i, prompt in enumerate(prompts):
        assert hashes[starts[i] : starts[i + 1]] == chain.chain(prompt)


@given(
    tokens=st.lists(tokens_32, max_size=60),
    extras=st.lists(st.binary(max_size=40), min_size=1, max_size=4),
    seed=seeds,
)
def test_xxh3_extras_stand_behind_the_tokens(tokens: list[int], extras: list[bytes], seed: int) -> None:
    chain = Xxh3Chain(block_tokens=4, seed=seed, link_seed=1)
    expected = [
        xxhash.xxh3_64_intdigest(pack(tokens[at : at + 4]) + extras[min(at // 4, len(extras) - 1)], seed)
        for at in range(0, len(tokens) - 3, 4)
    ]
    assert chain.blocks(tokens, extras).tolist() == expected
    assert chain.blocks(np.array(tokens, np.uint32), extras).tolist() == expected


def digest_function(name: str) -> Callable[[bytes], bytes]:
    if name == "xxh3_128":
        return lambda message: xxhash.xxh3_128_digest(message)
    return lambda message: hashlib.sha256(message).digest()


def encode(encoding: str, parent: bytes, tokens: list[int]) -> bytes:
    if encoding == "pickle":
        return pickle.dumps((parent, tuple(tokens), None), protocol=5)
    if encoding == "cbor":
        return encode_cbor((parent, tuple(tokens), None))
    return parent + pack(tokens)


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("encoding", ["pickle", "cbor", "page"])
@given(
    tokens=st.lists(tokens_31, max_size=200),
    block=st.integers(1, 70),
    root=st.binary(min_size=1, max_size=255),
)
def test_digest_chains(encoding: str, digest: str, tokens: list[int], block: int, root: bytes) -> None:
    chain = DigestChain(block_tokens=block, encoding=encoding, digest=digest, root=root)
    hash_message = digest_function(digest)
    expected, parent = [], root
    for at in range(0, len(tokens) - block + 1, block):
        parent = hash_message(encode(encoding, parent, tokens[at : at + block]))
        expected.append(parent)
    digests, keys = chain.chain(tokens)
    assert digests == b"".join(expected)
    part = slice(0, 8) if encoding == "page" else slice(-8, None)
    assert keys.tolist() == [int.from_bytes(each[part], "big") for each in expected]
    assert chain.chain(np.array(tokens, np.uint32)) == (digests, keys)


@given(data=st.binary(max_size=400), seed=seeds)
def test_one_shot_hashes(data: bytes, seed: int) -> None:
    assert xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)
    assert xxh3_128(data) == xxhash.xxh3_128_digest(data)


@given(tokens=st.lists(tokens_32, max_size=50))
def test_packing_keeps_every_token(tokens: list[int]) -> None:
    for form in (tokens, tuple(tokens), np.array(tokens, np.uint64), pack(tokens)):
        assert pack_tokens(form).tolist() == tokens


def test_both_sha256_paths_agree_on_every_length() -> None:
    """Paddings of one and of two blocks: the message of a page is 4 n bytes behind a root of any length."""
    for root_bytes in range(1, 140):
        root = bytes(range(root_bytes))
        for name in ("sha256", "sha256_plain"):
            chain = DigestChain(block_tokens=1, encoding="page", digest=name, root=root)
            assert chain.chain([7])[0] == hashlib.sha256(root + pack([7])).digest()
