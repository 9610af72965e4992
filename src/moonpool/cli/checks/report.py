"""All checks of this machine together, and the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from moonpool.cli.checks.check import Check, Level
from moonpool.cli.checks.devices import check_devices
from moonpool.cli.checks.far_memory import check_far_memory
from moonpool.cli.checks.kernel import check_kernel
from moonpool.cli.checks.libraries import check_libraries
from moonpool.cli.checks.memory import check_memory
from moonpool.cli.checks.network import check_network
from moonpool.cli.checks.nvme import check_nvme
from moonpool.cli.checks.process_vm import check_process_vm
from moonpool.cli.checks.rdma import check_rdma
from moonpool.config import EngineConfig
from moonpool.topology import LiveSysfs, SysfsReader

REPORT_SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class TransportState:
    """Whether a transport can run here; if not, why and how to get it."""

    name: str
    available: bool
    reason: str = ""
    how_to_get_it: str = ""

    def as_check(self, *, needed: bool) -> Check:
        """A finding: a needed transport that is away is a failure, any other a fact."""
        if self.available:
            about = f"available: {self.reason}" if self.reason else "available"
            return Check("transports", self.name, Level.OK, about)
        return Check(
            "transports", self.name, Level.FAIL if needed else Level.INFO, self.reason, self.how_to_get_it
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found. ``ok`` is False when a check failed: the default engine would not run here."""

    checks: tuple[Check, ...]
    transports: tuple[TransportState, ...]

    @property
    def ok(self) -> bool:
        return all(check.level is not Level.FAIL for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and strings, ready for JSON."""
        return {
            "schema": REPORT_SCHEMA,
            "ok": self.ok,
            "transports": [dataclasses.asdict(state) for state in self.transports],
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def examine(transports: Iterable[TransportState], reader: SysfsReader | None = None) -> Report:
    """Runs every check on this machine. Takes well under a second; changes and leaves nothing."""
    source = LiveSysfs() if reader is None else reader
    states = tuple(transports)
    needed = EngineConfig().transports
    checks = [state.as_check(needed=state.name in needed) for state in states]
    known = {state.name for state in states}
    checks += [
        Check("transports", name, Level.FAIL, "this installation does not have it", "install Moonpool anew")
        for name in needed
        if name not in known
    ]
    checks += [*check_kernel(source), check_process_vm(source), *check_memory(source)]
    checks += [*check_network(source), *check_rdma(source), *check_nvme(source), *check_far_memory(source)]
    checks += [*check_devices(), *check_libraries(source)]
    return Report(tuple(checks), states)
