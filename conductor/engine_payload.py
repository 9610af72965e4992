"""Payloads of serving engines' cache events: bytes in, plain records out. No I/O, and nothing is believed.

One reader for all that speak vLLM's protocol: vLLM itself (arrays until mid 2026, maps since), SGLang,
TensorRT-LLM's streaming mode, LMCache and FlexKV connectors, and the Mooncake master with its other names.
A batch is `[stamp, [event, ...], rank]` or the same as a map. An event is an array tagged by its first
element, or a map tagged by `type` (`event_type`); fields may be missing at the end, and unknown ones are
passed over. TensorRT-LLM's pull interface gives JSON, read by `decode_tensorrt`.

What breaks the rules raises `ProtocolError` for the whole batch: half a batch would leave a wrong picture
that nobody knows to be wrong. Kinds of events that are not known here are counted and passed over.

Sources: vllm/distributed/kv_events.py (0.26 to 0.33), sglang/srt/disaggregation/kv_events.py,
TensorRT-LLM's KV cache events, Mooncake's master publisher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from moonpool.errors import ProtocolError
from moonpool.units import MIB

PAYLOAD_BYTES_MAX: Final = 64 * MIB
EVENTS_MAX: Final = 1 << 20
BLOCKS_MAX: Final = 1 << 20
TOKENS_MAX: Final = 1 << 24

#: Kinds of attention whose blocks are a prefix that another request can use.
PREFIX_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

#: Hashes as engines send them: 64-bit integers, or digests of 8 bytes and more.
RawHash: TypeAlias = "int | bytes"


@final
@dataclass(frozen=True, slots=True)
class RawStored:
    """Blocks that came; `tokens` may be empty, `block_tokens` is 0 when the event does not say."""

    hashes: tuple[RawHash, ...]
    parent: RawHash | None
    tokens: tuple[int, ...]
    block_tokens: int
    medium: str | None = None
    lora: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group: int | None = None
    kind: str | None = None


@final
@dataclass(frozen=True, slots=True)
class RawRemoved:
    """Blocks that left."""

    hashes: tuple[RawHash, ...]
    medium: str | None = None
    group: int | None = None


@final
@dataclass(frozen=True, slots=True)
class RawCleared:
    """Everything left."""


RawEvent: TypeAlias = RawStored | RawRemoved | RawCleared


@final
@dataclass(frozen=True, slots=True)
class RawBatch:
    """The events of one message in their order; `unknown` counts those passed over."""

    stamp_s: float
    events: tuple[RawEvent, ...]
    rank: int | None = None
    unknown: int = 0


# Field names in the order of the array form.
_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
_TAGS: Final = {
    "BlockStored": "stored",
    "BlockRemoved": "removed",
    "AllBlocksCleared": "cleared",
    "stored": "stored",
    "removed": "removed",
    "cleared": "cleared",
}
#: Other names of a field, for those who took up vLLM's protocol.
_ALIASES: Final = {
    "block_hashes": ("seq_hashes",),
    "parent_block_hash": ("parent_hash", "parent_seq_hash"),
    "medium": ("storage_medium",),
}


def decode_payload(payload: bytes) -> RawBatch:
    """One message's events. Raises `ProtocolError` for anything that is not a whole batch."""
    import msgpack  # type: ignore[import-untyped]

    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a batch of events has at most {PAYLOAD_BYTES_MAX} bytes; got {len(payload)}")
    try:
        batch = msgpack.unpackb(
            payload, raw=False, strict_map_key=False, use_list=False, max_ext_len=0, unicode_errors="strict"
        )
    except Exception as exc:  # msgpack raises a dozen kinds for bad bytes, RecursionError among them
        raise ProtocolError(f"a batch of events is not MessagePack: {exc}") from exc
    return _read_batch(batch)


