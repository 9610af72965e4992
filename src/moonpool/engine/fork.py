"""Engines and fork: the child's copy is unusable, and holds no connection of the parent's open."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """What lives in one process only."""

    def abandon_after_fork(self) -> None:
        """In the forked child: become unusable, and close the child's copies of the parent's sockets."""
        ...


_live: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch_forks(one: Forkable) -> None:
    """Have this one abandoned in every child forked from now on, until `forget_forks` or its end."""
    _live.add(one)


def forget_forks(one: Forkable) -> None:
    """Undo `watch_forks`; nothing happens when it was not watched."""
    _live.discard(one)


def _abandon_all() -> None:
    for one in list(_live):
        one.abandon_after_fork()
    _live.clear()


os.register_at_fork(after_in_child=_abandon_all)
