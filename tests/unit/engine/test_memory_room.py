"""How much memory may be taken: the machine's word, the cgroup's, and neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool import Engine, OutOfMemory, UsageError
from moonpool.engine.memory_room import available_bytes, check_room


def machine(
    root: Path, meminfo: str, cgroup: str = "", files: dict[str, str] | None = None
) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(meminfo)
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


MEMINFO = "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "room"),
    [
        ("", {}, 1000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "5000\n", "a/b/memory.current": "2000\n"}, 3000),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "2000\n"}, 1000 * 1024),
        ("0::/a\n", {"a/memory.max": "100\n", "a/memory.current": "200\n"}, 0),
        ("12:memory:/old\n", {}, 1000 * 1024),
        ("0::/\n", {}, 1000 * 1024),
    ],
)
def test_the_least_of_what_machine_and_cgroup_have_left(
    tmp_path: Path, cgroup: str, files: dict[str, str], room: int
) -> None:
    proc, cgroups = machine(tmp_path, MEMINFO, cgroup, files)
    assert available_bytes(proc, cgroups) == room
    check_room(room, proc, cgroups)
    with pytest.raises(OutOfMemory, match=str(room)):
        check_room(room + 1, proc, cgroups)


def test_a_machine_that_says_nothing_refuses_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    check_room(1 << 60, tmp_path, tmp_path)


@pytest.mark.parametrize("size", [2**70, 2**47 + 1, 0, -1])
def test_a_size_no_region_has_is_a_usage_error(size: int) -> None:
    with Engine() as engine, pytest.raises(UsageError, match="size_bytes"):
        engine.allocate(size)


def test_more_than_the_machine_has_is_refused_before_a_page_is_touched() -> None:
    with Engine() as engine, pytest.raises(OutOfMemory, match="available"):
        engine.allocate(2**46)
