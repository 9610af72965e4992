"""`moonpool nvmf`: attach and detach remote NVMe namespaces, and list what this host sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moonpool.cli.options import ExitCode, Seconds, json_option, make_console, print_json
from moonpool.units import format_size

if TYPE_CHECKING:
    from moonpool.transport.nvme_fabrics import AttachOptions
    from moonpool.transport.nvme_sysfs import Controller, Namespace, Subsystem


@click.group("nvmf")
def command() -> None:
    """Attach, detach and list remote NVMe namespaces (NVMe over fabrics).

    The kernel does the work; attaching and detaching need root. Each command takes --json.
    """


_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0.1, 600),
    default=30.0,
    show_default=True,
    help="Longest wait, in seconds.",
)


@command.command("attach")
@click.argument("subsystem_nqn")
@click.option("--address", required=True, help="Address of the target.")
@click.option("--transport", type=click.Choice(["tcp", "rdma"]), default="tcp", show_default=True)
@click.option("--port", default="4420", show_default=True, help="Port of the target.")
@click.option("--host-nqn", default="", help="This host's NQN; that of /etc/nvme/hostnqn by default.")
@click.option("--host-id", default="", help="This host's UUID; that of /etc/nvme/hostid by default.")
@click.option("--host-address", default="", help="Address of this host to come from.")
@click.option("--host-interface", default="", help="Network interface of this host to come from (tcp).")
@click.option("--keep-alive", "keep_alive_s", type=int, default=5, show_default=True, help="Seconds.")
@click.option(
    "--reconnect-delay",
    "reconnect_delay_s",
    type=int,
    default=2,
    show_default=True,
    help="Seconds between tries.",
)
@click.option(
    "--loss-timeout",
    "loss_timeout_s",
    type=int,
    default=600,
    show_default=True,
    help="Seconds after which the kernel gives a lost controller up.",
)
@click.option(
    "--fail-fast",
    "fail_fast_s",
    type=int,
    default=5,
    show_default=True,
    help="Seconds after which requests on a lost controller's block devices fail.",
)
@click.option("--queues", "io_queues", type=int, help="I/O queues; one for each CPU by default.")
@click.option("--header-digest", is_flag=True, help="CRC over headers (tcp).")
@click.option("--data-digest", is_flag=True, help="CRC over data (tcp).")
@_timeout_option
@json_option
def attach_command(timeout_s: float, as_json: bool, **options: Any) -> None:
    """Attach the subsystem SUBSYSTEM_NQN of a target.

    Idempotent: attaching what is attached already says so and succeeds.
    """
    from moonpool.transport.nvme_fabrics import attach

    done = attach(attach_options(**options), timeout_s)
    if as_json:
        about = subsystem_json(done.subsystem)
        print_json({"attached": done.is_new, "controller": done.controller.name, "subsystem": about})
        return
    word = "attached" if done.is_new else "was attached already"
    console = make_console()
    console.print(f"{done.controller.name} {word}: {done.subsystem.nqn}", markup=False)
    for namespace in done.subsystem.namespaces:
        console.print(f"  {namespace_line(namespace)}", markup=False)


def attach_options(**options: Any) -> AttachOptions:
    """What the kernel is asked for, from the command's options; UsageError for a wrong one."""
    from moonpool.transport.nvme_attribute import Target
    from moonpool.transport.nvme_fabrics import AttachOptions, host_identity

    target = Target(options.pop("transport"), options.pop("address"), options.pop("port"))
    host_nqn, host_id = host_identity()
    if not options["host_nqn"] and not options["host_id"]:
        options["host_nqn"], options["host_id"] = host_nqn, host_id
    return AttachOptions(target=target, **options)


@command.command("detach")
@click.argument("name")
@_timeout_option
@json_option
def detach_command(name: str, timeout_s: float, as_json: bool) -> int:
    """Detach NAME: a controller (nvme0), or all those of a subsystem (its NQN).

    Exit code 1 when there is none of that name.
    """
    from moonpool.transport.nvme_fabrics import detach

    gone = detach(name, timeout_s)
    if as_json:
        print_json({"detached": list(gone)})
    elif gone:
        click.echo(f"detached {', '.join(gone)}")
    else:
        click.echo(f"there is no attached controller or subsystem {name}", err=True)
    return ExitCode.OK if gone else ExitCode.FAILURE


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the NVMe subsystems of this host: controllers, their states, and namespaces."""
    from moonpool.transport.nvme_sysfs import read_subsystems

    found = read_subsystems()
    if as_json:
        print_json([subsystem_json(subsystem) for subsystem in found])
        return
    if not found:
        click.echo("this host sees no NVMe subsystem")
        return
    show(found)


def show(found: tuple[Subsystem, ...]) -> None:
    """The subsystems as a tree."""
    from rich.text import Text
    from rich.tree import Tree

    console = make_console()
    for subsystem in found:
        root = Tree(Text(f"{subsystem.nqn}  ({subsystem.model})", "bold"))
        for controller in subsystem.controllers:
            root.add(Text(controller_line(controller), "" if controller.is_live else "yellow"))
        for namespace in subsystem.namespaces:
            root.add(Text(namespace_line(namespace), "cyan"))
        console.print(root)


def controller_line(controller: Controller) -> str:
    """One controller in words."""
    line = f"{controller.name}  {controller.transport}  {controller.state}  {controller.address_text}"
    if controller.reconnect_delay_s is None:
        return line
    given_up = "never" if controller.loss_timeout_s is None else f"{controller.loss_timeout_s} s"
    fails = "off" if controller.fail_fast_s is None else f"{controller.fail_fast_s} s"
    patience = f"reconnects every {controller.reconnect_delay_s} s, given up after {given_up}"
    return f"{line}  {patience}, fails fast: {fails}"


def namespace_line(namespace: Namespace) -> str:
    """One namespace in words."""
    parts = [
        namespace.block_name,
        namespace.generic_name or "no passthrough device",
        f"namespace {namespace.nsid}",
        format_size(namespace.size_bytes),
        f"blocks of {namespace.block_bytes}",
        namespace.wwid,
    ]
    if namespace.metadata_bytes:
        parts.insert(5, f"+ {namespace.metadata_bytes} of metadata")
    if namespace.read_only:
        parts.append("read-only")
    if not namespace.is_live:
        parts.append("no live path")
    return "  ".join(parts)


def subsystem_json(subsystem: Subsystem) -> dict[str, Any]:
    """A subsystem as JSON."""
    return {
        "nqn": subsystem.nqn,
        "model": subsystem.model,
        "controllers": [
            {
                "name": each.name,
                "transport": each.transport,
                "state": each.state,
                "address": dict(each.address) or each.address_text,
                "host_nqn": each.host_nqn,
                "reconnect_delay_s": each.reconnect_delay_s,
                "loss_timeout_s": each.loss_timeout_s,
                "fail_fast_s": each.fail_fast_s,
            }
            for each in subsystem.controllers
        ],
        "namespaces": [
            {
                "nsid": each.nsid,
                "wwid": each.wwid,
                "block_device": each.block_name,
                "generic_device": each.generic_name,
                "size_bytes": each.size_bytes,
                "block_bytes": each.block_bytes,
                "metadata_bytes": each.metadata_bytes,
                "read_only": each.read_only,
                "live": each.is_live,
                "controllers": [controller.name for controller in each.controllers],
            }
            for each in subsystem.namespaces
        ],
    }
