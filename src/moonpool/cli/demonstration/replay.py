"""The replay itself: hands requests to workers in their order and adds up what they answer, bounded in
time.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from moonpool.cli.demonstration.child_process import ChildProcess
from moonpool.cli.demonstration.replay_tally import ReplayTally, RequestOutcome, merge_transports
from moonpool.cli.demonstration.replay_worker import WorkerSettings
from moonpool.errors import PeerStalled

START_S: Final = 30.0
"""Longest wait for a worker to start: an interpreter, numpy, a connection to the pool."""

ANSWER_S: Final = 60.0
"""Longest wait for any worker's answer."""


@contextlib.contextmanager
def started_workers(
    settings: WorkerSettings, transports: Sequence[tuple[str, ...]]
) -> Iterator[list[ChildProcess]]:
    """One worker for each entry of `transports`: what it may read and write by. All end with the context."""
    with contextlib.ExitStack() as stack:
        workers = []
        for number, allowed in enumerate(transports):
            worker = stack.enter_context(
                ChildProcess(f"worker {number} of the demo", ["moonpool.cli.demonstration.replay_worker"])
            )
            worker.say(replace(settings, transports=allowed).to_dict())
            workers.append(worker)
        for worker in workers:
            worker.hear(START_S)
        yield workers


def replay(workers: Sequence[ChildProcess], chains: Sequence[Sequence[int]], tally: ReplayTally) -> None:
    """Replays all chains: each worker has one request at a time and gets the next one in order when done.

    Adds to `tally` after each answer. Raises `PeerStalled` or `PeerGone` for a worker that does not answer.
    """
    waiting = iter(enumerate(chains))
    with selectors.DefaultSelector() as selector:
        busy = 0
        for worker in workers:
            selector.register(worker.fd, selectors.EVENT_READ, worker)
            busy += give_next(worker, waiting)
        while busy:
            ready = selector.select(ANSWER_S)
            if not ready:
                raise PeerStalled("no worker of the demo answers", timeout_ms=ANSWER_S * 1e3)
            for key, _ in ready:
                for line in key.data.ready_lines():
                    tally.add(RequestOutcome.from_list(line))
                    busy += give_next(key.data, waiting) - 1


def give_next(worker: ChildProcess, waiting: Iterator[tuple[int, Sequence[int]]]) -> int:
    """Gives a worker the next request; returns how many it got, 1 or at the end 0."""
    for number, chain in waiting:
        worker.say([number, list(chain)])
        return 1
    return 0


def ask_transports(workers: Sequence[ChildProcess]) -> dict[str, dict[str, int]]:
    """Bytes that all workers moved, by transport and direction."""
    for worker in workers:
        worker.say(None)
    return merge_transports([worker.hear(ANSWER_S) for worker in workers])
