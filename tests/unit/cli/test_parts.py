"""What the commands share: sizes, signals, status addresses, streams with a bar, and how facts are shown."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from moonpool.cli.options import ExitCode, Size
from moonpool.cli.pool_options import json_key, key_of, text_of
from moonpool.cli.root import code_of
from moonpool.cli.serving import StopSignals, http_config, say_ready
from moonpool.cli.stat import plain, shown
from moonpool.cli.streams import BAR_FROM_BYTES, PIECE_BYTES, progress, read_value, write_value
from moonpool.config_sections import Settings
from moonpool.errors import OutOfMemory, UsageError
from moonpool.store.errors import DeadlinePassed, MasterUnavailable, NoSpace, NoSuchObject


@pytest.mark.parametrize(
    ("text", "size"), [("64KiB", 65536), ("4 GiB", 4 << 30), ("1.5GB", 1_500_000_000), ("7", 7)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size
    assert Size().convert(size, None, None) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5"])
def test_what_is_no_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), ExitCode.USAGE),
        (NoSuchObject(), ExitCode.USAGE),
        (DeadlinePassed(), ExitCode.FAILURE),
        (NoSpace(), ExitCode.FAILURE),
        (OutOfMemory(), ExitCode.FAILURE),
        (MasterUnavailable(), ExitCode.UNAVAILABLE),
    ],
)
def test_who_must_act_is_the_exit_code(error: Any, code: ExitCode) -> None:
    assert code_of(error) is code


def test_signals_are_waited_for_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    also: list[int] = []
    with StopSignals(lambda: also.append(1)) as signals:
        assert not signals.wait(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wait(10)
        assert signals.wait(0), "and stays so"
    assert also == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_status_pages_are_where_the_option_or_the_settings_say(tmp_path: Path) -> None:
    nothing = Settings.read(None, ("http",), {})
    assert http_config(nothing, None) is None
    named = http_config(nothing, "[::1]:80")
    assert named is not None
    assert (named.bind_host, named.port) == ("::1", 80)
    variable = http_config(Settings.read(None, ("http",), {"MOONPOOL_HTTP_PORT": "81"}), None)
    assert variable is not None
    assert (variable.bind_host, variable.port) == ("127.0.0.1", 81)
    file = tmp_path / "pool.toml"
    file.write_text("[http]\nport = 82\n")
    from_file = http_config(Settings.read(file, ("http",), {}), None)
    assert from_file is not None
    assert from_file.port == 82
    for text in ("80", "host:", "host:port"):
        with pytest.raises(click.UsageError):
            http_config(nothing, text)


def test_ready_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"address": "a:1", "http": "", "pid": 7}
    say_ready("the node", facts, as_json=False)
    assert capsys.readouterr().out == "the node serves at a:1 (pid 7)\n"
    say_ready("the node", facts, as_json=True)
    assert capsys.readouterr().out == '{"address":"a:1","http":"","pid":7}\n'


class Terminal(io.StringIO):
    """Standard error that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_a_terminal_for_what_takes_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, is_shown in ((BAR_FROM_BYTES, True), (BAR_FROM_BYTES - 1, False), (None, True)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress("moving", total) as advance:
            advance(10)
        assert ("moving" in terminal.getvalue()) is is_shown, total
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stderr", elsewhere)
    with progress("moving", BAR_FROM_BYTES) as advance:
        advance(10)
    assert elsewhere.getvalue() == ""


def test_values_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    value = os.urandom(PIECE_BYTES + 5)
    file = tmp_path / "value"
    write_value(str(file), memoryview(value))
    assert read_value(str(file)) == value
    write_value(str(file), memoryview(b"other"))
    assert file.read_bytes() == b"other"
    assert [path.name for path in tmp_path.iterdir()] == ["value"]
    write_value("/dev/null", memoryview(value))
    with pytest.raises(click.ClickException, match="cannot write"):
        write_value(str(tmp_path / "no" / "value"), memoryview(value))
    with pytest.raises(click.ClickException, match="cannot read"):
        read_value(str(tmp_path))


def test_keys_as_text() -> None:
    assert key_of("a/ä") == "a/ä".encode()
    assert key_of(os.fsdecode(b"\xff\x00"[:1])) == b"\xff"
    assert text_of(b"\xffk") == "\\xffk"
    assert json_key(b"k") == {"key": "k"}
    assert json_key(b"\xff") == {"key": "\\xff", "key_hex": "ff"}


def test_facts_are_shown_with_units_and_bytes_as_text() -> None:
    assert plain({b"k": [b"text", b"\x00\x01", (1, None)]}) == {"k": ["text", "0001", [1, None]]}
    assert shown("size", 4096) == "4 KiB"
    assert shown("memory_bytes", 4096) == "4 KiB"
    assert shown("objects", 4096) == "4,096"
    assert shown("settled", True) == "True"
    assert shown("gauges", {"free": 1, "live": 2}) == "free 1, live 2"
    assert shown("names", ["a", "b"]) == "a, b"
