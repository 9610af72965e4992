"""Bodies of the service: JSON or MessagePack in, the same out; and the shapes of answers.

Two shapes of a query's answer are known in the world. JSON gets that of Mooncake's Go generation (counts in
tokens, by tenant), MessagePack that of its C++ generation. Counts are cumulative: what is on the device, with
what follows in host memory, with what follows on disk.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from moonpool.conductor.catalogue import Answer, Question
from moonpool.conductor.request import TOKENS_MAX
from moonpool.errors import UsageError
from moonpool.events import DEFAULT_TENANT
from moonpool.native.table.token_text import read_token_list

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
MSGPACK_TYPES: Final = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
#: Why a body is refused, in the words of Mooncake's service; anything else is "invalid".
REASONS: Final = frozenset(
    {"unknown_field", "invalid_registration", "invalid_json", "invalid_msgpack", "unsupported_content_type"}
)
_TOKEN_BYTES: Final = 4
_TOKENS_KEY: Final = b'"token_ids"'


def decode_body(body: bytes, content_type: str) -> dict[Any, Any]:
    """The map in a body. Raises `UsageError` whose `value` is the reason that peers' clients know."""
    if content_type in MSGPACK_TYPES:
        found, reason = _decode_msgpack(body), "invalid_msgpack"
    elif content_type in (JSON, "", "text/json"):
        found, reason = _decode_json(body), "invalid_json"
    else:
        raise UsageError(
            f"bodies are {JSON} or {MSGPACK}, not {content_type}", value="unsupported_content_type"
        )
    if not isinstance(found, dict):
        raise UsageError("a body is a map of fields", value=reason)
    return found


def encode_body(answer: Any, content_type: str) -> tuple[bytes, str]:
    """An answer in the form of its request, and that form's name."""
    if content_type in MSGPACK_TYPES:
        import msgpack  # type: ignore[import-untyped]

        packed: bytes = msgpack.packb(answer, use_bin_type=True)
        return packed, MSGPACK
    try:
        import msgspec
    except ImportError:
        return json.dumps(answer).encode(), JSON
    return msgspec.json.encode(answer), JSON


def _decode_msgpack(body: bytes) -> Any:
    import msgpack

    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=False, max_ext_len=0)
    except Exception as exc:  # a dozen kinds for bad bytes
        raise UsageError(f"the body is not MessagePack: {exc}", value="invalid_msgpack") from exc


def _decode_json(body: bytes) -> Any:
    """The value of a JSON body. A long list of token ids is taken out of the text first, as `array('I')`."""
    at = body.find(_TOKENS_KEY)
    # Twice, or inside a text (where its quotes would be escaped): left to the reader of all of JSON.
    if at > 0 and body[at - 1 : at] != b"\\":
        found = read_token_list(body, at + len(_TOKENS_KEY))
        if found is not None and body.find(_TOKENS_KEY, found[1]) < 0:
            value = _loads(body[:at] + _TOKENS_KEY + b":null" + body[found[1] :])
            if isinstance(value, dict) and "token_ids" in value and value["token_ids"] is None:
                value["token_ids"] = found[0]
                return value
    return _loads(body)


def _loads(body: bytes) -> Any:
    try:
        try:
            import msgspec
        except ImportError:
            return json.loads(body)
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"the body is not JSON: {exc}", value="invalid_json") from exc


def read_question(body: Mapping[Any, Any], more: frozenset[str]) -> Question:
    """The fields that say which blocks are meant; `more` are the other fields that the path takes."""
    known = {"model", "lora_name", "lora_id", "tenant_id", "instance_id", "block_size", "cache_salt"}
    for name in body:
        if name not in known and name not in more:
            raise UsageError(f"this path takes no field {name!r}", field=str(name), value="unknown_field")
    return Question(
        model=text(body, "model", required=True),
        lora=text(body, "lora_name"),
        tenant=text(body, "tenant_id") or DEFAULT_TENANT,
        block_tokens=number(body, "block_size", 0, 8_192),
        salt=text(body, "cache_salt"),
        instance=text(body, "instance_id"),
    )


def read_tokens(body: Mapping[Any, Any]) -> Any:
    """`token_ids`: an array of integers, or bytes of little-endian 32-bit ones; as `BlockHasher` takes."""
    tokens = body.get("token_ids")
    if isinstance(tokens, bytes):
        if len(tokens) % _TOKEN_BYTES or len(tokens) > TOKENS_MAX * _TOKEN_BYTES:
            raise UsageError(f"token_ids as bytes are at most {TOKENS_MAX} of 4 bytes", field="token_ids")
        return tokens
    if isinstance(tokens, list | array) and len(tokens) <= TOKENS_MAX:
        return tokens
    raise UsageError(f"token_ids is an array of at most {TOKENS_MAX} integers, or bytes", field="token_ids")


