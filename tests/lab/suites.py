#!/usr/bin/env python3
"""The suites that need hardware of the lab: each boots one emulated machine and runs one command in it.

    tests/lab/suites.py [--list] [NAME...]      (default: all; run tests/lab/setup first)

A suite passes when its command exits with 0. To add one, add a line to SUITES. Commands run in the repository
root; they find LAB_GUEST=1 in their environment.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Suite:
    """One machine and one command; `timeout_s` bounds boot and command together."""

    name: str
    devices: tuple[str, ...]
    command: tuple[str, ...]
    timeout_s: int = 300


PYTEST = (".venv/bin/pytest", "-q", "-p", "no:cacheprovider")
DOCTOR = (*PYTEST, "tests/lab/doctor")
CXL = (*PYTEST, "tests/lab/cxl")
RDMA = (*PYTEST, "-s", "--noconftest", "tests/lab/rdma/test_failures.py")
STORE = ("env", "PYTHONPATH=.", ".venv/bin/python", "tests/lab/store/places.py")
NVMEOF = (*PYTEST, "tests/lab/nvmeof")


def contract(ways: str) -> tuple[str, ...]:
    """The contract suite over some of its ways, by shell patterns with commas between."""
    return ("env", f"MOONPOOL_CONTRACT_WAYS={ways}", *PYTEST, "tests/contract")


SUITES = (
    Suite("rdma", ("--rdma", "2"), ("bash", "tests/lab/selftest/rdma.sh")),
    Suite("rdma-verbs", ("--rdma", "2"), (*PYTEST, "--noconftest", "tests/lab/rdma/test_verbs_devices.py")),
    Suite("rdma-short", ("--rdma", "2"), (*RDMA, "-k", "all_rails or killed")),
    Suite("rdma-failures", ("--rdma", "4"), RDMA, 600),
    Suite("rdma-contract-2", ("--rdma", "2"), contract("rdma-rxe*"), 1_800),
    Suite("rdma-contract-4", ("--rdma", "4"), contract("rdma-rxe*"), 1_800),
    Suite(
        "rdma-store",
        ("--rdma", "2"),
        (*STORE, "--transports", "local,rdma,tcp", "--expect", "rdma"),
    ),
    Suite("nvmf-tcp", ("--nvmf", "tcp"), ("bash", "tests/lab/selftest/nvmf.sh")),
    Suite("far-memory", ("--cxl", "256"), ("/usr/bin/python3", "tests/lab/selftest/far_memory.py")),
    Suite("cxl-dax", ("--cxl", "256"), CXL),
    Suite("cxl-node", ("--numa", "2", "--cxl", "256", "--cxl-mode", "node"), CXL),
    Suite("cxl-type3", ("--cxl", "256", "--cxl-mode", "type3"), CXL),
    Suite("cxl-contract-dax", ("--cxl", "512"), contract("cxl-dax*"), 1_800),
    Suite("cxl-contract-node", ("--cxl", "512", "--cxl-mode", "node"), contract("cxl-node"), 1_200),
    Suite("cxl-contract-type3", ("--cxl", "512", "--cxl-mode", "type3"), contract("cxl-dax"), 1_800),
    Suite("file-drive", ("--nvme", "256"), (*PYTEST, "tests/lab/file")),
    Suite("nvmeof-short", ("--nvmf", "tcp"), (*NVMEOF, "-k", "goes_and_comes_back or command_line")),
    Suite("nvmeof-tcp", ("--nvmf", "tcp"), NVMEOF, 600),
    Suite("nvmeof-rdma", ("--nvmf", "rdma"), NVMEOF, 600),
    Suite(
        "nvmeof-store",
        ("--nvmf", "tcp"),
        (*STORE, "--transports", "local,nvmeof,tcp", "--on", "nvme:nvme0n1", "--expect", "nvmeof"),
    ),
    Suite("nvmeof-contract-tcp", ("--nvmf", "tcp"), contract("nvmeof-*"), 1_800),
    Suite("nvmeof-contract-rdma", ("--nvmf", "rdma"), contract("nvmeof-*"), 1_800),
    Suite("doctor-rdma", ("--rdma", "2"), DOCTOR),
    Suite("doctor-nvmf", ("--nvmf", "tcp", "--nvme", "64"), DOCTOR),
    Suite("doctor-dax", ("--cxl", "256"), DOCTOR),
    Suite("doctor-node", ("--numa", "2", "--cxl", "256", "--cxl-mode", "node"), DOCTOR),
    Suite("doctor-type3", ("--cxl", "256", "--cxl-mode", "type3"), DOCTOR),
)


def run_suite(suite: Suite) -> int:
    """The exit status of the suite's command in its machine."""
    command = [sys.executable, str(HERE / "run.py"), *suite.devices, "--timeout", str(suite.timeout_s), "--"]
    return subprocess.run([*command, *suite.command], cwd=ROOT, check=False).returncode


def main(names: Sequence[str]) -> int:
    """Runs the named suites, or all; 0 when all passed, 1 when one failed, 2 for an unknown name."""
    known = {suite.name: suite for suite in SUITES}
    if "--list" in names:
        for suite in SUITES:
            print(f"{suite.name:12s} {' '.join(suite.devices):14s} {' '.join(suite.command)}")
        return 0
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"lab: no suite {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = 0
    chosen = [known[name] for name in names] if names else list(SUITES)
    for suite in chosen:
        print(f"== lab suite {suite.name} ({' '.join(suite.devices)})", flush=True)
        started = time.monotonic()
        status = run_suite(suite)
        verdict = "passed" if status == 0 else f"FAILED with status {status}"
        print(f"== lab suite {suite.name}: {verdict} in {time.monotonic() - started:.0f} s", flush=True)
        failed += status != 0
    print(f"lab: {len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
