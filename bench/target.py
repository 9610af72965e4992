"""tebench's passive side: offers a buffer and waits to be told to stop. Peers move bytes without its help."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from moonpool import Engine
from moonpool.bench.workload import Options

NOTIFICATION_POLL_S: Final = 0.2  # how soon a target with --notifi sees that it should stop


def ready_command(options: Options, engine: Engine) -> str:
    """The command that starts an initiator against this target."""
    name = engine.endpoint
    words = ["tebench"]
    if options.metadata_urls and options.seg_name:
        name = options.seg_name
        words += ["--metadata_type=redis", f"--metadata_url_list={','.join(options.metadata_urls)}"]
    if options.xport_type:
        words.append(f"--xport_type={options.xport_type}")
    words += [f"--target_seg_name={name}", f"--total_buffer_size={options.total_buffer_size}"]
    return " ".join(words)


def run_target(options: Options, engine: Engine, stop: threading.Event, say: Callable[[str], None]) -> int:
    """Serves until ``stop`` is set; returns how many notifications came."""
    region = engine.allocate(options.total_buffer_size)
    say(f"segment {options.seg_name or engine.endpoint}: {region.size_bytes} bytes. Start an initiator with")
    say(f"  {ready_command(options, engine)}")
    if not options.notifi:
        stop.wait()
        return 0
    received = 0
    while not stop.is_set():
        received += len(engine.notifications(timeout_s=NOTIFICATION_POLL_S))
    return received
