"""The harness's side of one contender: its two processes, started, asked, paused and ended within bounds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from moonpool.bench.plan import Shape
from moonpool.bench.workers.protocol import Job, JobReport, Ready, WorkerFailed, decode, encode

STOP_TIMEOUT_S: Final = 5.0
SHARED_MEMORY_FOLDER: Final = Path("/dev/shm")
LINE_BYTES_MAX: Final = 1 << 16
SETTLE_S: Final = 0.005  # a stopped process's last time slice ends before another contender is measured


class ProcessPair:
    """An initiator process and the target it started. Use as a context manager; not thread-safe."""

    def __init__(self, command: Sequence[str], *, spins_when_idle: bool, start_timeout_s: float) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
        )
        self._pending = b""
        self._spins = spins_when_idle
        self._paused = False
        self.failure = ""
        self.ready: Ready | None = None
        try:
            self.ready = Ready(**self._answer("ready", start_timeout_s))
        except WorkerFailed:
            self.stop()
            raise
        self._pause()

    def __enter__(self) -> ProcessPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, job: Job, timeout_s: float) -> JobReport:
        """Has the worker do the job; raises ``WorkerFailed`` with the worker's own sentence."""
        return JobReport(**self.ask("report", encode("job", job), timeout_s))

    def check(self, shape: Shape, variant: str, timeout_s: float) -> int:
        """Has the worker compare patterns after moving them both ways; returns the bytes compared."""
        request = {"block_bytes": shape.block_bytes, "count": shape.count, "variant": variant}
        return int(self.ask("checked", encode("check", request), timeout_s))

    def cpu_seconds(self) -> float:
        """CPU time that both processes have used so far."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._pids())

    def stop(self) -> None:
        """Ends both processes and removes what a killed peer leaves in /dev/shm. Idempotent."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        pids = self._pids()
        self._resume()
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the target asked the kernel to die with it
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        for pid in pids:
            for leftover in SHARED_MEMORY_FOLDER.glob(f"mooncake_{pid}_*"):
                leftover.unlink(missing_ok=True)
        self.ready = None  # the pids may soon be another process's

    def _pids(self) -> list[int]:
        return [] if self.ready is None else [self.ready.initiator_pid, self.ready.target_pid]

    def ask(self, expected: str, request: str, timeout_s: float) -> Any:
        """Sends one line and returns the value of the answer, which must be of the kind ``expected``."""
        if self._process.stdin is None or self._process.stdin.closed:
            raise WorkerFailed(self.failure or "its processes have ended")
        self._resume()
        try:
            self._process.stdin.write(request.encode())
            return self._answer(expected, timeout_s)
        except BrokenPipeError as gone:
            self.failure = self._last_words()
            self.stop()
            raise WorkerFailed(self.failure) from gone
        finally:
            self._pause()

    def _answer(self, expected: str, timeout_s: float) -> Any:
        kind, value = decode(self._line(timeout_s))
        if kind == expected:
            return value
        if kind == "error":
            raise WorkerFailed(str(value))
        raise WorkerFailed(f"the worker answered {kind} where {expected} was due")

    def _line(self, timeout_s: float) -> str:
        """The worker's next line; on time-out or end of file the pair is stopped first."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            readable = select.select([self._process.stdout], [], [], max(0.0, left))[0]
            chunk = os.read(self._process.stdout.fileno(), LINE_BYTES_MAX) if readable else b""
            if not readable or not chunk or len(self._pending) > LINE_BYTES_MAX:
                self.failure = self._last_words() if readable else f"no answer within {timeout_s:.0f} s"
                self._process.kill()
                self.stop()
                raise WorkerFailed(self.failure)
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def _last_words(self) -> str:
        """The last line that the processes left on standard error."""
        self._log.seek(0)
        lines = self._log.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its process ended without a word"

    def _pause(self) -> None:
        if self._spins:
            self._signal(signal.SIGSTOP)
            time.sleep(SETTLE_S)
            self._paused = True

    def _resume(self) -> None:
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
