"""TensorRT-LLM's events as its pull interface gives them: JSON objects, one for each change.

`{"event_id", "data": {"type": "stored" | "removed" | "updated" | "created", ...}, "window_size",
"attention_dp_rank"}`. Cache level 0 is device memory, 1 host memory. A block that changes its level is stored
in the new one and removed from the old one. Event ids are consecutive for each rank.
Source: TensorRT-LLM, tensorrt_llm/_torch/pyexecutor and docs on KV cache events (1.x).
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from moonpool.conductor.engine_payload import (
    BLOCKS_MAX,
    PAYLOAD_BYTES_MAX,
    TOKENS_MAX,
    RawEvent,
    RawHash,
    RawRemoved,
    RawStored,
)
from moonpool.errors import ProtocolError

#: By cache level.
LEVELS: Final = ("GPU", "CPU")
EVENT_ID_MAX: Final = 2**63 - 1


class TensorrtEvent(NamedTuple):
    """One object: its number in its rank's stream, and what it says (`created` says nothing about blocks)."""

    event_id: int
    rank: int
    window_tokens: int | None
    events: tuple[RawEvent, ...]


def decode_tensorrt(text: bytes | str) -> TensorrtEvent:
    """Reads one JSON object; raises `ProtocolError` for anything else."""
    if len(text) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"an event has at most {PAYLOAD_BYTES_MAX} bytes; got {len(text)}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"an event is not JSON: {exc}") from exc
    data = _map(_map(found, "an event").get("data"), "data")
    kind = data.get("type")
    if kind == "stored":
        events = _stored(data)
    elif kind == "removed":
        events = (RawRemoved(_hashes(data.get("block_hashes"))),)
    elif kind == "updated":
        events = _updated(data)
    elif isinstance(kind, str):
        events = ()
    else:
        raise ProtocolError("data.type is a text")
    window = found.get("window_size")
    return TensorrtEvent(
        _integer(found.get("event_id"), "event_id", EVENT_ID_MAX),
        _integer(found.get("attention_dp_rank") or 0, "attention_dp_rank", 65_535),
        None if window is None else _integer(window, "window_size", 2**40),
        events,
    )


def _stored(data: dict[str, Any]) -> tuple[RawEvent, ...]:
    blocks = data.get("blocks")
    if not isinstance(blocks, list) or len(blocks) > BLOCKS_MAX:
        raise ProtocolError(f"blocks is an array of at most {BLOCKS_MAX}")
    parent = data.get("parent_hash")
    parent = None if parent is None else _hash(parent)
    events: list[RawEvent] = []
    for each in blocks:
        block = _map(each, "a block")
        tokens = block.get("tokens") or []
        if not isinstance(tokens, list) or len(tokens) > TOKENS_MAX:
            raise ProtocolError(f"a block's tokens are an array of at most {TOKENS_MAX}")
        ids = tuple(
            _integer(_map(token, "a token").get("token_id"), "token_id", 2**32 - 1) for token in tokens
        )
        found = _hash(block.get("block_hash"))
        lora = block.get("lora_id")
        events.append(
            RawStored(
                (found,),
                parent,
                ids,
                len(ids),
                _medium(block.get("cache_level", 0)),
                None if lora is None else str(_integer(lora, "lora_id", 2**63 - 1)),
            )
        )
        parent = found
    return tuple(events)


def _updated(data: dict[str, Any]) -> tuple[RawEvent, ...]:
    found = _hash(data.get("block_hash"))
    change = data.get("cache_level")
    if change is None:
        return ()
    levels = _map(change, "cache_level")
    stored = RawStored((found,), None, (), 0, _medium(levels.get("new_value")))
    return (stored, RawRemoved((found,), _medium(levels.get("old_value"))))


def _medium(level: Any) -> str:
    return LEVELS[_integer(level, "cache_level", len(LEVELS) - 1)]


def _hashes(raw: Any) -> tuple[RawHash, ...]:
    if not isinstance(raw, list) or len(raw) > BLOCKS_MAX:
        raise ProtocolError(f"block_hashes is an array of at most {BLOCKS_MAX}")
    return tuple(_hash(each) for each in raw)


def _hash(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and -(2**63) <= raw < 2**64:
        return raw
    raise ProtocolError("a block hash is a 64-bit integer")


def _map(raw: Any, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ProtocolError(f"{name} is an object")
    return raw


def _integer(raw: Any, name: str, high: int) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= high:
        raise ProtocolError(f"{name} is an integer from 0 to {high}")
    return raw
