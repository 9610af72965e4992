"""Entry of a worker of the pool benchmark: ``pool_main --driver NAME [--option KEY=VALUE]...``.

It starts its store's servers, and then answers requests (protocol.py) with jobs and checks of
pool_protocol.py.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Final

from moonpool.bench.workers.main import claim_standard_output, die_with_parent
from moonpool.bench.workers.pool_driver import PoolDriver, PoolWorker
from moonpool.bench.workers.pool_protocol import PoolJob
from moonpool.bench.workers.protocol import Ready, decode, encode

DRIVERS: Final = {
    "moonpool": "moonpool.bench.workers.pool_moonpool",
    "mooncake": "moonpool.bench.workers.pool_mooncake",
    "redhare": "moonpool.bench.workers.pool_redhare",
}


def answer(worker: PoolWorker, line: str) -> str:
    try:
        kind, value = decode(line)
        if kind == "job":
            return encode("report", worker.run(PoolJob(**value)))
        return encode("checked", worker.check(value["block_bytes"], value["count"], value["variant"]))
    except Exception as failure:  # the process boundary: the harness decides what a failure means
        return encode("error", f"{type(failure).__name__}: {failure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", required=True, choices=sorted(DRIVERS))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    die_with_parent()
    stream = claim_standard_output()
    options = dict(item.split("=", 1) for item in chosen.option)
    driver: PoolDriver = importlib.import_module(DRIVERS[chosen.driver]).make_driver(options)
    try:
        worker = PoolWorker(driver)
        stream.write(encode("ready", Ready(initiator_pid=os.getpid(), target_pid=os.getpid())))
        stream.flush()
        for line in sys.stdin:
            stream.write(answer(worker, line))
            stream.flush()
    finally:
        driver.close()
    os._exit(0)  # a peer's static destructors may wait for threads that never end


if __name__ == "__main__":
    main()
