"""A target process and an initiator process over one shared fake fabric; run by test_verbs_processes.py.

FAKE_VERBS_SHARE=FILE python two_processes.py initiator LIBRARY
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.native.fake_verbs.connections import End, reap
from tests.native.fake_verbs.fabric import WC_RETRY, FakeFabric

from moonpool.native.verbs.attributes import Route
from moonpool.native.verbs.devices import Device, VerbsLibrary, live_objects

SIZE = 300_000
PSN = 77


def tell(end: End) -> str:
    """What the other process needs to know of an end, as one line."""
    facts = {"qp": end.pair.number, "gid": end.device.gids(1)[3].gid.hex()}
    return json.dumps({**facts, "address": end.memory.address, "rkey": end.rkey})


def connect(end: End, facts: dict[str, str | int]) -> None:
    """INIT to RTS towards what `tell` said."""
    gid = bytes.fromhex(str(facts["gid"]))
    end.pair.to_ready(
        Route(remote_qp=int(facts["qp"]), remote_gid=gid, local_psn=PSN, remote_psn=PSN, gid_index=3)
    )


def run_target(library: VerbsLibrary) -> None:
    """Offers its memory until it is killed, or its input ends."""
    end = End(Device(library, "fake1"), SIZE)
    print(tell(end), flush=True)
    connect(end, json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    sys.stdin.read()


def run_initiator(library: VerbsLibrary) -> None:
    """Writes, reads back, kills the target, and sees what a request then ends with."""
    end = End(Device(library, "fake0"), SIZE)
    command = [sys.executable, __file__, "target", library.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdin is not None
        assert target.stdout is not None
        facts = json.loads(target.stdout.readline())
        connect(end, facts)
        print(tell(end), file=target.stdin, flush=True)
        assert target.stdout.readline() == "ready\n"
        sent = end.memory.pattern(9)
        piece = [(end.memory.address, SIZE, end.lkey)]
        end.pair.post(1, True, piece, facts["address"], facts["rkey"])
        assert [each.status for each in reap(end.queue, 1)] == [0]
        end.memory.pattern(1)
        end.pair.post(2, False, piece, facts["address"], facts["rkey"])
        assert [each.status for each in reap(end.queue, 1)] == [0]
        assert end.memory.read() == sent
        target.send_signal(signal.SIGKILL)
        target.wait(20)
    end.pair.post(3, True, piece, facts["address"], facts["rkey"])
    assert [each.status for each in reap(end.queue, 1)] == [WC_RETRY]
    end.device.close()
    assert not any(live_objects().values())


if __name__ == "__main__":
    FakeFabric(sys.argv[2]).devices(2)
    {"initiator": run_initiator, "target": run_target}[sys.argv[1]](VerbsLibrary(sys.argv[2]))
    print("done")
