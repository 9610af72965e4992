"""The grant book lets go of processes that have ended, and of sessions whose process lives on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moonpool.engine.control import SessionInfo
from moonpool.engine.grants import GrantBook
from moonpool.engine.region import Region
from moonpool.ids import new_instance_id
from moonpool.operations import Access

HANDLE = 1 << 32


def session(session_id: int, pid: int) -> SessionInfo:
    return SessionInfo(
        session_id=session_id,
        peer_instance=new_instance_id(),
        peer_address=f"unix process {pid}",
        is_unix=True,
        peer_pid=pid,
        peer_uid=os.getuid(),
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def book() -> Iterator[GrantBook]:
    made = GrantBook()
    yield made
    made.close()


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def region() -> Region:
    return Region(handle=HANDLE, address=4096, size_bytes=4096, access=Access.READ, location="cpu:0")


def test_many_ended_sessions_of_one_process_cost_one_descriptor(
    book: GrantBook, peer: subprocess.Popen[bytes]
) -> None:
    before = descriptors()
    for number in range(1, 51):
        book.note(HANDLE, session(number, peer.pid), process_vm=True)
        book.session_ended(number)
    assert descriptors() == before + 1
    assert len(book.vm_holders_alive(HANDLE)) == 1, "its memory must still be kept on a revoke"


def test_an_ended_process_costs_nothing_after_the_next_session(
    book: GrantBook, peer: subprocess.Popen[bytes]
) -> None:
    before = descriptors()
    book.note(HANDLE, session(1, peer.pid), process_vm=True)
    book.session_ended(1)
    peer.kill()
    peer.wait()
    book.session_ended(2)
    assert descriptors() == before
    assert not book.vm_holders_alive(HANDLE)


def test_kept_memory_passes_to_the_heir_and_goes_with_its_process(
    book: GrantBook, peer: subprocess.Popen[bytes]
) -> None:
    for number in (1, 2):
        book.note(HANDLE, session(number, peer.pid), process_vm=True)
    assert book.settle(HANDLE, {1, 2}, region())
    book.session_ended(1)
    book.session_ended(2)
    assert book.sweep() == 1
    peer.kill()
    peer.wait()
    assert book.sweep() == 0


def test_a_session_without_grants_leaves_nothing(book: GrantBook) -> None:
    before = descriptors()
    book.note(HANDLE, session(1, os.getpid()), process_vm=True)
    book.release(1)
    book.session_ended(1)
    assert descriptors() == before
    assert not book.holders(HANDLE)
