"""Build of the Cython modules under ``src/moonpool/native``; all other metadata is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "moonpool"
LINKS = ("kernels", "store", "conductor", "bench")
SHARED_UTILITY = "moonpool.native._cyutility"
SANITIZE = os.environ.get("MOONPOOL_SANITIZE", "")  # e.g. "address,undefined"

# What a module needs beyond libc: pkg-config names, and how to link them. Headers-only libraries link nothing.
NEEDS: dict[str, tuple[str, ...]] = {
    "moonpool.native.io.copying": ("libxxhash",),
    "moonpool.native.io.lanes": ("liburing",),
    "moonpool.native.io.server": ("liburing",),
}
APT = {"libxxhash": "libxxhash-dev", "liburing": "liburing-dev", "libibverbs": "libibverbs-dev"}
# C sources compiled into a module beside its .pyx.
EXTRA_SOURCES: dict[str, tuple[str, ...]] = {
    "moonpool.native.io.copying": ("xxh3_base.c", "xxh3_avx2.c", "xxh3_avx512.c"),
}


def check_links() -> None:
    for name in LINKS:
        if not (PACKAGE / name / "__init__.py").is_file():
            sys.exit(
                f"moonpool: the link src/moonpool/{name} -> ../../{name} is missing or broken; "
                f"restore it with `ln -s ../../{name} src/moonpool/{name}` or `git checkout src/moonpool/{name}`"
            )


def has_library(name: str) -> bool:
    if shutil.which("pkg-config") is None:
        return False
    return subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0


def static_archive(name: str) -> str | None:
    """Path of the PIC static archive of a library, so that a wheel has no run-time dependency on it."""
    out = subprocess.run(["pkg-config", "--variable=libdir", name], capture_output=True, text=True, check=False)
    archive = Path(out.stdout.strip()) / f"{name}.a"
    return str(archive) if out.stdout.strip() and archive.is_file() else None


def declare_extensions() -> list[Extension]:
    flags = ["-O3", "-fvisibility=hidden", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    link: list[str] = ["-pthread"]
    if SANITIZE:
        flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-O1"]
        link += [f"-fsanitize={SANITIZE}"]
    found: list[Extension] = []
    for pyx in sorted((PACKAGE / "native").rglob("*.pyx")):
        name = ".".join(pyx.relative_to(ROOT / "src").with_suffix("").parts)
        folder = pyx.parent
        shared = [str(p.relative_to(ROOT)) for ext in ("*.pxd", "*.h", "*.c") for p in folder.glob(ext)]
        extra = [str((folder / c).relative_to(ROOT)) for c in EXTRA_SOURCES.get(name, ())]
        found.append(
            Extension(
                name,
                [str(pyx.relative_to(ROOT)), *extra],
                depends=[str(pyx.relative_to(ROOT)), *shared],
                include_dirs=[str(folder.relative_to(ROOT))],
                extra_compile_args=flags,
                extra_link_args=list(link),
            )
        )
    if found:
        found.append(Extension(SHARED_UTILITY, ["src/moonpool/native/_cyutility.c"], extra_compile_args=flags[:2]))
    return found


class BuildNative(build_ext):
    """Drops modules whose library is absent (or fails, with MOONPOOL_NATIVE=require), then cythonizes the rest."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = os.cpu_count() or 1

    def build_extensions(self) -> None:
        from Cython.Build import cythonize

        self.extensions = [ext for ext in self.extensions if self.usable(ext)]
        wanted = [ext for ext in self.extensions]
        made = cythonize(
            [ext for ext in wanted if ext.name != SHARED_UTILITY],
            include_path=["src"],
            build_dir=str(Path(self.build_temp) / "cython"),
            nthreads=os.cpu_count() or 1,
            compiler_directives={
                "language_level": 3,
                "boundscheck": False,
                "wraparound": False,
                "initializedcheck": False,
                "cdivision": True,
                "embedsignature": True,
                "embedsignature.format": "python",
            },
            shared_utility_qualified_name=SHARED_UTILITY,
        )
        sources = {ext.name: ext.sources for ext in made}
        for ext in wanted:
            ext.sources = sources.get(ext.name, ext.sources)
        super().build_extensions()

    def usable(self, ext: Extension) -> bool:
        for library in NEEDS.get(ext.name, ()):
            if not has_library(library):
                message = (
                    f"moonpool: {ext.name} needs {library}, which pkg-config does not know; "
                    f"install it with `apt-get install pkg-config {APT[library]}`"
                )
                if os.environ.get("MOONPOOL_NATIVE", "auto") == "require":
                    sys.exit(message)
                warnings.warn(message + " (this module is left out)", stacklevel=1)
                return False
            archive = static_archive(library)
            if library != "libxxhash":
                if archive:
                    ext.extra_objects.append(archive)
                else:
                    ext.libraries.append(library.removeprefix("lib"))
        return True


check_links()
setup(ext_modules=declare_extensions(), cmdclass={"build_ext": BuildNative})
