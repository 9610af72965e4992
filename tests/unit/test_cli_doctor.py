"""The doctor's checks: real ones on this machine, and every verdict on made-up findings."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys

import pytest

from moonpool.cli import main
from moonpool.cli.checks import Level, Report, TransportState, examine, kernel, libraries, memory, network
from moonpool.cli.checks import process_vm as vm
from moonpool.topology import LiveSysfs, MappedTree

UNLIMITED = resource.RLIM_INFINITY
ALL = [TransportState(name, True) for name in ("local", "shm", "tcp")]


def pool(total: int, free: int) -> str:
    """The part of /proc/meminfo about huge pages."""
    return f"HugePages_Total: {total:7}\nHugePages_Free: {free:8}\nHugepagesize:       2048 kB"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_examining_this_machine_finds_every_subject_and_leaves_nothing() -> None:
    libraries.check_libraries(LiveSysfs())  # loading libraries the first time may open descriptors for good
    before = open_descriptors()
    report = examine(ALL)
    assert open_descriptors() == before
    assert {check.group for check in report.checks} == {
        "transports",
        "kernel",
        "memory",
        "network",
        "rdma",
        "nvme",
        "far memory",
        "devices",
        "libraries",
    }
    names = {check.name for check in report.checks}
    assert {"release", "memfd", "pidfd", "io_uring", "process_vm"} <= names
    assert {"huge pages", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "/dev/shm", "CPU features"} <= names
    assert {"congestion control", "unix sockets", "native modules"} <= names
    assert {"controllers", "fabrics", "DAX devices", "far numa nodes", "numa binding"} <= names
    assert {"ibverbs", "uring", "xxhash", "fabric", "cuda"} <= names
    assert all(check.detail for check in report.checks)
    assert all(check.advice for check in report.checks if check.level is Level.FAIL)


def test_report_fails_when_a_default_transport_is_away() -> None:
    empty = MappedTree({})
    away = TransportState("tcp", False, "no module", "build it")
    report = examine([*ALL[:2], away], empty)
    (check,) = (check for check in report.checks if check.name == "tcp")
    assert (check.level, check.detail, check.advice) == (Level.FAIL, "no module", "build it")
    assert not report.ok
    missing = examine(ALL[:2], empty)
    assert any(check.name == "tcp" and check.level is Level.FAIL for check in missing.checks)
    optional = TransportState("rdma", False, "libibverbs is missing", "apt-get install libibverbs1")
    (check,) = (check for check in examine([*ALL, optional], empty).checks if check.name == "rdma")
    assert check.level is Level.INFO


def test_report_as_json_has_the_verdict() -> None:
    report = Report((memory.judge_files(10, 10),), tuple(ALL))
    body = json.loads(json.dumps(report.to_dict()))
    assert body["schema"] == 1
    assert body["ok"] is True
    assert body["checks"][0]["level"] == "warn"
    assert body["transports"][0] == {"name": "local", "available": True, "reason": "", "how_to_get_it": ""}


@pytest.mark.parametrize(
    ("release", "level"),
    [("6.8.0-45-generic", Level.OK), ("5.14.0", Level.OK), ("5.10.0-8", Level.WARN), ("odd", Level.WARN)],
)
def test_kernel_release(release: str, level: Level) -> None:
    assert kernel.judge_release(release).level is level


def test_memfd_and_pidfd_work_here() -> None:
    assert kernel.check_memfd().level is Level.OK
    assert kernel.check_pidfd().level is Level.OK


def test_refused_memfd_is_a_failure_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    check = kernel.check_memfd()
    assert check.level is Level.FAIL
    assert "seccomp" in check.advice


@pytest.mark.parametrize(
    ("error", "disabled", "advice"),
    [
        (errno.EPERM, "2", "io_uring_disabled is 2"),
        (errno.EPERM, None, "seccomp"),
        (errno.ENOSYS, None, "5.10"),
    ],
)
def test_io_uring_absent_is_no_failure(error: int, disabled: str | None, advice: str) -> None:
    check = kernel.judge_io_uring(error, disabled)
    assert check.level is Level.INFO
    assert advice in check.advice
    assert kernel.judge_io_uring(0, disabled).level is Level.OK


def test_process_vm_trial_with_a_real_child() -> None:
    before = open_descriptors()
    trial = vm.try_with_child()
    assert trial.problem == ""
    assert open_descriptors() == before
    # What this user may do is the kernel's business; that the two ways of a parent agree is ours.
    assert (trial.parent_reads_child == 0) == (trial.parent_writes_child == 0)


def test_process_vm_trial_survives_a_child_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "CHILD", "pass")
    assert vm.try_with_child().problem != ""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "no child process" in vm.try_with_child().problem


def test_process_vm_trial_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "CHILD", "import sys; sys.stdin.read()")
    monkeypatch.setattr(vm, "CHILD_TIMEOUT_S", 0.05)
    assert "did not answer" in vm.try_with_child().problem


@pytest.mark.parametrize(
    ("trial", "scope", "level", "advice"),
    [
        (vm.Trial(), "1", Level.OK, ""),
        (vm.Trial(child_reads_parent=errno.EPERM), "1", Level.WARN, "ptrace_scope is 1"),
        (vm.Trial(errno.EPERM, errno.EPERM, errno.EPERM), "0", Level.WARN, "SYS_PTRACE"),
        (vm.Trial(errno.ENOSYS, errno.ENOSYS, errno.ENOSYS), None, Level.WARN, "CROSS_MEMORY_ATTACH"),
        (vm.Trial(problem="it broke"), None, Level.WARN, ""),
    ],
)
def test_process_vm_verdicts(trial: vm.Trial, scope: str | None, level: Level, advice: str) -> None:
    check = vm.judge(trial, scope)
    assert check.level is level
    assert advice in check.advice


@pytest.mark.parametrize(
    ("meminfo", "level", "detail"),
    [
        ("", Level.INFO, "no hugetlb"),
        (
            pool(0, 0),
            Level.INFO,
            "none set aside",
        ),
        (
            pool(4, 0),
            Level.WARN,
            "0 of 4 free",
        ),
    ],
)
def test_huge_pages(meminfo: str, level: Level, detail: str) -> None:
    check = memory.check_huge_pages(MappedTree({"/proc/meminfo": meminfo}))
    assert check.level is level
    assert detail in check.detail


def test_a_huge_page_that_cannot_be_mapped_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_map_huge_page", lambda page_bytes: f"mmap: no {page_bytes}")
    check = memory.check_huge_pages(MappedTree({"/proc/meminfo": pool(4, 4)}))
    assert check.level is Level.WARN
    assert "no 2097152" in check.detail


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (None, Level.INFO),
        ("always within_size advise [never] deny force", Level.INFO),
        ("always within_size [advise] never deny force", Level.OK),
    ],
)
def test_transparent_huge_pages(text: str | None, level: Level) -> None:
    assert memory.judge_transparent_huge_pages(text).level is level


def test_limits() -> None:
    assert memory.judge_locked(UNLIMITED, UNLIMITED).level is Level.OK
    assert memory.judge_locked(65536, UNLIMITED).level is Level.INFO
    assert memory.judge_files(1024, 4096).level is Level.WARN
    assert memory.judge_files(20000, UNLIMITED).detail == "soft 20000, hard unlimited"


def test_dev_shm_is_shown_to_be_independent_of_memfds() -> None:
    check = memory.check_dev_shm()
    assert check.level is Level.OK
    assert "not" in check.detail


def test_cgroup_limit_is_that_of_our_own_group() -> None:
    files = {"/proc/self/cgroup": "0::/pod/one", "/sys/fs/cgroup/pod/one/memory.max": "1073741824"}
    assert memory.cgroup_limit(MappedTree(files)) == 1 << 30
    assert "1 GiB" in memory.judge_cgroup(1 << 30).detail
    files["/sys/fs/cgroup/pod/one/memory.max"] = "max"
    assert memory.cgroup_limit(MappedTree(files)) is None
    assert memory.cgroup_limit(MappedTree({})) is None


def test_cpu_features_on_both_architectures() -> None:
    assert memory.judge_cpu("flags\t\t: fpu sse2 avx2 erms\n", "avx2").detail == (
        "sse2 avx2 erms; large copies run the avx2 kernel"
    )
    assert memory.judge_cpu("Features\t: fp asimd sve\n", "").detail == "asimd sve"
    assert memory.judge_cpu("", "").level is Level.INFO


def test_congestion_control_verdicts() -> None:
    good = network.judge_congestion(["reno", "cubic"], "bbr", "cubic", "")
    assert good.level is Level.OK
    bad = network.judge_congestion(["reno"], "reno", "cubic", "No such file or directory")
    assert bad.level is Level.WARN
    assert "modprobe tcp_cubic" in bad.advice
    assert network.try_congestion("nosuchcontrol") != ""
    assert network.try_congestion("reno") == "", "reno is built into every kernel"


def test_loopback_and_unix_sockets_work_here() -> None:
    assert network.check_loopback(socket.AF_INET, "127.0.0.1").level is Level.OK
    assert network.check_unix().level is Level.OK


def test_loopback_that_is_down_fails() -> None:
    check = network.check_loopback(socket.AF_INET, "192.0.2.1")  # TEST-NET-1 is nobody's address
    assert check.level is Level.FAIL
    assert "ip link set lo up" in check.advice


def test_libraries_found_and_missing() -> None:
    libc = libraries.Library("c", "libc.so.6", "everything", "nothing to do")
    assert libraries.load("libc.so.6") == ""
    found = libraries.judge_library(libc, "", LiveSysfs())
    assert found.level is Level.OK
    assert "libc" in found.detail
    problem = libraries.load("libmoonpool-nosuch.so.9")
    assert "libmoonpool-nosuch" in problem
    wanted = libraries.Library("x", "libx.so.1", "rdma", "apt-get install libx")
    missing = libraries.judge_library(wanted, problem, LiveSysfs())
    assert (missing.level, missing.advice) == (Level.INFO, "apt-get install libx")


def test_native_modules_are_found_and_loaded() -> None:
    names = libraries.native_module_names()
    assert "moonpool.native.io.copying" in names
    assert not any(name.rpartition(".")[2].startswith("_") for name in names)
    check = libraries.check_native_modules()
    missing = [name for name in names if libraries.import_problem(name)]
    assert check.level is (Level.FAIL if missing else Level.OK)
    assert f"{len(names) - len(missing)} of {len(names)} built" in check.detail


def test_native_modules_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "native_module_names", lambda: ["json", "moonpool.native.io.nosuch"])
    check = libraries.check_native_modules()
    assert check.level is Level.FAIL
    assert check.detail.startswith("1 of 2 built; moonpool.native.io.nosuch: No module named")
    monkeypatch.setattr(libraries, "native_module_names", list)
    assert libraries.check_native_modules().level is Level.FAIL


def test_native_modules_of_a_fabric_without_headers_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ["moonpool.native.verbs.nosuch", "moonpool.native.rdma.nosuch"]
    monkeypatch.setattr(libraries, "native_module_names", lambda: ["json", *absent])
    check = libraries.check_native_modules()
    assert (check.level, check.detail[:14]) == (Level.INFO, "1 of 3 built; ")
    assert check.advice == "for that fabric: apt-get install libibverbs-dev, then reinstall moonpool"
    monkeypatch.setattr(libraries, "native_module_names", lambda: [*absent, "moonpool.native.io.nosuch"])
    assert libraries.check_native_modules().level is Level.FAIL


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_command_agrees_with_its_exit_code(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--json"] if as_json else ["doctor"])
    output = capsys.readouterr().out
    if as_json:
        body = json.loads(output)
        assert caught.value.code == (0 if body["ok"] else 1)
        assert body["ok"] == all(check["level"] != "FAIL" for check in body["checks"])
        assert {state["name"] for state in body["transports"]} >= {"local", "shm", "tcp"}
    else:
        assert caught.value.code == (0 if "the engine works here" in output else 1)
        assert "congestion control" in output


def test_doctor_leaves_no_child_process() -> None:
    code = """
import os, sys
from moonpool.cli.checks import process_vm
process_vm.try_with_child()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    sys.exit(0)
sys.exit("a child is left")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
