"""Who may still write a region by itself: sessions, their ends, their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.engine.control import SessionInfo
from moonpool.engine.writers import WriterBook
from moonpool.ids import InstanceId, new_instance_id

WAIT_S = 20.0
HANDLE, OTHER = 1 << 32, 2 << 32


def session(number: int, instance: InstanceId, pid: int | None = None) -> SessionInfo:
    return SessionInfo(
        session_id=number,
        peer_instance=instance,
        peer_address="@peer",
        is_unix=True,
        peer_pid=pid,
        peer_uid=os.getuid(),
    )


@pytest.fixture
def book() -> Iterator[WriterBook]:
    made = WriterBook()
    yield made
    made.close()


@pytest.fixture
def process() -> Iterator[Any]:
    """One that lives until it is told to end."""
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield running
    running.kill()
    running.communicate(timeout=WAIT_S)


def test_a_session_counts_until_it_releases(book: WriterBook) -> None:
    first, second = new_instance_id(), new_instance_id()
    book.note(HANDLE, session(1, first))
    book.note(HANDLE, session(2, second))
    book.note(OTHER, session(2, second))
    assert book.of_region(HANDLE, None) == {1, 2}
    assert book.of_region(HANDLE, first) == {1}
    assert book.of_region(OTHER, first) == set()
    book.release(2)
    assert book.of_region(HANDLE, None) == {1}
    book.forget_region(HANDLE)
    assert book.of_region(HANDLE, None) == set()


def test_an_ended_session_counts_while_its_process_lives(book: WriterBook, process: Any) -> None:
    instance = new_instance_id()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(1, 6):
        book.note(HANDLE, session(number, instance, process.pid))
        book.session_ended(number)
    # Those of one engine are one, and one descriptor is enough for a process.
    assert len(book.of_region(HANDLE, instance)) == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    process.kill()
    process.wait(WAIT_S)
    assert book.of_region(HANDLE, instance) == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_session_whose_process_ended_is_no_writer(book: WriterBook, process: Any) -> None:
    book.note(HANDLE, session(1, new_instance_id(), process.pid))
    assert book.of_region(HANDLE, None) == {1}
    process.kill()
    process.wait(WAIT_S)
    assert book.of_region(HANDLE, None) == set()


def test_an_unknown_process_counts_until_the_region_goes(book: WriterBook) -> None:
    """Of another pid namespace: nobody can tell when it ends."""
    book.note(HANDLE, session(1, new_instance_id(), None))
    book.session_ended(1)
    assert book.of_region(HANDLE, None) == {1}
    book.forget_region(HANDLE)
    assert book.of_region(HANDLE, None) == set()
