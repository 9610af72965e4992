"""Rules of every test run: seeds, only known skips in CI, and no module imported under two names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

#: The folders of the repository root that must only ever be imported as moonpool.<name>.
BARE_NAMES = frozenset({"kernels", "store", "conductor", "bench", "src"})
#: Reasons for which a test may be skipped where MOONPOOL_NATIVE=require, one regular expression a line.
ALLOWED_SKIPS = Path(__file__).resolve().parent / "allowed_skips.txt"

_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "night", max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("MOONPOOL_TEST_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def _allowed_reasons() -> list[re.Pattern[str]]:
    lines = ALLOWED_SKIPS.read_text().splitlines()
    return [re.compile(line) for line in lines if line and not line.startswith("#")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip for an unknown reason into a failure where nothing may be missing."""
    report = yield
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    if os.environ.get("MOONPOOL_NATIVE") != "require" or not isinstance(report.longrepr, tuple):
        return report
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not any(allowed.search(reason) for allowed in _allowed_reasons()):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/allowed_skips.txt does not list: {reason}"
    return report


@pytest.fixture(autouse=True, scope="session")
def _one_name_per_module() -> Iterator[None]:
    """A bare `import store` would give a second copy of the modules, with its own classes and state."""
    yield
    assert not BARE_NAMES & sys.modules.keys(), "imported by a bare name; import it as moonpool.<name>"
