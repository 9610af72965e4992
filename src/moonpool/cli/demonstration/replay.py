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


class Turns:
    """Which request may begin: in order, and none before those that it follows.

    A request follows the one that is the first to have one of its blocks: a user's next turn begins with
    the turn before, and is not sent until that one is answered. Pure.
    """

    def __init__(self, chains: Sequence[Sequence[int]]) -> None:
        self._chains = chains
        self._next = 0
        self._open: set[int] = set()
        first: dict[int, int] = {}
        self._follows = [
            {first.setdefault(block, number) for block in chain} - {number}
            for number, chain in enumerate(chains)
        ]

    def take(self) -> tuple[int, Sequence[int]] | None:
        """The next request, which is open from now on; None while it must wait, and after the last."""
        number = self._next
        if number == len(self._chains) or self._follows[number] & self._open:
            return None
        self._next += 1
        self._open.add(number)
        return number, self._chains[number]

    def end(self, number: int) -> None:
        """The request is answered."""
        self._open.discard(number)

    @property
    def over(self) -> bool:
        """True when all were taken and answered."""
        return self._next == len(self._chains) and not self._open


def replay(workers: Sequence[ChildProcess], chains: Sequence[Sequence[int]], tally: ReplayTally) -> None:
    """Replays all chains: each worker has one request at a time, and they begin in order.

    Adds to `tally` after each answer. Raises `PeerStalled` or `PeerGone` for a worker that does not answer.
    """
    turns = Turns(chains)
    idle = list(workers)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.fd, selectors.EVENT_READ, worker)
        while not turns.over:
            while idle and (turn := turns.take()) is not None:
                idle.pop().say([turn[0], list(turn[1])])
            ready = selector.select(ANSWER_S)
            if not ready:
                raise PeerStalled("no worker of the demo answers", timeout_ms=ANSWER_S * 1e3)
            for key, _ in ready:
                for line in key.data.ready_lines():
                    outcome = RequestOutcome.from_list(line)
                    tally.add(outcome)
                    turns.end(outcome.number)
                    idle.append(key.data)


def ask_transports(workers: Sequence[ChildProcess]) -> dict[str, dict[str, int]]:
    """Bytes that all workers moved, by transport and direction."""
    for worker in workers:
        worker.say(None)
    return merge_transports([worker.hear(ANSWER_S) for worker in workers])
