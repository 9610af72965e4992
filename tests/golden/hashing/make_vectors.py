"""Writes vectors.json: block hashes computed by the engines' own code, in an environment of its own.

    pip install cbor2==6.3.0 xxhash==4.1.0 pybind11==3.1.0 ai-dynamo-runtime==1.6.1
    pip download --no-deps vllm==0.33.0 sglang==0.5.23 -d wheels
    python make_vectors.py wheels > vectors.json

vLLM's functions are taken out of its wheel's sources, since importing the package needs a GPU runtime;
SGLang's hash is its C++ extension, compiled from the wheel (g++ and OpenSSL's headers are needed); Dynamo's
comes with its runtime. The links of the plain XXH3 recipe and Mooncake's XXH64 recipe are computed with the
xxhash library.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import types
import zipfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 20261129
VLLM_FUNCTIONS = {
    "hash_block_tokens",
    "generate_block_hash_extra_keys",
    "generate_lookahead_block_hash_extra_keys",
    "get_request_block_hasher",
    "_gen_mm_extra_hash_keys",
    "_gen_lora_extra_hash_keys",
    "_gen_prompt_embeds_extra_hash_keys",
}


def wheel(folder: Path, name: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))


def vllm_module(folder: Path) -> types.SimpleNamespace:
    """vLLM's hash functions and the ones above, run from its sources."""
    with wheel(folder, "vllm") as archive:
        hashing = archive.read("vllm/utils/hashing.py").decode()
        utilities = archive.read("vllm/v1/core/kv_cache_utils.py").decode()
    scope: dict[str, Any] = {"Any": Any, "Callable": Callable, "BlockHash": bytes, "hashlib": hashlib}
    exec(compile(hashing, "hashing.py", "exec"), scope)
    tree = ast.parse(utilities)
    tree.body = [node for node in tree.body if getattr(node, "name", "") in VLLM_FUNCTIONS]
    for node in tree.body:
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                part.returns = None
                for argument in part.args.args:
                    argument.annotation = None
    assert len(tree.body) == len(VLLM_FUNCTIONS)
    exec(
        compile("from __future__ import annotations\n" + ast.unparse(tree), "kv_cache_utils.py", "exec"),
        scope,
    )
    return types.SimpleNamespace(**{name: scope[name] for name in VLLM_FUNCTIONS}, scope=scope)


def vllm_request(case: dict[str, Any]) -> types.SimpleNamespace:
    context, extras = case["context"], case.get("extras", {})
    lora = context.get("lora", "")
    block = context["block_tokens"]
    look = case["recipe"].get("lookahead_tokens", 0)
    embeddings = {int(at): bytes.fromhex(digest) for at, digest in extras.get("embeddings", {}).items()}
    position = types.SimpleNamespace
    return types.SimpleNamespace(
        all_token_ids=case["tokens"],
        num_tokens=len(case["tokens"]),
        block_hashes=[],
        lora_request=position(lora_name=lora, lora_path=case["lora_path"]) if lora else None,
        cache_salt=context.get("salt") or None,
        mm_features=[
            position(identifier=name, mm_position=position(offset=offset, length=length))
            for name, offset, length in extras.get("media", [])
        ],
        prompt_embeds=object() if embeddings else None,
        _prompt_embeds_per_block_hashes={
            (at * block, (at + 1) * block + look): digest for at, digest in embeddings.items()
        },
    )


def vllm_chain(vllm: types.SimpleNamespace, case: dict[str, Any]) -> list[bytes]:
    name = case["recipe"]["algorithm"].removeprefix("vllm_")
    function = vllm.scope[name]
    vllm.scope["NONE_HASH"] = function(case["recipe"].get("hash_seed", "vllm-none-hash"))
    request = vllm_request(case)
    if case["recipe"].get("tagged_extras", True):
        block = case["context"]["block_tokens"]
        look = case["recipe"].get("lookahead_tokens", 0)
        hasher = vllm.scope["get_request_block_hasher"](block, function, look)
        vllm.scope["get_mm_features_in_window"] = None  # only used when blocks were hashed before
        return list(hasher(request))
    return vllm_chain_before_tags(vllm, case, request, function)


def vllm_chain_before_tags(
    vllm: types.SimpleNamespace, case: dict[str, Any], request: types.SimpleNamespace, function: Any
) -> list[bytes]:
    """The same loop with the extra keys as 0.26 had them: each tagged key without its tag."""
    chain: list[bytes] = []
    block = case["context"]["block_tokens"]
    for start in range(0, len(case["tokens"]) - block + 1, block):
        keys, _ = vllm.scope["generate_block_hash_extra_keys"](request, start, start + block, 0)
        bare = keys and tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
        parent = chain[-1] if chain else None
        tokens = case["tokens"][start : start + block]
        chain.append(vllm.scope["hash_block_tokens"](function, parent, tokens, bare))
    return chain


