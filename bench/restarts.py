"""What a pool keeps when its master dies: ``python -m moonpool.bench.restarts [--keys N]``.

Master (with its own Redis), node and client are processes. In turn: the master ends cleanly and starts again;
it is killed while puts go on, in `async` durability, and starts again; master *and* Redis are killed and
their data thrown away, and the pool comes back from the node's directory. After each the keys are counted,
every value of a sample is compared byte for byte, and removed keys must stay away. Prints times and counts;
exit code 1 when a bound is broken.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, final

import click

import moonpool
from moonpool.bench.program import Program, module_words
from moonpool.errors import MoonpoolError, ResourceError

VALUE_BYTES: Final = 512
#: How long puts go on before the master is killed among them, at least.
WRITING_S: Final = 1.0
BATCH_KEYS: Final = 500
NODE_BYTES_A_KEY: Final = 6_144
SAMPLE_KEYS: Final = 5_000
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
#: Bounds on coming back, in seconds: with the journal, and from the nodes' directories alone.
RETURN_S_MAX: Final = 5.0
REBUILD_S_MAX: Final = 30.0
#: A killed master may lose what came in the last linger, on a busy machine in the last 100 ms (async_ms_max).
LINGER_MS: Final = 120.0
#: After a restart no memory is given to puts until nobody can use it any more.
PUT_WAIT_MS: Final = 30_000
ADDRESS_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def serving(*arguments: str) -> Program:
    """A `moonpool master` or `moonpool node` process that has said it serves."""
    words = module_words("moonpool.cli", *arguments, "--json", "--log", "error")
    program = Program(f"moonpool {arguments[0]}", words)
    try:
        program.wait_line(START_TIMEOUT_S)
    except BaseException:
        program.kill()
        raise
    return program


def key_of(number: int) -> bytes:
    """A key of 26 bytes."""
    return b"restart-key-%014d" % number


def value_of(number: int) -> bytes:
    """Its value: different for each key, and known without keeping it."""
    return random.Random(number).randbytes(VALUE_BYTES)


def batches(first: int, last: int) -> Iterator[range]:
    """Numbers from `first` to before `last`, some at a time."""
    for start in range(first, last, BATCH_KEYS):
        yield range(start, min(start + BATCH_KEYS, last))


@final
class Cluster:
    """One master and one node in a folder of their own."""

    def __init__(self, keys: int, folder: Path) -> None:
        # An abstract socket's name must be free on this machine, not only in this folder.
        self.address = "@moonpool-restarts-" + "".join(random.choices(ADDRESS_LETTERS, k=12))
        self.data = folder / "redis"
        # A node has a directory slot for every 4 KiB.
        self._memory = max(64 << 20, keys * NODE_BYTES_A_KEY)
        self.master = self.start_master()
        self.node = serving("node", "--master", self.address, "--memory", str(self._memory))

    def start_master(self) -> Program:
        """A master on this cluster's data."""
        return serving("master", "--listen", self.address, "--data-dir", str(self.data))

    def connect(self) -> Any:
        """A client's pool."""
        return moonpool.connect(self.address)

    def redis_pids(self) -> list[int]:
        """Processes of the master's own Redis: those that have a file open in its folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                folder = os.readlink(entry / "cwd")
            except OSError:
                continue
            program = command.split(b"\0")[0]
            is_server = b"redis" in program or b"valkey" in program
            if is_server and (str(self.data) in folder or str(self.data).encode() in command):
                found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Ends everything."""
        self.node.stop()
        self.master.stop()
        for pid in self.redis_pids():
            os.kill(pid, signal.SIGKILL)


def put_all(pool: Any, numbers: range) -> None:
    """Puts a batch; raises when a value is not stored."""
    keys, values = [key_of(n) for n in numbers], [value_of(n) for n in numbers]
    results = pool.put_many(keys, values, wait_ms=PUT_WAIT_MS)
    stored = sum(result.stored for result in results)
    if stored < len(numbers):
        raise ResourceError(f"only {stored} of {len(numbers)} values were stored: {results[-1]}")


def count_present(pool: Any, numbers: range) -> int:
    """How many of the keys exist."""
    return sum(
        sum(pool.exists_many([key_of(n) for n in batch])) for batch in batches(numbers.start, numbers.stop)
    )


def count_wrong(pool: Any, numbers: Sequence[int]) -> int:
    """How many present values are not what was put."""
    wrong = 0
    for start in range(0, len(numbers), BATCH_KEYS):
        part = numbers[start : start + BATCH_KEYS]
        for number, value in zip(part, pool.get_many([key_of(n) for n in part]), strict=True):
            wrong += value is not None and bytes(value) != value_of(number)
    return wrong


def until_served(cluster: Cluster, numbers: range, since: float, enough: Callable[[int], bool]) -> float:
    """Seconds from `since` until a fresh client finds enough of the keys; the bound is START_TIMEOUT_S."""
    while True:
        try:
            with cluster.connect() as pool:
                if enough(count_present(pool, numbers)):
                    return time.monotonic() - since
        except MoonpoolError:
            pass
        if time.monotonic() - since > START_TIMEOUT_S:
            return float("inf")
        time.sleep(0.02)


