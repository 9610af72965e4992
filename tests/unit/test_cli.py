"""The command line: exit codes, JSON, and that asking for help loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from moonpool.cli import main
from moonpool.cli.root import COMMANDS, root
from moonpool.errors import OutOfMemory, PeerGone, UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "topology"
TREE = str(GOLDEN / "eight-gpu-two-socket.tree.json")


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert "0 done, 1 failed or not there, 2 wrong usage, 3" in shown


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(name, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope",),
        ("version", "--nope"),
        ("topology", "--json", "--matrix"),
        ("topology", "--distances", "--matrix"),
        ("topology", "--nic", "eth0"),
        ("topology", "--from-tree", "/nonexistent/tree.json"),
        ("topology", "--matrix", "--from-tree", TREE, "--nic", "mlx9"),
    ],
)
def test_wrong_usage_is_2_and_explained_on_stderr(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.strip()) > 20


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("ask otherwise"), 2),
        (PeerGone("it went", peer="h:1"), 3),
        (OutOfMemory("no memory"), 1),
        (click.ClickException("no"), 1),
        (click.Abort(), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(root, "main", fail)
    assert code_of() == code
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    assert str(error) in output.err or "interrupted" in output.err


def test_version_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    import moonpool

    assert code_of("version") == 0
    assert capsys.readouterr().out.startswith(f"moonpool {moonpool.__version__} (")
    assert code_of("version", "--json") == 0
    assert json.loads(capsys.readouterr().out)["moonpool"] == moonpool.__version__


def test_topology_text_shows_the_golden_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("topology", "--from-tree", TREE) == 0
    shown = capsys.readouterr().out
    for piece in ("cpu:0: CPUs 0-63,128-191", "GPU cuda:7", "NIC mlx5_7: active, 200 Gbit/s", "NVMe nvme3"):
        assert piece in shown, piece
    assert shown.index("GPU cuda:3") < shown.index("cpu:1:") < shown.index("GPU cuda:4"), (
        "grouped by numa node"
    )
    assert shown.index("no numa node") < shown.index("NIC docker0: down, virtual")


def test_topology_text_of_a_broken_host_prints_its_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("topology", "--from-tree", str(GOLDEN / "broken.tree.json")) == 0
    assert "warning: /sys/bus/pci/devices/0000:00:01.0/class" in capsys.readouterr().out


def test_topology_json_and_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("topology", "--json", "--from-tree", TREE) == 0
    expected = json.loads((GOLDEN / "eight-gpu-two-socket.expected.json").read_text())
    assert json.loads(capsys.readouterr().out) == expected["topology"]
    assert code_of("topology", "--matrix", "--from-tree", TREE) == 0
    assert json.loads(capsys.readouterr().out) == expected["matrix"]
    assert code_of("topology", "--matrix", "--from-tree", TREE, "--nic", "mlx5_1", "--nic", "mlx5_6") == 0
    assert json.loads(capsys.readouterr().out)["cuda:0"] == [["mlx5_1"], ["mlx5_6"]]


def test_a_matrix_goes_out_and_comes_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("topology", "--matrix", "--from-tree", TREE) == 0
    file = tmp_path / "matrix.json"
    file.write_text(capsys.readouterr().out)
    assert code_of("topology", "--check-matrix", str(file), "--from-tree", TREE) == 0
    assert "fits" in capsys.readouterr().out
    file.write_text(file.read_text().replace("mlx5_3", "mlx5_33"))
    assert code_of("topology", "--check-matrix", str(file), "--from-tree", TREE, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert any("mlx5_33" in line for line in told["problems"])
    assert code_of("topology", "--distances", "--from-tree", TREE, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cuda:0"]["cuda:0"] == 0
    assert code_of("topology", "--distances", "--from-tree", TREE) == 0
    assert "mlx5_0" in capsys.readouterr().out
    file.write_text('{"cpu:0": 5}')
    assert code_of("topology", "--check-matrix", str(file)) == 2


def test_a_saved_tree_shows_the_same_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "tree.json"
    assert code_of("topology", "--json", "--save-tree", str(saved)) == 0
    here = capsys.readouterr().out
    assert code_of("topology", "--json", "--from-tree", str(saved)) == 0
    assert capsys.readouterr().out == here


@pytest.mark.parametrize("content", ["", "[]", '{"/sys/x": 1}', "[" * 100_000, "\x00"])
def test_a_file_that_is_no_tree_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content)
    assert code_of("topology", "--from-tree", str(file)) == 1
    assert "is not a saved tree" in capsys.readouterr().err


def test_a_tree_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("topology", "--save-tree", str(tmp_path / "missing" / "tree.json")) == 1
    assert "cannot write" in capsys.readouterr().err


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_and_version_load_nothing_heavy() -> None:
    code = """
import sys
from moonpool.cli import main
for arguments in (["--help"], ["version"], ["topology", "--help"], ["doctor", "--help"]):
    try:
        main(arguments)
    except SystemExit as exc:
        assert exc.code == 0, arguments
heavy = {"numpy", "numba", "cupy", "redis", "rich", "asyncio", "msgpack"} & set(sys.modules)
native = {name for name in sys.modules if name.startswith("moonpool.native.")}
sys.exit(f"loaded: {sorted(heavy | native)}" if heavy or native else 0)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_stops_early_causes_no_traceback() -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-P", "-m", "moonpool.cli", "topology", "--json"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
child.stdout.close()
error = child.stderr.read()
child.stderr.close()
child.wait(timeout=60)
sys.exit(error.decode())
"""
    done = run_python("-c", code)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
