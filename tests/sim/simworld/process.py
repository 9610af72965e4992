"""Processes that can be stopped, continued and killed, each with a clock of its own.

Whatever a process does runs through `post` or `after`: held back while it is stopped, dropped once it was
killed. Its clock (CLOCK_BOOTTIME) has an offset and a rate of its own and may jump forward, never back: two
processes' readings say nothing about each other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from simworld.loop import Future, Loop, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOptions:
    """How far clocks may differ."""

    offset_us_max: int = 10**12
    #: Parts per million by which a clock may run fast or slow.
    drift_ppm_max: int = 2_000


class Clock:
    """One process's CLOCK_BOOTTIME in microseconds."""

    def __init__(self, loop: Loop, options: ClockOptions) -> None:
        self._loop = loop
        self._offset = loop.chance.randrange(options.offset_us_max + 1)
        self._ppm = loop.chance.randint(-options.drift_ppm_max, options.drift_ppm_max)

    def now_us(self) -> int:
        now = self._loop.now
        return self._offset + now + now * self._ppm // 1_000_000

    def now_ms(self) -> int:
        return self.now_us() // 1_000

    def jump(self, forward_us: int) -> None:
        """The machine slept: time went on."""
        assert forward_us >= 0
        self._offset += forward_us


class Process:
    """One process on a host. A restart is a new `Process`."""

    def __init__(self, loop: Loop, name: str, host: str, clock: Clock) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.clock = clock
        self.is_alive = True
        self.is_stopped = False
        self._held: list[Callable[[], None]] = []
        self._tasks: list[Task] = []
        self._on_death: list[Callable[[], None]] = []

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_stopped

    def post(self, run: Callable[[], None]) -> None:
        """Runs `run` in this process soon."""
        self.loop.after(0, lambda: self._run(run))

    def after(self, delay_us: int, run: Callable[[], None]) -> None:
        """A timer of this process."""
        self.loop.after(delay_us, lambda: self._run(run))

    def _run(self, run: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_stopped:
            self._held.append(run)
            return
        run()

    def spawn(self, work: Coroutine[Any, Any, None]) -> Task:
        """Starts a task that ends with the process."""
        task = Task(work, self.post)
        self._tasks = [one for one in self._tasks if not one.is_done]
        self._tasks.append(task)
        return task

    def sleep(self, delay_us: int) -> Future[None]:
        """Done after a time, or later when the process is stopped then."""
        future: Future[None] = Future()
        self.after(delay_us, lambda: future.set(None))
        return future

    def on_death(self, run: Callable[[], None]) -> None:
        """What the kernel does when the process is gone: close its connections, drop its pins."""
        self._on_death.append(run)

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT: everything held back runs now, in its order."""
        if not self.is_stopped:
            return
        self.is_stopped = False
        held, self._held = self._held, []
        for run in held:
            self.post(run)

    def kill(self) -> None:
        """SIGKILL."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._held.clear()
        for task in self._tasks:
            task.cancel()
        hooks, self._on_death = self._on_death, []
        for run in hooks:
            run()
