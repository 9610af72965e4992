"""Which transports can run here, as the doctor shows them."""

from __future__ import annotations

from moonpool.cli.checks import TransportState
from moonpool.transport.registry import availability


def transport_states() -> list[TransportState]:
    """The state of every transport that this version knows, in order of preference."""
    return [
        TransportState(name, state.ok, state.reason, state.how_to_get_it)
        for name, state in availability().items()
    ]
