"""Payloads of engines: each form that a reader must take, as bytes, and what it must refuse."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import msgpack
import pytest

from moonpool.conductor.engine_payload import RawBatch, RawCleared, RawRemoved, RawStored, decode_payload
from moonpool.conductor.tensorrt_payload import decode_tensorrt
from moonpool.errors import ProtocolError

DIGEST = bytes(range(32))
#: Recorded form of vLLM 0.26: maps in an array, the newest fields named.
VLLM_MAP = bytes.fromhex(
    "93cb3ff800000000000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf8000000000"
    "000001b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394070809"
    + "0aaa626c6f636b5f73697a6504a7"
    "6c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69"
    "647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
)


def packed(*batch: Any) -> bytes:
    made: bytes = msgpack.packb(list(batch), use_bin_type=True)
    return made


def only(payload: bytes) -> Any:
    batch = decode_payload(payload)
    assert len(batch.events) == 1
    return batch.events[0]


def test_recorded_bytes_of_the_map_form() -> None:
    assert decode_payload(VLLM_MAP) == RawBatch(
        1.5,
        (
            RawStored(
                (0x8000000000000001,), None, (7, 8, 9, 10), 4, "GPU", None, (None,), 0, "full_attention"
            ),
        ),
        0,
    )


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (["BlockStored", [1, -2], None, [5, 6], 1], RawStored((1, -2), None, (5, 6), 1)),
        (["BlockStored", [DIGEST], DIGEST, [], 16, None, "CPU"], RawStored((DIGEST,), DIGEST, (), 16, "CPU")),
        (["BlockStored", [1], 2, [3], 1, 7], RawStored((1,), 2, (3,), 1, None, "7")),
        (["BlockStored", [1], 2, [3], 1, 7, "GPU", "sql"], RawStored((1,), 2, (3,), 1, "GPU", "sql")),
        (["BlockStored", [1], 2, [3], 1, None, None, None, [["salt"]], 3, "sliding_window", 512, "newer"],
         RawStored((1,), 2, (3,), 1, None, None, (("salt",),), 3, "sliding_window")),
        (["BlockRemoved", [1, 2]], RawRemoved((1, 2))),
        (["BlockRemoved", [1], "CPU_TIER2", 4], RawRemoved((1,), "CPU_TIER2", 4)),
        (["AllBlocksCleared"], RawCleared()),
        ({"type": "AllBlocksCleared"}, RawCleared()),
        ({"event_type": "stored", "seq_hashes": [9], "parent_hash": 8, "medium": "cpu"},
         RawStored((9,), 8, (), 0, "cpu")),
        ({"event_type": "removed", "seq_hashes": [9], "object_key": "k", "backend_id": "b"},
         RawRemoved((9,))),
    ],
)  # fmt: skip
def test_forms_of_an_event(event: Any, found: Any) -> None:
    assert only(packed(0.0, [event])) == found


@pytest.mark.parametrize(
    "batch",
    [
        [1, []],
        [1.0, [], None],
        [1.0, [], 0, "newer"],
        {"ts": 1.0, "events": []},
        {"ts": 1.0, "events": [], "data_parallel_rank": 3, "more": 1},
    ],
)
def test_forms_of_a_batch(batch: Any) -> None:
    assert decode_payload(msgpack.packb(batch)).events == ()


def test_kinds_that_are_not_known_are_counted_and_passed_over() -> None:
    batch = decode_payload(packed(0.0, [["BlockMoved", 1], {"type": "pinged"}, ["AllBlocksCleared"]]))
    assert batch.unknown == 2
    assert batch.events == (RawCleared(),)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        packed(),
        packed(1.0),
        packed("now", []),
        packed(True, []),
        packed(1.0, {}),
        packed(1.0, [1]),
        packed(1.0, [[]]),
        packed(1.0, [[7]]),
        packed(1.0, [{}]),
        packed(1.0, [], -1),
        packed(1.0, [], "0"),
        packed(1.0, [["BlockStored"]]),
        packed(1.0, [["BlockStored", 5]]),
        packed(1.0, [["BlockStored", ["a"]]]),
        packed(1.0, [["BlockStored", [b"short"]]]),
        packed(1.0, [["BlockStored", [True]]]),
        packed(1.0, [["BlockStored", [1], "parent"]]),
        packed(1.0, [["BlockStored", [1], None, 7]]),
        packed(1.0, [["BlockStored", [1], None, [], 0]]),
        packed(1.0, [["BlockStored", [1], None, [], 1 << 20]]),
        packed(1.0, [["BlockStored", [1], None, [], 1, None, 5]]),
        packed(1.0, [["BlockRemoved", None]]),
        packed(1.0, []) + b"\x00",
        msgpack.packb([1.0, [["BlockStored", [msgpack.ExtType(4, b"x" * 8)]]]]),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_what_breaks_the_rules_is_refused_whole(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_payload(payload)


def test_any_bytes_are_a_batch_or_a_protocol_error() -> None:
    seed = 41
    draw = random.Random(seed)
    whole = [VLLM_MAP, packed(1.0, [["BlockStored", [1, 2], 3, [4, 5], 1], ["BlockRemoved", [1]]], 2)]
    for _ in range(20_000):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode_payload(bytes(data[: draw.randrange(len(data) + 1)])), RawBatch)


def stored(**more: Any) -> dict[str, Any]:
    token = {"token_id": 5, "token_extra_id": 0}
    block = {"type": "stored_block", "block_hash": 11, "tokens": [token, token], "cache_level": 0, **more}
    second = {**block, "block_hash": 12}
    return {"type": "stored", "parent_hash": None, "blocks": [block, second]}


def test_tensorrt_stored_blocks_chain_on() -> None:
    found = decode_tensorrt(json.dumps({"event_id": 4, "data": stored(lora_id=3), "window_size": 128}))
    assert (found.event_id, found.rank, found.window_tokens) == (4, 0, 128)
    assert found.events == (
        RawStored((11,), None, (5, 5), 2, "GPU", "3"),
        RawStored((12,), 11, (5, 5), 2, "GPU", "3"),
    )


def test_tensorrt_removed_and_moved_blocks() -> None:
    removed = {"event_id": 5, "attention_dp_rank": 2, "data": {"type": "removed", "block_hashes": [1, 2]}}
    assert decode_tensorrt(json.dumps(removed))[1:] == (2, None, (RawRemoved((1, 2)),))
    level = {"type": "event_diff", "new_value": 1, "old_value": 0}
    moved = {"event_id": 6, "data": {"type": "updated", "block_hash": 1, "cache_level": level}}
    assert decode_tensorrt(json.dumps(moved)).events == (
        RawStored((1,), None, (), 0, "CPU"),
        RawRemoved((1,), "GPU"),
    )
    for silent in (
        {"type": "created", "num_blocks_per_cache_level": [9, 9]},
        {"type": "updated", "block_hash": 1},
    ):
        assert decode_tensorrt(json.dumps({"event_id": 0, "data": silent})).events == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"event_id": 1}',
        '{"event_id": -1, "data": {"type": "created"}}',
        '{"event_id": 1, "data": {"type": 5}}',
        '{"event_id": 1, "data": {"type": "stored"}}',
        '{"event_id": 1, "data": {"type": "stored", "blocks": [5]}}',
        '{"event_id": 1, "data": {"type": "stored", "blocks": [{"block_hash": "a"}]}}',
        '{"event_id": 1, "data": {"type": "stored", "blocks": [{"block_hash": 1, "cache_level": 2}]}}',
        '{"event_id": 1, "data": {"type": "removed", "block_hashes": [1.5]}}',
        '{"event_id": 1, "data": {"type": "updated", "block_hash": 1, "cache_level": {"new_value": 0}}}',
        "[" * 100_000,
    ],
)
def test_tensorrt_objects_that_break_the_rules_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        decode_tensorrt(text)
