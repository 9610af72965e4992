"""Far memory: DAX devices, numa nodes without CPUs, binding to a node, cache lines written back by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.errors import MoonpoolError
from moonpool.topology import DaxDevice, NumaNode, SysfsReader, Topology, parse_topology, pool_identity
from moonpool.units import format_size

GROUP: Final = "far memory"
DEV: Final = "/dev"
OK: Final = "ok"


def check_far_memory(reader: SysfsReader) -> list[Check]:
    """DAX devices, far nodes, binding, cache lines. Opens nothing but what it may, and maps nothing."""
    topology = parse_topology(reader)
    devices = [judge_device(dax, may_open(dax.name), topology) for dax in topology.dax_devices]
    if not devices:
        devices = [Check(GROUP, "DAX devices", Level.INFO, "none")]
    return [
        *devices,
        judge_nodes(topology.far_nodes),
        judge_binding(try_binding(node.id for node in topology.numa_nodes if node.memory_bytes)),
        judge_lines(line_kernel()),
    ]


def may_open(name: str) -> bool:
    """Whether this user may open a DAX device for both directions."""
    return os.access(f"{DEV}/{name}", os.R_OK | os.W_OK)


def judge_device(dax: DaxDevice, openable: bool, topology: Topology) -> Check:
    """One DAX device: what it is good for, and what would make it so. Pure."""
    size = format_size(dax.size_bytes) if dax.size_bytes else "unknown size"
    identity = pool_identity(dax, topology.cxl_regions, topology.cxl_memories)
    about = f"{size}, aligned to {format_size(dax.align_bytes or 0)}" + (f", {identity}" if identity else "")
    if dax.driver == "kmem":
        return Check(
            GROUP, dax.name, Level.OK, f'{about}: is numa node {dax.target_node} ("cxl:{dax.target_node}")'
        )
    if not dax.mappable or not dax.size_bytes:
        advice = f"daxctl enable-device {dax.name}, or daxctl reconfigure-device --mode=devdax {dax.name}"
        return Check(GROUP, dax.name, Level.WARN, f"{about}: has no driver and cannot be mapped", advice)
    if not openable:
        advice = f"let this user read and write {DEV}/{dax.name} (its group, or a udev rule)"
        return Check(GROUP, dax.name, Level.WARN, f"{about}: this user may not open it", advice)
    return Check(GROUP, dax.name, Level.OK, f'{about}: can be offered as "dax:{DEV}/{dax.name}"')


def judge_nodes(far: Iterable[NumaNode]) -> Check:
    """Numa nodes without CPUs. Pure."""
    shown = [
        f'"{node.location}" ({format_size(node.memory_bytes)}'
        + (f", distance {nearest}" if (nearest := _nearest(node)) is not None else "")
        + ")"
        for node in far
    ]
    if not shown:
        return Check(GROUP, "far numa nodes", Level.INFO, "none")
    return Check(GROUP, "far numa nodes", Level.OK, ", ".join(shown))


def _nearest(node: NumaNode) -> int | None:
    return min((value for other, value in node.distances if other != node.id), default=None)


def try_binding(nodes: Iterable[int]) -> str:
    """`OK` when memory can be bound to a numa node; else why not, "" without the native modules."""
    try:
        from moonpool.native.cxl.numa import bind_memory
        from moonpool.native.io.memory import PAGE_BYTES, create_memory
    except ImportError:
        return ""
    node = next(iter(nodes), 0)
    memory = create_memory(PAGE_BYTES, prefault=False)
    try:
        bind_memory(memory.address, memory.size_bytes, node)
    except MoonpoolError as problem:
        return problem.message
    finally:
        memory.close()
    return OK


def judge_binding(outcome: str) -> Check:
    """`outcome` is what `try_binding` gave. Pure."""
    if outcome == OK:
        return Check(GROUP, "numa binding", Level.OK, "a page was bound to a node")
    if not outcome:
        return Check(GROUP, "numa binding", Level.INFO, "not tried: the native modules are not there")
    advice = 'allow mbind in the container (SYS_NICE, or its seccomp profile); locations "cpu:0" work without'
    return Check(GROUP, "numa binding", Level.INFO, outcome, advice)


def line_kernel() -> str:
    """How this CPU writes cache lines back; "" when it cannot, or the native modules are not there."""
    try:
        from moonpool.native.cxl.mapping import cache_line_kernel
    except ImportError:
        return ""
    return cache_line_kernel()


def judge_lines(kernel: str) -> Check:
    """Only memory that hosts share without hardware coherence needs it. Pure."""
    if kernel:
        return Check(
            GROUP, "cache lines", Level.OK, f"written back by {kernel}; cxl_coherence=software works"
        )
    detail = "a program cannot write them back here: cxl_coherence=software is refused"
    return Check(GROUP, "cache lines", Level.INFO, detail)
