"""Which transports can run here, as the command line shows them."""

from __future__ import annotations

from moonpool.cli.checks import TransportState
from moonpool.cli.checks.libraries import import_problem

# What each built-in transport loads.
_MODULES = {
    "local": "moonpool.native.io.copying",
    "shm": "moonpool.native.io.shm",
    "tcp": "moonpool.native.io.stream",
}


def transport_states() -> list[TransportState]:
    """The state of every transport."""
    states = []
    for name, module in _MODULES.items():
        problem = import_problem(module)
        states.append(
            TransportState(name, not problem, problem, "build the native modules" if problem else "")
        )
    return states
