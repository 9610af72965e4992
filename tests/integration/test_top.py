"""`moonpool top` and the pages of engines: real engines, real pages, processes that go and come back."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import numpy as np
import pytest
from tests.terminal import run_on_terminal

from moonpool import Engine, ResourceError, UsageError
from moonpool.cli.options import ExitCode
from moonpool.cli.root import run
from moonpool.cli.top import FETCH_TIMEOUT_S, Source, View, as_dict, look, split_address
from moonpool.cli.top_samples import SERVED_TO

SIZE = 1 << 16
TIMEOUT_S = 60
FORKING = """
import os, signal, socket, warnings
from moonpool import Engine
warnings.simplefilter("ignore")
engine = Engine(metrics_address="127.0.0.1:0")
host, _, port = engine.metrics_address.rpartition(":")
told, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"x")
    signal.pause()
os.read(told, 1)
engine.close()
try:
    socket.create_connection((host, int(port)), 5).close()
    print("the child listens")
except ConnectionRefusedError:
    print("nobody listens")
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""
CHILD = """
import sys, numpy
from moonpool import Engine
with Engine(name="restarted", metrics_address=sys.argv[1], transports=("tcp",)) as engine:
    with Engine(transports=("tcp",)) as target:
        region = target.allocate(65536)
        segment = engine.open(target.endpoint)
        into = bytearray(65536)
        print("ready", flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                engine.read(segment, region.handle, 0, into)
            print("moved", flush=True)
"""


