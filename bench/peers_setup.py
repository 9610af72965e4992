"""Makes one virtual environment for each peer system that ours is measured against.

``python -m moonpool.bench.peers_setup [NAME...]`` fills ``.venv-peers/NAME`` and leaves a ``peer.json`` in it
that says how the peer is started. Nothing of it is needed to build, test or use Moonpool; a contender whose
environment is missing is left out of the benchmark with the reason.

Mooncake's CUDA 13 wheel is linked against the NVIDIA driver even where it moves host memory only. On a
machine without a driver it gets a stand-in ``libcuda.so.1`` in which every driver call answers "no device"
(code 100, CUDA_ERROR_NO_DEVICE of cuda.h), which is what a machine without a GPU would answer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import click

from moonpool.bench.locations import peers_directory

INSTALL_TIMEOUT_S: Final = 900
PROBE_TIMEOUT_S: Final = 120
DESCRIPTION_FILE: Final = "peer.json"
TOOLKIT_FOLDER: Final = Path("/usr/local")
DRIVER_SYMBOL = re.compile(r"\bU (cu[A-Z]\w*)")


class PeerSetupFailed(RuntimeError):
    """A peer's environment could not be made; the message says which step failed and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPackage:
    """What one peer needs: packages without their dependency trees (serving extras are not measured)."""

    name: str
    requirements: tuple[str, ...]
    probe: str  # Python that proves that the peer's library loads
    needs_cuda_stand_in: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer that is ready to start: its interpreter and the environment variables it needs."""

    name: str
    python: str
    requirements: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


PACKAGES: Final = (
    PeerPackage(
        name="mooncake-0.3.13",
        requirements=("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy>=2,<3"),
        probe="import mooncake.engine",
    ),
    PeerPackage(
        name="mooncake-0.3.14",
        requirements=("mooncake-transfer-engine-cuda13==0.3.14", "numpy>=2,<3"),
        probe="import mooncake.engine",
        needs_cuda_stand_in=True,
    ),
    PeerPackage(
        name="nixl-1.5.1",
        requirements=("nixl-cu12==1.5.1", "numpy>=2,<3"),
        probe="from nixl_cu12._api import nixl_agent",
    ),
    PeerPackage(
        name="dynamo-1.6.1",
        requirements=(
            "ai-dynamo-runtime==1.6.1",
            "pydantic>=2,<3",
            "pydantic-core",
            "annotated-types",
            "typing-inspection",
            "typing-extensions",
            "uvloop>=0.20",
        ),
        probe="from dynamo import _core; _core.RadixTree()",
    ),
    PeerPackage(name="redhare-0.6.0", requirements=("redhare==0.6.0", "numpy>=2,<3"), probe="import redhare"),
)


def with_environment(command: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The command, started with these variables beside the inherited ones."""
    return ["env", *(f"{name}={value}" for name, value in environment.items()), *command]


def run(command: Sequence[str], timeout_s: float, what: str) -> str:
    """Runs a command and returns its standard output; raises ``PeerSetupFailed`` with its last lines."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError as missing:
        raise PeerSetupFailed(
            f"{what}: `{command[0]}` is not installed (Debian: `apt-get install gcc binutils`)"
        ) from missing
    except subprocess.TimeoutExpired as late:
        raise PeerSetupFailed(f"{what}: not finished after {timeout_s:.0f} s; try again") from late
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise PeerSetupFailed(
            f"{what}: `{' '.join(command[:4])} ...` failed with code {done.returncode}:\n{tail}"
        )
    return done.stdout


def driver_is_installed() -> bool:
    """Whether the loader knows a real NVIDIA driver library."""
    listing = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False, timeout=30
    )
    return "libcuda.so.1 " in listing.stdout


def build_cuda_stand_in(site_packages: Path, folder: Path) -> Path:
    """Compiles a ``libcuda.so.1`` with every driver symbol the wheel's libraries want; returns its folder."""
    symbols: set[str] = set()
    for library in sorted(site_packages.glob("mooncake/*.so*")):
        listing = run(
            ["nm", "-D", "--undefined-only", str(library)], 60, f"reading the symbols of {library.name}"
        )
        symbols.update(DRIVER_SYMBOL.findall(listing))
    if not symbols:
        raise PeerSetupFailed(
            "the wheel asks for no CUDA driver symbol; its layout changed, look at its *.so files"
        )
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "no_device.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(symbols)))
    library_path = folder / "libcuda.so.1"
    run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library_path), str(source)],
        60,
        "compiling the stand-in driver library",
    )
    return folder


