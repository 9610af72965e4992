"""Capacity planning: how many instances keep the promises of a given load?

Run it: python examples/conductor_simulation.py
"""

from __future__ import annotations

from dataclasses import replace

from moonpool.conductor import (
    GeneratorConfig,
    SimulationOptions,
    Simulator,
    generate_trace,
    load_settings,
)


def main() -> None:
    """Simulates conversations at four requests a second on ever more decode instances."""
    trace = generate_trace(GeneratorConfig(requests=400, per_s=4.0), seed=7)
    options = SimulationOptions(policy="affinity", admission="predictive", seed=7)
    for decode in (1, 2, 4):
        settings = replace(load_settings(), prefill=4, decode=decode)
        result = Simulator(settings, trace, options).run()
        print(
            f"4 prefill + {decode} decode: {100 * result.goodput:5.1f} % within both promises, "
            f"{result.rejections} rejected, TTFT p99 {result.ttft.p99:.2f} s, "
            f"hit ratio {result.hit_ratio:.3f}"
        )


if __name__ == "__main__":
    main()
