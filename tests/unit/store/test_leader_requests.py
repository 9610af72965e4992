"""Every method with wrong parameters, from wrong callers, of a deposed leader: typed errors, no change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.store.core_world import MIB, World, segment_map

from moonpool.errors import InternalError, UsageError
from moonpool.store import errors as store_errors
from moonpool.store.errors import ERRORS_BY_CODE, StoreError, error_of_code, wire_error
from moonpool.store.keys import as_key, is_name
from moonpool.store.master_config import MasterConfig
from moonpool.store.method_table import METHODS, Caller
from moonpool.store.records import EPOCH_MAX, EPOCH_TOLD_MAX

GOOD: dict[str, list[Any]] = {
    "exists": [[b"a"], 0],
    "lookup": [[b"a"], 0],
    "put_start": [[b"a"], [1], None, 0],
    "put_end": [1, []],
    "client_join": [b"i" * 16, "c", "h", "", ""],
    "client_beat": [],
    "segments": [],
    "put_abort": [1, None],
    "remove": [[b"a"], "defer", False],
    "remove_prefix": [b"", "defer", False, 10, None],
    "remove_all": ["defer", False, 10, None],
    "list": [b"", 10, None],
    "stat": [[b"a"]],
    "pin": [[b"a"], 0, 0],
    "damaged": [b"a", 1, 1, 0],
    "status": [],
    "tenant_set": ["t", 0, b""],
    "node_join": ["n9", "h", b"j" * 16, "e", "v", 0, [segment_map("s", MIB, 64)]],
    "node_report": [1, 0, True, b""],
    "node_ack": [0, 0, [], []],
    "node_leave": [],
}
#: Method, which parameter, and what it must not be.
BAD: list[tuple[str, int, Any]] = [
    ("exists", 0, b"a"),
    ("exists", 0, [b""]),
    ("exists", 0, [b"x" * 1025]),
    ("exists", 0, [5]),
    ("exists", 0, [None]),
    ("exists", 0, ["\ud800"]),
    ("exists", 0, [b"a"] * 20_000),
    ("exists", 1, -1),
    ("exists", 1, True),
    ("exists", 1, "5"),
    ("exists", 1, None),
    ("lookup", 0, {}),
    ("lookup", 1, 1.5),
    ("put_start", 0, []),
    ("put_start", 1, []),
    ("put_start", 1, [1, 2]),
    ("put_start", 1, [-1]),
    ("put_start", 1, ["1"]),
    ("put_start", 1, [True]),
    ("put_start", 2, 5),
    ("put_start", 2, {"replicas": 0}),
    ("put_start", 2, {"replicas": 99}),
    ("put_start", 2, {"replace": 1}),
    ("put_start", 2, {"pin": 3}),
    ("put_start", 2, {"pin": 1}),
    ("put_start", 2, {"soft_pin_ms": 5}),
    ("put_start", 2, {"group": 5}),
    ("put_start", 2, {"group": "g" * 256}),
    ("put_start", 2, {"type": 99}),
    ("put_start", 2, {"tier": 9}),
    ("put_start", 2, {"kind": 0}),
    ("put_start", 2, {"preferred": "n1"}),
    ("put_start", 2, {"preferred": [""]}),
    ("put_start", 2, {"preferred": ["x"] * 65}),
    ("put_start", 2, {"surprise": 1}),
    ("put_start", 2, {5: 1}),
    ("put_start", 3, -1),
    ("put_end", 0, -1),
    ("put_end", 0, 1 << 64),
    ("put_end", 1, None),
    ("put_end", 1, [[0, b""]]),
    ("put_end", 1, [["0", b"", b""]]),
    ("put_end", 1, [[0, "x", b""]]),
    ("put_end", 1, [[0, b"", None]]),
    ("put_end", 1, [[0, b"", b"", -1]]),
    ("put_end", 1, [[0, b"", b"", 0, 0]]),
    ("put_end", 1, [5]),
    ("put_abort", 1, 5),
    ("put_abort", 1, [-1]),
    ("client_join", 0, b"short"),
    ("client_join", 0, "i" * 16),
    ("client_join", 2, ""),
    ("client_join", 2, 5),
    ("client_join", 4, 5),
    ("client_join", 4, "x" * 5_000),
    ("remove", 1, "never"),
    ("remove", 1, None),
    ("remove", 2, 1),
    ("remove_prefix", 0, 5),
    ("remove_prefix", 3, 0),
    ("remove_prefix", 4, -5),
    ("remove_all", 3, "x"),
    ("list", 1, 0),
    ("list", 1, 1 << 40),
    ("list", 2, b"x"),
    ("stat", 0, [b""]),
    ("pin", 1, 3),
    ("pin", 2, -1),
    ("damaged", 0, b""),
    ("damaged", 1, "1"),
    ("damaged", 2, -1),
    ("damaged", 3, 1 << 32),
    ("tenant_set", 0, ""),
    ("tenant_set", 0, "a\nb"),
    ("tenant_set", 1, -1),
    ("tenant_set", 2, b"x"),
    ("node_join", 0, ""),
    ("node_join", 2, b""),
    ("node_join", 5, 1 << 23),
    ("node_join", 5, EPOCH_MAX),
    ("node_join", 5, EPOCH_TOLD_MAX + 1),
    ("node_join", 6, [5]),
    ("node_join", 6, [{}]),
    ("node_join", 6, [segment_map("s", MIB + 64, 64)]),
    ("node_join", 6, [segment_map("s", 0, 64)]),
    ("node_join", 6, [segment_map("s", MIB, 0)]),
    ("node_join", 6, [segment_map("", MIB, 64)]),
    ("node_join", 6, [segment_map("s", MIB, 64), segment_map("s", MIB, 64)]),
    ("node_join", 6, [{**segment_map("s", MIB, 64), "tier": 9}]),
    ("node_join", 6, [{**segment_map("s", MIB, 64), "more": 1}]),
    ("node_report", 0, 99),
    ("node_report", 2, 1),
    ("node_report", 3, "x"),
    ("node_ack", 0, 1000),
]


def world() -> tuple[World, dict[Caller, int]]:
    w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0))
    node = w.node()
    return w, {Caller.CLIENT: w.client(), Caller.NODE: node.connection, Caller.ANYONE: 7}


def test_there_is_a_sample_of_every_method() -> None:
    assert GOOD.keys() == METHODS.keys()
    for name, method in METHODS.items():
        assert name == method.name
        assert len(GOOD[name]) == len(method.params)
        assert method.doc
        assert method.result


@pytest.mark.parametrize(("method", "which", "value"), BAD)
def test_wrong_parameters_change_nothing(method: str, which: int, value: Any) -> None:
    w, callers = world()
    before = w.leader.state.state_hash()
    params = list(GOOD[method])
    params[which] = value
    assert w.refused(callers[METHODS[method].caller], method, params) == "BAD_PARAMS"
    assert w.leader.state.state_hash() == before
    assert w.epoch_wanted == 0
    w.leader.check()


def test_no_node_can_use_up_the_epochs() -> None:
    w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0))
    params: list[Any] = list(GOOD["node_join"])
    params[5] = EPOCH_TOLD_MAX
    assert w.refused(7, "node_join", params) == "NOT_READY"
    assert EPOCH_TOLD_MAX < w.epoch_wanted < EPOCH_MAX - 1_000_000
    # A journal that came further by itself goes on with the nodes that it has.
    late = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0), epoch=EPOCH_MAX - 1)
    node = late.node()
    assert node.highest == EPOCH_MAX - 1
    late.cut(node)
    late.join(node)
    params[5] = EPOCH_MAX
    assert late.refused(7, "node_join", params) == "BAD_PARAMS"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_parameters_must_be_as_many_as_the_table_says(method: str) -> None:
    w, callers = world()
    who = callers[METHODS[method].caller]
    for params in ([*GOOD[method], None], GOOD[method][:-1] if GOOD[method] else [1], None, {}, 5):
        assert w.refused(who, method, params) == "BAD_PARAMS"  # type: ignore[arg-type]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_only_who_may_call_a_method_may(method: str) -> None:
    w, callers = world()
    caller = METHODS[method].caller
    if caller is Caller.CLIENT:
        assert w.refused(7, method, GOOD[method]) == "UNKNOWN_CLIENT"
        assert w.refused(callers[Caller.NODE], method, GOOD[method]) == "UNKNOWN_CLIENT"
    elif caller is Caller.NODE:
        assert w.refused(7, method, GOOD[method]) == "UNKNOWN_NODE"
        assert w.refused(callers[Caller.CLIENT], method, GOOD[method]) == "UNKNOWN_NODE"


def test_a_connection_is_of_a_client_or_of_a_node() -> None:
    w, callers = world()
    assert w.refused(callers[Caller.CLIENT], "node_join", GOOD["node_join"]) == "BAD_PARAMS"
    assert w.refused(callers[Caller.NODE], "client_join", GOOD["client_join"]) == "BAD_PARAMS"


def test_unknown_methods_are_refused() -> None:
    w, _ = world()
    for method in ("", "nothing", "drain", "__init__", None, 5, b"exists"):
        assert w.refused(7, method, []) == "UNKNOWN_METHOD"  # type: ignore[arg-type]


def test_a_leader_that_was_deposed_refuses_and_says_who_leads() -> None:
    w, callers = world()
    client = callers[Caller.CLIENT]
    w.put(client, b"a")
    w.auto = False
    held = w.send(client, "remove", [[b"a"], "defer", False])
    waiting = w.send(client, "put_start", [[b"x"], [8 * MIB - 64], {"kind": 2}, 9_000])
    w.leader.deposed(w.now_ms, "elsewhere:7420")
    out = w.leader.take_outputs()
    assert {reply.message_id for reply in out.replies} == {held, waiting}
    for reply in out.replies:
        assert reply.error is not None
        assert reply.error[1] == "NOT_LEADER"
        assert "elsewhere:7420" in str(reply.error[2])
    w.leader.request(client, 10_000, "exists", [[b"a"], 0], w.now_ms)
    w.leader.tick(w.now_ms + 5_000)
    out = w.leader.take_outputs()
    assert [reply.error[1] for reply in out.replies if reply.error] == ["NOT_LEADER"]
    assert out.facts == []
    assert out.pushes == []


def test_time_never_goes_back() -> None:
    w, callers = world()
    client = callers[Caller.CLIENT]
    w.put(client, b"a")
    w.lookup(client, b"a", lease_ms=1_000)
    w.leader.request(client, 9_999, "stat", [[b"a"]], w.now_ms - 800)
    reply = w.leader.take_outputs().replies[0]
    assert reply.result[1][0]["lease_left_ms"] == 1_000


def test_a_bound_on_facts_that_wait_is_a_typed_error() -> None:
    w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0, facts_waiting_max=40))
    w.node(slots=4096)
    client = w.client()
    w.auto = False
    for at in range(60):
        message = w.send(client, "put_start", [[b"k%d" % at], [64], None, 0])
        error, result = w.replies[message]
        if error is not None:
            break
        w.send(client, "put_end", [result[2], [[0, bytes(16), b""]]])
    assert error is not None
    assert error[1] == "JOURNAL_UNAVAILABLE"
    assert w.call(client, "exists", [[b"k0"], 0]) == b"\x01", "reads go on"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=20)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from(sorted(METHODS)), st.lists(values, max_size=7))
def test_no_parameters_break_the_leader(method: str, params: list[Any]) -> None:
    w, callers = world()
    message = w.send(callers[METHODS[method].caller], method, params)
    error, _ = w.replies.get(message, (None, None))
    assert error is None or error[0] in ERRORS_BY_CODE
    w.settle()
    w.leader.check()


# Errors


def test_codes_and_classes_agree() -> None:
    classes = [
        each
        for each in vars(store_errors).values()
        if isinstance(each, type) and issubclass(each, StoreError) and each.code
    ]
    assert {each.code: each for each in classes} == dict(ERRORS_BY_CODE)
    for code, kind in ERRORS_BY_CODE.items():
        assert wire_error(kind()) == [code, kind.wire_name, kind.sentence]
        assert type(error_of_code(code, "why")) is kind
    assert isinstance(error_of_code(999, "odd"), InternalError)
    assert wire_error(UsageError("no"))[1] == "BAD_PARAMS"
    assert wire_error(InternalError("no"))[1] == "INTERNAL"


@pytest.mark.parametrize(
    ("key", "raw"),
    [("a", b"a"), (b"a", b"a"), (bytearray(b"a"), b"a"), (memoryview(b"a"), b"a"), ("é", b"\xc3\xa9")],
)
def test_keys_are_bytes(key: Any, raw: bytes) -> None:
    assert as_key(key) == raw


@pytest.mark.parametrize("key", ["", b"", "x" * 1025, 5, None, "\ud800", ["a"]])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(UsageError):
        as_key(key)


def test_names_are_printable_and_short() -> None:
    assert is_name("é" * 127)
    for name in ("", "é" * 128, "a\n", 5, None, "\ud800"):
        assert not is_name(name)
