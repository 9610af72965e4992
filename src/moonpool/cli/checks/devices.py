"""Runtimes of devices: which of them open here, and what they can do."""

from __future__ import annotations

from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.errors import TransportUnavailable

GROUP: Final = "devices"
ADVICE: Final = "only the transport cuda needs one; install the device's driver, or name device_library"


def check_devices() -> list[Check]:
    """One finding for each runtime that is here; one in all when none is."""
    try:
        from moonpool.native.device.runtime import DeviceRuntime, row_names
    except ImportError as problem:
        return [Check(GROUP, "runtimes", Level.INFO, f"the native module is not there ({problem})")]
    found = []
    for row in row_names():
        try:
            runtime = DeviceRuntime(row)
        except TransportUnavailable:
            continue
        found.append(judge_runtime(row, runtime.devices, runtime.features))
    return found or [Check(GROUP, "runtimes", Level.INFO, f"none of {', '.join(row_names())}", ADVICE)]


def judge_runtime(row: str, devices: int, features: dict[str, bool]) -> Check:
    """What a runtime with so many devices can and cannot do. Pure."""
    missing = [name for name, there in features.items() if not there]
    about = f"{devices} device{'s' if devices != 1 else ''}"
    if not missing:
        return Check(GROUP, row, Level.OK, f"{about}, {', '.join(features)}")
    advice = "staging is slower without pinning" if "pinning" in missing else ""
    return Check(GROUP, row, Level.OK, f"{about}, without {', '.join(missing)}", advice)
