"""The one way kernels are compiled: cached on disk where that is possible, without the GIL.

A kernel and all its compiled helpers live in one file: numba's cache is stamped with the kernel's own file,
and would keep calling an old helper from another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def jit(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compiles a function of arrays and numbers at its first call with each set of types.

    numba refuses to cache when neither the source folder nor NUMBA_CACHE_DIR nor the user's cache can be
    written (a read-only container without a home): then the kernel is compiled anew in each process.
    """
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return cast("Callable[_Parameters, _Result]", compiled)
