"""`moonpool simulate`: replays a trace on a modelled cluster, to plan capacity and to compare policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.options import json_option, print_json

if TYPE_CHECKING:
    from moonpool.conductor.settings import ClusterSettings
    from moonpool.conductor.simulation_result import SimulationResult
    from moonpool.conductor.trace import Trace

#: Options that change the settings, by the field they change.
_SETTINGS: Final = (
    ("prefill", int, "Prefill instances."),
    ("decode", int, "Decode instances."),
    ("aggregated", int, "Instances that do both; instead of --prefill and --decode."),
    ("cache_blocks", int, "Blocks that each instance caches."),
    ("prefill_chunk_tokens", int, "Prompt tokens of one step; 0: the whole prompt."),
    ("link_bytes_per_s", float, "Speed of each instance's network link."),
    ("ttft_limit_s", float, "Promised time to the first token."),
    ("tbt_limit_s", float, "Promised time between tokens."),
)
_PATH: Final = click.Path(dir_okay=False, path_type=Path)


def settings_options(function: Any) -> Any:
    """Adds one option for each of `_SETTINGS`."""
    for name, kind, text in reversed(_SETTINGS):
        function = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(function)
    return function


@click.command("simulate")
@json_option
@click.option(
    "--trace", "trace_path", type=_PATH, help="A published trace (JSON lines); else one is generated."
)
@click.option("--requests", type=int, help="Only the first so many, or how many to generate.")
@click.option("--rate", type=float, help="Generated requests a second.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="How much faster to replay.")
@click.option("--dequantise", is_flag=True, help="Spread bursts of equal time stamps at random.")
@click.option("--settings", "settings_path", type=_PATH, help="A TOML file of settings.")
@click.option("--study", is_flag=True, help="The settings of the scheduler study, not the papers'.")
@settings_options
@click.option("--policy", "policies", multiple=True, help="May be repeated to compare; default: affinity.")
@click.option("--admission", default="none", show_default=True, help="How requests are rejected.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same result.")
@click.option(
    "--sample", "sample_s", type=float, default=0.0, help="Record copies of blocks every so many s."
)
@click.option("--instances", "show_instances", is_flag=True, help="Also print what each instance did.")
@click.option("--output", type=_PATH, help="Also write the results as JSON to this file.")
@click.option("--png", type=_PATH, help="Also draw the results (needs moonpool[plots]).")
def command(as_json: bool, **options: Any) -> None:
    """Simulate a serving cluster.

    Replays a trace of requests on modelled instances with the scheduler that serves in production, and
    prints latencies, promises kept, rejections and reuse for each policy.
    """
    from moonpool.conductor.report import instance_table, summary, to_json

    settings, trace = choose_settings(options), choose_trace(options)
    results = run_policies(settings, trace, options)
    about = {
        "requests": len(trace),
        "speed": options["speed"],
        "seed": options["seed"],
        "admission": options["admission"],
        "instances": [spec.name for spec in settings.instances()],
    }
    plain = to_json(results, about)
    if options["output"] is not None:
        write_json(options["output"], plain)
    if options["png"] is not None:
        from moonpool.conductor.plots import draw

        draw(results, options["png"])
    if as_json:
        print_json(plain)
        return
    click.echo(summary(results))
    if options["show_instances"]:
        for name, result in results.items():
            click.echo(f"\n{name}\n{instance_table(result)}")


def choose_settings(options: dict[str, Any]) -> ClusterSettings:
    """The settings that the options name, with the options' changes."""
    from moonpool.conductor.settings import load_settings

    if options["study"] and options["settings_path"] is not None:
        raise click.UsageError("--study names settings; give it or --settings, not both")
    name = "study_settings.toml" if options["study"] else "paper_settings.toml"
    settings = load_settings(options["settings_path"], name)
    changes = {field: options[field] for field, _, _ in _SETTINGS if options[field] is not None}
    if changes.get("aggregated"):
        changes = {"prefill": 0, "decode": 0, **changes}
    elif {"prefill", "decode"} & changes.keys():
        changes = {"aggregated": 0, **changes}
    return replace(settings, **changes)


def choose_trace(options: dict[str, Any]) -> Trace:
    """The trace that the options name, at their pace."""
    from moonpool.conductor.trace import GeneratorConfig, generate_trace, load_trace

    if options["trace_path"] is not None:
        if options["rate"] is not None:
            raise click.UsageError("--rate is for generated requests; use --speed with --trace")
        trace = load_trace(options["trace_path"])
    else:
        given = {"requests": options["requests"], "per_s": options["rate"]}
        config = GeneratorConfig(**{name: value for name, value in given.items() if value is not None})
        trace = generate_trace(config, options["seed"])
    if options["requests"] is not None:
        trace = trace.first(options["requests"])
    if options["dequantise"]:
        trace = trace.dequantised(options["seed"])
    return trace.at_speed(options["speed"])


def run_policies(
    settings: ClusterSettings, trace: Trace, options: dict[str, Any]
) -> dict[str, SimulationResult]:
    """One run for each policy that was asked for, by name."""
    from moonpool.conductor.simulator import SimulationOptions, Simulator

    chosen = options["policies"] or ("affinity",)
    runs = [
        SimulationOptions(
            policy=policy,
            admission=options["admission"],
            seed=options["seed"],
            sample_s=options["sample_s"],
        )
        for policy in chosen
    ]
    return {run.policy: Simulator(settings, trace, run).run() for run in runs}


def write_json(path: Path, plain: dict[str, Any]) -> None:
    """Writes the results; a path that cannot be written is the user's to change."""
    try:
        path.write_text(json.dumps(plain, indent=2) + "\n")
    except OSError as exc:
        raise click.ClickException(f"cannot write {path}: {exc.strerror}") from exc
