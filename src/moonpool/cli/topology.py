"""`moonpool topology`: what this host is made of, as a tree, as JSON, or as a priority matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.cli.options import ExitCode, json_option, make_console, print_json

if TYPE_CHECKING:
    from rich.tree import Tree

    from moonpool.topology import RecordingReader, SysfsReader, Topology

TREE_BYTES_MAX: Final = 64 * 1024 * 1024


@click.command("topology")
@json_option
@click.option("--matrix", is_flag=True, help="Print the priority matrix of NICs by memory location.")
@click.option("--nic", "nics", multiple=True, help="Only this NIC in the matrix; may be repeated.")
@click.option(
    "--save-tree",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the /sys and /proc files that were read, for a bug report.",
)
@click.option(
    "--from-tree",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show the host of such a file instead of this one.",
)
@click.option("--distances", "far", is_flag=True, help="Print how far everything is from everything.")
@click.option(
    "--check-matrix",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read a priority matrix and say what of it does not fit this host.",
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Show what this host is made of.

    Numa nodes, NICs, GPUs, disks and CXL memory, and what hangs where.
    """
    from moonpool.topology import LiveSysfs, RecordingReader, parse_topology, priority_matrix, usable_nics

    if options["as_json"] and options["matrix"]:
        raise click.UsageError("--matrix is JSON already; give --json or --matrix, not both")
    if options["far"] and options["matrix"]:
        raise click.UsageError("give --distances or --matrix, not both")
    if options["nics"] and not options["matrix"]:
        raise click.UsageError("--nic chooses the NICs of --matrix; give both")
    from_tree = options["from_tree"]
    recorder = RecordingReader(LiveSysfs() if from_tree is None else load_tree(from_tree))
    topology = parse_topology(recorder)
    if options["save_tree"] is not None:
        save(recorder, options["save_tree"])
    if options["check_matrix"] is not None:
        ctx.exit(check(options["check_matrix"], topology, as_json=options["as_json"]))
    if options["matrix"]:
        click.echo(priority_matrix(topology, usable_nics(topology, options["nics"])).to_json())
    elif options["far"]:
        show_distances(topology, as_json=options["as_json"])
    elif options["as_json"]:
        print_json(topology.to_dict())
    else:
        console = make_console()
        console.print(draw(topology))
        for warning in topology.warnings:
            console.print(f"warning: {warning}", markup=False, style="yellow")


def show_distances(topology: Topology, *, as_json: bool) -> None:
    """A table of distances, nearest first in each class: see docs/topology.md for the numbers."""
    from moonpool.topology import distances

    found = distances(topology)
    if as_json:
        print_json(found)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("", *found):
        table.add_column(Text(heading), justify="right")
    for name, row in found.items():
        table.add_row(Text(name), *(str(row[other]) for other in found))
    make_console().print(table)


def save(recorder: RecordingReader, path: Path) -> None:
    """Writes what was read, as `load_tree` reads it."""
    try:
        path.write_text(json.dumps(dict(sorted(recorder.files.items())), indent=0) + "\n")
    except OSError as exc:
        raise click.ClickException(f"cannot write {path}: {exc.strerror}") from exc


def check(path: Path, topology: Topology, *, as_json: bool) -> ExitCode:
    """Reads a classic matrix and prints what does not fit the host; FAILURE when something does not."""
    from moonpool.topology import PriorityMatrix, misfits

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise click.ClickException(f"cannot read {path}: {exc}") from exc
    found = misfits(PriorityMatrix.from_json(text), topology)
    if as_json:
        print_json({"ok": not found, "problems": found})
    else:
        for line in found or ("the matrix fits this host",):
            click.echo(line)
    return ExitCode.FAILURE if found else ExitCode.OK


def load_tree(path: Path) -> SysfsReader:
    """The tree of a file that --save-tree wrote."""
    from moonpool.topology import MappedTree

    try:
        if path.stat().st_size > TREE_BYTES_MAX:
            raise click.ClickException(f"{path} is larger than {TREE_BYTES_MAX} bytes")
        files = json.loads(path.read_text())
    except OSError as exc:
        raise click.ClickException(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise click.ClickException(f"{path} is not a saved tree: {exc}") from exc
    if not isinstance(files, dict) or not all(isinstance(content, str) for content in files.values()):
        raise click.ClickException(f"{path} is not a saved tree: expected an object of path to text")
    return MappedTree(files)


def draw(topology: Topology) -> Tree:
    """The host as a tree: each numa node with what is attached to it, then what has no node."""
    from rich.text import Text
    from rich.tree import Tree

    from moonpool.cli.topology_lines import (
        host_line,
        lines_by_node,
        node_line,
    )

    root = Tree(Text(host_line(topology.host), "bold"))
    grouped = lines_by_node(topology)
    for node in topology.numa_nodes:
        branch = root.add(Text(node_line(node), "cyan"))
        for line in grouped.pop(node.id, ()):
            branch.add(Text(line))
    leftover = [line for lines in grouped.values() for line in lines]
    if leftover:
        branch = root.add(Text("no numa node", "cyan"))
        for line in leftover:
            branch.add(Text(line))
    return root
