"""NVMe commands as the kernel gets them, byte for byte, and what its answers mean."""

from __future__ import annotations

import errno
import struct

import pytest

from moonpool.errors import Status
from moonpool.native.nvmeof.command import entry_bytes, verdict

# ---- commands


def fields_of(entry: bytes) -> dict[str, int]:
    """An entry taken apart by the layouts of linux/io_uring.h and linux/nvme_ioctl.h."""
    names = (
        *("opcode", "flags", "rsvd1", "nsid", "cdw2", "cdw3", "metadata", "addr", "metadata_len", "data_len"),
        *(f"cdw{number}" for number in range(10, 16)),
        *("timeout_ms", "rsvd2"),
    )
    command = struct.unpack_from("<BBHIIIQQII6III", entry, 48)
    found = dict(zip(names, command, strict=True))
    ring_opcode, ring_flags, priority, fd, cmd_op = struct.unpack_from("<BBHiI", entry, 0)
    found |= {"ring_opcode": ring_opcode, "ring_flags": ring_flags, "priority": priority, "fd": fd}
    found["cmd_op"] = cmd_op
    found["rest"] = sum(entry[12:48]) + sum(entry[48 + 72 :])
    return found


@pytest.mark.parametrize(("opcode", "fua"), [(1, False), (1, True), (2, False)])
def test_a_command_byte_for_byte(opcode: int, fua: bool) -> None:
    entry = entry_bytes(opcode, 7, 3, 0x1_2345_6789, 8, 0xDEAD_BEEF_000, 4096, fua=fua, timeout_ms=5000)
    assert len(entry) == 128
    assert fields_of(entry) == {
        "ring_opcode": 46,  # IORING_OP_URING_CMD
        "ring_flags": 0,
        "priority": 0,
        "fd": 7,
        "cmd_op": 3 << 30 | 72 << 16 | ord("N") << 8 | 0x80,  # _IOWR('N', 0x80, 72 bytes)
        "rest": 0,
        "opcode": opcode,
        "flags": 0,
        "rsvd1": 0,
        "nsid": 3,
        "cdw2": 0,
        "cdw3": 0,
        "metadata": 0,
        "addr": 0xDEAD_BEEF_000,
        "metadata_len": 0,
        "data_len": 4096,
        "cdw10": 0x2345_6789,
        "cdw11": 1,
        "cdw12": 7 | (1 << 30 if fua else 0),
        "cdw13": 0,
        "cdw14": 0,
        "cdw15": 0,
        "timeout_ms": 5000,
        "rsvd2": 0,
    }


def test_a_flush_has_no_range() -> None:
    found = fields_of(entry_bytes(0, 5, 9, 77, 8, 0x1000, 4096, fua=False, timeout_ms=10))
    assert found["opcode"] == 0
    assert found["nsid"] == 9
    assert found["timeout_ms"] == 10
    assert not any(found[name] for name in ("addr", "data_len", "cdw10", "cdw11", "cdw12"))


@pytest.mark.parametrize(
    ("result", "meaning"),
    [
        (0, "done"),
        (0x370, "lost"),  # host path error
        (0x371 | 0x4000, "lost"),  # aborted by the host
        (0x302, "lost"),  # asymmetric access: inaccessible
        (0x4000 | 0x0B, "lost"),  # the target took the namespace away
        (-errno.EINTR, "lost"),
        (-errno.ENODEV, "lost"),
        (-errno.EINVAL, "invalid"),
        (-errno.EOPNOTSUPP, "elsewhere"),
        (-errno.EACCES, "elsewhere"),
        (-errno.EAGAIN, "again"),
        (-errno.EFAULT, Status.NOT_REGISTERED),
        (0x82, "again"),  # not ready
        (0x4082, Status.PEER_GONE),  # the same, and it will not be
        (0x06, "again"),
        (0x21, "again"),
        (0x02, Status.INTERNAL),  # invalid field
        (0x80, Status.OUT_OF_RANGE),
        (0x81, Status.NO_MEMORY),
        (0x20, Status.ACCESS_DENIED),  # write protected
        (0x83, Status.ACCESS_DENIED),  # reserved by another host
        (0x281, Status.PEER_GONE),  # a block that cannot be read
        (0x7FF, Status.PEER_GONE),
    ],
)
def test_answers_to_commands(result: int, meaning: object) -> None:
    assert verdict(result, passthrough=True) == meaning


@pytest.mark.parametrize(
    ("result", "meaning"),
    [
        (512, "done"),
        (-errno.EIO, "doubt"),
        (-errno.ENXIO, "lost"),
        (-errno.EINVAL, Status.INTERNAL),
        (-errno.EACCES, Status.ACCESS_DENIED),
        (-errno.EROFS, Status.ACCESS_DENIED),
        (0, "doubt"),  # the end of a device that was taken away
        (-errno.ENOSPC, "doubt"),
        (-errno.EDQUOT, Status.INTERNAL),
        (-errno.EAGAIN, "again"),
    ],
)
def test_answers_to_requests(result: int, meaning: object) -> None:
    assert verdict(result, passthrough=False) == meaning


def test_every_answer_has_a_meaning() -> None:
    words = {"done", "again", "lost", "doubt", "elsewhere", "invalid"}
    for passthrough in (True, False):
        for result in (*range(-140, 0), *range(0x8000)):
            said = verdict(result, passthrough=passthrough)
            assert said in words or said in set(Status) - {Status.COMPLETE, Status.PENDING}
