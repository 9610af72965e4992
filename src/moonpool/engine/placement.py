"""Where engine memory lies: what a location asks for, and memory that is bound to a numa node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from moonpool.engine.memory_room import check_room_of_node
from moonpool.errors import OutOfMemory, ResourceError, UnsupportedOperation, UsageError
from moonpool.native.io.memory import SharedMemory, create_memory, prefault_memory

if TYPE_CHECKING:
    from moonpool.topology import Topology

#: The location of memory that is left to the kernel: the default, and never bound.
ANYWHERE: Final = "cpu:0"
_PLACE = re.compile(r"(cpu|numa|cxl):([0-9]{1,4})")


def create_placed(size_bytes: int, location: str, *, huge_pages: bool, prefault: bool) -> SharedMemory:
    """New engine memory where `location` says.

    "numa:<n>" binds it to a numa node, "cxl:<n>" to one without CPUs, "cpu:<n>" to a node with CPUs where
    there are several; "cpu:0" and every other text leave it to the kernel. UsageError for a node that is not
    there, OutOfMemory when it has too little left, UnsupportedOperation where binding is forbidden.
    """
    node = None if location == ANYWHERE else wanted_node(location)
    if node is None:
        return create_memory(size_bytes, huge_pages=huge_pages, prefault=prefault)
    from moonpool.native.cxl.numa import bind_memory

    # The kernel answers a bound page that it cannot give by killing processes: ask first.
    check_room_of_node(size_bytes, node)
    memory = create_memory(size_bytes, huge_pages=huge_pages, prefault=False)
    try:
        bind_memory(memory.address, memory.size_bytes, node)
    except ResourceError as problem:
        memory.close()
        raise UnsupportedOperation(
            f"memory cannot be bound to numa node {node} here ({problem.message}); "
            'in a container allow the system call mbind, or leave the location at "cpu:0"'
        ) from problem
    if prefault:
        try:
            prefault_memory(memory)
            _check_landed(memory, node)
        except BaseException:
            memory.close()
            raise
    return memory


def wanted_node(location: str) -> int | None:
    """The numa node that a location binds memory to, or None; UsageError for one that is not there."""
    match = _PLACE.fullmatch(location)
    if match is None:
        return None
    from moonpool.topology import read_topology

    return judge(match[1], int(match[2]), read_topology())


def judge(kind: str, number: int, topology: Topology) -> int | None:
    """`wanted_node` for "<kind>:<number>" on a host. Pure."""
    node = topology.numa_node(number)
    if kind == "cpu":
        # On one node there is nothing to choose, and a tag of old stays a tag.
        return number if node is not None and len(topology.numa_nodes) > 1 and not node.cpu_less else None
    have = ", ".join(str(one.id) for one in topology.numa_nodes if one.memory_bytes)
    far = ", ".join(str(one.id) for one in topology.far_nodes) or "none"
    if node is None or not node.memory_bytes:
        raise UsageError(
            f"there is no numa node {number} with memory here; there are {have} (far ones: {far})",
            field="location",
            value=f"{kind}:{number}",
        )
    if kind == "cxl" and not node.cpu_less:
        raise UsageError(
            f'numa node {number} has CPUs, it is no far memory: use "numa:{number}" (far nodes: {far})',
            field="location",
            value=f"{kind}:{number}",
        )
    return number


def _check_landed(memory: SharedMemory, node: int) -> None:
    """Every page looked at is on the node: a strict binding that the kernel did not keep is an error."""
    from moonpool.native.cxl.numa import pages_by_node

    found = pages_by_node(memory.address, memory.size_bytes)
    elsewhere = {where: pages for where, pages in found.items() if where not in (node, -1)}
    if elsewhere:
        raise OutOfMemory(
            f"memory bound to numa node {node} came from elsewhere ({elsewhere}); free some on that node",
            length_bytes=memory.size_bytes,
        )
