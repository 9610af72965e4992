"""`moonpool nvmf`: what it shows, what it asks of the kernel, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli import main
from moonpool.errors import PeerRefused, TransportUnavailable
from moonpool.transport import nvme_fabrics, nvme_sysfs
from moonpool.transport.nvme_fabrics import Attached, AttachOptions
from moonpool.transport.nvme_sysfs import read_subsystems

sys.path.insert(0, str(Path(__file__).parent))
from nvme_hosts import recorded, two_controllers

NQN = "nqn.2026-01.lab:ns"


def code_of(*arguments: str) -> int:
    """The exit code of one command."""
    with pytest.raises(SystemExit) as ended:
        main(["nvmf", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def see(monkeypatch: pytest.MonkeyPatch, tree: Any) -> None:
    found = read_subsystems(tree)
    monkeypatch.setattr(nvme_sysfs, "read_subsystems", lambda: found)


def test_a_host_without_nvme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(nvme_sysfs, "read_subsystems", lambda: ())
    assert code_of("list") == 0
    assert "no NVMe subsystem" in capsys.readouterr().out
    assert code_of("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_list_tells_states_and_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    see(monkeypatch, two_controllers("connecting"))
    assert code_of("list") == 0
    shown = capsys.readouterr().out
    for part in (NQN, "nvme0  tcp  live", "nvme1  tcp  connecting", "given up after 30 s", "fails fast: off"):
        assert part in shown
    assert "nvme0n1  ng0n1  namespace 1  128 MiB  blocks of 512" in shown


def test_the_list_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    see(monkeypatch, recorded("pcie"))
    assert code_of("list", "--json") == 0
    (subsystem,) = json.loads(capsys.readouterr().out)
    assert subsystem["controllers"][0]["transport"] == "pcie"
    assert subsystem["controllers"][0]["loss_timeout_s"] is None
    assert subsystem["namespaces"][0]["generic_device"] == "ng0n1"
    assert subsystem["namespaces"][0]["live"]


def test_attach_asks_the_kernel_for_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[AttachOptions, float]] = []
    (subsystem,) = read_subsystems(recorded("tcp"))

    def attach(options: AttachOptions, timeout_s: float) -> Attached:
        asked.append((options, timeout_s))
        return Attached(subsystem.controllers[0], subsystem, len(asked) == 1)

    monkeypatch.setattr(nvme_fabrics, "attach", attach)
    monkeypatch.setattr(nvme_fabrics, "host_identity", lambda: ("nqn.2026-01.lab:me", ""))
    where = ("attach", NQN, "--address", "10.99.0.2")
    assert code_of(*where, "--fail-fast", "9", "--timeout", "3") == 0
    assert "nvme0 attached" in capsys.readouterr().out
    ((options, timeout_s),) = asked
    assert timeout_s == 3.0
    assert options.line().startswith(f"transport=tcp,traddr=10.99.0.2,trsvcid=4420,nqn={NQN},")
    assert "fast_io_fail_tmo=9" in options.line()
    assert "hostnqn=nqn.2026-01.lab:me" in options.line()
    assert code_of(*where, "--json", "--host-nqn", "nqn.2026-01.lab:other") == 0
    assert json.loads(capsys.readouterr().out)["attached"] is False
    assert asked[1][0].host_nqn == "nqn.2026-01.lab:other"


@pytest.mark.parametrize(
    ("problem", "code"),
    [(PeerRefused("nothing listens"), 3), (TransportUnavailable("no initiator", "modprobe"), 1)],
)
def test_what_goes_wrong_has_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: Exception, code: int
) -> None:
    def attach(_options: AttachOptions, _timeout_s: float) -> Attached:
        raise problem

    monkeypatch.setattr(nvme_fabrics, "attach", attach)
    assert code_of("attach", NQN, "--address", "10.99.0.2") == code
    assert str(problem) in capsys.readouterr().err


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("attach", NQN) == 2
    assert code_of("attach", "no-nqn", "--address", "10.99.0.2") == 2
    assert code_of("attach", NQN, "--address", "10.99.0.2,tls") == 2
    assert code_of("attach", NQN, "--address", "10.99.0.2", "--transport", "fc") == 2
    assert "qualified name" in capsys.readouterr().err


def test_detach_tells_what_it_let_go_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [("nvme0", "nvme1"), ()]
    monkeypatch.setattr(nvme_fabrics, "detach", lambda _name, _timeout_s: answers.pop(0))
    assert code_of("detach", NQN) == 0
    assert capsys.readouterr().out == "detached nvme0, nvme1\n"
    assert code_of("detach", NQN) == 1
    assert "no attached controller" in capsys.readouterr().err