def sglang_module(folder: Path, build: Path) -> Any:
    with wheel(folder, "sglang") as archive:
        source = archive.read("sglang/srt/mem_cache/cpp_utils/hash_binding.cpp")
    (build / "binding.cpp").write_bytes(source)
    target = build / f"sglang_hash{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True, check=True
    ).stdout.split()
    options = ["-O2", "-std=c++17", "-mavx2", "-shared", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=sglang_hash"]
    command = ["g++", *options, *includes, str(build / "binding.cpp"), "-o", str(target), "-lcrypto"]
    subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location("sglang_hash", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_chain(module: Any, case: dict[str, Any]) -> list[bytes]:
    bigram = case["recipe"]["algorithm"] == "sglang_bigram"
    salt = case["context"].get("salt", "")
    root = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else None
    page = case["context"]["block_tokens"]
    whole = (len(case["tokens"]) - bigram) // page * page
    tokens = array("q", case["tokens"][: whole + bigram])
    width = 2 if bigram else 1
    return [bytes.fromhex(each) for each in module.get_hash(tokens, whole, width, bigram, root, page)]


def xxh3_links(local: list[int], seed: int) -> list[int]:
    import xxhash

    chain: list[int] = []
    for alone in local:
        pair = chain[-1].to_bytes(8, "little") + alone.to_bytes(8, "little") if chain else b""
        chain.append(xxhash.xxh3_64_intdigest(pair, seed) if chain else alone)
    return chain


def integer_chain(case: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(chain, blocks alone) of the recipes with 64-bit hashes."""
    import xxhash
    from dynamo._core import compute_block_hash_for_seq

    recipe, context, tokens = case["recipe"], case["context"], case["tokens"]
    block = context["block_tokens"]
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    pieces = [raw[4 * at : 4 * (at + block)] for at in range(0, len(tokens) - block + 1, block)]
    if recipe["algorithm"] == "dynamo":
        eagle = bool(recipe.get("lookahead_tokens"))
        local = compute_block_hash_for_seq(
            tokens, block, lora_name=context.get("lora") or None, is_eagle=eagle
        )
        return xxh3_links(local, 1337), local
    if recipe["algorithm"] == "xxh3":
        local = [xxhash.xxh3_64_intdigest(piece, recipe["seed"]) for piece in pieces]
        return xxh3_links(local, recipe["seed"]), local
    parent = xxhash.xxh64_intdigest(context.get("salt", "").encode())
    chain = []
    for piece in pieces:
        parent = xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + piece)
        chain.append(parent)
    return chain, []


def plans() -> list[dict[str, Any]]:
    """Every size class of tokens and blocks, with salts, LoRAs, media, embeddings and look-ahead."""
    source = random.Random(SEED)
    small = [1, 2, 3, 4, 5, 6, 7, 8]
    edges = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 151643, 9, 10, 11, 12, 13, 14, 15]
    long = [source.randrange(152064) for _ in range(150)]
    hash32 = hashlib.sha256(b"embedding").hexdigest()
    media = [["9f" * 32, 3, 5], ["ab" * 32, 8, 2], ["cd" * 32, 20, 20]]
    cases: list[dict[str, Any]] = []

    def add(recipe: dict[str, Any], block: int, tokens: list[int], **more: Any) -> None:
        context = {"block_tokens": block} | {key: more.pop(key) for key in ("lora", "salt") if key in more}
        cases.append({"recipe": recipe, "context": context, "tokens": tokens, **more})

    for name in ("vllm_sha256", "vllm_sha256_cbor", "vllm_xxhash", "vllm_xxhash_cbor"):
        seeded = {"algorithm": name, "hash_seed": "0"}
        for block, tokens in ((1, small), (2, small), (3, small), (4, small), (16, long), (17, edges)):
            add(seeded, block, tokens)
        add(seeded | {"hash_seed": "random text"}, 64, long)
        add(seeded, 4, small, salt="user-1")
        for tagged in (True, False):
            style = seeded | {"tagged_extras": tagged}
            add(style, 16, long, lora="adapter", lora_path="/models/adapter", salt="s")
            add(style, 4, long[:40], extras={"media": media})
            embeddings = {str(block): hash32 for block in range(10)}
            add(style, 4, long[:40], salt="s", extras={"embeddings": embeddings, "media": media[:1]})
        for look in (1, 3):
            style = seeded | {"lookahead_tokens": look}
            add(style, 4, long[:42], lora="l", lora_path="p", salt="s", extras={"media": media})
            add(style, 16, long)
    add({"algorithm": "vllm_sha256"}, 16, long)
    for name in ("sglang", "sglang_bigram"):
        for block, tokens in ((1, small), (4, [*small, 9]), (16, long), (64, long)):
            add({"algorithm": name}, block, tokens)
        add({"algorithm": name}, 16, long, salt="tenant-a")
    for block in (1, 2, 3, 4, 16, 31, 32, 33, 59, 64, 75):
        add({"algorithm": "dynamo"}, block, long)
        add({"algorithm": "xxh3", "seed": 7}, block, long)
        add({"algorithm": "mooncake_xxh64"}, block, long)
    add({"algorithm": "dynamo"}, 16, edges)
    add({"algorithm": "dynamo"}, 16, long, lora="adapter")
    add({"algorithm": "dynamo", "lookahead_tokens": 1}, 16, long)
    add({"algorithm": "mooncake_xxh64"}, 16, long, salt="tenant-a")
    return cases


def main() -> None:
    folder = Path(sys.argv[1])
    vllm = vllm_module(folder)
    cases = plans()
    with tempfile.TemporaryDirectory() as build:
        sglang = sglang_module(folder, Path(build))
        for case in cases:
            name = case["recipe"]["algorithm"]
            if name.startswith("vllm"):
                case["digests"] = [digest.hex() for digest in vllm_chain(vllm, case)]
            elif name.startswith("sglang"):
                case["digests"] = [digest.hex() for digest in sglang_chain(sglang, case)]
            else:
                case["hashes"], case["local"] = integer_chain(case)
    print("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]")


if __name__ == "__main__":
    os.environ.setdefault("DYN_LOG", "error")
    main()
