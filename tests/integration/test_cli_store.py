"""`moonpool master`, `node`, `put`, `get`, `ls`, `rm`, `stat`: real processes, as a user types them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli import main
from moonpool.cli.demonstration.child_process import ChildProcess

START_S = 60.0
END_S = 30.0


def started(what: str, *arguments: str) -> ChildProcess:
    return ChildProcess(what, ["moonpool.cli", *arguments, "--log", "warning", "--json"])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A master with its own Redis and a node; gives what they said when they were ready."""
    folder = tmp_path_factory.mktemp("pool")
    listen = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with started("the master", "master", *listen, "--data-dir", str(folder)) as master:
        said = master.hear(START_S)
        words = ("--master", said["address"], "--memory", "32MiB", "--name", "n1", "--http", "127.0.0.1:0")
        with started("the node", "node", *words) as node:
            yield {"master": said, "node": node.hear(START_S)}


@pytest.fixture
def run(
    pool: dict[str, Any], capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs a command on the pool: (exit code, standard output, standard error)."""
    monkeypatch.setenv("MOONPOOL_CLIENT_ADDRESSES", pool["master"]["address"])

    def command(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        shown = capsysbinary.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, shown.out, shown.err.decode()

    command("rm", "--all", "--force")
    return command


def test_a_file_goes_in_and_comes_out(run: Any, tmp_path: Path) -> None:
    value = os.urandom(3_000_000)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(value)
    code, out, err = run("put", "a/b", str(source))
    assert (code, err) == (0, "")
    assert out == b"a/b: stored, 2.86 MiB, 1 copy\n"
    code, out, _ = run("get", "a/b", str(target))
    assert (code, out) == (0, b"a/b: 2.86 MiB\n")
    assert target.read_bytes() == value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"], "nothing half-written is left"


def test_standard_streams_carry_bytes(run: Any) -> None:
    assert run("put", "s", stdin=b"\x00\xff bytes")[0] == 0
    assert run("get", "s") == (0, b"\x00\xff bytes", "")
    assert run("put", "empty", stdin=b"")[0] == 0
    assert run("get", "empty") == (0, b"", "")


def test_no_is_1(run: Any, tmp_path: Path) -> None:
    assert run("put", "k", stdin=b"1")[0] == 0
    code, out, err = run("put", "k", stdin=b"2")
    assert (code, out, err) == (1, b"", "k: exists already\n")
    assert run("get", "k")[1] == b"1"
    assert run("put", "k", "--replace", stdin=b"2")[0] == 0
    assert run("get", "k")[1] == b"2"
    code, out, err = run("get", "absent", str(tmp_path / "f"))
    assert (code, out, err) == (1, b"", "absent: no such object\n")
    assert not (tmp_path / "f").exists()
    code, out, _ = run("stat", "k", "absent", "--json")
    assert code == 1
    assert [each["found"] for each in json.loads(out)] == [True, False]
    code, out, err = run("rm", "k", "absent")
    assert (code, out, err) == (1, b"k: removed\n", "absent: absent\n")


def test_a_full_pool_is_1_and_says_so(run: Any) -> None:
    big = bytes(20 << 20)
    assert run("put", "big", "--pin", "hard", stdin=big)[0] == 0
    code, out, err = run("put", "more", stdin=big)
    assert (code, out) == (1, b"")
    assert err == "more: the pool has no space\n"
    code, out, _ = run("put", "more", "--json", stdin=big)
    assert code == 1
    assert json.loads(out)["status"] == "no_space"
    assert run("rm", "big")[0] == 1, "pinned"
    assert run("rm", "big", "--force")[0] == 0


@pytest.mark.parametrize("pin", ["none", "soft", "hard"])
def test_each_pin_can_be_had(run: Any, pin: str) -> None:
    assert run("put", "p", "--pin", pin, stdin=b"1")[0] == 0
    assert json.loads(run("ls", "--json")[1])["pin"] == pin
    if pin == "soft":
        assert json.loads(run("stat", "p", "--json")[1])[0]["soft_pin_left_ms"] > 60_000
        assert run("put", "q", "--pin", pin, "--soft-pin-ms", "5000", stdin=b"1")[0] == 0
        assert 0 < json.loads(run("stat", "q", "--json")[1])[0]["soft_pin_left_ms"] <= 5000


def test_a_put_waits_for_the_first_node(tmp_path: Path) -> None:
    socket = str(tmp_path / "master")
    put = [sys.executable, "-P", "-m", "moonpool.cli", "put", "k", os.devnull, "--master", socket]
    with started("the master", "master", "--listen", socket, "--data-dir", str(tmp_path / "data")) as master:
        master.hear(START_S)
        none = subprocess.run(
            [*put, "--wait", "1"], capture_output=True, text=True, timeout=END_S, check=False
        )
        assert (none.returncode, none.stderr) == (1, "k: the pool has no node yet\n")
        waits = {**os.environ, "MOONPOOL_CLIENT_PUT_WAIT_MS": "30000"}
        with (
            subprocess.Popen(put, env=waits) as waiting,
            started("the node", "node", "--master", socket, "--memory", "8MiB") as node,
        ):
            node.hear(START_S)
            assert waiting.wait(END_S) == 0


def test_json_of_every_command(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("put", "j", "--json", stdin=b"12345")
    assert code == 0
    said = json.loads(out)
    assert (said["key"], said["status"], said["size"], said["replicas"]) == ("j", "stored", 5, 1)
    assert json.loads(run("get", "j", str(tmp_path / "j"), "--json")[1]) == {
        "key": "j",
        "hit": True,
        "size": 5,
    }
    assert json.loads(run("get", "x", str(tmp_path / "x"), "--json")[1])["hit"] is False
    rows = [json.loads(line) for line in run("ls", "--json")[1].splitlines()]
    assert rows == [{"key": "j", "size": 5, "type": 0, "pin": "none", "places": 1}]
    assert json.loads(run("stat", "j", "--json")[1])[0]["size"] == 5
    status = json.loads(run("stat", "--json")[1])
    assert [node["name"] for node in status["nodes"]] == ["n1"]
    assert sum(status["gauges"].values()) == status["capacity"] == 32 << 20
    assert json.loads(run("rm", "j", "--json")[1]) == [{"key": "j", "status": "removed"}]


def test_keys_are_bytes(run: Any) -> None:
    odd = os.fsdecode(b"\xff\x01key")
    assert run("put", odd, stdin=b"x")[0] == 0
    assert json.loads(run("ls", "--json")[1]) | {"key": ""} == {
        "key": "",
        "key_hex": "ff016b6579",
        "size": 1,
        "type": 0,
        "pin": "none",
        "places": 1,
    }
    assert run("get", odd)[1] == b"x"
    assert b"\\xff" in run("ls")[1]


def test_listing_and_removing_by_prefix(run: Any) -> None:
    for key in ("a/1", "a/2", "b/1"):
        assert run("put", key, stdin=b"v")[0] == 0
    shown = run("ls", "a/")[1].decode()
    assert [line.split()[0] for line in shown.splitlines()] == ["key", "a/1", "a/2"]
    code, out, err = run("ls", "--limit", "2")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "first 2" in err
    assert run("rm", "--prefix", "a/") == (0, b"2 removed\n", "")
    assert json.loads(run("rm", "--all", "--json")[1]) == {"removed": 1}


def test_text_of_stat(run: Any) -> None:
    assert run("put", "t", stdin=bytes(5000))[0] == 0
    shown = run("stat", "t")[1].decode()
    assert "4.88 KiB" in shown
    assert "n1/0" in shown
    shown = run("stat")[1].decode()
    assert "32 MiB" in shown


def test_wrong_usage_is_2(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (
        ("rm",),
        ("rm", "k", "--all"),
        ("get", "k", "--json"),
        ("put", "", "/dev/null"),
        ("put", "x" * 1025, "/dev/null"),
        ("put", "k", "--replicas", "0"),
        ("ls", "--config", str(tmp_path / "none.toml")),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, b""), arguments
        assert err, arguments
    monkeypatch.delenv("MOONPOOL_CLIENT_ADDRESSES")
    code, _, err = run("ls")
    assert code == 2
    assert "--master" in err


def test_files_that_cannot_be_read_or_written_are_1(run: Any, tmp_path: Path) -> None:
    code, out, err = run("put", "k", str(tmp_path / "none"))
    assert (code, out) == (1, b"")
    assert "cannot read" in err
    assert run("put", "k", stdin=b"x")[0] == 0
    code, _, err = run("get", "k", str(tmp_path / "no" / "f"))
    assert code == 1
    assert "cannot write" in err


def test_a_settings_file_names_the_master(
    run: Any, pool: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[client]\naddresses = ["{pool["master"]["address"]}"]\ntransfer_timeout_ms = "5 s"\n')
    monkeypatch.delenv("MOONPOOL_CLIENT_ADDRESSES")
    assert run("ls", "--config", str(file))[0] == 0
    file.write_text("[client]\nnope = 1\n")
    code, _, err = run("ls", "--config", str(file))
    assert code == 2
    assert "unknown key 'nope'" in err


def test_a_master_that_is_not_there_is_3(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONPOOL_CLIENT_ADDRESSES", str(tmp_path / "nobody.sock"))
    monkeypatch.setenv("MOONPOOL_CLIENT_UNAVAILABLE_MS", "50")
    code, out, err = run("ls")
    assert (code, out) == (3, b"")
    assert err.startswith("moonpool: ")
    assert "Traceback" not in err


def fetched(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        body: bytes = answer.read()
    return body


def test_status_pages_of_master_and_node(pool: dict[str, Any]) -> None:
    for name, word in (("master", b"moonpool_master_"), ("node", b"moonpool_node_")):
        assert json.loads(fetched(pool[name]["http"], "/healthz"))["ok"] is True
        assert word in fetched(pool[name]["http"], "/metrics")


def test_servers_end_cleanly_on_sigterm_and_leave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with started("the master", "master", "--listen", "127.0.0.1:0", "--data-dir", str(folder)) as master:
        address = master.hear(START_S)["address"]
        with started("the node", "node", "--master", address, "--memory", "1MiB") as node:
            node.hear(START_S)
            for child in (node, master):
                child.process.send_signal(signal.SIGTERM)
                assert child.process.wait(END_S) == 0
    processes = subprocess.run(
        ["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True, timeout=10
    )
    assert str(folder) not in processes.stdout, "its Redis is gone"


def test_a_node_without_a_master_waits_and_can_be_ended(tmp_path: Path) -> None:
    words = ("node", "--master", str(tmp_path / "nobody.sock"), "--memory", "1MiB")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "moonpool.cli", *words], stderr=subprocess.PIPE, text=True
    ) as node:
        try:
            assert node.stderr is not None
            assert "no master at" in node.stderr.readline()
            node.send_signal(signal.SIGINT)
            assert node.wait(END_S) == 0
        finally:
            node.kill()


@pytest.mark.parametrize(
    "arguments",
    [
        ("master", "--listen", "not an address"),
        ("master", "--redis", "http://x"),
        ("master", "--http", "8080"),
        ("master", "--events-replay", "tcp://127.0.0.1:*"),
        ("master", "--evict-high", "0.5", "--evict-low", "0.9"),
        ("node",),
        ("node", "--master", "x:1", "--memory", "much"),
        ("node", "--master", "x:1", "--memory", "1KiB"),
    ],
)
def test_servers_refuse_wrong_settings_at_once(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    extra = ("--data-dir", str(tmp_path)) if arguments[0] == "master" else ()
    with pytest.raises(SystemExit) as caught:
        main([*arguments, *extra])
    assert caught.value.code == 2
    assert capsys.readouterr().err
