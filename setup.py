"""Build of the Cython modules under ``src/moonpool/native``; all other metadata is in pyproject.toml.

Three environment variables change what is built:

``MOONPOOL_NATIVE``
    ``auto`` (default) leaves out, with a warning, the modules whose C library is absent; ``require`` makes
    that an error; ``skip`` builds none (the Makefile installs the package first, then builds in place).
``MOONPOOL_SANITIZE``
    A value for gcc's ``-fsanitize=``, e.g. ``address,undefined``. Build such modules into their own tree.
``MOONPOOL_JOBS``
    How many modules are compiled at once; the number of CPUs by default.
"""

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
NATIVE_MODES = ("auto", "require", "skip")
NATIVE = os.environ.get("MOONPOOL_NATIVE", "auto")
SANITIZE = os.environ.get("MOONPOOL_SANITIZE", "")
JOBS = int(os.environ.get("MOONPOOL_JOBS", "0")) or os.cpu_count() or 1

# What a module needs beyond libc, by pkg-config's names.
NEEDS: dict[str, tuple[str, ...]] = {
    "moonpool.native.io.copying": ("libxxhash",),
    "moonpool.native.io.ring": ("liburing",),
    "moonpool.native.table.chains": ("libxxhash",),
    "moonpool.native.table.object_records": ("libxxhash",),
}
# The same for all modules of a folder, and the folders whose headers it uses besides native/io's.
FOLDER_NEEDS: dict[str, tuple[str, ...]] = {
    "verbs": ("libibverbs",),
    "rdma": ("libibverbs",),
    "ofi": ("libfabric",),
    "disk": ("liburing",),
    "nvmeof": ("liburing",),
}
FOLDER_HEADERS: dict[str, tuple[str, ...]] = {"rdma": ("verbs",), "nvmeof": ("disk",)}
APT = {
    "libxxhash": "libxxhash-dev",
    "liburing": "liburing-dev",
    "libibverbs": "libibverbs-dev",
    "libfabric": "libfabric-dev",
}
# xxhash is compiled into its module from the header (XXH_INLINE_ALL), the others are opened at run time.
HEADER_ONLY = ("libxxhash", "libibverbs", "libfabric")
# Modules of native/table that use headers of native/io; those of the transports' folders all do.
HOT_PARTS = ("", "_state", "_reads", "_starts", "_ends")
BOTH_FOLDERS = tuple(f"moonpool.native.table.hot{part}" for part in HOT_PARTS)
OWN_FOLDERS = ("io", "table")
# C sources compiled into a module beside its .pyx.
EXTRA_SOURCES: dict[str, tuple[str, ...]] = {
    "moonpool.native.io.copying": ("xxh3_base.c", "xxh3_avx2.c", "xxh3_avx512.c"),
    "moonpool.native.device.runtime": ("calls.c",),
}


def check_surroundings() -> None:
    """Stops with one sentence where a build would otherwise succeed and silently lack a part."""
    if NATIVE not in NATIVE_MODES:
        sys.exit(f"moonpool: MOONPOOL_NATIVE={NATIVE!r} is not one of {', '.join(NATIVE_MODES)}")
    for name in LINKS:
        if not (PACKAGE / name / "__init__.py").is_file():
            sys.exit(
                f"moonpool: the link src/moonpool/{name} -> ../../{name} is missing or broken; "
                f"restore it with `ln -s ../../{name} src/moonpool/{name}` or "
                f"`git checkout src/moonpool/{name}`"
            )


def has_library(name: str) -> bool:
    if shutil.which("pkg-config") is None:
        return False
    return subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0


def static_archive(name: str) -> str | None:
    """Path of the PIC static archive of a library, so that a wheel has no run-time dependency on it."""
    query = ["pkg-config", "--variable=libdir", name]
    out = subprocess.run(query, capture_output=True, text=True, check=False)
    archive = Path(out.stdout.strip()) / f"{name}.a"
    return str(archive) if out.stdout.strip() and archive.is_file() else None


def compile_flags() -> list[str]:
    flags = ["-O3", "-fvisibility=hidden", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    if SANITIZE:
        flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-O1"]
    return flags


def declare_extensions() -> list[Extension]:
    if NATIVE == "skip":
        return []
    link = ["-pthread", *([f"-fsanitize={SANITIZE}"] if SANITIZE else [])]
    found: list[Extension] = []
    for pyx in sorted((PACKAGE / "native").rglob("*.pyx")):
        name = ".".join(pyx.relative_to(ROOT / "src").with_suffix("").parts)
        folder = pyx.parent
        with_io = name in BOTH_FOLDERS or folder.name not in OWN_FOLDERS
        folders = [folder, PACKAGE / "native" / "io"] if with_io else [folder]
        folders += [PACKAGE / "native" / other for other in FOLDER_HEADERS.get(folder.name, ())]
        shared = [
            str(path.relative_to(ROOT))
            for pattern in ("*.pxd", "*.h", "*.c")
            for each in folders
            for path in sorted(each.glob(pattern))
        ]
        extra = [str((folder / c).relative_to(ROOT)) for c in EXTRA_SOURCES.get(name, ())]
        found.append(
            Extension(
                name,
                [str(pyx.relative_to(ROOT)), *extra],
                # Declared sources and headers are what makes a rebuild correct, and what the sdist carries.
                depends=[str(pyx.relative_to(ROOT)), *shared],
                include_dirs=[str(each.relative_to(ROOT)) for each in folders],
                extra_compile_args=compile_flags(),
                extra_link_args=list(link),
            )
        )
    if found:
        # One module with Cython's memoryview runtime for all others; cythonize generates its C file.
        source = "src/moonpool/native/_cyutility.c"
        flags = compile_flags()
        found.append(Extension(SHARED_UTILITY, [source], extra_compile_args=flags, extra_link_args=link))
    return found


class BuildNative(build_ext):
    """Drops the modules whose library is absent, or fails (MOONPOOL_NATIVE=require); cythonizes the rest."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = JOBS

    def build_extensions(self) -> None:
        from Cython.Build import cythonize  # here and not above: pip's metadata steps need no Cython

        self.extensions = [ext for ext in self.extensions if self.usable(ext)]
        generated = Path(self.build_temp) / "cython"
        (generated / "src/moonpool/native").mkdir(parents=True, exist_ok=True)
        made = cythonize(
            list(self.extensions),
            include_path=["src"],
            build_dir=str(generated),
            nthreads=JOBS,
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
        # setuptools has decorated the declared objects (_full_name): keep them, take over only the sources.
        sources = {ext.name: ext.sources for ext in made}
        for ext in self.extensions:
            ext.sources = sources[ext.name]
        super().build_extensions()

    def usable(self, ext: Extension) -> bool:
        for library in NEEDS.get(ext.name, ()) + FOLDER_NEEDS.get(ext.name.split(".")[-2], ()):
            if not has_library(library):
                message = (
                    f"moonpool: {ext.name} needs {library}, which pkg-config does not know; "
                    f"install it with `apt-get install pkg-config {APT[library]}`"
                )
                if NATIVE == "require":
                    sys.exit(message)
                warnings.warn(message + " (this module is left out)", stacklevel=1)
                return False
            if library in HEADER_ONLY:
                continue
            archive = static_archive(library)
            if archive:
                ext.extra_objects.append(archive)
            else:
                ext.libraries.append(library.removeprefix("lib"))
        return True


# From Python 3.14 on, Cython's worker processes import this file: only the first process may build.
if __name__ == "__main__":
    check_surroundings()
    setup(ext_modules=declare_extensions(), cmdclass={"build_ext": BuildNative})
