"""Bodies in both forms mean the same, and token ids taken out of the text are those that JSON has."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor import service_bodies as bodies
from moonpool.errors import UsageError
from moonpool.native.table.token_text import read_token_list

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
BLANKS = st.text(" \t\r\n", max_size=3)


@given(TOKENS, BLANKS, BLANKS, st.sampled_from([None, 0, 2]))
def test_token_ids_are_read_as_json_reads_them(
    tokens: list[int], before: str, after: str, indent: Any
) -> None:
    text = json.dumps({"model": "m", "token_ids": tokens, "x": [1]}, indent=indent)
    text = text.replace('"token_ids":', f'"token_ids"{before}:{after}')
    found = bodies.decode_body(text.encode(), "application/json")
    assert found == {"model": "m", "token_ids": array("I", tokens), "x": [1]}
    assert list(bodies.read_tokens(found)) == tokens


@pytest.mark.parametrize(
    "text",
    [
        '{"token_ids": [1.0]}',
        '{"token_ids": [-1]}',
        '{"token_ids": [4294967296]}',
        '{"token_ids": [99999999999999999999]}',
        '{"token_ids": "a"}',
        '{"token_ids": null}',
        '{"token_ids": [1], "token_ids": [2]}',
        '{"a": {"token_ids": [1]}}',
        '{"a": "\\"token_ids\\": [1]", "b": 2}',
        '{"a": ["token_ids"], "b": 2}',
        '{"token_ids": [[1]]}',
        '{"token_ids": [true]}',
        '{"token_ids" : [ ] , "a":1}',
    ],
)
def test_whatever_else_it_is_means_what_json_means(text: str) -> None:
    assert bodies.decode_body(text.encode(), "application/json") == json.loads(
        text, object_pairs_hook=lambda pairs: {k: arrays(k, v) for k, v in pairs}
    )


def arrays(key: str, value: Any) -> Any:
    return array("I") if key == "token_ids" and value == [] else value


@pytest.mark.parametrize(
    "text",
    [
        '{"token_ids": [01]}',
        '{"token_ids": [1,]}',
        '{"token_ids": [,1]}',
        '{"token_ids": [1 2]}',
        '{"token_ids": [1',
        '{"token_ids": ',
        '{"token_ids"',
        '{"token_ids": [1]',
        '{"token_ids": [1]]}',
    ],
)
def test_broken_lists_are_broken_json(text: str) -> None:
    with pytest.raises(UsageError, match="JSON"):
        bodies.decode_body(text.encode(), "application/json")


def test_any_bytes_are_a_list_or_nothing() -> None:
    draw = random.Random(5)
    letters = b'0123456789,[]: \n"-.e'
    for _ in range(20_000):
        text = bytes(draw.choice(letters) for _ in range(draw.randrange(1, 24)))
        found = read_token_list(text, 0)
        if found is None:
            continue
        tokens, end = found
        assert text.lstrip(b" \n")[:1] == b":"
        assert json.loads(text[text.index(b":") + 1 : end]) == list(tokens)
    assert read_token_list(b": [1]", -1) is None
    assert read_token_list(b": [1]", 9) is None


def test_long_lists_are_read_as_json_reads_them_or_not_at_all() -> None:
    draw = random.Random(6)
    odd = (0, 9, 10, 99_999, 99_999_999, 100_000_000, 2**32 - 1)
    for _ in range(3_000):
        numbers = [
            draw.choice(odd) if draw.random() < 0.1 else draw.randrange(200_000)
            for _ in range(draw.randrange(60))
        ]
        if draw.random() < 0.1:
            numbers.insert(draw.randrange(len(numbers) + 1), 2**32)
        listed = "[" + draw.choice([",", ", ", " ,", ",\n"]).join(map(str, numbers)) + "]"
        if draw.random() < 0.3:
            at = draw.randrange(len(listed))
            listed = listed[:at] + draw.choice("-.e0 x\x00\xff9],") + listed[at + 1 :]
        text = f'"token_ids":{listed}}}{" " * draw.randrange(90)}'.encode("latin-1")
        listed = listed[: listed.find("]") + 1]
        try:
            wanted = json.loads(listed)
        except ValueError:
            wanted = None
        right = wanted is not None and "-" not in listed
        right = right and all(type(one) is int and one < 2**32 for one in wanted)
        found = read_token_list(text, len('"token_ids"'))
        assert (found is not None) == right, listed
        assert found is None or list(found[0]) == wanted


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2)),
        st.lists(st.integers(0, 9), min_size=3, max_size=3),
    )
)
def test_both_shapes_give_each_instances_best_rank(rows: dict[tuple[str, int], list[int]]) -> None:
    from moonpool.conductor.catalogue import Answer
    from moonpool.conductor.prefix_match import Depths
    from moonpool.events import Holder

    depths = {Holder(*place): Depths(*sorted(row)) for place, row in rows.items()}
    answers = [Answer(4, 9, depths)]
    by_instance = bodies.by_instance(answers)["instances"]
    by_tenant = bodies.by_tenant("t", answers)["t"]
    assert set(by_instance) == set(by_tenant) == {holder.instance for holder in depths}
    for name, found in by_instance.items():
        mine = [row for holder, row in depths.items() if holder.instance == name]
        assert found["longest_matched"] == 4 * max(row.disk for row in mine) == by_tenant[name]["DISK"]
        assert found["gpu"] == 4 * max(row.device for row in mine) == by_tenant[name]["GPU"]
        assert found["dp"] == by_tenant[name]["DP"]
        assert found["rank_matches"] == {
            str(holder.rank): {"gpu": 4 * row.device, "cpu": 4 * row.host, "disk": 4 * row.disk}
            for holder, row in depths.items()
            if holder.instance == name
        }
