"""The conductor: who should serve which prompt.

Public names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moonpool.conductor.blocks import BlockHasher
    from moonpool.conductor.index import PrefixIndex
    from moonpool.conductor.index_config import IndexConfig
    from moonpool.conductor.index_view import IndexView
    from moonpool.conductor.instance import InstanceSpec, Role
    from moonpool.conductor.overlap import OverlapIndex, ResidencyTable
    from moonpool.conductor.policy import Policy, make_policy, policy_names, register_policy
    from moonpool.conductor.prefix_match import PrefixMatch
    from moonpool.conductor.recipes import Algorithm, HashRecipe
    from moonpool.conductor.request import CopyRequest, Decision, Prompt, Verdict
    from moonpool.conductor.scheduler import Scheduler
    from moonpool.conductor.scheduler_config import SchedulerConfig
    from moonpool.conductor.settings import ClusterSettings, load_settings
    from moonpool.conductor.simulation_result import SimulationResult
    from moonpool.conductor.simulator import SimulationOptions, Simulator
    from moonpool.conductor.trace import GeneratorConfig, Trace, generate_trace, load_trace
    from moonpool.events import CacheContext, Holder, Tier

__all__ = [
    "Algorithm",
    "BlockHasher",
    "CacheContext",
    "ClusterSettings",
    "CopyRequest",
    "Decision",
    "GeneratorConfig",
    "HashRecipe",
    "Holder",
    "IndexConfig",
    "IndexView",
    "InstanceSpec",
    "OverlapIndex",
    "Policy",
    "PrefixIndex",
    "PrefixMatch",
    "Prompt",
    "ResidencyTable",
    "Role",
    "Scheduler",
    "SchedulerConfig",
    "SimulationOptions",
    "SimulationResult",
    "Simulator",
    "Tier",
    "Trace",
    "Verdict",
    "generate_trace",
    "load_settings",
    "load_trace",
    "make_policy",
    "policy_names",
    "register_policy",
]

# Where each public name lives.
_HOMES: Final[dict[str, str]] = {
    "Algorithm": "moonpool.conductor.recipes",
    "BlockHasher": "moonpool.conductor.blocks",
    "CacheContext": "moonpool.events",
    "ClusterSettings": "moonpool.conductor.settings",
    "CopyRequest": "moonpool.conductor.request",
    "Decision": "moonpool.conductor.request",
    "GeneratorConfig": "moonpool.conductor.trace",
    "HashRecipe": "moonpool.conductor.recipes",
    "Holder": "moonpool.events",
    "IndexConfig": "moonpool.conductor.index_config",
    "IndexView": "moonpool.conductor.index_view",
    "InstanceSpec": "moonpool.conductor.instance",
    "OverlapIndex": "moonpool.conductor.overlap",
    "Policy": "moonpool.conductor.policy",
    "PrefixIndex": "moonpool.conductor.index",
    "PrefixMatch": "moonpool.conductor.prefix_match",
    "Prompt": "moonpool.conductor.request",
    "ResidencyTable": "moonpool.conductor.overlap",
    "Role": "moonpool.conductor.instance",
    "Scheduler": "moonpool.conductor.scheduler",
    "SchedulerConfig": "moonpool.conductor.scheduler_config",
    "SimulationOptions": "moonpool.conductor.simulator",
    "SimulationResult": "moonpool.conductor.simulation_result",
    "Simulator": "moonpool.conductor.simulator",
    "Tier": "moonpool.events",
    "Trace": "moonpool.conductor.trace",
    "Verdict": "moonpool.conductor.request",
    "generate_trace": "moonpool.conductor.trace",
    "load_settings": "moonpool.conductor.settings",
    "load_trace": "moonpool.conductor.trace",
    "make_policy": "moonpool.conductor.policy",
    "policy_names": "moonpool.conductor.policy",
    "register_policy": "moonpool.conductor.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonpool.conductor' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