def token_count(tokens: Any) -> int:
    """How many tokens `read_tokens` gave."""
    return len(tokens) // _TOKEN_BYTES if isinstance(tokens, bytes) else len(tokens)


def read_hashes(body: Mapping[Any, Any]) -> list[int]:
    """`seq_hashes` (`block_hash` in older clients): chain hashes, signed or not."""
    hashes = body.get("seq_hashes", body.get("block_hash"))
    if not isinstance(hashes, list) or len(hashes) > TOKENS_MAX:
        raise UsageError("seq_hashes is an array of 64-bit integers", field="seq_hashes")
    for each in hashes:
        if not isinstance(each, int) or isinstance(each, bool) or not -(2**63) <= each < 2**64:
            raise UsageError("seq_hashes is an array of 64-bit integers", field="seq_hashes")
    return hashes


def text(body: Mapping[Any, Any], name: str, *, required: bool = False) -> str:
    """A text field; "" when it is missing and may be."""
    value = body.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        raise UsageError(f"{name} is a text{' that is not empty' if required else ''}", field=name)
    return value


def number(body: Mapping[Any, Any], name: str, low: int, high: int, default: int = 0) -> int:
    """A whole number field within bounds."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name} is a whole number from {low} to {high}", field=name, value=repr(value)[:64])
    return value


def by_tenant(tenant: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """`{tenant: {instance: {longest_matched, GPU, DP, CPU, DISK}}}`, in tokens."""
    return {tenant: _shaped(answers, _go_shape)}


def by_instance(answers: Sequence[Answer]) -> dict[str, Any]:
    """`{"instances": {instance: {longest_matched, gpu, cpu, disk, dp, rank_matches}}}`, in tokens."""
    return {"instances": _shaped(answers, _cpp_shape)}


def _go_shape(ranks: Mapping[int, _Tokens]) -> dict[str, Any]:
    device, host, disk = _best(ranks)
    return {
        "longest_matched": disk,
        "GPU": device,
        "CPU": host,
        "DISK": disk,
        "DP": {str(rank): found[0] for rank, found in ranks.items()},
    }


def _cpp_shape(ranks: Mapping[int, _Tokens]) -> dict[str, Any]:
    device, host, disk = _best(ranks)
    return {
        "longest_matched": disk,
        "gpu": device,
        "cpu": host,
        "disk": disk,
        "dp": {str(rank): found[0] for rank, found in ranks.items()},
        "rank_matches": {
            str(rank): {"gpu": found[0], "cpu": found[1], "disk": found[2]} for rank, found in ranks.items()
        },
    }


def _shaped(
    answers: Sequence[Answer], shape: Callable[[Mapping[int, _Tokens]], dict[str, Any]]
) -> dict[str, Any]:
    """What each instance has; those that have the same share one map."""
    shapes: dict[Any, dict[str, Any]] = {}
    if len(answers) == 1:
        size, depths = answers[0].block_tokens, answers[0].depths
        instances: dict[str, Any] = {}
        for (instance, rank), depth in depths.items():
            same = shapes.get((rank, depth))
            if same is None:
                device, host, disk = depth
                same = shape({rank: (device * size, host * size, disk * size)})
                shapes[rank, depth] = same
            instances[instance] = same
        if len(instances) == len(depths):  # one rank each
            return instances
    return {instance: shape(ranks) for instance, ranks in _tokens(answers).items()}


#: Tokens on the device, with host memory, with disk.
_Tokens: TypeAlias = tuple[int, int, int]


def _best(ranks: Mapping[int, _Tokens]) -> _Tokens:
    """The best of an instance's ranks, tier by tier."""
    found = list(ranks.values())
    if len(found) == 1:
        return found[0]
    devices, hosts, disks = zip(*found, strict=True)
    return max(devices), max(hosts), max(disks)


def _tokens(answers: Iterable[Answer]) -> dict[str, dict[int, _Tokens]]:
    """Depths in tokens by instance and rank; the better one where two ways of hashing know a rank."""
    found: dict[str, dict[int, _Tokens]] = {}
    for answer in answers:
        size = answer.block_tokens
        for (instance, rank), (device, host, disk) in answer.depths.items():
            tokens = (device * size, host * size, disk * size)
            ranks = found.get(instance)
            if ranks is None:
                found[instance] = {rank: tokens}
            elif rank in ranks:
                known = ranks[rank]
                ranks[rank] = (max(known[0], tokens[0]), max(known[1], tokens[1]), max(known[2], tokens[2]))
            else:
                ranks[rank] = tokens
    return found
