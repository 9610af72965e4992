"""One asyncio loop on its own daemon thread, and the doors into it for other threads.

Python-level control traffic of an engine runs here, so its objects need no locks. Other threads come in
by `call` (wait for a coroutine) and `post` (run a function soon). What a caller gave up on is handed to
`discard` instead, so that descriptors are never lost between the two threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, final

from moonpool.errors import EngineClosed, ForkedEngine, InternalError, ResourceError, TransferTimeout

#: How much longer than its own deadline a caller waits for a coroutine that a busy loop has not ended yet.
GRACE_S: Final = 1.0

_T = TypeVar("_T")


def _new_loop() -> tuple[selectors.BaseSelector, asyncio.AbstractEventLoop]:
    try:
        selector = selectors.DefaultSelector()
        try:
            # The loop needs two more for its wake-up pair, and half a loop complains when it is collected.
            for sock in socket.socketpair():
                sock.close()
            return selector, asyncio.SelectorEventLoop(selector)
        except BaseException:
            selector.close()
            raise
    except OSError as exc:
        raise ResourceError(
            "no descriptors are left for the control thread; close some or raise `ulimit -n`",
            errno=exc.errno or 0,
        ) from exc


@final
class LoopThread:
    """Owns the loop, its selector and the thread: `start` once, `stop`; `abandon_after_fork` in a child."""

    def __init__(self, name: str) -> None:
        """Raises `ResourceError` when the system has no descriptors left for a loop."""
        self._selector, self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._gate = threading.Lock()
        self._is_open = False
        self._wind_up_task: asyncio.Task[None] | None = None
        self._owner_pid = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """True in a process forked from the one that made this object."""
        return os.getpid() != self._owner_pid

    @property
    def is_current(self) -> bool:
        """True on the loop's own thread."""
        return threading.get_ident() == self._thread.ident

    def start(self) -> None:
        """Starts the thread."""
        self._is_open = True
        self._thread.start()

    def post(self, function: Callable[[], object]) -> bool:
        """Runs a function on the loop soon; False, and nothing runs, once the loop stops."""
        if self.is_foreign:
            return False
        with self._gate:
            if not self._is_open:
                return False
            self.loop.call_soon_threadsafe(function)
            return True

    def call(
        self,
        make_coroutine: Callable[[], Coroutine[Any, Any, _T]],
        timeout_s: float,
        discard: Callable[[_T], object],
    ) -> _T:
        """Runs a coroutine on the loop and waits for its result or error.

        The coroutine bounds itself by `timeout_s`; should the loop be too busy to end it, this call gives
        up a second later with `TransferTimeout`. A result that comes later still goes to `discard`.
        Raises `EngineClosed` when the loop stops and `ForkedEngine` in a forked child.
        """
        if self.is_foreign:
            raise ForkedEngine()
        if self.is_current:
            raise InternalError("a blocking call on the control thread would wait for itself")
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        running: list[asyncio.Task[_T]] = []

        def settle(task: asyncio.Task[_T]) -> None:
            closed = EngineClosed("the engine was closed during the call") if task.cancelled() else None
            error = closed or task.exception()
            if not answer.set_running_or_notify_cancel():
                if error is None:
                    discard(task.result())
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        def begin() -> None:
            task = self.loop.create_task(make_coroutine())
            task.add_done_callback(settle)
            running.append(task)

        if not self.post(begin):
            raise EngineClosed()
        try:
            concurrent.futures.wait([answer], timeout_s + GRACE_S)
        finally:
            # False when the answer is there, or about to be.
            gave_up = answer.cancel()
            if gave_up:
                self.post(lambda: [task.cancel() for task in running])
        if gave_up:
            raise TransferTimeout("the control thread did not answer in time", timeout_ms=timeout_s * 1e3)
        return answer.result()

    def discard(self) -> None:
        """Lets go of a loop whose thread was never started."""
        self.loop.close()

    def stop(self, last_words: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> bool:
        """Runs a last coroutine, ends every task, closes the loop and joins the thread.

        False when the thread has not ended after `timeout_s`, because a function on the loop does not return.
        """
        with self._gate:
            was_open, self._is_open = self._is_open, False
            if was_open:
                self.loop.call_soon_threadsafe(self._begin_stop, last_words)
        if self._thread.ident is None:
            self.discard()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon_after_fork(self) -> None:
        """In a forked child: closes this process's copies of the loop's descriptors, and nothing else.

        The epoll instance is shared with the parent, so it must be closed and never edited: taking a
        descriptor out of it here would deafen the parent.
        """
        self._is_open = False
        self._selector.close()
        # The loop's wake-up pair; closing the loop itself would edit the shared epoll instance.
        for name in ("_ssock", "_csock"):
            end = getattr(self.loop, name, None)
            if end is not None:
                end.close()

    def _begin_stop(self, last_words: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._wind_up_task = self.loop.create_task(self._wind_up(last_words))

    async def _wind_up(self, last_words: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await last_words()
            others = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        finally:
            self.loop.stop()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
