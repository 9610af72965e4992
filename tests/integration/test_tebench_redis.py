"""tebench with names in Redis: published by the target, found by the initiator, a dead server passed over."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = shutil.which("redis-server")
pytestmark = pytest.mark.skipif(
    SERVER is None and os.environ.get("MOONPOOL_NATIVE") != "require",
    reason="redis-server is not installed (apt-get install redis-server)",
)
TEBENCH = (
    sys.executable,
    "-P",
    "-m",
    "moonpool.bench.cli",
    "--metadata_type=redis",
    "--total_buffer_size=1MiB",
)
QUICK = ("--duration=0.05", "--warmup=0", "--max_block_size=4KiB", "--check_consistency", "--json")
TIMEOUT_S = 60.0


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A redis-server of our own on a unix socket, whose path must be short: hence not tmp_path."""
    assert SERVER is not None, "redis-server is missing: apt-get install redis-server"
    folder = Path(tempfile.mkdtemp(prefix="moonpool-tebench-"))
    command = [SERVER, "--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any("ready to accept connections" in line.lower() for line in process.stdout)
        yield f"redis+unix://{folder / 's'}"
        process.kill()
    shutil.rmtree(folder)


def tebench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TEBENCH, *flags], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_target_is_found_by_name_and_a_dead_server_is_passed_over(redis_url: str) -> None:
    command = [*TEBENCH, "--seg_name=prefill-0", f"--metadata_url_list={redis_url}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as target:
        try:
            assert target.stdout is not None
            printed = target.stdout.readline() + target.stdout.readline()
            assert re.search(r"--metadata_type=redis .*--target_seg_name=prefill-0 ", printed), printed
            urls = f"redis+unix:///nowhere/at/all.sock,{redis_url}"
            done = tebench("--target_seg_name=prefill-0", f"--metadata_url_list={urls}", *QUICK)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["checked_bytes"] > 0
        finally:
            target.kill()


def test_a_name_that_nobody_published_is_a_usage_error(redis_url: str) -> None:
    done = tebench("--target_seg_name=nobody", f"--metadata_url_list={redis_url}", *QUICK)
    assert done.returncode == 2
    assert "tebench: NoSuchSegment" in done.stderr


def test_no_server_at_all_is_a_typed_error() -> None:
    done = tebench("--target_seg_name=x", "--metadata_url_list=redis+unix:///nowhere/at/all.sock", *QUICK)
    assert done.returncode == 1
    assert "tebench: MetadataUnavailable" in done.stderr
