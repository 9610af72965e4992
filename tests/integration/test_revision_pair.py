"""The comparison of two revisions, here of one with itself."""

from __future__ import annotations

import json
import sys

from click.testing import CliRunner

from moonpool.bench.interval import Interval
from moonpool.bench.revision_pair import holds, main


def test_a_loss_is_told_from_noise() -> None:
    assert holds(Interval(0.99, 0.95, 1.02, 30))
    assert holds(Interval(0.985, 0.975, 0.99, 30))
    assert holds(Interval(1.2, 1.1, 1.3, 30))
    assert not holds(Interval(0.95, 0.9, 0.99, 30))


def test_both_revisions_are_measured_in_every_cell() -> None:
    words = ["--other", sys.executable, "--rounds", "3", "--cells", "4K,64K:2", "--job-ms", "2", "--json"]
    done = CliRunner().invoke(main, [*words, "--buffer-bytes", str(1 << 20)])
    assert done.exit_code in (0, 1), done.output
    rows = json.loads(done.output)
    assert {(row["transport"], row["cell"]) for row in rows} == {
        (transport, f"{operation} {shape}")
        for transport in ("shm", "tcp")
        for operation in ("write", "read")
        for shape in ("4K", "64K x2")
    }
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert done.exit_code == (0 if all(row["holds"] for row in rows) else 1)
