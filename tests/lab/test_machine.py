"""The lab's description of a machine, without booting one (suites.py does that)."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def lab() -> Iterator[dict[str, ModuleType]]:
    """The scripts of this folder as modules; they import each other by bare name, as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        loaded = {}
        for name in ("machine", "run", "suites"):
            spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            loaded[name] = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, loaded[name])
            spec.loader.exec_module(loaded[name])
        yield loaded


def command_for(lab: dict[str, ModuleType], tmp_path: Path, *options: str) -> list[str]:
    order = lab["run"].parse_order([*options, "--", "true"])
    wiring = lab["machine"].Wiring(
        cache=tmp_path, run_folder=tmp_path, shared=order.shared, stdout_fd=3, stderr_fd=4
    )
    command: list[str] = lab["machine"].qemu_command(order.machine, wiring)
    return command


def test_the_guest_gets_every_variable_it_reads(lab: dict[str, ModuleType], tmp_path: Path) -> None:
    order = lab["run"].parse_order(["--rdma", "2", "--", "true"])
    wiring = lab["machine"].Wiring(cache=tmp_path, run_folder=tmp_path, shared=(), stdout_fd=3, stderr_fd=4)
    settings = lab["machine"].guest_settings(order.machine, wiring, "6.12")
    init = (HERE / "init").read_text()
    read_by_init = set(re.findall(r"\$\{?([A-Z][A-Z_]{2,})\b", init)) - {"PATH", "LOADED"}
    assert read_by_init <= settings.keys()
    assert [name for name in settings if not re.search(rf"\b{name}\b", init)] == []
    assert settings["RDMA"] == settings["LINKS"] == "2"


@pytest.mark.parametrize(
    ("options", "links", "rdma"),
    [
        ([], 0, 0),
        (["--rdma", "3"], 3, 3),
        (["--nvmf", "tcp"], 2, 0),
        (["--nvmf", "rdma"], 2, 2),
        (["--links", "4", "--rdma", "1"], 4, 1),
    ],
)
def test_devices_bring_the_links_they_need(
    lab: dict[str, ModuleType], options: list[str], links: int, rdma: int
) -> None:
    machine = lab["run"].parse_order([*options, "--", "true"]).machine
    assert (machine.links, machine.rdma) == (links, rdma)


def test_far_memory_is_a_node_of_its_own_and_far_from_all(lab: dict[str, ModuleType], tmp_path: Path) -> None:
    command = command_for(lab, tmp_path, "--numa", "2", "--cxl", "256", "--mem", "1024")
    nodes = [part for part in command if part.startswith("node,")]
    assert [node.count("cpus=") for node in nodes] == [1, 1, 0]
    distances = {part for part in command if part.startswith("dist,")}
    assert {d for d in distances if d.endswith("val=40")} == {
        f"dist,src={a},dst={b},val=40" for a, b in [(0, 2), (2, 0), (1, 2), (2, 1)]
    }
    assert command[command.index("-m") + 1].startswith("1280M")
    assert any("memmap=256M%0x100000000-1+0xefffffff" in part for part in command)


def test_a_plain_machine_has_no_numa_and_no_drive(lab: dict[str, ModuleType], tmp_path: Path) -> None:
    command = command_for(lab, tmp_path)
    assert "-numa" not in command
    assert "-drive" not in command
    assert not (tmp_path / "nvme.img").exists()


def test_an_nvme_drive_has_its_size(lab: dict[str, ModuleType], tmp_path: Path) -> None:
    command_for(lab, tmp_path, "--nvme", "64")
    assert (tmp_path / "nvme.img").stat().st_size == 64 << 20


def test_a_run_without_a_command_is_refused(
    lab: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        lab["run"].parse_order(["--rdma", "2"])
    assert refused.value.code == 2
    assert "no COMMAND" in capsys.readouterr().err


def test_the_guest_environment_is_chosen(lab: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_PORT", "7")
    monkeypatch.setenv("SOMETHING_ELSE", "secret")
    order = lab["run"].parse_order(["--env", "EXTRA=1", "--env", "SOMETHING_ELSE", "--", "true"])
    assert order.environment["LAB_GUEST"] == order.environment["EXTRA"] == "1"
    assert order.environment["MOONPOOL_PORT"] == "7"
    assert order.environment["SOMETHING_ELSE"] == "secret"
    assert "SOMETHING_ELSE" not in lab["run"].parse_order(["--", "true"]).environment


def test_every_example_in_the_readme_is_a_valid_order(lab: dict[str, ModuleType]) -> None:
    lines = re.findall(
        r"^tests/lab/run\.py (.*?)(?:\s+#.*)?$", (HERE / "README.md").read_text(), re.MULTILINE
    )
    assert len(lines) >= 8
    for line in lines:
        assert lab["run"].parse_order(shlex.split(line)).command


def test_suites_are_valid_orders_and_their_scripts_exist(lab: dict[str, ModuleType]) -> None:
    names = [suite.name for suite in lab["suites"].SUITES]
    assert len(set(names)) == len(names)
    for suite in lab["suites"].SUITES:
        assert lab["run"].parse_order([*suite.devices, "--", *suite.command]).command == suite.command
        scripts = [part for part in suite.command if part.startswith("tests/")]
        assert scripts
        assert all((lab["suites"].ROOT / script).exists() for script in scripts)


def test_an_unknown_suite_is_named(lab: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert lab["suites"].main(["moon"]) == 2
    assert "no suite 'moon'" in capsys.readouterr().err
