"""The fake libibverbs for tests: built once for a run, and what it plays, as methods.

    fabric = FakeFabric()                  # then moonpool.native.verbs.devices.use_library(fabric.path)
    fabric.cut(0, True)                    # packets of fake0 vanish, its port stays up

All methods act at once, on every process of a shared fabric (`share`, or FAKE_VERBS_SHARE in a child's
environment). Devices are named fake0, fake1, ...; GID 3 of each is a routable RoCE v2 one.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).resolve().parent
LOST: Final = -1
#: IBV_WC_* that tests let requests end with.
WC_FLUSH: Final = 5
WC_REMOTE_ACCESS: Final = 10
WC_RETRY: Final = 12
WC_RNR: Final = 13
WC_FATAL: Final = 19
#: Kinds for `FakeFabric.live`.
LIVE: Final = ("contexts", "domains", "regions", "channels", "queues", "pairs")


@functools.cache
def library_path(old: bool = False) -> str:
    """Builds the library into a temporary folder that goes when this process ends.

    `old`: as libraries were before rdma-core 28, without calls and attributes that came later.
    """
    folder = Path(tempfile.mkdtemp(prefix="moonpool-fake-verbs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / "libfake-ibverbs.so"
    flags = [
        "-shared",
        "-fPIC",
        "-O1",
        "-g",
        "-pthread",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    if old:
        flags.append("-DFAKE_OLD")
    if os.environ.get("MOONPOOL_SANITIZED"):
        flags += ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    command = ["gcc", *flags, str(SOURCES / "fake_verbs.c"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return str(made)


class FakeFabric:
    """The script of the fake; a device is given by its number. Counts of `after` and `times` are of requests
    or calls.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path or library_path()
        self._calls = ctypes.CDLL(self.path)
        self._calls.fake_count.restype = ctypes.c_uint64

    def share(self, path: str) -> None:
        """Keep the fabric in a file, for several processes; before its first use in this one."""
        self._calls.fake_share(path.encode())

    def devices(self, n: int) -> None:
        """How many devices there are, at most 16; two at first."""
        self._calls.fake_devices(n)

    def clear(self) -> None:
        """Back to links that are up, no failures, no rates and no bounds."""
        self._calls.fake_clear()

    def port(self, device: int, up: bool) -> None:
        """Take the port down or up, with its event; requests then end with RETRY_EXC after the retry time."""
        self._calls.fake_port(device, int(up))

    def cut(self, device: int, cut: bool) -> None:
        """Lose all packets to and from the device without a sign: requests end with RETRY_EXC."""
        self._calls.fake_cut(device, int(cut))

    def hold(self, device: int, held: bool) -> None:
        """Let the device do nothing: requests stay in flight until it is let go, or their pair is ended."""
        self._calls.fake_hold(device, int(held))

    def remove(self, device: int) -> None:
        """Unplug the device: DEVICE_FATAL, everything in flight is flushed, calls give EIO."""
        self._calls.fake_remove(device)

    def restore(self, device: int) -> None:
        """Plug it in again: it can be opened anew; contexts of before stay dead."""
        self._calls.fake_restore(device)

    def rate(self, device: int, bytes_per_s: int) -> None:
        """Bound what the device sends and fetches; 0: as fast as it goes."""
        self._calls.fake_rate(device, ctypes.c_uint64(bytes_per_s))

    def latency(self, device: int, microseconds: int) -> None:
        """The least time from posting a request to its completion."""
        self._calls.fake_latency(device, ctypes.c_uint32(microseconds))

    def retry(self, milliseconds: int) -> None:
        """How long a request finds no peer until it ends with RETRY_EXC; 30 at first."""
        self._calls.fake_retry_ms(ctypes.c_uint32(milliseconds))

    def link_layer(self, device: int, infiniband: bool) -> None:
        """Let the port be an InfiniBand one: one GID, and a LID, which is the device's number and 1."""
        self._calls.fake_link_layer(device, int(infiniband))

    def limits(self, max_mr_bytes: int = 0, max_wr: int = 0, max_cqe: int = 0) -> None:
        """Bounds of all devices; 0 leaves one as it is."""
        self._calls.fake_limits(
            ctypes.c_uint64(max_mr_bytes), ctypes.c_uint32(max_wr), ctypes.c_uint32(max_cqe)
        )

    def complete(self, device: int, status: int, after: int = 0, times: int = 1) -> None:
        """Let requests end with a status (IBV_WC_*), or do their work and lose the completion (LOST)."""
        assert self._calls.fake_complete(device, status, after, times) == 0, "too many rules"

    def fail(self, call: str, errno: int, device: int = -1, after: int = 0, times: int = 1) -> None:
        """Let a call fail: reg_mr, reg_dmabuf_mr, dereg_mr, create_qp, modify_qp, destroy_qp, create_cq,
        post_send, create_comp_channel, alloc_pd, open_device, query_port, req_notify_cq, get_device_list.
        """
        assert self._calls.fake_fail(call.encode(), device, errno, after, times) == 0, "too many rules"

    def kill_pair(self, number: int) -> None:
        """End a queue pair by itself, with its QP_FATAL event."""
        self._calls.fake_kill_pair(ctypes.c_uint32(number))

    def live(self, kind: str) -> int:
        """Objects of this process: contexts, domains, regions, channels, queues, pairs."""
        return int(self._calls.fake_live(kind.encode()))

    def count(self, device: int, what: str) -> int:
        """Of a device since the start: requests, bytes, completions, lost, overruns, failures, flushed."""
        return int(self._calls.fake_count(device, what.encode()))