def clean_restart(cluster: Cluster, keys: range) -> dict[str, Any]:
    """SIGTERM, start, everything is there."""
    cluster.master.stop()
    began = time.monotonic()
    cluster.master = cluster.start_master()
    took = until_served(cluster, keys, began, lambda present: present == len(keys))
    with cluster.connect() as pool:
        present = count_present(pool, keys)
        wrong = count_wrong(pool, random.Random(1).sample(keys, min(SAMPLE_KEYS, len(keys))))
    return {"return_s": took, "present": present, "expected": len(keys), "wrong": wrong}


def killed_while_writing(cluster: Cluster, first: int, count: int) -> tuple[dict[str, Any], int]:
    """kill -9 in the middle of puts. What had been acknowledged a linger before the kill must be there."""
    acknowledged: list[tuple[float, int]] = []
    with cluster.connect() as pool:
        for batch in batches(first, first + count):
            # Spread over a time that is long beside the limit: else nothing would be old enough to be judged.
            time.sleep(WRITING_S * BATCH_KEYS / count)
            put_all(pool, batch)
            acknowledged.append((time.monotonic(), batch.stop))
        killed = time.monotonic()
        cluster.master.kill()
    safe = max((stop for at, stop in acknowledged if at < killed - LINGER_MS / 1e3), default=first)
    began = time.monotonic()
    cluster.master = cluster.start_master()
    took = until_served(cluster, range(first, safe), began, lambda present: present == safe - first)
    with cluster.connect() as pool:
        everything = range(first, first + count)
        present = count_present(pool, range(first, safe))
        wrong = count_wrong(pool, random.Random(2).sample(everything, min(SAMPLE_KEYS, count)))
        last_linger = count_present(pool, everything) - present
    report = {"return_s": took, "present": present, "expected": safe - first, "wrong": wrong}
    return {**report, "of_last_linger": last_linger, "put_in_last_linger": first + count - safe}, safe


def lost_everything(cluster: Cluster, keys: range, removed: range) -> dict[str, Any]:
    """Master and Redis killed, their data gone: the node has it all, and what was removed stays removed."""
    with cluster.connect() as pool:
        for batch in batches(removed.start, removed.stop):
            pool.remove_many([key_of(n) for n in batch])
    cluster.master.kill()
    for pid in cluster.redis_pids():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while cluster.redis_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(cluster.data)
    began = time.monotonic()
    cluster.master = cluster.start_master()
    took = until_served(cluster, keys, began, lambda present: present == len(keys))
    with cluster.connect() as pool:
        report = {
            "return_s": took,
            "present": count_present(pool, keys),
            "expected": len(keys),
            "wrong": count_wrong(pool, random.Random(3).sample(keys, min(SAMPLE_KEYS, len(keys)))),
            "removed_that_came_back": count_present(pool, removed),
        }
    return report


def run(keys: int) -> dict[str, dict[str, Any]]:
    """All three, one after the other, on one pool."""
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-restarts-")))
        cluster = Cluster(keys, folder)
        stack.callback(cluster.close)
        with cluster.connect() as pool:
            began = time.monotonic()
            for batch in batches(0, keys):
                put_all(pool, batch)
            found["filling"] = {"seconds": time.monotonic() - began, "keys": keys}
        found["clean restart"] = clean_restart(cluster, range(keys))
        more = max(BATCH_KEYS, keys // 10)
        found["kill -9"], safe = killed_while_writing(cluster, keys, more)
        removed = range(0, max(1, keys // 20))
        found["master and Redis lost"] = lost_everything(cluster, range(removed.stop, safe), removed)
    return found


def broken(found: dict[str, dict[str, Any]]) -> list[str]:
    """Sentences on what does not hold."""
    sentences = []
    for name, report in found.items():
        if "expected" not in report:
            continue
        if report["present"] != report["expected"]:
            sentences.append(f"{name}: {report['present']} of {report['expected']} keys are there")
        if report["wrong"]:
            sentences.append(f"{name}: {report['wrong']} values are wrong")
        bound = REBUILD_S_MAX if "removed_that_came_back" in report else RETURN_S_MAX
        if report["return_s"] > bound:
            sentences.append(f"{name}: back after {report['return_s']:.1f} s, more than {bound:.0f}")
        if report.get("removed_that_came_back"):
            sentences.append(f"{name}: {report['removed_that_came_back']} removed keys came back")
    return sentences


@click.command(help=__doc__)
@click.option("--keys", type=click.IntRange(1_000, 10_000_000), default=200_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(keys: int, as_json: bool) -> None:
    """The command; its help is this module's own docstring."""
    found = run(keys)
    problems = broken(found)
    if as_json:
        click.echo(json.dumps({"runs": found, "broken": problems}))
    else:
        for name, report in found.items():
            facts = ", ".join(
                f"{field} {value:.2f}" if isinstance(value, float) else f"{field} {value}"
                for field, value in report.items()
            )
            click.echo(f"{name}: {facts}")
        for sentence in problems:
            click.echo(f"broken: {sentence}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
