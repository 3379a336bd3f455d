"""How many threads the matrix library may use, whoever imported numpy first."""

from __future__ import annotations

import ctypes
from importlib import import_module

# The names under which numpy's builds carry OpenBLAS; which one depends on the build.
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def limit_matrix_threads(count: int) -> bool:
    """Let OpenBLAS use ``count`` threads from now on; False where numpy has another library.

    One thread for compute leaves the other cores to the copies, as a device of its own would, and
    small products are not slowed down by threads that spin for each other.
    """
    try:
        module = import_module("numpy._core._multiarray_umath")
    except ImportError:  # numpy 1
        module = import_module("numpy.core._multiarray_umath")
    library = ctypes.CDLL(str(module.__file__))  # finds symbols of what it is linked to as well
    for name in _SETTERS:
        setter = getattr(library, name, None)
        if setter is not None:
            setter(ctypes.c_int(count))
            return True
    return False