def _read_batch(batch: Any) -> RawBatch:
    if isinstance(batch, dict):
        parts = (batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank"))
    elif isinstance(batch, tuple) and 2 <= len(batch) <= 8:
        parts = (batch[0], batch[1], batch[2] if len(batch) > 2 else None)
    else:
        raise ProtocolError("a batch of events is an array [stamp, events, rank] or a map of these")
    stamp, events, rank = parts
    if not isinstance(stamp, int | float) or isinstance(stamp, bool):
        raise ProtocolError("a batch's stamp is a number of seconds")
    if not isinstance(events, tuple) or len(events) > EVENTS_MAX:
        raise ProtocolError(f"a batch's events are an array of at most {EVENTS_MAX}")
    read = [_read_event(event) for event in events]
    known = tuple(event for event in read if event is not None)
    return RawBatch(float(stamp), known, _integer(rank, "rank", 0, 65_535), len(read) - len(known))


def _read_event(event: Any) -> RawEvent | None:
    if isinstance(event, dict):
        tag = event.get("type", event.get("event_type"))
        fields = event
    elif isinstance(event, tuple) and event:
        tag = event[0]
        names = _STORED_FIELDS if _kind_of(tag) == "stored" else _REMOVED_FIELDS
        fields = dict(zip(names, event[1:], strict=False))
    else:
        raise ProtocolError("an event is an array that begins with its kind, or a map with a type")
    kind = _kind_of(tag)
    if kind == "stored":
        return _read_stored(fields)
    if kind == "removed":
        return RawRemoved(
            _hashes(_field(fields, "block_hashes")),
            _text(_field(fields, "medium"), "medium"),
            _integer(fields.get("group_idx"), "group_idx", 0, 65_535),
        )
    return RawCleared() if kind == "cleared" else None


def _kind_of(tag: Any) -> str | None:
    if not isinstance(tag, str):
        raise ProtocolError("an event's kind is a text")
    return _TAGS.get(tag)


def _read_stored(fields: dict[Any, Any]) -> RawStored:
    hashes = _hashes(_field(fields, "block_hashes"))
    parent = _field(fields, "parent_block_hash")
    tokens = fields.get("token_ids") or ()
    if not isinstance(tokens, tuple) or len(tokens) > TOKENS_MAX:
        raise ProtocolError(f"token_ids is an array of at most {TOKENS_MAX}")
    extra = fields.get("extra_keys")
    if extra is not None and not isinstance(extra, tuple):
        raise ProtocolError("extra_keys is an array with one entry for each block, or nil")
    lora = _text(fields.get("lora_name"), "lora_name")
    if lora is None and fields.get("lora_id") is not None:
        lora = str(_integer(fields["lora_id"], "lora_id", 0, 2**63 - 1))
    return RawStored(
        hashes,
        None if parent is None else _hash(parent),
        tokens,
        _integer(fields.get("block_size"), "block_size", 1, 8_192) or 0,
        _text(_field(fields, "medium"), "medium"),
        lora,
        extra,
        _integer(fields.get("group_idx"), "group_idx", 0, 65_535),
        _text(fields.get("kv_cache_spec_kind"), "kv_cache_spec_kind"),
    )


def _field(fields: dict[Any, Any], name: str) -> Any:
    found = fields.get(name)
    if found is None:
        for alias in _ALIASES[name]:
            found = fields.get(alias)
            if found is not None:
                break
    return found


def _hashes(raw: Any) -> tuple[RawHash, ...]:
    if not isinstance(raw, tuple) or len(raw) > BLOCKS_MAX:
        raise ProtocolError(f"block_hashes is an array of at most {BLOCKS_MAX}")
    for each in raw:
        _hash(each)
    return raw


def _hash(raw: Any) -> RawHash:
    if isinstance(raw, int) and not isinstance(raw, bool):
        if -(2**63) <= raw < 2**64:
            return raw
    elif isinstance(raw, bytes) and 8 <= len(raw) <= 64:
        return raw
    raise ProtocolError("a block hash is a 64-bit integer or a digest of 8 to 64 bytes")


def _integer(raw: Any, name: str, low: int, high: int) -> int | None:
    if raw is None:
        return None
    if not isinstance(raw, int) or isinstance(raw, bool) or not low <= raw <= high:
        raise ProtocolError(f"{name} is an integer from {low} to {high}, or nil")
    return raw


def _text(raw: Any, name: str) -> str | None:
    if raw is None or isinstance(raw, str):
        return raw
    raise ProtocolError(f"{name} is a text or nil")
