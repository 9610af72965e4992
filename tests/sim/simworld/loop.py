"""Simulated time and the tasks that live in it: one heap of events, one generator of chance, no threads.

Time is whole microseconds from 0. Events of one moment run in the order in which they were asked for, so a
run is a function of its seed. Tasks are coroutines that await `Future`s of this module and nothing else.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MS = 1_000
SECOND = 1_000_000


class TaskFailed(Exception):
    """A task of the simulation ended by an error that nobody expected."""


class Future(Generic[T]):
    """A value that comes later; awaiting it twice is fine, setting it twice keeps the first."""

    __slots__ = ("_callbacks", "_is_done", "_value")

    def __init__(self) -> None:
        self._is_done = False
        self._value: T | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        return self._is_done

    def set(self, value: T) -> None:
        """Gives the value and wakes who waits."""
        if self._is_done:
            return
        self._is_done = True
        self._value = value
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Runs `callback` at once when the value is there, else when it comes."""
        if self._is_done:
            callback()
        else:
            self._callbacks.append(callback)

    def value(self) -> T:
        assert self._is_done
        return self._value  # type: ignore[return-value]

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self._is_done:
            yield self
        return self.value()


class Loop:
    """The events of one world. `trace` counts and hashes what ran, for the test of determinism."""

    def __init__(self, seed: int) -> None:
        self.now = 0
        self.steps = 0
        self.chance = random.Random(seed)
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, when: int, run: Callable[[], None]) -> None:
        """Runs `run` at a moment, not before now."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, run))

    def after(self, delay: int, run: Callable[[], None]) -> None:
        self.at(self.now + delay, run)

    def step(self) -> bool:
        """Runs the next event; False when there is none."""
        if not self._heap:
            return False
        when, _, run = heapq.heappop(self._heap)
        assert when >= self.now
        self.now = when
        self.steps += 1
        run()
        return True

    def next_at(self) -> int | None:
        """When the next event is due."""
        return self._heap[0][0] if self._heap else None


class Task:
    """Drives one coroutine. `post` decides when a wake-up may run: a stopped process holds it back."""

    def __init__(self, work: Coroutine[Any, Any, None], post: Callable[[Callable[[], None]], None]) -> None:
        self._work = work
        self._post = post
        self.is_done = False
        post(self._advance)

    def _advance(self) -> None:
        if self.is_done:
            return
        try:
            waited_for = self._work.send(None)
        except StopIteration:
            self.is_done = True
            return
        waited_for.when_done(lambda: self._post(self._advance))

    def cancel(self) -> None:
        """Ends the coroutine where it stands, as a kill does; it must not await in a `finally`."""
        if not self.is_done:
            self.is_done = True
            self._work.close()
