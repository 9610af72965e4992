"""An engine made when descriptors run out: a typed error that says so, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, os, resource
import moonpool
from moonpool import Engine, EngineConfig

def descriptors():
    return len(os.listdir("/proc/self/fd"))

config = EngineConfig()
Engine(config).close()
gc.disable()  # what is left must have been closed by name, not by a collection
before = descriptors()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
seen = []
for spare in range(16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + spare, hard))
    try:
        Engine(config).close()
        outcome = "made"
    except moonpool.ResourceError as error:
        outcome = f"{error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    seen.append([outcome, descriptors() - before])
print(json.dumps(seen))
"""


def test_each_number_of_spare_descriptors_makes_an_engine_or_a_typed_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen: list[tuple[str, int]] = json.loads(done.stdout)
    assert [left for _outcome, left in seen] == [0] * len(seen), seen
    made = [outcome == "made" for outcome, _left in seen]
    assert made == sorted(made), seen
    assert not made[0], seen
    assert made[-1], seen
    for outcome, _left in seen:
        assert outcome == "made" or "descriptor" in outcome, outcome