def fetched(address: str, page: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{page}", timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text


def top(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run(["top", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


class Traffic:
    """An engine with pages, and another that it reads from."""

    def __init__(self) -> None:
        self.engine = Engine(name="watched", metrics_address="127.0.0.1:0", transports=("tcp",))
        self.target = Engine(transports=("tcp",))
        self.region = self.target.allocate(SIZE)
        self.into = np.zeros(SIZE, dtype=np.uint8)

    def read(self, times: int) -> None:
        segment = self.engine.open(self.target.endpoint)
        for _ in range(times):
            self.engine.read(segment, self.region.handle, 0, self.into)
        self.engine.close_segment(segment)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.target.close()


def test_an_engine_shows_its_pages_and_totals_outlive_segments() -> None:
    with Traffic() as traffic:
        address = traffic.engine.metrics_address
        traffic.read(3)
        traffic.read(4)  # the first segment is closed, and so is this one
        text = fetched(address)
        labels = f'engine="watched",transport="tcp",peer="{traffic.target.endpoint}",path="0",op="READ"'
        assert f"moonpool_transfers_total{{{labels}}} 7" in text
        assert f"moonpool_transfer_bytes_total{{{labels}}} {7 * SIZE}" in text
        assert f"moonpool_transfer_latency_seconds_count{{{labels}}} 7" in text
        assert 'moonpool_segments_open{engine="watched"} 0' in text
        assert json.loads(fetched(address, "/healthz"))["ok"] is True
        counters = traffic.engine.metrics()["counters"]
        assert counters["lanes_connected"] >= 2
    with pytest.raises(OSError, match="refused"):
        fetched(address)


def test_pages_are_off_by_default_and_a_taken_port_is_an_error() -> None:
    with Engine() as plain:
        assert plain.metrics_address == ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError, match="status pages"):
            Engine(metrics_address=address)
    for wrong in ("9400", "a b:1", "host:port", "host:123456"):
        with pytest.raises(UsageError, match="metrics_address"):
            Engine(metrics_address=wrong)


def test_a_forked_child_does_not_keep_the_port() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ran.stdout.strip() == "nobody listens", ran.stderr


def test_rates_of_an_engine_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    with Traffic() as traffic:
        watched = [Source(split_address(traffic.engine.metrics_address))]
        look(watched)
        traffic.read(10)
        look(watched)
        shown = as_dict(watched, View("bandwidth", 10))
        (line,) = shown["paths"]
        moved = line["bytes_per_s"] * (watched[0].page.at_s - watched[0].before.at_s)  # type: ignore[union-attr]
        assert moved == pytest.approx(10 * SIZE, rel=1e-3)
        assert (line["transport"], line["op"], line["engine"]) == ("tcp", "READ", "watched")
        assert line["p50_us"] <= line["p99_us"]
        look(watched)
        assert as_dict(watched, View("bandwidth", 10))["paths"] == []
        idle = as_dict(watched, View("name", 9, idle=True))["paths"]
        assert [line["op"] for line in idle if line["peer"] != SERVED_TO] == ["READ"]
        code, out = top("--once", "--interval", "0.05", "--idle", watched[0].name, capsys=capsys)
        assert code == ExitCode.OK
        assert "watched" in out
        assert "READ" in out
        code, out = top("--json", "--interval", "0.05", watched[0].name, "127.0.0.1:1", capsys=capsys)
        assert code == ExitCode.OK
        assert [source["ok"] for source in json.loads(out)["sources"]] == [True, False]


def test_a_target_shows_what_its_lanes_serve() -> None:
    with (
        Engine(name="target", metrics_address="127.0.0.1:0", transports=("tcp",)) as target,
        Engine(transports=("tcp",)) as engine,
    ):
        region = target.allocate(SIZE)
        watched = [Source(split_address(target.metrics_address))]
        look(watched)
        segment = engine.open(target.endpoint)
        for _ in range(4):
            engine.read(segment, region.handle, 0, bytearray(SIZE))
        look(watched)
        (line,) = as_dict(watched, View("bandwidth", 10))["paths"]
        assert (line["engine"], line["peer"], line["op"], line["bytes_total"]) == (
            "target",
            SERVED_TO,
            "READ",
            4 * SIZE,
        )


def test_the_live_table_on_a_terminal() -> None:
    with Traffic() as traffic:
        traffic.read(1)
        code, shown = run_on_terminal(
            "top", "--count", "2", "--interval", "0.05", traffic.engine.metrics_address
        )
    assert code == ExitCode.OK
    assert "bandwidth" in shown
    assert "Traceback" not in shown


def test_nobody_there_and_wrong_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = top("--json", "--interval", "0.05", "127.0.0.1:1", capsys=capsys)
    assert code == ExitCode.UNAVAILABLE
    assert json.loads(out)["paths"] == []
    for wrong in ("host", "host:0", "host:70000", ":1"):
        assert top("--once", wrong, capsys=capsys)[0] == ExitCode.USAGE


def test_a_page_that_never_comes_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        watched = [Source(("127.0.0.1", silent.getsockname()[1]))]
        look(watched)
        assert "timed out" in watched[0].problem
        assert FETCH_TIMEOUT_S <= 5


def start(address: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    said(child, "ready")
    return child


def said(child: subprocess.Popen[Any], word: str) -> None:
    assert child.stdout is not None
    assert child.stdout.readline().strip() == word


def move(child: subprocess.Popen[str], times: int) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{times}\n")
    child.stdin.flush()
    said(child, "moved")


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(TIMEOUT_S)
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def test_it_works_through_a_restart_of_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    watched = [Source(("127.0.0.1", port))]
    first = start(f"127.0.0.1:{port}")
    try:
        move(first, 5)
        look(watched)
        assert watched[0].problem == ""
    finally:
        end(first)
    look(watched)
    assert "refused" in watched[0].problem
    assert watched[0].rates == []
    second = start(f"127.0.0.1:{port}")
    try:
        move(second, 9)  # more than the first life had: only the start time tells that it is another
        look(watched)
        moved = [rate for rate in watched[0].rates if rate.transfers_per_s]
        assert watched[0].page is not None
        assert watched[0].before is not None
        seconds = watched[0].page.at_s - watched[0].before.at_s
        assert [round(rate.transfers_per_s * seconds) for rate in moved] == [9]
    finally:
        end(second)
