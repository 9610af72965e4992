"""Where the benchmarks find their peers and leave their results."""

from __future__ import annotations

from pathlib import Path


def project_directory() -> Path:
    """Root of the checkout this package lives in; of an installed package, the working directory."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


def peers_directory() -> Path:
    """Folder of the peers' virtual environments; not kept in git."""
    return project_directory() / ".venv-peers"


def results_directory() -> Path:
    """Folder of the history and the latest report; not kept in git."""
    return project_directory() / "bench-results"


def import_directory() -> Path:
    """The folder that holds the package ``moonpool``, for interpreters that do not have it installed."""
    return Path(__file__).parent.parent.parent.resolve()
