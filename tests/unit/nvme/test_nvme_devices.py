"""Devices opened by identity: the right ones, new ones after a return, none that are somebody else's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import AccessDenied, ResourceError
from moonpool.topology.sysfs import MappedTree
from moonpool.transport import nvme_devices
from moonpool.transport.nvme_devices import COMING_BACK, GONE, LIVE, DeviceFinder, check_unused, close_devices

sys.path.insert(0, str(Path(__file__).parent))
from nvme_hosts import SUBSYSTEM, files_of

NQN = "nqn.2026-01.lab:ns"


class Host:
    """The tcp host with device files of its own making, whose tree a test may change."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.files = files_of("tcp")
        self.wwid = self.files[f"{SUBSYSTEM}/nvme0n1/wwid"]
        self.numbers: dict[str, str] = {}
        self.plug("ng0n1", "243:0")
        self.plug("nvme0n1", "259:1")
        self.files[f"{SUBSYSTEM}/ng0n1/dev"] = "243:0"
        self.files[f"{SUBSYSTEM}/nvme0n1/dev"] = "259:1"
        monkeypatch.setattr(nvme_devices, "device_number", self.number_of)

    def plug(self, name: str, number: str) -> None:
        """A plain file that says that it is the device of that number."""
        (self.folder / name).write_bytes(bytes(4096))
        self.numbers[name] = number

    def number_of(self, fd: int) -> str:
        return self.numbers[os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))]

    def read(self, path: str) -> str | None:
        return MappedTree(self.files).read(path)

    def list(self, path: str) -> tuple[str, ...]:
        return MappedTree(self.files).list(path)

    def finder(self) -> DeviceFinder:
        return DeviceFinder(NQN, 1, self.wwid, folder=str(self.folder), reader=self)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_both_devices_are_opened_and_kept(host: Host) -> None:
    find = host.finder()
    state, devices = find(None)
    assert state == LIVE
    assert devices is not None
    assert [os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in devices[:2]] == [
        "ng0n1",
        "nvme0n1",
    ]
    assert find(devices) == (LIVE, devices)
    close_devices(devices)


def test_another_appearance_is_opened_anew(host: Host) -> None:
    find = host.finder()
    _, before = find(None)
    assert before is not None
    host.files[f"{SUBSYSTEM}/nvme0n1/diskseq"] = "99"
    state, after = find(before)
    assert state == LIVE
    assert after is not None
    assert after is not before
    close_devices(before)
    close_devices(after)


def test_states_without_a_way(host: Host) -> None:
    find = host.finder()
    _, devices = find(None)
    assert devices is not None
    host.files[f"{SUBSYSTEM}/nvme0/state"] = "connecting"
    assert find(devices) == (COMING_BACK, devices)
    host.files[f"{SUBSYSTEM}/nvme0/state"] = "dead"
    assert find(devices) == (GONE, devices)
    host.files[f"{SUBSYSTEM}/nvme0n1/wwid"] = "uuid.another"
    assert find(devices) == (GONE, None)
    close_devices(devices)


def test_a_device_under_the_right_name_with_another_number_is_not_it(host: Host) -> None:
    host.plug("ng0n1", "243:5")
    state, devices = host.finder()(None)
    assert state == LIVE
    assert devices is not None
    assert devices[0] == -1, "the char device is somebody else's"
    assert devices[1] >= 0
    close_devices(devices)
    host.plug("nvme0n1", "259:9")
    with pytest.raises(ResourceError, match="not the device 259:1"):
        host.finder()(None)


def test_one_that_goes_while_it_is_opened(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = nvme_devices.open_devices

    def slow(namespace: Any, folder: str = "/dev") -> Any:
        opened = inner(namespace, folder)
        host.files[f"{SUBSYSTEM}/nvme0n1/diskseq"] = "100"
        return opened

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(nvme_devices, "open_devices", slow)
    assert host.finder()(None) == (COMING_BACK, None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_devices_that_may_not_be_opened(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, _flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(nvme_devices, "_open_path", refuse)
    with pytest.raises(AccessDenied, match="run as root"):
        host.finder()(None)


def test_a_device_in_use_by_this_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = host.finder().find()
    assert namespace is not None
    check_unused(namespace, str(host.folder))
    tries = []

    def busy(path: str, flags: int) -> int:
        assert flags & os.O_EXCL
        tries.append(path)
        raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(nvme_devices, "_open_path", busy)
    monkeypatch.setattr(nvme_devices, "_PAUSE_S", 0.0)
    with pytest.raises(ResourceError, match="in use on this host"):
        check_unused(namespace, str(host.folder))
    assert len(tries) == 20


def test_the_number_of_a_device() -> None:
    for path, number in (("/dev/null", "1:3"), ("/proc/self/status", "")):
        fd = os.open(path, os.O_RDONLY)
        assert nvme_devices.device_number(fd) == number
        os.close(fd)
