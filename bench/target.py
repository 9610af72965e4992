"""tebench's passive side: offers a buffer and waits to be told to stop. Peers move bytes without its help."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from moonpool import Engine
from moonpool.bench.segments import offer
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
    if options.seg_type_mix:
        words.append(f"--seg_type_mix={options.seg_type_mix}")
    elif options.seg_type != "DRAM":
        words.append(f"--seg_type={options.seg_type}")
    words += [f"--target_seg_name={name}", f"--total_buffer_size={options.total_buffer_size}"]
    return " ".join(words)


def run_target(options: Options, engine: Engine, stop: threading.Event, say: Callable[[str], None]) -> int:
    """Serves until ``stop`` is set; returns how many notifications came."""
    how = (options.locations, options.target_gpu_id)
    regions = [offer(engine, kind, options.total_buffer_size, how) for kind in options.kinds]
    name, sizes = options.seg_name or engine.endpoint, " + ".join(str(one.size_bytes) for one in regions)
    say(f"segment {name}: {sizes} bytes. Start an initiator with")
    say(f"  {ready_command(options, engine)}")
    if not options.notifi:
        stop.wait()
        return 0
    received = 0
    while not stop.is_set():
        received += len(engine.notifications(timeout_s=NOTIFICATION_POLL_S))
    return received
