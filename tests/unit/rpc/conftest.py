"""A native core for the loop, and ports that serve in a thread for as long as a test runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.ids import InstanceId, new_instance_id
from moonpool.rpc.limits import ServerLimits
from moonpool.rpc.server import Closed, Request, RpcPort

HERE = Path(__file__).parent
NATIVE = Path(__file__).parents[3] / "src" / "moonpool" / "native" / "io"
JOIN_S = 20.0


class HotAnswers:
    """The core of hot_answers.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.hot_bind.restype = ctypes.c_void_p
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._name = b"moonpool.rpc.hot"  # borrowed by the capsule
        self._capsule = new_capsule(library.hot_bind(), self._name, None)

    def hot_binding(self) -> object:
        return self._capsule

    def calls(self) -> list[int]:
        return list((ctypes.c_uint64 * 4).in_dll(self._library, "hot_calls"))

    def last(self) -> tuple[int, int, int]:
        """(cluster ms, client, tenant) of the last call."""
        return (
            ctypes.c_uint64.in_dll(self._library, "hot_last_ms").value,
            ctypes.c_uint32.in_dll(self._library, "hot_last_client").value,
            ctypes.c_uint32.in_dll(self._library, "hot_last_tenant").value,
        )


@pytest.fixture(scope="session")
def hot(tmp_path_factory: pytest.TempPathFactory) -> HotAnswers:
    target = tmp_path_factory.mktemp("hot") / "hot_answers.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [compiler, "-shared", "-fPIC", "-O2", f"-I{NATIVE}", "-o", target, HERE / "hot_answers.c"]
    subprocess.run(command, check=True, timeout=60)
    return HotAnswers(ctypes.CDLL(str(target)))


class Service:
    """A port whose thread answers `echo`, `bind`, `push` and `large`, and keeps the rest for the test."""

    def __init__(self, port: RpcPort) -> None:
        self.port = port
        self.closed: list[Closed] = []
        self.kept: list[Request] = []
        self.changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="rpc-test-loop")
        self._jobs: list[Callable[[], object]] = []
        port.start()
        self._thread.start()

    @property
    def address(self) -> str:
        return self.port.addresses[0]

    def do(self, job: Callable[[], object]) -> None:
        """Runs something on the loop's thread, soon."""
        self._jobs.append(job)
        self.port.wake()

    def wait_for(self, what: Callable[[], bool]) -> bool:
        """Waits until something is so that changes with an event, or with a look each 10 ms."""
        limit = JOIN_S
        with self.changed:
            while not what() and limit > 0:
                self.changed.wait(0.01)
                limit -= 0.01
            return what()

    def stop(self) -> None:
        self._stop = True
        self.port.wake()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        self.port.close()

    def _run(self) -> None:
        while not self._stop:
            events = self.port.poll(1_000)
            while self._jobs:
                self._jobs.pop(0)()
            for event in events:
                self._serve(event)
            with self.changed:
                self.changed.notify_all()

    def _serve(self, event: Request | Closed) -> None:
        port = self.port
        if isinstance(event, Closed):
            self.closed.append(event)
        elif event.method == "echo":
            port.reply(event.connection, event.message_id, event.params)
        elif event.method == "bind":
            port.reply(event.connection, event.message_id, port.bind(event.connection, *event.params))
        elif event.method == "push":
            for _ in range(event.params[0]):
                port.push(event.connection, "told", event.params[1:])
            port.reply(event.connection, event.message_id, None)
        elif event.method == "large":
            port.reply(event.connection, event.message_id, bytes(event.params[0]))
        else:
            self.kept.append(event)


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """`serve(endpoints=..., hot=..., secret=..., **limits)` gives a running service."""
    with contextlib.ExitStack() as stack:

        def make(*endpoints: str, hot: Any = None, secret: bytes | None = None, **limits: int) -> Service:
            port = RpcPort(
                endpoints or (f"@moonpool-test-{os.getpid()}-{os.urandom(6).hex()}",),
                instance=InstanceId(new_instance_id()),
                secret=secret,
                limits=ServerLimits(**limits),
                hot=hot,
                methods=("echo",),
            )
            service = Service(port)
            stack.callback(service.stop)
            return service

        yield make
