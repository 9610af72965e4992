"""What the control plane counts. A name is counted from the loop only; `snapshot` may be called anywhere."""

from __future__ import annotations

from typing import Final, final

#: Name and meaning of every counter; all start at 0 and only grow.
CONTROL_COUNTERS: Final[dict[str, str]] = {
    "connections_accepted": "connections taken from the listeners",
    "accept_failures": "times that accepting failed and the listener waited, e.g. with no free descriptor",
    "handshakes_completed": "hellos that ended well, both kinds of connection",
    "handshakes_evicted": "unfinished hellos closed because handshakes_max newer ones came",
    "handshakes_timed_out": "hellos not finished within handshake_timeout_ms",
    "handshakes_cut_off": "hellos whose connection ended before them",
    "hellos_malformed": "connections that did not begin with a hello",
    "versions_refused": "hellos of another wire version",
    "instances_refused": "hellos that expected another instance",
    "kinds_refused": "hellos for a service that this port does not have",
    "secrets_refused": "hellos with a wrong proof of the cluster secret",
    "users_refused": "unix connections of another user",
    "connections_refused": "connections beyond connections_max",
    "lanes_accepted": "data lanes handed to the engine",
    "lanes_refused": "data lanes that the engine did not take",
    "sessions_opened": "control sessions, of both directions",
    "sessions_closed": "control sessions that ended",
    "sessions_broken": "control sessions closed because the peer broke the protocol",
    "sessions_stalled": "control sessions closed because the peer stopped reading",
    "requests_served": "requests answered with a result",
    "requests_failed": "requests answered with an error",
    "requests_unknown": "requests for a method that this end does not have",
    "replies_unclaimed": "replies that came after their request was given up",
    "pushes_ignored": "pushes of a method that this end does not have",
    "handler_bugs": "handlers and callbacks that failed in a way they should not",
}


@final
class ControlCounters:
    """The counters of one service."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = dict.fromkeys(CONTROL_COUNTERS, 0)

    def add(self, name: str) -> None:
        """Counts one; a name outside the table is a KeyError, so that none is counted in vain."""
        self._counts[name] += 1

    def snapshot(self) -> dict[str, int]:
        """A copy of all counters."""
        return dict(self._counts)
