"""The classic priority matrix: for each memory location, the preferred NICs and the merely usable ones.

Form on the wire and in files: ``{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [[...], [...]], "*": ...}``.
Rules: ``cpu:N`` prefers the NICs of numa node N; ``cxl:N``, a node without CPUs, those of the nearest nodes
that have NICs; ``cuda:N`` prefers, among the NICs of the GPU's numa node (or among all where there are none),
those at the smallest distance, ties included; ``*`` prefers every NIC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moonpool.errors import UsageError
from moonpool.topology.distance import distance
from moonpool.topology.model import Gpu, LinkState, Nic, NumaNode, Topology

WILDCARD = "*"
MATRIX_BYTES_MAX = 1024 * 1024
LOCATIONS_MAX = 4_096
NICS_MAX = 1_024
NAME_LENGTH_MAX = 255

_LOCATION = re.compile(r"\*|[a-z][a-z0-9_]{0,31}(:[!-~]{1,220})?")


@dataclass(frozen=True, slots=True)
class Preference:
    """The NIC names of one location, best first; no name is in both."""

    preferred: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def ordered(self) -> tuple[str, ...]:
        """Preferred names, then the others: the order in which a transfer tries them."""
        return self.preferred + self.others


@dataclass(frozen=True, slots=True)
class PriorityMatrix:
    """Location to preference. Equal matrices compare equal whatever their order of locations."""

    rows: Mapping[str, Preference]

    def lookup(self, location: str) -> Preference:
        """The preference of a location; one that is not listed gets the row "*", or no NIC at all."""
        return self.rows.get(location) or self.rows.get(WILDCARD) or Preference((), ())

    def to_json(self) -> str:
        """The classic JSON object, in the order of ``rows``."""
        return json.dumps({name: [list(row.preferred), list(row.others)] for name, row in self.rows.items()})

    @classmethod
    def from_json(cls, text: str) -> PriorityMatrix:
        """Reads the classic JSON object. Raises ``UsageError`` that says where the text breaks the form."""
        if len(text) > MATRIX_BYTES_MAX:
            raise UsageError(
                f"the priority matrix is longer than {MATRIX_BYTES_MAX} bytes", limit=MATRIX_BYTES_MAX
            )
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"the priority matrix is not JSON: {exc}") from exc
        if not isinstance(document, dict) or len(document) > LOCATIONS_MAX:
            raise UsageError(
                f"the priority matrix must be a JSON object with at most {LOCATIONS_MAX} locations"
            )
        return cls(MappingProxyType({name: _read_row(name, row) for name, row in document.items()}))


def _read_row(location: str, row: object) -> Preference:
    if _LOCATION.fullmatch(location) is None:
        raise UsageError(
            f"{location[:40]!r} is not a location; write e.g. cpu:0, cuda:0 or *",
            field="location",
            value=location[:40],
        )
    if not isinstance(row, list) or not 1 <= len(row) <= 2:
        raise UsageError(f"{location}: expected [[preferred NICs], [other NICs]]", field=location)
    preferred, others = _read_names(location, row[0]), _read_names(location, row[1] if len(row) == 2 else [])
    if len(set(preferred + others)) != len(preferred) + len(others):
        raise UsageError(f"{location}: a NIC is listed twice; list each once", field=location)
    return Preference(preferred, others)


def _read_names(location: str, names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or len(names) > NICS_MAX:
        raise UsageError(f"{location}: expected a list of at most {NICS_MAX} NIC names", field=location)
    for name in names:
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX:
            raise UsageError(f"{location}: {str(name)[:40]!r} is not a NIC name", field=location)
    return tuple(names)


def usable_nics(topology: Topology, only: Iterable[str] = ()) -> tuple[Nic, ...]:
    """The NICs a matrix is made of: those with an RDMA device, or, on a host without RDMA, real interfaces.

    A NIC whose link is down is left out, and so are virtual interfaces. ``only`` restricts the choice to NICs
    that have one of those names. Raises ``UsageError`` for a name that no NIC has.
    """
    wanted = set(only)
    known = {name for nic in topology.nics for name in (*nic.netdevs, *nic.rdma_devices)}
    if wanted - known:
        missing, have = ", ".join(sorted(wanted - known)), ", ".join(sorted(known)) or "none"
        raise UsageError(f"no NIC is called {missing}; this host has: {have}", field="only", value=missing)
    candidates = [nic for nic in topology.nics if nic.state is not LinkState.DOWN]
    if wanted:
        return tuple(nic for nic in candidates if wanted.intersection((*nic.netdevs, *nic.rdma_devices)))
    rdma = tuple(nic for nic in candidates if nic.rdma_devices)
    return rdma or tuple(nic for nic in candidates if not nic.virtual)


def priority_matrix(topology: Topology, nics: Sequence[Nic] | None = None) -> PriorityMatrix:
    """The matrix of a host over ``nics`` (by default ``usable_nics``), which keep their order."""
    chosen = usable_nics(topology) if nics is None else tuple(nics)
    rows = {node.location: _split(chosen, _at_node(topology, node, chosen)) for node in topology.numa_nodes}
    for gpu in topology.gpus:
        if gpu.location is not None:
            rows[gpu.location] = _split(chosen, _nearest(topology, gpu, chosen))
    rows[WILDCARD] = _split(chosen, chosen)
    return PriorityMatrix(MappingProxyType(rows))


def misfits(matrix: PriorityMatrix, topology: Topology) -> list[str]:
    """What of a matrix does not fit a host: NICs that are not there or down, or that no row names."""
    nics = {name: nic for nic in topology.nics for name in (*nic.netdevs, *nic.rdma_devices)}
    named: dict[str, str] = {}
    for location, row in matrix.rows.items():
        for name in row.ordered:
            named.setdefault(name, location)
    found = [
        f"{name} (in {where}): this host has no such NIC" for name, where in named.items() if name not in nics
    ]
    found += [
        f"{name} (in {where}): its link is down"
        for name, where in named.items()
        if name in nics and nics[name].state is LinkState.DOWN
    ]
    found += [
        f"{nic.name}: no row names it"
        for nic in usable_nics(topology)
        if not {*nic.netdevs, *nic.rdma_devices} & set(named)
    ]
    return found


def _at_node(topology: Topology, node: NumaNode, nics: Sequence[Nic]) -> list[Nic]:
    """The NICs of a numa node; for one without CPUs, which has none, those of the nearest nodes."""
    here = [nic for nic in nics if topology.numa_of(nic) == node.id]
    if here or not node.cpu_less:
        return here
    ways = {id(nic): node.distance_to(at) for nic in nics if (at := topology.numa_of(nic)) is not None}
    shortest = min((way for way in ways.values() if way is not None), default=None)
    return [nic for nic in nics if shortest is not None and ways.get(id(nic)) == shortest]


def _nearest(topology: Topology, gpu: Gpu, nics: Sequence[Nic]) -> list[Nic]:
    node = topology.numa_of(gpu)
    near = [nic for nic in nics if node is not None and topology.numa_of(nic) == node] or list(nics)
    ways = {id(nic): distance(topology, gpu, nic) for nic in near}
    shortest = min(ways.values(), default=0)
    return [nic for nic in near if ways[id(nic)] == shortest]


def _split(nics: Sequence[Nic], preferred: Sequence[Nic]) -> Preference:
    chosen = {id(nic) for nic in preferred}
    return Preference(
        tuple(nic.name for nic in nics if id(nic) in chosen),
        tuple(nic.name for nic in nics if id(nic) not in chosen),
    )
