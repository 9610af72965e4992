"""Who should serve which prompt: a scheduler, and a simulator that runs it on traces.

The names are loaded at first use, because numpy and numba take a moment to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moonpool.conductor.instance import InstanceSpec, Role
    from moonpool.conductor.overlap import OverlapIndex, ResidencyTable
    from moonpool.conductor.policy import Policy, make_policy, policy_names, register_policy
    from moonpool.conductor.request import CopyRequest, Decision, Prompt, Verdict
    from moonpool.conductor.scheduler import Scheduler
    from moonpool.conductor.scheduler_config import SchedulerConfig
    from moonpool.conductor.settings import ClusterSettings, load_settings
    from moonpool.conductor.simulation_result import SimulationResult
    from moonpool.conductor.simulator import SimulationOptions, Simulator
    from moonpool.conductor.trace import GeneratorConfig, Trace, generate_trace, load_trace

__all__ = [
    "ClusterSettings",
    "CopyRequest",
    "Decision",
    "GeneratorConfig",
    "InstanceSpec",
    "OverlapIndex",
    "Policy",
    "Prompt",
    "ResidencyTable",
    "Role",
    "Scheduler",
    "SchedulerConfig",
    "SimulationOptions",
    "SimulationResult",
    "Simulator",
    "Trace",
    "Verdict",
    "generate_trace",
    "load_settings",
    "load_trace",
    "make_policy",
    "policy_names",
    "register_policy",
]

#: The module of each public name.
_HOMES: Final = {
    "instance": ("InstanceSpec", "Role"),
    "overlap": ("OverlapIndex", "ResidencyTable"),
    "policy": ("Policy", "make_policy", "policy_names", "register_policy"),
    "request": ("CopyRequest", "Decision", "Prompt", "Verdict"),
    "scheduler": ("Scheduler",),
    "scheduler_config": ("SchedulerConfig",),
    "settings": ("ClusterSettings", "load_settings"),
    "simulation_result": ("SimulationResult",),
    "simulator": ("SimulationOptions", "Simulator"),
    "trace": ("GeneratorConfig", "Trace", "generate_trace", "load_trace"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"moonpool.conductor.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'moonpool.conductor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