def find_cuda_runtime(site_packages: Path) -> Path | None:
    """Folder of ``libcudart.so.13``: a toolkit of the machine or the runtime wheel, or None."""
    candidates = [*TOOLKIT_FOLDER.glob("cuda*/lib*"), *site_packages.glob("nvidia/*/lib")]
    return next((folder for folder in candidates if (folder / "libcudart.so.13").exists()), None)


def cuda_environment(python: Path, site_packages: Path, home: Path) -> dict[str, str]:
    """LD_LIBRARY_PATH under which the CUDA 13 wheel loads, after building or installing what is missing."""
    folders: list[Path] = []
    if not driver_is_installed():
        folders.append(build_cuda_stand_in(site_packages, home / "no-driver"))
    if find_cuda_runtime(site_packages) is None:
        install(python, ("nvidia-cuda-runtime>=13,<14",), "installing the CUDA 13 runtime library")
    runtime = find_cuda_runtime(site_packages)
    if runtime is None:
        raise PeerSetupFailed("libcudart.so.13 is not on this machine and the runtime wheel did not bring it")
    return {"LD_LIBRARY_PATH": ":".join(str(folder) for folder in [*folders, runtime])}


def install(python: Path, requirements: tuple[str, ...], what: str) -> None:
    """Installs packages into an environment without their dependencies."""
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        *requirements,
    ]
    run(command, INSTALL_TIMEOUT_S, what)


def make_peer(package: PeerPackage, directory: Path) -> Peer:
    """Makes or completes the environment of one peer, proves that it loads, and writes its description."""
    home = directory / package.name
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True, symlinks=True)
    install(python, package.requirements, f"installing {package.requirements[0]}")
    site_packages = next((home / "lib").glob("python3*/site-packages"))
    environment = cuda_environment(python, site_packages, home) if package.needs_cuda_stand_in else {}
    probe = with_environment([str(python), "-c", package.probe], environment)
    run(probe, PROBE_TIMEOUT_S, f"loading {package.name}")
    peer = Peer(
        name=package.name, python=str(python), requirements=package.requirements, environment=environment
    )
    (home / DESCRIPTION_FILE).write_text(json.dumps(asdict(peer), indent=1) + "\n")
    return peer


def load_peer(name: str, directory: Path | None = None) -> Peer | None:
    """The peer of that name if its environment is complete and still holds the pinned versions, else None."""
    package = next(package for package in PACKAGES if package.name == name)
    description = (directory or peers_directory()) / name / DESCRIPTION_FILE
    if not description.is_file():
        return None
    values = json.loads(description.read_text())
    if tuple(values["requirements"]) != package.requirements or not Path(values["python"]).exists():
        return None
    return Peer(
        name=name,
        python=values["python"],
        requirements=package.requirements,
        environment=values["environment"],
    )


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice([package.name for package in PACKAGES]))
@click.option(
    "--directory", type=click.Path(path_type=Path), default=None, help="Default: .venv-peers of the checkout."
)
def main(names: tuple[str, ...], directory: Path | None) -> None:
    """The command; its help is this module's own docstring."""
    failures = 0
    for package in PACKAGES:
        if names and package.name not in names:
            continue
        started = time.monotonic()
        try:
            peer = make_peer(package, directory or peers_directory())
        except PeerSetupFailed as failure:
            failures += 1
            click.echo(f"{package.name}: not available: {failure}", err=True)
        else:
            click.echo(f"{peer.name}: ready in {time.monotonic() - started:.0f} s ({peer.python})")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
