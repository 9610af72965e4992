"""User programs under mypy --strict: a line marked `# E: code` must be refused so, and no other line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((Path(__file__).resolve().parent / "programs").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
EXPECTED = re.compile(r"#\s*E:\s*([a-z-]+)\s*$")
FOUND = re.compile(r"^(.+?):(\d+)(?::\d+)?: error: .*\[([a-z-]+)\]$", re.MULTILINE)


def test_the_type_checker_sees_what_a_user_should_see() -> None:
    assert PROGRAMS
    expected = {
        (path.relative_to(ROOT).as_posix(), number, match[1])
        for path in PROGRAMS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := EXPECTED.search(line))
    }
    command = [sys.executable, "-P", "-m", "mypy", "--strict", "--no-error-summary", "--no-color-output"]
    files = [str(path.relative_to(ROOT)) for path in PROGRAMS + EXAMPLES]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {(path, int(line), code) for path, line, code in FOUND.findall(done.stdout)}
    assert found == expected, done.stdout
