"""The doctor on runtimes of devices."""

from __future__ import annotations

import pytest

from moonpool.cli.checks import devices
from moonpool.cli.checks.check import Level


def test_a_runtime_that_can_do_everything() -> None:
    check = devices.judge_runtime("cuda", 8, {"pinning": True, "IPC": True})
    assert (check.group, check.name, check.level) == ("devices", "cuda", Level.OK)
    assert check.detail == "8 devices, pinning, IPC"
    assert not check.advice


def test_what_is_missing_is_named() -> None:
    check = devices.judge_runtime("cambricon", 1, {"pinning": False, "IPC": True, "dma-buf": False})
    assert check.detail == "1 device, without pinning, dma-buf"
    assert "pinning" in check.advice


def test_a_machine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    import moonpool.native.device.runtime as native

    monkeypatch.setattr(native, "row_names", lambda: [])
    (check,) = devices.check_devices()
    assert check.level is Level.INFO
    assert "device_library" in check.advice
