"""What besides tokens makes a vLLM block differ: LoRA, media, salt, embeddings; encoded as vLLM encodes it.

Order in a block: LoRA (every block), the media that overlap it, the salt (first block only), the digest of
prompt embeddings. Since 0.33 each is tagged with its kind; before, a LoRA was its name, media (identifier,
offset), salt and embeddings bare. With look-ahead the keys become (keys, next tokens ...).
Source: vllm/v1/core/kv_cache_utils.py, `generate_block_hash_extra_keys`, `get_request_block_hasher` (0.33.0).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, final

from moonpool.errors import UsageError

#: What extra keys are made of, as far as canonical CBOR is written here.
Key: TypeAlias = "str | bytes | int | None | tuple[Key, ...]"

PICKLE_PROTOCOL: Final = 5
EMBEDDING_DIGEST_BYTES: Final = 32
MEDIA_MAX: Final = 65_536
# What pickle writes before the extra keys of (32 bytes, 4 small tokens, extra): PROTO and FRAME (11), the
# parent (35), MARK, 4 tokens of 2 bytes, TUPLE, MEMOIZE; and after them TUPLE3, MEMOIZE, STOP.
_BEFORE_EXTRA: Final = 11 + 35 + 1 + 8 + 1 + 1
_AFTER_EXTRA: Final = 3


class MediaItem(NamedTuple):
    """An image, sound or film in a prompt: its content hash, and which tokens stand for it."""

    identifier: str
    offset_tokens: int
    length_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExtras:
    """What one prompt has besides tokens. Media ascend by offset; embeddings are SHA-256 digests by block."""

    media: Sequence[MediaItem] = ()
    embeddings: Mapping[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.media) > MEDIA_MAX:
            raise UsageError(f"a prompt has at most {MEDIA_MAX} media", field="media")
        offsets = [item.offset_tokens for item in self.media]
        if offsets != sorted(offsets) or any(item.length_tokens < 1 for item in self.media):
            raise UsageError("media ascend by offset and have a token or more", field="media")
        if any(len(digest) != EMBEDDING_DIGEST_BYTES for digest in self.embeddings.values()):
            raise UsageError(f"an embedding's digest has {EMBEDDING_DIGEST_BYTES} bytes", field="embeddings")


@final
class VllmExtraKeys:
    """Extra keys of the blocks of prompts with one LoRA and salt."""

    def __init__(self, *, tagged: bool, lora: str, lora_path: str, salt: str) -> None:
        self._tagged: Final = tagged
        self._lora: Final = lora
        self._lora_path: Final = lora_path
        self._salt: Final = salt

    def of_block(
        self, block: int, window: tuple[int, int], extras: PromptExtras | None
    ) -> tuple[Key, ...] | None:
        """The keys of block number `block`, whose hash covers the tokens [window[0], window[1])."""
        keys: list[Key] = []
        if self._lora:
            own = _own(self._lora)
            keys.append(("lora", own, _own(self._lora_path)) if self._tagged else own)
        start, end = window
        for item in extras.media if extras else ():
            if item.offset_tokens < end and item.offset_tokens + item.length_tokens > start:
                place = (_own(item.identifier), item.offset_tokens - start)
                keys.append(("mm", *place) if self._tagged else place)
        if block == 0 and self._salt:
            keys.append(("cache_salt", _own(self._salt)) if self._tagged else _own(self._salt))
        digest = extras.embeddings.get(block) if extras else None
        if digest is not None:
            keys.append(("prompt_embeds", digest) if self._tagged else digest)
        return tuple(keys) if keys else None


def encode_pickle(extra: Key) -> bytes:
    """The extra keys as they stand in `pickle.dumps((parent, tokens, extra), protocol=5)`."""
    whole = pickle.dumps((bytes(32), (0, 0, 0, 0), extra), protocol=PICKLE_PROTOCOL)
    return whole[_BEFORE_EXTRA:-_AFTER_EXTRA]


def encode_cbor(extra: Key) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2.1) of text, bytes, integers of 64 bits, null and arrays."""
    if extra is None:
        return b"\xf6"
    if isinstance(extra, str):
        text = extra.encode()
        return _cbor_head(0x60, len(text)) + text
    if isinstance(extra, bytes):
        return _cbor_head(0x40, len(extra)) + extra
    if isinstance(extra, tuple):
        return _cbor_head(0x80, len(extra)) + b"".join(map(encode_cbor, extra))
    return _cbor_head(0x00, extra) if extra >= 0 else _cbor_head(0x20, -1 - extra)


def hash_seed_message(seed: str, cbor: bool) -> bytes:
    """The message whose digest is the first parent."""
    return encode_cbor(seed) if cbor else pickle.dumps(seed, protocol=PICKLE_PROTOCOL)


def _cbor_head(major: int, value: int) -> bytes:
    for extra_bytes, info in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if value < 24:
            return bytes([major | value])
        if value < 1 << 8 * extra_bytes:
            return bytes([major | info]) + value.to_bytes(extra_bytes, "big")
    raise UsageError("an integer among extra keys has at most 64 bits", field="extras")


def _own(text: str) -> Any:
    """An equal text that is an object of its own.

    Pickle writes a second occurrence of one object as a reference. The texts of a request come from different
    places and are different objects to vLLM, even where they are equal; the tags are constants and are not.
    """
    return text.encode().decode()
